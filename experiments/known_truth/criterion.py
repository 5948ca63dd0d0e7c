"""The criterion and its judge. Both stand before the runs of the seeds that decide.

Seeds 0 and 1 choose learning rate, KL weight and iterations; seeds 10, 11 and 12 decide. For every
deciding seed, on the same held-out prompts with eight samples each:

1. vanilla PPO's proxy is above SFT's by at least one standard deviation of SFT's scores, and its
   truth is below SFT's: the 95 % interval of the paired difference lies below 0;
2. PPO-max's truth is above SFT's and above vanilla's: both intervals lie above 0;
3. PPO-max's truth is above best of 4 of SFT by the proxy: the interval lies above 0.

Intervals are a bootstrap over prompts: the samples of a prompt stay together, and the two policies
of a difference are drawn on the same prompts. All arms have the same rates, prompts, iterations and
longest response.

Version 1 asked for 256 held-out prompts with four samples each, forbade two words in a row twice
instead of three, and SFT learned the best of eight samples by the labels' rule. Before any deciding
seed was trained, seed 0 showed that 55 % of such an SFT model's responses are valid: form was most
of what PPO gained, also vanilla PPO, whose truth fell for nine iterations and rose then.

Version 2 drew the pairs from all responses. Its SFT model's are valid in 80 %, and a reward model
that had seen invalid ones lose kept vanilla PPO near them: seed 0's truth fell to -0.45 for some
iterations and ended near SFT's, with responses that were nearly all alike (distinct-2 0.27). Now
the pairs are of valid responses, as a labeller would be shown whose sampler filters them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from lit_rlhf.functional import best_of_n
from lit_rlhf.tools.evaluation.outcomes import score_summary

VERSION = "3, 2026-11-24"
CHOOSING_SEEDS = (0, 1)
DECIDING_SEEDS = (10, 11, 12)
BEST_OF = (1, 2, 4, 8)
SAMPLES = 8


class Difference(NamedTuple):
    """A paired difference of means with its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Difference `first - second` of means over prompts, `[N]` or `[N, samples]` each."""
    a, b = (values.reshape(len(values), -1).mean(1) for values in (first, second))
    summary = score_summary(a - b)
    return Difference(summary.mean, summary.low, summary.high)


def best_of(n: int, proxy: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Expected value of the best of `n` by the proxy, `[N]`, from `[N, samples]`."""
    return best_of_n(proxies=torch.from_numpy(proxy), values=torch.from_numpy(values), n=n).numpy()


def read_arms(steps: dict[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """`proxy` and `truth` of each policy, `[N, SAMPLES]`, from the results of steps."""
    return {
        policy: {key: np.array(row[key]).reshape(-1, SAMPLES) for key in ("proxy", "truth")}
        for policy, row in steps["policies"].items()
    }


def judge(arms: dict[str, dict[str, np.ndarray]]) -> dict[str, object]:
    """Judge a seed.

    Args:
        arms: `proxy` and `truth`, `[N, SAMPLES]` each, of `sft`, `ppo_vanilla` and `ppo_max`.
    """
    sft, vanilla, ppo_max = (arms[name] for name in ("sft", "ppo_vanilla", "ppo_max"))
    best = best_of(4, sft["proxy"], sft["truth"])
    proxy_gain = (vanilla["proxy"].mean() - sft["proxy"].mean()) / sft["proxy"].std()
    differences = {
        "vanilla - SFT": paired_difference(vanilla["truth"], sft["truth"]),
        "PPO-max - SFT": paired_difference(ppo_max["truth"], sft["truth"]),
        "PPO-max - vanilla": paired_difference(ppo_max["truth"], vanilla["truth"]),
        "PPO-max - best of 4": paired_difference(ppo_max["truth"], best),
    }
    holds = {
        "1 exploited": bool(proxy_gain >= 1 and differences["vanilla - SFT"].high < 0),
        "2 improved": bool(
            differences["PPO-max - SFT"].low > 0 and differences["PPO-max - vanilla"].low > 0
        ),
        "3 beats best of 4": bool(differences["PPO-max - best of 4"].low > 0),
    }
    return {
        "vanilla's proxy above SFT's, in SFT's standard deviations": float(proxy_gain),
        "differences": {name: list(value) for name, value in differences.items()},
        "holds": holds,
    }
