"""The lab: a small helpful/harmless world in which the true ("gold") reward is known.

Its parts, none of which loads another layer of the project:

- :mod:`lit_rlhf.lab.lexicon`: the words of the world, English and Chinese;
- :mod:`lit_rlhf.lab.world`: prompts and imperfect demonstrations;
- :mod:`lit_rlhf.lab.gold`: what a response is really worth;
- :mod:`lit_rlhf.lab.preferences`: biased, noisy labels on pairs of responses;
- :mod:`lit_rlhf.lab.artifacts`: the world on disk, with a tokenizer and an untrained base model.
"""
