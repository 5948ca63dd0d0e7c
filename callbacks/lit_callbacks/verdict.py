"""Combines the levels of all monitors into one verdict: a level and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from lit_callbacks.monitors import Level, Monitor, choose

LONGER_AND_SURER = {("length", "high"), ("entropy", "low")}
"""Signals that move together, without harm, when training on answers that can be checked."""


class Verdict(NamedTuple):
    """The judgement of a step.

    Attributes:
        level: Level of the run.
        sentence: Reasons in plain words.
        step: Number of steps judged so far, this one included.
    """

    level: Level = Level.HEALTHY
    sentence: str = "all signals are healthy"
    step: int = 0


DEFAULT_VOTES = 2
"""Number of different signals that make a collapse if nothing else is asked for."""


def judge(monitors: Sequence[Monitor], votes: int | None, step: int) -> Verdict:
    """Combine the monitors' levels.

    The verdict is collapsed if `votes` different signals (or all, if there are fewer) are, or if a
    monitor decides it by itself. Without `votes`, two signals do, and so does each monitor that has
    no signal: whoever sets a threshold for a metric of their own means it. Where the distance to
    the reference is watched (the signal `kl`), it has to be one of the two: responses that change
    while the policy stays near its reference follow from the prompts. Where it is not watched,
    longer responses and lower entropy are one signal: training on answers that can be checked
    brings both. If the prompts' own signal (`data`) has changed, the verdict is that the data
    changed.

    The verdict is suspicious if one signal has collapsed, or if two (or all, if there are fewer)
    are suspicious. An advisory monitor has no vote for a collapse.

    Args:
        monitors: The monitors, after the step.
        votes: Number of different signals that make a collapse, at least 1; `None`: see above.
        step: Number of steps judged so far, this one included.
    """
    known = {m.vote for m in monitors if m.steps and not m.stands_in}
    voting = [m for m in monitors if m.signal != "data" and not (m.stands_in and m.vote in known)]
    beyond = {m.vote for m in voting if m.level is Level.COLLAPSED and not m.advisory}
    advised = any(m.level is Level.COLLAPSED and m.advisory for m in voting)
    doubtful = {m.vote for m in voting if m.level is not Level.HEALTHY}
    # An optional monitor has no vote until it has observed a step.
    read = [m for m in voting if m.steps and not m.decisive and not m.advisory]
    signals = len({m.vote for m in read}) or 1
    sides = {(m.vote, m.side) for m in voting if m.level is Level.COLLAPSED}
    is_measured = any(m.signal == "kl" for m in read)
    is_near = is_measured and "kl" not in beyond
    if not is_measured and sides >= LONGER_AND_SURER:
        beyond -= {"entropy"}
    changed = [m for m in monitors if m.signal == "data" and m.level is Level.COLLAPSED]
    named = [m for m in voting if m.is_beyond or m.level is not Level.HEALTHY]
    named.sort(key=lambda m: (-m.is_beyond, -m.level))  # the worst first, otherwise as given
    needed = min(choose(votes, DEFAULT_VOTES), signals)
    decided = any(m.decides or (votes is None and counts_alone(m)) for m in voting)
    if decided or (len(beyond) >= needed and not is_near):
        level = Level.COLLAPSED
    elif changed:
        return Verdict(Level.DATA_CHANGED, ", ".join(m.sentence() for m in changed), step)
    elif not named:
        return Verdict(step=step)
    elif beyond or advised or len(doubtful) >= min(2, signals):
        level = Level.SUSPICIOUS
    else:
        level = Level.HEALTHY
    reasons = ", ".join(m.sentence() for m in named)
    if level is Level.HEALTHY:
        return Verdict(level, f"not enough for a suspicion: {reasons}", step)
    # by signal and not by vote: the key of a monitor without a signal may be named like one
    signs = {"high": "+", "low": "-"}
    meaning = conclude({f"{m.signal}{signs.get(m.side, '')}" for m in named})
    if meaning and level is Level.SUSPICIOUS:
        meaning = f"perhaps {meaning}"
    return Verdict(level, f"{reasons}: {meaning}" if meaning else reasons, step)


def counts_alone(monitor: Monitor) -> bool:
    """Whether a monitor is one of a metric of the user's own, and collapsed."""
    return not monitor.signal and not monitor.advisory and monitor.level is Level.COLLAPSED


class Conclusion(NamedTuple):
    """Meanings of combined signals. The side follows the signal: `kl+` is high, `length-` low.

    Attributes:
        meaning: The meaning in words.
        all_of: Signals that must all be beyond a threshold.
        one_of: Signals of which at least one must be, too; empty for none.
    """

    meaning: str
    all_of: frozenset[str]
    one_of: frozenset[str] = frozenset()


# from the most specific to the least
_CONCLUSIONS = (
    Conclusion("the computation is broken", frozenset({"non-finite+"})),
    Conclusion("the policy gives one answer to everything", frozenset({"kl+", "opening+"})),
    Conclusion("the policy cuts its answers short", frozenset({"kl+", "length-"})),
    Conclusion(
        "the policy is exploiting its reward",
        frozenset({"kl+"}),
        one_of=frozenset(
            {
                "length+",
                "entropy-",
                "repetition-",
                "repetition+",
                "reward+",
                "reward-",
                "ensemble+",
            }
        ),
    ),
    Conclusion("the policy cuts its answers short", frozenset({"length-"})),
    Conclusion(
        "the policy repeats itself",
        frozenset({"repetition-"}),
        one_of=frozenset({"entropy-", "length+"}),
    ),
    Conclusion("the policy loses its language", frozenset({"entropy+"})),
    Conclusion("the policy stops exploring", frozenset({"entropy-"})),
    Conclusion("rollouts and updates compute log-probs differently", frozenset({"ratio+"})),
    Conclusion("rollouts and updates compute log-probs differently", frozenset({"ratio-"})),
    Conclusion("the critic does not follow the returns", frozenset({"critic-"})),
)


def conclude(signals: AbstractSet[str]) -> str:
    """Meaning of signals with their sides, such as `kl+`, together; empty if not known."""
    for conclusion in _CONCLUSIONS:
        if not signals >= conclusion.all_of:
            continue
        if not conclusion.one_of or signals & conclusion.one_of:
            return conclusion.meaning
    return ""


_ADVICE = {
    "the computation is broken": "find the first metric that is not finite; lower the learning "
    "rate, or compute in float32",
    "the policy gives one answer to everything": "read that answer to see what the reward likes; "
    "raise the KL coefficient or lower the learning rate",
    "the policy cuts its answers short": "see whether the reward pays for short answers; add a "
    "rule with a lower bound of length, or raise the KL coefficient",
    "the policy is exploiting its reward": "take the best checkpoint on held-out prompts, read the "
    "best-scored responses for what the reward likes, and raise the KL coefficient or mend the "
    "reward",
    "the policy repeats itself": "add a rule against repetition, or raise the KL coefficient",
    "the policy loses its language": "lower the learning rate, or raise the KL coefficient",
    "the policy stops exploring": "lower the learning rate, raise the temperature, or add an "
    "entropy bonus",
    "rollouts and updates compute log-probs differently": "compare dropout, padding, temperature "
    "and precision of sampling and update",
    "the critic does not follow the returns": "train the critic longer before the policy, or raise "
    "its learning rate",
}
"""What to do next, by the meaning of a verdict."""


def advise(sentence: str) -> str:
    """What to do next about a verdict; empty if its sentence has no known meaning."""
    meaning = sentence.rpartition(": ")[2].removeprefix("perhaps ")
    return _ADVICE.get(meaning, "")
