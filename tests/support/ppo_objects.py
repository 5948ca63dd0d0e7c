"""Networks of a PPO object that needs no Trainer, with a reward that counts tokens."""

from lit_rlhf.forward import freeze, optimize_forward
from lit_rlhf.models import ModelOptions
from lit_rlhf.models.heads import build_scalar_model
from lit_rlhf.ppo import PPONetworks
from lit_rlhf.rewards import WeightedReward
from tests.support.tiny_models import optimized_causal_lm, tiny_causal_lm, tiny_tokenizer


def count_tokens(prompts: list[str], responses: list[str], lengths: list[int]) -> list[float]:
    return [float(length) for length in lengths]


def tiny_networks() -> PPONetworks:
    """Policy, reference and critic of one tiny Llama."""
    tokenizer = tiny_tokenizer()
    return PPONetworks(
        policy=optimized_causal_lm("llama"),
        reference=freeze(optimized_causal_lm("llama")),
        critic=optimize_forward(build_scalar_model(tiny_causal_lm("llama"))),
        reward=WeightedReward(count_tokens, ModelOptions(), tokenizer),
        tokenizer=tokenizer,
    )
