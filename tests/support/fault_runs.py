"""What each of two ranks runs when the second has a fault: every stage, under DDP and engines."""

import os
import warnings
from pathlib import Path
from typing import Any

from tests.support.faulty_stages import Course, FaultyEstimates, FaultyPPO, faulty_stage
from tests.support.rank_runs import RANKS, strategy
from tests.support.stages import fit_module, ppo_options, prompts

STRATEGIES = ("ddp", "deepspeed")
# a fault with a finite gradient shows on its own rank alone: the ranks have to tell each other
SILENT = "infinite without a gradient"


def runs(rank: int, root: Path) -> dict[str, Any]:
    """Modules and data; the fault is in the second batch of rank 1."""
    at = (1,) if rank == 1 else ()
    ppo = {"minibatches.minibatch_size": 2, "minibatches.ppo_epochs": 1}
    critic = FaultyPPO(at, "critic", SILENT, **ppo_options(root, **ppo))
    logprobs = FaultyEstimates(at, "logprobs", **ppo_options(root, **ppo))
    return {
        "sft": faulty_stage("sft", root, at, SILENT, micro_batch_size=None),
        "reward": faulty_stage("reward", root, at, "nan"),
        "critic": (critic, prompts(root, batch_size=2)),
        "log-probs": (logprobs, prompts(root, batch_size=2)),
    }


def on_a_rank(rank: int, root: Path, folder: Path) -> dict[str, Any]:
    """Record the course and warnings of each run on this rank, by strategy and stage."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    results: dict[str, Any] = {}
    ranks = {"devices": RANKS, "use_distributed_sampler": False}
    for name in STRATEGIES:
        for stage, (module, data) in runs(rank, root).items():
            course = Course()
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                place, options = folder / name / stage, {"strategy": strategy(name), **ranks}
                fit_module(module, data, place, max_epochs=2, callbacks=[course], **options)
            logged = [item for metrics in course.metrics for item in metrics.items()]
            results[f"{name} {stage}"] = {
                "states": course.states,
                "moments": course.moments,
                "skipped": [value for key, value in logged if key.endswith("/skipped_updates")],
                "warnings": [str(w.message) for w in shown if "skipped at" in str(w.message)],
            }
    return results
