"""Combines the levels of all monitors into one verdict: a level, a kind of trouble, a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import NamedTuple

from lit_callbacks.monitors import Level, Monitor, choose

LONGER_AND_SURER = {("length", "high"), ("entropy", "low")}
"""Signals that move together, without harm, when training on answers that can be checked."""


class Trouble(StrEnum):
    """A kind of trouble, from the gravest on."""

    BROKEN = "broken"
    """The numbers cannot be trusted: not finite, or samples that are not the policy's."""
    EXPLOITING = "exploiting"
    """The answers become worse in the way of a policy that exploits its reward."""
    MONOTONOUS = "monotonous"
    """The answers lose their variety; they may be right."""
    DATA_CHANGED = "data changed"
    """The prompts have changed, and no other signal says more."""

    @classmethod
    def parse(cls, argument: str, words: Iterable[str]) -> tuple[Trouble, ...]:
        """Parse the value of an argument.

        Args:
            argument: Name of the argument, for the error.
            words: Its value: kinds, or their values such as `broken`.

        Raises:
            ValueError: If a word is no kind, or there is none.
        """
        values = [trouble.value for trouble in cls]
        names = [str(word) for word in words]
        if not names or not set(names) <= set(values):
            got = ", ".join(names) or "none"
            raise ValueError(f"{argument}: expected some of {', '.join(values)}, got {got}")
        return tuple(cls(word) for word in dict.fromkeys(names))


GRAVE = (Trouble.BROKEN, Trouble.EXPLOITING)
"""Kinds at which a run is stopped or rolled back if nothing else is asked for."""


class Verdict(NamedTuple):
    """The judgement of a step.

    Attributes:
        level: Level of the run.
        sentence: Reasons in plain words.
        step: Number of steps judged so far, this one included.
        trouble: The gravest kind of trouble; `None` if the run is healthy, or if only signals
            without a known meaning speak, such as a metric of your own.
    """

    level: Level = Level.HEALTHY
    sentence: str = "all signals are healthy"
    step: int = 0
    trouble: Trouble | None = None

    def is_one_of(self, kinds: Iterable[Trouble]) -> bool:
        """Whether the trouble is of one of these kinds, or of no known kind."""
        return self.trouble is None or self.trouble in kinds


DEFAULT_VOTES = 2
"""Number of different signals that make a collapse if nothing else is asked for."""


def judge(monitors: Sequence[Monitor], votes: int | None, step: int) -> Verdict:
    """Combine the monitors' levels.

    The verdict is collapsed if `votes` different signals (or all, if there are fewer) are, or if a
    monitor decides it by itself. One signal alone is suspicious, unless it has a threshold of the
    user's own, `votes` is 1, or no other is watched. Without `votes`, two signals do, and so does
    each monitor that has no signal: whoever sets a threshold for a metric of their own means it.
    Where the distance to the reference is watched (the signal `kl`), it has to be one of the two:
    responses that change while the policy stays near its reference follow from the prompts. Where
    it is not watched, longer responses and lower entropy are one signal: training on answers that
    can be checked brings both. Two signals of lost variety make a collapse at any distance. If the
    prompts' own signal (`data`) has changed, the verdict is that the data changed.

    The verdict is suspicious if one signal has collapsed, or if two (or all, if there are fewer)
    are suspicious. An advisory monitor has no vote for a collapse.

    Args:
        monitors: The monitors, after the step.
        votes: Number of different signals that make a collapse, at least 1; `None`: see above.
        step: Number of steps judged so far, this one included.
    """
    observed_votes = {m.vote for m in monitors if m.steps and not m.stands_in}
    voting = [
        m for m in monitors if m.signal != "data" and not (m.stands_in and m.vote in observed_votes)
    ]
    changed = [m for m in monitors if m.signal == "data" and m.level is Level.COLLAPSED]
    named = [m for m in voting if m.is_beyond or m.level is not Level.HEALTHY]
    named.sort(key=lambda m: (-m.is_beyond, -m.level))  # the worst first, otherwise as given
    collapsed = [m for m in named if m.level is Level.COLLAPSED]
    doubtful = {m.vote for m in voting if m.level is not Level.HEALTHY}
    if _is_collapse(voting, votes, may_be_alone=not watches_several_signals(monitors)) or (
        not changed and _is_monotonous(collapsed, _count_needed(voting, votes))
    ):
        level = Level.COLLAPSED
    elif changed:
        sentence = ", ".join(m.sentence() for m in changed)
        return Verdict(Level.DATA_CHANGED, sentence, step, Trouble.DATA_CHANGED)
    elif not named:
        return Verdict(step=step)
    elif collapsed or len(doubtful) >= min(2, _count_signals(voting)):
        level = Level.SUSPICIOUS
    else:
        level = Level.HEALTHY
    reasons = ", ".join(m.sentence() for m in named)
    if level is Level.HEALTHY:
        return Verdict(level, f"not enough for a suspicion: {reasons}", step)
    conclusions = conclude(find_signs(collapsed)) if level is Level.COLLAPSED else []
    conclusions = conclusions or conclude(find_signs(named))
    if not conclusions:
        return Verdict(level, reasons, step)
    gravest, *others = conclusions
    meaning = gravest.meaning if level is Level.COLLAPSED else f"perhaps {gravest.meaning}"
    meaning += "".join(f"; also {other.trouble}" for other in others)
    return Verdict(level, f"{reasons}: {meaning}", step, gravest.trouble)


