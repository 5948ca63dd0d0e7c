"""The gold of policies of the built-in world, which several experiments measure alike."""

from __future__ import annotations

from lit_rlhf.tools.commands.evaluate import EvaluateOptions, evaluate
from lit_rlhf.tools.commands.quickstart import GOLD, Quickstart


def measure_gold(stages: Quickstart, name: str) -> float:
    """Mean gold of a policy's responses to the held-out prompts, sampled at temperature 1.

    Args:
        stages: The quickstart whose world, folder and seed are used.
        name: Folder of the policy in the quickstart's folder.
    """
    options = EvaluateOptions(
        policies=[str(stages.root / name)],
        prompts=str(stages.root / "world" / "prompts_heldout.jsonl"),
        rewards={f"{GOLD}:gold_reward": 1.0},
        max_new_tokens=48,
        temperature=1.0,
        top_p=1.0,
        repetition_penalty=1.0,
        seed=stages.seed,
    )
    (policy,) = evaluate(options)["policies"].values()
    return round(float(policy["rewards"]["gold_reward"]["mean"]), 4)
