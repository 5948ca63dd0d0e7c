"""The paper's statements, and the rules by which results confirm or contradict them.

A claim is a list of comparisons between measures of a seed's runs. Its verdict is a count over
seeds, see `judge`. Claims and rules stand before the runs are made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from benchmarks.reproduce import table
from benchmarks.reproduce.table import Arm, Foundation

MIN_SEEDS = 3
"""Fewer seeds give no verdict."""
MOST = 2 / 3
"""Share of the seeds in which a comparison has to hold."""
TAIL = 0.1
"""Share of a curve over which its start and its end are averaged."""

Runs = Mapping[str, Mapping[str, Any]]
"""Results of one seed by the name of arm or foundation."""
At = Literal["start", "end", "peak", "low", "early"]


class Verdict(StrEnum):
    """A verdict on a claim."""

    CONFIRMED = "confirmed"
    PARTLY = "partly"
    NOT_AT_THIS_SCALE = "not at this scale"
    CONTRADICTED = "contradicted"
    NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Value:
    """A number of a run.

    Attributes:
        part: The arm or foundation.
        measure: A measure of the samples on held-out prompts; or of the curves, of rollouts, which
            `rollout.` before its name asks for; or the dotted name of a single number of the
            result.
        at: Which value of a course: the first, the last, the largest, the smallest, or the mean
            over the first quarter (`early`). Of curves each is a mean over a tenth of the run. Not
            used for a single number.
    """

    part: Arm | Foundation
    measure: str
    at: At = "end"

    def of(self, runs: Runs) -> float:
        """The number; NaN if the run has none.

        Raises:
            KeyError: If the run is not there.
        """
        result = runs[self.part.name]
        if self.measure in result.get("samples", {}):
            return _pick(result["samples"][self.measure], self.at, width=1)
        curve = self.measure.removeprefix("rollout.")
        if curve in result.get("curves", {}):
            course = result["curves"][curve]
            return _pick(course, self.at, width=max(1, round(TAIL * len(course))))
        found: Any = result
        for name in self.measure.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:  # a monitor that never warned warned later than any other
            return math.inf if self.measure.startswith("first_warning.") else math.nan
        return float(found)

    @property
    def measure_name(self) -> str:
        """The measure in words."""
        words = self.measure.replace("_", " ").replace(".", ", ")
        return re.sub(r"\bkl\b", "KL", words)

    @property
    def run_name(self) -> str:
        """The run in words, with the place in its course unless that is the end."""
        words = {"end": "", "start": " at the start", "early": " in the first quarter"}
        return self.part.label + words.get(self.at, f" at its {self.at}")


def _pick(course: Sequence[float | None], at: At, width: int) -> float:
    values = [value for value in course if value is not None]
    if not values:
        return math.nan
    windows = [values[k : k + width] for k in range(max(1, len(values) - width + 1))]
    parts: dict[At, Sequence[float]] = {
        "start": values[:width],
        "end": values[-width:],
        "early": values[: max(1, len(values) // 4)],
        "peak": max(windows, key=fmean),
        "low": min(windows, key=fmean),
    }
    return fmean(parts[at])


@dataclass(frozen=True)
class Check:
    """A comparison: `left` is below, above or near `factor * right + margin`.

    Attributes:
        left: A number.
        sign: `<`, `>`, or `~` for a difference of at most `margin`.
        right: Another, or a constant.
        factor: Factor of the right one.
        margin: Added to the right one.
    """

    left: Value
    sign: Literal["<", ">", "~"]
    right: Value | float
    factor: float = 1.0
    margin: float = 0.0

    def holds(self, runs: Runs) -> bool:
        """Whether it is so in the runs of a seed; a NaN makes it false."""
        left = self.left.of(runs)
        right = self.factor * (self.right.of(runs) if isinstance(self.right, Value) else self.right)
        if self.sign == "~":
            return abs(left - right) <= self.margin
        return left < right + self.margin if self.sign == "<" else left > right + self.margin

    def values(self) -> list[Value]:
        """The numbers that it compares."""
        return [value for value in (self.left, self.right) if isinstance(value, Value)]

    def describe(self, seeds: Sequence[Runs]) -> str:
        """The comparison with the means over seeds, and in how many it holds."""
        left, right = self.left, self.right
        of_one = not isinstance(right, Value) or right.measure == left.measure

        def describe(value: Value) -> str:
            measure = "" if of_one else f"{value.measure_name} of "
            return f"{measure}{_describe(value, seeds)}"

        bound = describe(right) if isinstance(right, Value) else f"{right:g}"
        factor = "" if self.factor == 1 else f"{self.factor:g} x "
        sign = {"<": "below", ">": "above", "~": "near"}[self.sign]
        if self.sign == "~":
            margin = f", within {self.margin:g}"
        else:
            margin = "" if self.margin == 0 else f" {'+' if self.margin > 0 else '-'} "
            margin += "" if self.margin == 0 else f"{abs(self.margin):g}"
        count = sum(self.holds(runs) for runs in seeds)
        measure = f"{left.measure_name}: " if of_one else ""
        compared = f"{measure}{describe(left)} {sign} {factor}{bound}{margin}"
        return f"{compared}; {count} of {len(seeds)} seeds"


def _describe(value: Value, seeds: Sequence[Runs]) -> str:
    numbers = [number for runs in seeds if math.isfinite(number := value.of(runs))]
    never = len(seeds) - len(numbers)
    words = []
    if numbers:
        spread = f" ± {_shown(stdev(numbers), 2)}" if len(numbers) > 1 else ""
        words.append(f"{_shown(fmean(numbers), 3)}{spread}")
    if never:
        words.append(f"{never} never" if numbers else "never")
    return f"{value.run_name} ({', '.join(words)})"


def _shown(number: float, digits: int) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.{digits}g}"


@dataclass(frozen=True)
class Claim:
    """A statement.

    Attributes:
        source: Section or figure of the paper; of claims beyond it, `beyond the paper`.
        text: The statement in our words.
        figure: Name of the figure that shows it.
        checks: The comparisons that make it true.
        premise: A comparison without which there is nothing to see at this scale.
    """

    source: str
    text: str
    figure: str
    checks: tuple[Check, ...]
    premise: Check | None = None

    def parts(self) -> set[str]:
        """Names of the arms and foundations that it is about."""
        checks = (*self.checks, *([self.premise] if self.premise else []))
        return {value.part.name for check in checks for value in check.values()}


class Finding(NamedTuple):
    """The verdict on a claim with its numbers.

    Attributes:
        verdict: The verdict.
        lines: The comparisons with their numbers.
        seeds: Number of seeds with all runs.
    """

    verdict: Verdict
    lines: list[str]
    seeds: int


def judge(claim: Claim, results: Mapping[int, Runs]) -> Finding:
    """Judge a claim.

    - Fewer than `MIN_SEEDS` seeds with all its runs: not run yet.
    - The premise holds in fewer than `MOST` of the seeds: not at this scale.
    - Each comparison holds in at least `MOST` of the seeds: confirmed; none of them: contradicted;
      some: partly.

    Args:
        claim: The claim.
        results: Results by seed.
    """
    seeds = [runs for runs in results.values() if claim.parts() <= runs.keys()]
    premises = [claim.premise] if claim.premise else []
    lines = [check.describe(seeds) for check in (*premises, *claim.checks)] if seeds else []
    if len(seeds) < MIN_SEEDS:
        return Finding(Verdict.NOT_RUN, lines, len(seeds))

    def holds(check: Check) -> bool:
        return sum(check.holds(runs) for runs in seeds) >= MOST * len(seeds)

    if not all(map(holds, premises)):
        return Finding(Verdict.NOT_AT_THIS_SCALE, lines, len(seeds))
    held = [holds(check) for check in claim.checks]
    verdict = (
        Verdict.CONFIRMED if all(held) else Verdict.PARTLY if any(held) else Verdict.CONTRADICTED
    )
    return Finding(verdict, lines, len(seeds))


# --- the claims


def _of(measure: str) -> Callable[..., Value]:
    def value(part: Arm | Foundation, at: At = "end") -> Value:
        return Value(part, measure, at)

    return value


gold, score, kl = _of("gold"), _of("score"), _of("kl")
length, perplexity, win, lose = (
    _of("response_length"),
    _of("perplexity"),
    _of("win"),
    _of("lose"),
)
T = table
SFT_GOLD = gold(T.VANILLA, "start")
"""Gold of the SFT policy: every arm starts from it."""
COLLAPSES = Check(gold(T.VANILLA), "<", SFT_GOLD, margin=-0.5)
"""Vanilla PPO ends well below SFT."""
HARM = -0.3
"""A collapse in units of gold: that far below SFT."""
NEAR = 0.2
"""Difference of gold that is none."""


def best(arm: Arm) -> Value:
    """The peak of gold over a run, of rollouts: samples on held-out prompts are too rare for it."""
    return Value(arm, "rollout.gold", "peak")


CLAIMS = (
    Claim(
        "Figure 2, Section 4.3",
        "The reward models prefer the response that labellers prefer for most unseen pairs, in "
        "English and in Chinese.",
        "fig2",
        (
            Check(Value(T.ENGLISH, "accuracy"), ">", 0.6),
            Check(Value(T.CHINESE, "accuracy"), ">", 0.6),
        ),
    ),
    Claim(
        "Figure 3, Section 4.4",
        "After a fifth of its steps a reward model is almost as accurate as at the end.",
        "fig3",
        (Check(Value(T.EARLIER, "accuracy"), ">", Value(T.ENGLISH, "accuracy"), margin=-0.03),),
    ),
    Claim(
        "Section 4.4",
        "PPO on the earlier reward model is worse all the same: accuracy is not enough to judge "
        "a reward model.",
        "fig3",
        (Check(gold(T.EARLY_MAX), "<", gold(T.PPO_MAX), margin=-0.1),),
        Check(Value(T.EARLIER, "accuracy"), ">", Value(T.ENGLISH, "accuracy"), margin=-0.03),
    ),
    Claim(
        "Figure 4, Section 5.2",
        "Vanilla PPO is over-optimized: the score rises while the win rate against SFT falls from "
        "its peak, and in the end it loses more than it wins.",
        "fig4",
        (
            Check(score(T.VANILLA), ">", score(T.VANILLA, "start")),
            Check(win(T.VANILLA), "<", win(T.VANILLA, "peak"), margin=-0.05),
            Check(win(T.VANILLA), "<", lose(T.VANILLA)),
        ),
    ),
    Claim(
        "Figure 4, Section 5.2",
        "KL, length and perplexity show it: a collapsed policy is far from SFT, its responses are "
        "long and their perplexity is low.",
        "fig4",
        (
            Check(kl(T.VANILLA), ">", kl(T.PPO_MAX), factor=3.0),
            Check(length(T.VANILLA), ">", length(T.VANILLA, "start"), factor=1.5),
            Check(perplexity(T.VANILLA), "<", perplexity(T.VANILLA, "start"), factor=0.8),
        ),
        COLLAPSES,
    ),
    Claim(
        "Figure 4, Section 5.2",
        "The training losses do not show it: the critic's loss is no higher at the end than in the "
        "first quarter.",
        "fig4",
        (Check(Value(T.VANILLA, "value_loss"), "<", Value(T.VANILLA, "value_loss", "early")),),
        COLLAPSES,
    ),
    Claim(
        "Section 5.2",
        "A collapsed policy writes fixed patterns: few of its responses are well-formed.",
        "fig4",
        (
            Check(
                Value(T.VANILLA, "well_formed"),
                "<",
                Value(T.VANILLA, "well_formed", "start"),
                factor=0.5,
            ),
        ),
        COLLAPSES,
    ),
    Claim(
        "Section 5.2",
        "Responses out of the reward model's distribution are over-rated. It happens also where "
        "the labels are right: the score rises and gold ends below SFT.",
        "worlds",
        (
            Check(score(T.RIGHT_LABELS[0]), ">", score(T.RIGHT_LABELS[0], "start")),
            Check(gold(T.RIGHT_LABELS[0]), "<", gold(T.RIGHT_LABELS[0], "start")),
        ),
    ),
    Claim(
        "Figure 6, Section 5.3.1",
        "Reward scaling does not prevent the collapse.",
        "fig6",
        (Check(gold(T.SCALING), "<", SFT_GOLD, margin=HARM),),
        COLLAPSES,
    ),
    Claim(
        "Figure 6, Section 5.3.1",
        "A tight bound on normalized rewards (0.3) keeps the policy near SFT; a wider one (0.8) "
        "lets it go further, to higher scores.",
        "fig6",
        (
            Check(kl(T.REWARD_03), "<", kl(T.VANILLA), factor=0.5),
            Check(kl(T.REWARD_03), "<", kl(T.REWARD_08)),
            Check(score(T.REWARD_03), "<", score(T.REWARD_08)),
        ),
    ),
    Claim(
        "Figure 6, Section 5.3.1",
        "A tight bound on normalized advantages (0.12) acts like one on rewards, and more than a "
        "wider one (0.5).",
        "fig6",
        (
            Check(kl(T.ADVANTAGE_012), "<", kl(T.VANILLA), factor=0.5),
            Check(kl(T.ADVANTAGE_012), "<", kl(T.ADVANTAGE_05)),
        ),
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "A token-level KL penalty keeps training stable, near SFT and better than it.",
        "fig7",
        (
            Check(kl(T.KL), "<", kl(T.VANILLA), factor=0.25),
            Check(gold(T.KL), ">", SFT_GOLD),
        ),
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "An entropy bonus keeps training stable, too, but has no advantage over the KL penalty.",
        "fig7",
        (
            Check(kl(T.ENTROPY), "<", kl(T.VANILLA), factor=0.5),
            Check(gold(T.ENTROPY), "<", gold(T.KL), margin=NEAR),
        ),
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "Importance sampling against the reference alone does less harm than expected: it ends no "
        "worse than vanilla PPO.",
        "fig7",
        (Check(gold(T.REFERENCE), ">", gold(T.VANILLA), margin=-NEAR),),
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "Together with the KL penalty it stabilizes training further, at the cost of the final "
        "reward.",
        "fig7",
        (
            Check(kl(T.KL_REFERENCE), "<", kl(T.KL)),
            Check(score(T.KL_REFERENCE), "<", score(T.KL)),
        ),
    ),
    Claim(
        "Figure 7",
        "Length and perplexity move alike under all constraints early in training: longer, and "
        "more certain.",
        "fig7",
        tuple(
            check
            for arm in (T.VANILLA, T.KL, T.ENTROPY, T.REFERENCE)
            for check in (
                Check(length(arm, "early"), ">", length(arm, "start")),
                Check(perplexity(arm, "early"), "<", perplexity(arm, "start")),
            )
        ),
    ),
    Claim(
        "Figure 8, Section 5.3.3",
        "Without SFT, PPO fails.",
        "fig8",
        (Check(gold(T.NO_SFT), "<", SFT_GOLD, margin=HARM),),
    ),
    Claim(
        "Figure 8, Section 5.3.3",
        "A critic from the SFT model converges to the same result as one from the reward model.",
        "fig8",
        (Check(gold(T.CRITIC_SFT), "~", gold(T.PPO_MAX), margin=NEAR),),
    ),
    Claim(
        "Figure 8, Section 5.3.3",
        "Pre-training the critic gives better advantage estimates early in training.",
        "fig8",
        (
            Check(
                Value(T.CRITIC_PRETRAINED, "explained_variance", "early"),
                ">",
                Value(T.VANILLA, "explained_variance", "early"),
            ),
        ),
    ),
    Claim(
        "Figure 9, Section 5.4",
        "PPO-max stays stable for 10,000 updates: it ends above SFT, and KL does not run away.",
        "fig9",
        (
            Check(gold(T.LONG), ">", gold(T.LONG, "start")),
            Check(gold(T.LONG), ">", gold(T.LONG, "peak"), margin=HARM),
            Check(kl(T.LONG), "<", kl(T.LONG, "early"), factor=3.0),
        ),
    ),
    Claim(
        "Section 5.4",
        "PPO-max improves the policy where vanilla PPO collapses.",
        "fig4",
        (
            Check(gold(T.PPO_MAX), ">", SFT_GOLD, margin=0.3),
            Check(gold(T.PPO_MAX), ">", gold(T.VANILLA)),
        ),
    ),
    Claim(
        "Figure 10, Section 6.2",
        "PPO-max wins more prompts against SFT than it loses: helpful and harmless, English and "
        "Chinese.",
        "fig10",
        tuple(
            Check(
                Value(arm, f"preferences.{kind}.win"), ">", Value(arm, f"preferences.{kind}.lose")
            )
            for arm in (T.PPO_MAX, T.CHINESE_MAX)
            for kind in ("helpful", "harmless")
        ),
    ),
    Claim(
        "Figure 12, Section 6.4",
        "PPO costs language understanding (here: perplexity of unseen text of the world), and "
        "PPO-ptx mitigates it.",
        "fig12",
        (
            Check(
                Value(T.PTX, "text_perplexity.policy"),
                "<",
                Value(T.PPO_MAX, "text_perplexity.policy"),
            ),
        ),
        Check(
            Value(T.PPO_MAX, "text_perplexity.policy"),
            ">",
            Value(T.PPO_MAX, "text_perplexity.sft"),
            factor=1.01,
        ),
    ),
    Claim(
        "Figure 13, Appendix A",
        "The distribution of scores keeps its shape while training is stable, and grows a long "
        "tail when it collapses.",
        "fig13",
        (
            Check(
                Value(T.VANILLA, "score_skewness"),
                ">",
                Value(T.VANILLA, "score_skewness", "start"),
                margin=0.5,
            ),
        ),
        COLLAPSES,
    ),
    Claim(
        "Figure 14, Appendix B.1",
        "Clipping advantages and values together is worse than clipping rewards and advantages "
        "alone.",
        "fig14",
        (
            Check(gold(T.B1[1]), "<", gold(T.B1[0]), margin=-NEAR),
            Check(gold(T.B1[2]), "<", gold(T.B1[0]), margin=-NEAR),
        ),
    ),
    Claim(
        "Figure 14, Appendix B.1",
        "Reward scaling with a value clip, and normalized and clipped rewards and advantages, are "
        "stable.",
        "fig14",
        (
            Check(gold(T.B1[0]), ">", SFT_GOLD, margin=HARM),
            Check(gold(T.B1[4]), ">", SFT_GOLD, margin=HARM),
        ),
    ),
    Claim(
        "Figure 15, Appendix B.2",
        "A smaller weight of the KL penalty gives higher scores and a larger distance from SFT, in "
        "order.",
        "fig15",
        tuple(
            check
            for looser, tighter in zip(T.KL_WEIGHTS, T.KL_WEIGHTS[1:], strict=False)
            for check in (
                Check(score(looser), ">", score(tighter)),
                Check(kl(looser), ">", kl(tighter)),
            )
        ),
    ),
    Claim(
        "Figure 16, Appendix B.3",
        "Without a bound the entropy bonus makes training fail; with one it does not.",
        "fig16",
        (
            Check(gold(T.ENTROPY_FREE), "<", gold(T.PPO_MAX), margin=HARM),
            Check(gold(T.ENTROPY_BOUND), ">", gold(T.PPO_MAX), margin=HARM),
        ),
    ),
    Claim(
        "Figure 17, Appendix C.1",
        "Clipping the ratio changes little and does not make training stable, as the KL penalty "
        "does.",
        "fig17",
        (
            Check(gold(T.RATIO_05), "<", SFT_GOLD, margin=HARM),
            Check(gold(T.KL), ">", SFT_GOLD, margin=HARM),
        ),
        COLLAPSES,
    ),
    Claim(
        "Figure 18, Appendix C.2",
        "Global gradient clipping, at 0.5, at 1 or not at all, makes no difference: all collapse.",
        "fig18",
        (
            Check(gold(T.GRADIENT_05), "<", SFT_GOLD, margin=HARM),
            Check(gold(T.GRADIENT_1), "<", SFT_GOLD, margin=HARM),
        ),
        COLLAPSES,
    ),
    Claim(
        "Figure 19, Appendix C.3",
        "With lambda 0 the estimates are unstable: the critic explains less of the returns late in "
        "training than with 0.9.",
        "fig19",
        (
            Check(
                Value(T.LAMBDAS[0], "explained_variance"),
                "<",
                Value(T.LAMBDAS[2], "explained_variance"),
            ),
        ),
    ),
    Claim(
        "Figure 19, Appendix C.3",
        "With lambda 1 the variance is larger: the critic's loss is higher than with 0.9.",
        "fig19",
        (Check(Value(T.LAMBDAS[4], "value_loss"), ">", Value(T.LAMBDAS[2], "value_loss")),),
    ),
    Claim(
        "beyond the paper (limits, Section 7; arXiv 2210.10760)",
        "A reward model with more preference data is over-optimized less: gold has a higher peak.",
        "size",
        (Check(best(T.VANILLA), ">", best(T.FEW_VANILLA)),),
    ),
    Claim(
        "beyond the paper (limits, Section 7; arXiv 2210.10760)",
        "Larger models are over-optimized less: gold has a higher peak.",
        "size",
        (
            Check(best(T.VANILLA), ">", best(T.NARROW_VANILLA)),
            Check(best(T.WIDE_VANILLA), ">", best(T.VANILLA)),
        ),
    ),
    Claim(
        "beyond the paper",
        "KL and length warn earlier than the distribution of the rewards.",
        "monitors",
        tuple(
            Check(
                Value(T.VANILLA, f"first_warning.{signal}"),
                "<",
                Value(T.VANILLA, "first_warning.reward"),
            )
            for signal in ("kl", "length")
        ),
    ),
    Claim(
        "beyond the paper",
        "Of PPO-max's tricks the KL penalty acts most: without it the most gold is lost.",
        "tricks",
        tuple(
            Check(gold(T.LEFT_OUT[0]), "<", gold(other), margin=-NEAR) for other in T.LEFT_OUT[1:]
        ),
    ),
    Claim(
        "beyond the paper",
        "The KL penalty alone, added to vanilla PPO, brings most of PPO-max's gain: it ends within "
        "0.2 gold of PPO-max, and no other trick alone does.",
        "tricks",
        (
            Check(gold(T.ADDED[0]), "~", gold(T.PPO_MAX), margin=NEAR),
            *(Check(gold(other), "<", gold(T.PPO_MAX), margin=-NEAR) for other in T.ADDED[1:]),
        ),
    ),
)
"""One per statement, in the order of the paper."""