def _counted(voting: Sequence[Monitor]) -> list[Monitor]:
    """The monitors that can make a collapse together."""
    # an optional monitor has no vote until it has observed a step
    return [m for m in voting if m.steps and not m.decisive and not m.advisory]


def _count_signals(voting: Sequence[Monitor]) -> int:
    """Number of different signals that can make a collapse together, at least 1."""
    return len({m.vote for m in _counted(voting)}) or 1


def _count_needed(voting: Sequence[Monitor], votes: int | None) -> int:
    """Number of different signals that make a collapse."""
    return min(choose(votes, DEFAULT_VOTES), _count_signals(voting))


def _is_collapse(voting: Sequence[Monitor], votes: int | None, *, may_be_alone: bool) -> bool:
    """Whether enough signals are beyond their thresholds, or one of them decides alone.

    Args:
        voting: The monitors that have a vote.
        votes: Number of different signals that make a collapse, see `judge`.
        may_be_alone: Whether one signal may be enough, because no other is watched.
    """
    if any(m.decides or (votes is None and counts_alone(m)) for m in voting):
        return True
    collapsed = [m for m in voting if m.level is Level.COLLAPSED and not m.advisory]
    beyond = {m.vote for m in collapsed}
    # what one signal alone says may have other reasons, unless a person set its threshold
    is_alone = len(beyond) == 1 and all(m.signal for m in voting if m.vote in beyond)
    if is_alone and votes != 1 and not may_be_alone:
        return False
    is_measured = any(m.signal == "kl" for m in _counted(voting))
    anywhere = {m.vote for m in collapsed if not m.needs_distance}
    is_near = is_measured and "kl" not in beyond
    if is_near and len(anywhere) < choose(votes, DEFAULT_VOTES):
        return False
    sides = {(m.vote, m.side) for m in voting if m.level is Level.COLLAPSED}
    if not is_measured and sides >= LONGER_AND_SURER:
        beyond -= {"entropy"}
    return len(beyond) >= _count_needed(voting, votes)


def _is_monotonous(collapsed: Sequence[Monitor], needed: int) -> bool:
    """Whether at least two signals say that variety is lost.

    Args:
        collapsed: The monitors beyond their thresholds.
        needed: Number of different signals that make a collapse.
    """
    variety = {m.vote for m in collapsed if find_signs([m]) & VARIETY}
    return len(variety) >= max(needed, 2)


def watches_several_signals(monitors: Iterable[Monitor]) -> bool:
    """Whether the monitors could vote for more than one signal, if the run logged them all."""
    votes = {m.vote for m in monitors if m.signal != "data" and not m.decisive and not m.advisory}
    return len(votes) > 1


def find_signs(monitors: Iterable[Monitor]) -> set[str]:
    """The signals of monitors with their sides, such as `kl+`, or `kl++` where it decides alone."""
    signs = {"high": "+", "low": "-"}
    found_signs = set()
    for monitor in monitors:
        # by signal and not by vote: the key of a monitor without a signal may be named like one
        sign = f"{monitor.signal}{signs.get(monitor.side, '')}"
        found_signs |= {sign, f"{sign}+"} if sign == "kl+" and monitor.decides else {sign}
    return found_signs


def counts_alone(monitor: Monitor) -> bool:
    """Whether a monitor is one of a metric of the user's own, and collapsed."""
    return not monitor.signal and not monitor.advisory and monitor.level is Level.COLLAPSED


class Conclusion(NamedTuple):
    """Meanings of combined signals. The side follows the signal: `kl+` is high, `length-` low.

    A KL that decides alone is `kl++`, too.

    Attributes:
        trouble: The kind of trouble that they are a sign of.
        meaning: The meaning in words.
        all_of: Signals that must all be beyond a threshold.
        one_of: Signals of which at least one must be, too; empty for none.
        none_of: Signals that must all be within their thresholds.
    """

    trouble: Trouble
    meaning: str
    all_of: frozenset[str] = frozenset()
    one_of: frozenset[str] = frozenset()
    none_of: frozenset[str] = frozenset()

    def follows_from(self, signals: AbstractSet[str]) -> bool:
        """Whether the signals have this meaning."""
        if self.one_of and not signals & self.one_of:
            return False
        return signals >= self.all_of and not signals & self.none_of


