"""The metrics on the page, with their titles and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lit_callbacks.runs import Run


class Panel(NamedTuple):
    """One metric on the page.

    Attributes:
        key: Key of the metric.
        title: Title of its chart.
        unit: Unit of its values; empty for none.
        group: Heading of the group that it belongs to.
        signed_log: Whether the y axis may be logarithmic on both sides of zero.
        floor: Lowest value of the y axis, however low the values are; `None` for no limit.
        meaning: What the curve says, and which course of it is normal; empty for an unknown metric.
    """

    key: str
    title: str
    unit: str
    group: str
    signed_log: bool = False
    floor: float | None = None
    meaning: str = ""


# The metrics of Figure 4 of arXiv 2307.04964, and their neighbours.
KNOWN = (
    Panel(
        "rollout/score",
        "Score of the reward model",
        "reward",
        "Reward",
        meaning="What PPO raises. A steady rise is normal, and says nothing about quality by "
        "itself: look at KL and responses. The level means nothing.",
    ),
    Panel(
        "rollout/reward",
        "Reward trained on",
        "normalized, after penalties",
        "Reward",
        meaning="The score after normalization and the KL penalty. It may fall while the score "
        "rises, where the policy pays for its distance.",
    ),
    Panel(
        "rollout/gold",
        "Gold reward",
        "never trained on",
        "Reward",
        meaning="A second judge. If it falls while the score rises, the reward is being exploited.",
    ),
    # KL spans orders of magnitude when a run collapses, and its estimate can be negative.
    Panel(
        "rollout/kl",
        "KL to the SFT policy",
        "nats per response",
        "Policy",
        signed_log=True,
        meaning="How far the policy has moved. It begins at 0 and grows with every update; a slow "
        "rise that levels off is normal, one that speeds up is not.",
    ),
    Panel(
        "rollout/perplexity",
        "Perplexity of the responses",
        "",
        "Policy",
        signed_log=True,
        meaning="How many tokens the policy hesitates between. A slow fall is normal; near 1 it "
        "says the same each time, and a rise means that it loses its language.",
    ),
    Panel(
        "rollout/entropy",
        "Entropy",
        "nats per token",
        "Policy",
        meaning="The logarithm of the perplexity, on average. A slow fall is normal; near 0 "
        "nothing new is tried.",
    ),
    Panel(
        "rollout/response_length",
        "Response length",
        "tokens",
        "Responses",
        meaning="Many reward models like length. A rise without end, to the limit, is the "
        "commonest way to exploit them.",
    ),
    Panel(
        "rollout/truncation_rate",
        "Truncation rate",
        "share of responses",
        "Responses",
        meaning="Responses that were cut off. If it is high from the start, raise max_new_tokens; "
        "if it grows, the policy has learned not to end.",
    ),
    Panel(
        "rollout/distinct_2",
        "Distinct-2",
        "share of bigrams",
        "Responses",
        meaning="How varied the responses are together. A fall means that they repeat themselves, "
        "or each other.",
    ),
    Panel(
        "ppo/policy_loss",
        "Policy loss",
        "",
        "Optimization",
        meaning="It wanders around 0 and does not fall in a good run: advantages are relative. "
        "Look at score and KL instead.",
    ),
    Panel(
        "ppo/value_loss",
        "Value loss",
        "reward squared",
        "Optimization",
        meaning="The critic's error. It falls in critic pre-training, and may rise with the spread "
        "of the rewards.",
    ),
    # A new critic's first values are far below 0 and would flatten the rest.
    Panel(
        "ppo/explained_variance",
        "Explained variance of the critic",
        "",
        "Optimization",
        floor=-1.0,
        meaning="1 is a critic that knows the returns, 0 one that knows their mean. Values of 0.2 "
        "to 0.8 are normal; below 0 for long, train the critic first.",
    ),
)
MOST_PANELS = 500
"""Largest number of charts of a page; each takes time to draw."""
_NOT_SHOWN = {"epoch"}  # a counter


def choose_panels(runs: Sequence[Run], keys: Sequence[str] | None) -> list[Panel]:
    """Choose the panels of a page.

    Without `keys`, choose the known metrics that a run logged, and all metrics of a run that logged
    none of them. A key that no run logged is a ValueError.
    """
    if isinstance(keys, str):
        raise ValueError(f"keys: expected a list of keys, got the string {keys!r}")
    logged = {key for run in runs for key in run.curves}
    chosen_keys = _usual_keys(runs) if keys is None else list(keys)
    if len(chosen_keys) > MOST_PANELS:
        raise ValueError(
            f"keys: expected at most {MOST_PANELS} metrics on a page, got {len(chosen_keys)}; name "
            "the ones to show (--keys KEY KEY)"
        )
    missing = [key for key in chosen_keys if key not in logged]
    if missing or not chosen_keys:
        raise ValueError(
            f"keys: expected metrics that a run logged ({', '.join(sorted(logged))}), "
            f"got {', '.join(missing) or 'none'}"
        )
    panels = {panel.key: panel for panel in KNOWN}
    return [panels.get(key) or _unknown_panel(key) for key in dict.fromkeys(chosen_keys)]


def _usual_keys(runs: Sequence[Run]) -> list[str]:
    usual = {panel.key for panel in KNOWN}
    metric_keys = set()
    for run in runs:
        shown = {k for k in run.curves if k not in _NOT_SHOWN and not k.startswith("monitor/")}
        metric_keys |= usual & shown or shown
    others = sorted(metric_keys - usual, key=lambda key: (key.rpartition("/")[0], key))
    return [panel.key for panel in KNOWN if panel.key in metric_keys] + others


def _unknown_panel(key: str) -> Panel:
    """A panel of a metric that is not in `KNOWN`, named after its key."""
    prefix, _, name = key.rpartition("/")
    return Panel(key, name, "", prefix or "Metrics")
