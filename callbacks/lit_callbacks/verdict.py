"""What the monitors say together, in a level and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lit_callbacks.levels import Level
from lit_callbacks.monitors import Monitor


class Verdict(NamedTuple):
    """The judgement of one record.

    Attributes:
        level: healthy, suspicious or collapsed.
        sentence: why, in plain words.
        record: records seen so far, this one included.
    """

    level: Level = Level.HEALTHY
    sentence: str = "all signals are healthy"
    record: int = 0


def verdict(monitors: Sequence[Monitor], votes: int, record: int) -> Verdict:
    """Combine the monitors' levels.

    Collapsed: `votes` different signals (or as many as there are) beyond their lines for as long as
    their monitors' patience asks, or one signal more than that at once, or a decisive monitor: a
    sudden collapse shows in many signals before patience ends. Suspicious: one signal beyond its
    line for so long, or two that are suspicious (or as many as there are).

    Args:
        monitors: after they have seen the record.
        votes: signals beyond their lines that make a collapse.
        record: number of the record.
    """
    patient = {m.vote for m in monitors if m.level is Level.COLLAPSED}
    at_once = {m.vote for m in monitors if m.beyond}
    doubtful = {m.vote for m in monitors if m.level is not Level.HEALTHY}
    # an optional monitor has no vote before it has seen anything
    signals = len({m.vote for m in monitors if m.records and not m.decisive}) or 1
    needed = min(votes, signals)
    decided = any(m.decisive and m.level is Level.COLLAPSED for m in monitors)
    told = [m for m in monitors if m.beyond or m.level is not Level.HEALTHY]
    told.sort(key=lambda m: (-m.beyond, -m.level))  # the worst first, else in the order given
    reasons = ", ".join(m.sentence() for m in told)
    if not told:
        return Verdict(record=record)
    if decided or len(patient) >= needed or len(at_once) > needed:
        level = Level.COLLAPSED
    elif patient or len(doubtful) >= min(2, signals):
        level = Level.SUSPICIOUS
    else:
        return Verdict(Level.HEALTHY, f"not enough for a suspicion: {reasons}", record)
    meaning = conclusion({(m.vote, m.side) for m in told})
    if meaning and level is Level.SUSPICIOUS:
        meaning = f"perhaps {meaning}"
    return Verdict(level, f"{reasons}: {meaning}" if meaning else reasons, record)


# From the most telling to the least: what must be seen, of which others one must be, the meaning.
_CONCLUSIONS: tuple[tuple[set[tuple[str, str]], set[tuple[str, str]], str], ...] = (
    ({("non-finite", "high")}, set(), "the computation is broken"),
    (
        {("kl", "high")},
        {("length", "high"), ("perplexity", "low"), ("repetition", "low"), ("reward", "high")},
        "the policy is exploiting the reward model",
    ),
    ({("length", "low")}, set(), "the policy cuts its answers short"),
    (
        {("repetition", "low")},
        {("entropy", "low"), ("perplexity", "low"), ("length", "high")},
        "the policy repeats itself",
    ),
    ({("perplexity", "high")}, set(), "the policy loses its language"),
    ({("entropy", "high")}, set(), "the policy loses its language"),
    ({("entropy", "low")}, set(), "the policy stops exploring"),
    ({("perplexity", "low")}, set(), "the policy stops exploring"),
    ({("ratio", "high")}, set(), "rollouts and updates compute log-probs differently"),
    ({("ratio", "low")}, set(), "rollouts and updates compute log-probs differently"),
    ({("critic", "low")}, set(), "the critic does not follow the returns"),
)


def conclusion(seen: set[tuple[str, str]]) -> str:
    """What signals and their sides mean together; empty where they do not mean a known thing.

    Args:
        seen: signal and side (`high`, `low`) of every monitor that has something to say.
    """
    for all_of, one_of, meaning in _CONCLUSIONS:
        if all_of <= seen and (not one_of or one_of & seen):
            return meaning
    return ""
