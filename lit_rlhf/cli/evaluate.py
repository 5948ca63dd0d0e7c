"""`lit_rlhf evaluate`: policies side by side on the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lit_rlhf.cli.command import run_command
from lit_rlhf.data import DataSource
from lit_rlhf.evaluation import Comparison, compared_policies, print_comparison
from lit_rlhf.evaluation.files import write_json_lines, write_text
from lit_rlhf.evaluation.sampling import chosen_device
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import SamplingOptions

POLICIES_HELP = (
    "Folders or hub ids of language models. The first is the baseline: win, tie, lose and KL are "
    "against it."
)


def evaluate(
    policies: list[str],
    prompts: str,
    rewards: dict[str, float | dict[str, Any]],
    output: str | None = None,
    responses: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    tie_margin: float = 0.0,
    split: str = "test",
    max_prompts: int | None = None,
    max_prompt_length: int | None = None,
    chat_template: str = "tokenizer",
    batch_size: int = 64,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Comparison:
    """Compare policies: sample from each on the same prompts, score the responses, print a table.

    Args:
        policies: Folders or hub ids of language models, the baseline first.
        prompts: A file with prompts (.jsonl, .json, .parquet, .jsonl.gz) or the id of a dataset on
            the hub. Files of preferences and demonstrations do too: their prompts are taken.
        rewards: Weight by source; a source is a reward model's folder or 'package.module:function'.
            A mapping instead of a weight describes a rule (docs/rewards.md). Each is reported by
            itself, times its weight (1.0: as it is). The first decides who wins.
        output: JSON file for the report.
        responses: JSON lines file for all responses with their scores, KL and length.
        max_new_tokens: Longest response in tokens, EOS counted. Give what the policies were trained
            with: a longer response is cut off.
        temperature: Of sampling, and so of KL and perplexity.
        tie_margin: Largest difference in the first reward that still is a tie.
        split: Of a dataset on the hub, for instance test or test[:200]; not used for files.
        max_prompts: Use only this many of the first prompts. Default: all.
        max_prompt_length: Longest prompt in tokens; longer ones lose their oldest turns. Default:
            the longest sequence that the baseline was trained on, or 512.
        chat_template: tokenizer for the template in the policies' folders, or hh, paper-en,
            paper-zh.
        batch_size: Prompts that generate together. The draws depend on it.
        seed: Of sampling, the same draws for every policy, and of the intervals.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Of all weights: float32, bfloat16 or float16.
        trust_remote_code: Run code that comes with a model. Leave off unless you have read it.
    """
    comparison = compared_policies(
        policies,
        DataSource(prompts, split=split),
        rewards,
        SamplingOptions(max_new_tokens=max_new_tokens, temperature=temperature),
        ModelOptions(dtype=dtype, trust_remote_code=trust_remote_code),
        chosen_device(device),
        batch_size=batch_size,
        tie_margin=tie_margin,
        chat_template=chat_template,
        max_prompt_length=max_prompt_length,
        max_prompts=max_prompts,
        seed=seed,
    )
    if comparison.shortened:
        print(f"{comparison.shortened} prompts were shortened to fit max_prompt_length.")
    print_comparison(comparison)
    if output is not None:
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "tie_margin": tie_margin,
            "batch_size": batch_size,
            "seed": seed,
            "dtype": dtype,
        }
        report = json.dumps(comparison.as_dict() | {"settings": settings}, indent=2) + "\n"
        print(f"Report: {write_text(output, report)}")
    if responses is not None:
        print(f"Responses: {write_json_lines(responses, comparison.records())}")
    return comparison


def main(argv: Sequence[str]) -> Comparison:
    """Entry point of `lit_rlhf evaluate`."""
    return run_command(evaluate, argv, "lit_rlhf evaluate", lists={"policies": POLICIES_HELP})
