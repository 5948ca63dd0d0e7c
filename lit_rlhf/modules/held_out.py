"""How good a stage's model is on held-out data, in one line, from the metrics of its validation."""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_callbacks import CollapseDetector, Verdict
from lit_callbacks.trainer_attributes import find_callbacks
from lit_rlhf.functional import Interval, wilson_interval

REQUIRED_METRICS = {
    "sft": (
        "sft/loss",
        "sft/token_accuracy",
        "sft/frequency_loss",
        "sft/frequency_accuracy",
    ),
    "reward": ("reward/accuracy", "reward/longer_accuracy", "reward/pairs"),
    "ppo": (
        "rollout/score",
        "rollout/start_score",
        "rollout/win_rate",
        "rollout/responses",
        "rollout/kl",
        "rollout/response_length",
    ),
}
"""Metrics of a validation that a stage's line needs. Without any of them there is no line."""

_Z = NormalDist().inv_cdf(0.975)  # half the width of a 95 % interval, in standard errors

_WIDEST = 0.4
"""Widest 95 % interval of an accuracy for a verdict beside a baseline on the same pairs.

With 20 pairs, an accuracy of one half has such an interval."""


def describe_held_out(stage: str, metrics: Mapping[str, float], trainer: Trainer) -> str | None:
    """Say how good a model is on held-out data, with a 95 % interval and a naive baseline.

    Args:
        stage: `sft`, `reward` or `ppo`.
        metrics: The last metrics of the run, by key.
        trainer: The trainer of the run, whose detector has the verdict on it.

    Returns:
        The line; `None` if the stage is another one, or nothing was held out.
    """
    held_out = {
        key.removeprefix("val/"): value for key, value in metrics.items() if key.startswith("val/")
    }
    describe = _DESCRIPTIONS.get(stage)
    if describe is None or held_out.keys().isdisjoint(REQUIRED_METRICS[stage]):
        return None
    if missing := [key for key in REQUIRED_METRICS[stage] if key not in held_out]:
        # the model is saved all the same
        rank_zero_warn(f"{stage}: the validation has not logged val/{', val/'.join(missing)}")
        return None
    line = describe(held_out)
    verdict = find_verdict(trainer) if stage == "ppo" else None
    return line if verdict is None else f"{line}; verdict: {verdict.level.word}"


def find_verdict(trainer: Trainer) -> Verdict | None:
    """The verdict of the trainer's first detector on the last step; `None` without one."""
    detectors = find_callbacks(trainer, CollapseDetector)
    return detectors[0].verdict if detectors else None


def _describe_sft(metrics: Mapping[str, float]) -> str:
    loss = metrics["sft/loss"]
    baseline = metrics["sft/frequency_loss"]
    error = metrics.get("sft/loss_error")  # none of a single dialogue
    bounds = ""
    verdict = ""
    if error is not None:
        interval = Interval(math.exp(loss - _Z * error), math.exp(loss + _Z * error))
        bounds = f" [{interval.low:.3g}, {interval.high:.3g}]"
        verdict = f": {_compare(interval, math.exp(baseline), lower_is_better=True)}"
    return (
        f"perplexity {math.exp(loss):.3g}{bounds}, token accuracy "
        f"{metrics['sft/token_accuracy']:.2f}; by the frequency of tokens alone "
        f"{math.exp(baseline):.3g} and {metrics['sft/frequency_accuracy']:.2f}{verdict}"
    )


def _compare(interval: Interval, baseline: float, *, lower_is_better: bool = False) -> str:
    """Say whether a number is better than a baseline.

    Args:
        interval: The interval of the number.
        baseline: The baseline.
        lower_is_better: Whether a lower number is better.
    """
    if interval.low <= baseline <= interval.high:
        return "no better"
    return "better" if (interval.low > baseline) != lower_is_better else "worse"


def describe_pairs(metrics: Mapping[str, float]) -> str:
    """Say how good a reward model is on pairs, beside a rule of length.

    Args:
        metrics: `reward/accuracy`, `reward/longer_accuracy` and `reward/pairs`.
    """
    n_pairs = round(metrics["reward/pairs"])
    accuracy = metrics["reward/accuracy"]
    longer = metrics["reward/longer_accuracy"]
    interval = wilson_interval(accuracy * n_pairs, n_pairs)
    rule = "longer" if longer >= 0.5 else "shorter"
    baseline = max(longer, 1 - longer)
    is_wide = interval.high - interval.low > _WIDEST
    verdict = "too few pairs to tell" if is_wide else _compare(interval, baseline)
    return (
        f"accuracy {accuracy:.2f} [{interval.low:.2f}, {interval.high:.2f}] on {n_pairs} pairs; "
        f'"{rule} is better" {baseline:.2f}: {verdict}'
    )


def _describe_ppo(metrics: Mapping[str, float]) -> str:
    n_responses = round(metrics["rollout/responses"])
    win_rate = metrics["rollout/win_rate"]
    interval = wilson_interval(win_rate * n_responses, n_responses)
    return (
        f"score {metrics['rollout/score']:.3g} (start {metrics['rollout/start_score']:.3g}), wins "
        f"{win_rate:.2f} [{interval.low:.2f}, {interval.high:.2f}] of {n_responses} against the "
        f"start by its own reward; KL {metrics['rollout/kl']:.3g} nats, length "
        f"{metrics['rollout/response_length']:.3g} tokens"
    )


_DESCRIPTIONS: dict[str, Callable[[Mapping[str, float]], str]] = {
    "sft": _describe_sft,
    "reward": describe_pairs,
    "ppo": _describe_ppo,
}
