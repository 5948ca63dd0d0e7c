"""From updates to figures: useful work, medians over quiet updates, ratios."""

from __future__ import annotations

from itertools import product
from statistics import fmean, median
from typing import Any

from benchmarks.speed.flops import generation_bytes, stage_flops
from benchmarks.speed.job import Job
from benchmarks.speed.turns import Labels, quiet_updates

PHASES = ("rollout", "score", "update", "other")


def counted(update: dict[str, Any], job: Job) -> dict[str, Any]:
    """An update with its useful work in place of the lengths of its prompts and responses."""
    prompts, responses = update["prompts"], update["responses"]
    result = {
        **{key: update[key] for key in ("seconds", "foreign_cores", "phases")},
        "prompt_tokens": sum(prompts),
        "response_tokens": sum(responses),
        "flops": stage_flops(job.stage, job.work, prompts, responses)._asdict(),
    }
    if job.stage == "ppo":
        value_bytes = 4 if job.precision == "fp32" else 2
        result["generation_bytes"] = generation_bytes(job.work, prompts, responses, value_bytes)
    return result


def labelled(run: dict[str, Any], labels: Labels, job: Job) -> dict[str, Any]:
    """A turn's result with its case and side, and its updates' work counted."""
    case, _, side = labels
    updates = [counted(update, job) for update in run["updates"]]
    return {"case": case, "side": side, **run, "updates": updates}


def summary(
    runs: list[dict[str, Any]], ceilings: dict[str, Any], quiet_cores: float
) -> dict[str, Any]:
    """One side's figures in one case and precision.

    Args:
        runs: Its turns.
        ceilings: What the machine can reach.
        quiet_cores: Foreign load that an update is used with.

    Raises:
        RuntimeError: If no update was quiet.
    """
    first = runs[0]
    used = quiet_updates(
        runs, f"{first['side']}, {first['case']}, {first['precision']}", quiet_cores
    )
    seconds = [update["seconds"] for update in used]
    rate = median(sum(u["flops"].values()) / u["seconds"] for u in used)
    ceiling = ceilings["flops_fp32" if first["precision"] == "fp32" else "flops_bf16"]
    row = {
        **{key: first[key] for key in ("side", "case", "precision")},
        "updates": len(used),
        "updates_dropped": sum(len(run["updates"]) for run in runs) - len(used),
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "phases": {
            phase: median(u["phases"][phase] for u in used)
            for phase in PHASES
            if phase in used[0]["phases"]
        },
        "response_tokens": fmean(u["response_tokens"] for u in used),
        "real_tokens": fmean(u["prompt_tokens"] + u["response_tokens"] for u in used),
        "useful_gflops": rate / 1e9,
        "ceiling_fraction": rate / ceiling,
        "peak_memory_mib": max(run["peak_memory_mib"] for run in runs),
        "memory_before_mib": max(run["memory_before_mib"] for run in runs),
    }
    if ceilings["peak_bf16"] is not None:
        row |= of_gpu(used, ceilings)
    return row


def of_gpu(used: list[dict[str, Any]], ceilings: dict[str, Any]) -> dict[str, float]:
    """Model FLOP utilization of training, and generation against the memory's bandwidth."""
    update_seconds = [u["phases"].get("update", u["seconds"]) for u in used]
    row = {
        "training_mfu": median(
            u["flops"]["update"] / seconds / ceilings["peak_bf16"]
            for u, seconds in zip(used, update_seconds, strict=True)
        )
    }
    if "generation_bytes" in used[0]:
        bound = ceilings["bytes_per_second"]
        row["generation_tokens_per_second"] = median(
            u["response_tokens"] / u["phases"]["rollout"] for u in used
        )
        row["generation_bound_fraction"] = median(
            u["generation_bytes"] / bound / u["phases"]["rollout"] for u in used
        )
    return row


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The peer's seconds over ours and our memory over the peer's, for all precisions of a case.

    `speed_at_equal_work` divides useful operations per second instead: where responses end at
    random, the sides sampled others, and one had more to do.
    """
    return [
        {
            "case": a["case"],
            "precision": a["precision"],
            "peer_precision": b["precision"],
            "speed": b["seconds"] / a["seconds"],
            "speed_at_equal_work": a["useful_gflops"] / b["useful_gflops"],
            "memory": a["peak_memory_mib"] / b["peak_memory_mib"],
        }
        for a, b in product(rows, rows)
        if (a["side"], b["side"]) == ("lit_rlhf", "TRL") and a["case"] == b["case"]
    ]
