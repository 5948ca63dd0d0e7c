"""Watch GRPO of TRL: a policy learns to write nothing but one letter, and is stopped.

The policy has a few thousand random weights and writes up to sixteen letters. The reward counts one
letter, so the best response repeats it.

    pip install trl lit-callbacks    # from the folder `callbacks` of a clone
    python trl_grpo.py
"""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from lit_callbacks import WatchCallback

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def count_e(completions: list[str], **_: object) -> list[float]:
    """Reward that is easily exploited: the number of e's."""
    return [text.count("e") / 10 for text in completions]


def tokenizer_of_letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter."""
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def main(steps: int = 150) -> None:
    """Train until the monitors see the collapse, or for a maximum number of steps."""
    set_seed(0)
    tokenizer = tokenizer_of_letters()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    config = GPT2Config(vocab_size=len(tokenizer), **sizes, **special)
    GPT2LMHeadModel(config).save_pretrained("letters")
    tokenizer.save_pretrained("letters")
    watch = WatchCallback(stop="collapsed")
    trainer = GRPOTrainer(
        model="letters",
        processing_class=tokenizer,
        reward_funcs=count_e,
        train_dataset=Dataset.from_list([{"prompt": a + b} for a in LETTERS for b in LETTERS]),
        callbacks=[watch],
        args=GRPOConfig(
            output_dir="letters_grpo",
            max_steps=steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=16,
            learning_rate=3e-3,
            beta=0.001,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    trainer.save_state()  # `lit_rlhf watch letters_grpo` judges the log again
    print(f"ended at step {trainer.state.global_step}: {watch.watch.verdict.level.word}")
    print(watch.watch.verdict.sentence)


if __name__ == "__main__":
    main()