HARM = frozenset({"length+", "truncation+", "reward+", "ensemble+"})
VARIETY = frozenset({"entropy-", "repetition-", "repetition+", "opening+"})

# From the most specific to the least. A policy that loses its variety leaves its reference by that:
# a distance that does not decide alone is no sign of harm beside it.
_CONCLUSIONS = (
    Conclusion(Trouble.BROKEN, "the computation is broken", frozenset({"non-finite+"})),
    Conclusion(Trouble.BROKEN, "the samples are not the policy's", frozenset({"negative-kl-"})),
    Conclusion(Trouble.BROKEN, "the run unlearns what its reward asks for", frozenset({"score-"})),
    Conclusion(
        Trouble.EXPLOITING,
        "the policy gives one answer to everything",
        frozenset({"kl++", "opening+"}),
    ),
    Conclusion(Trouble.EXPLOITING, "the policy cuts its answers short", frozenset({"length-"})),
    Conclusion(
        Trouble.EXPLOITING,
        "the policy is exploiting its reward",
        frozenset({"kl+"}),
        # a policy that loops within its responses has not only lost variety between them
        one_of=HARM | {"kl++", "reward-", "repetition+"},
    ),
    Conclusion(
        Trouble.EXPLOITING,
        "the policy repeats itself",
        frozenset({"repetition-", "length+"}),
    ),
    Conclusion(Trouble.EXPLOITING, "the policy loses its language", frozenset({"entropy+"})),
    Conclusion(
        Trouble.BROKEN,
        "rollouts and updates compute log-probs differently",
        one_of=frozenset({"ratio+", "ratio-", "sampler+"}),
    ),
    Conclusion(Trouble.EXPLOITING, "the policy is exploiting its reward", one_of=HARM),
    Conclusion(
        Trouble.EXPLOITING,
        "the policy is exploiting its reward",
        frozenset({"kl+"}),
        none_of=VARIETY,
    ),
    Conclusion(Trouble.MONOTONOUS, "the policy has lost its variety", one_of=VARIETY | {"reward-"}),
    Conclusion(Trouble.BROKEN, "the critic does not follow the returns", frozenset({"critic-"})),
)


def conclude(signals: AbstractSet[str]) -> list[Conclusion]:
    """What signals with their sides, such as `kl+`, mean together.

    Returns:
        The first meaning that follows, and then the first of each further kind of trouble; empty
        if none is known.
    """
    first: dict[Trouble, Conclusion] = {}
    for conclusion in _CONCLUSIONS:
        if conclusion.follows_from(signals):
            first.setdefault(conclusion.trouble, conclusion)
    return list(first.values())


_ADVICE = {
    "the computation is broken": "find the first metric that is not finite; lower the learning "
    "rate, or compute in float32",
    "the samples are not the policy's": "compare weights, top-p and temperature, padding and the "
    "masks of sampling with the ones of the log-probs",
    "the run unlearns what its reward asks for": "lower the learning rate, and see whether the "
    "advantages have the sign of the reward",
    "the policy gives one answer to everything": "read that answer to see what the reward likes; "
    "raise the KL coefficient or lower the learning rate",
    "the policy cuts its answers short": "see whether the reward pays for short answers; add a "
    "rule with a lower bound of length, or raise the KL coefficient",
    "the policy is exploiting its reward": "take the best checkpoint on held-out prompts, read the "
    "best-scored responses for what the reward likes, and raise the KL coefficient or mend the "
    "reward",
    "the policy repeats itself": "add a rule against repetition, or raise the KL coefficient",
    "the policy loses its language": "lower the learning rate, or raise the KL coefficient",
    "the policy has lost its variety": "read whether the answers are right all the same; if they "
    "are not, lower the learning rate, raise the temperature, or add an entropy bonus",
    "rollouts and updates compute log-probs differently": "compare dropout, padding, temperature "
    "and precision of sampling and update",
    "the critic does not follow the returns": "train the critic longer before the policy, or raise "
    "its learning rate",
}
"""What to do next, by the meaning of a verdict."""


def advise(sentence: str) -> str:
    """What to do next about a verdict; empty if its sentence has no known meaning."""
    meaning = sentence.rpartition(": ")[2].removeprefix("perhaps ").partition("; also ")[0]
    return _ADVICE.get(meaning, "")
