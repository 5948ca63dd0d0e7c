"""Win, tie and lose by people, and their agreement with each other and with machines.

A second look of a person at a comparison counts for that person's consistency only. A choice of
both responses as bad is a tie, and its share is given too. A skip is no choice.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_rlhf.functional import Interval, wilson_interval
from lit_rlhf.tools.evaluation.labels import Label
from lit_rlhf.tools.evaluation.outcomes import HeadToHeads, Outcomes
from lit_rlhf.tools.evaluation.output import to_json_types
from lit_rlhf.tools.evaluation.responses import Turns

Verdict = Literal["a", "tie", "b"]
"""The better response of a comparison."""
_VERDICTS: tuple[Verdict, ...] = ("a", "tie", "b")
_RESAMPLES = 2000
_CONFIDENCE = 0.95
BY_PEOPLE = "people"
"""Name of people among rewards and criteria of a judge."""


class Agreement(NamedTuple):
    """How often two sides say the same.

    Attributes:
        n: Number of comparisons, or of pairs of choices, that both judged.
        share: Share on which they say the same, in [0, 1].
        interval: Wilson's interval of the share, 95 %.
        kappa: Cohen's kappa, 1 for full agreement and 0 for what chance would give; `None` where
            all say the same, which tells nothing about chance.
    """

    n: int
    share: float
    interval: Interval
    kappa: float | None


class AnnotatorRow(NamedTuple):
    """One annotator.

    Attributes:
        labels: Number of choices, skips and second looks included.
        skips: Number of skips.
        left: Share of the left response among choices of one response; `None` without any.
        ties: Share of ties, both bad included, among first looks; `None` without any.
        seconds: Median time for a choice in seconds; `None` if no browser told it.
        consistency: Agreement with oneself; `None` without a second look.
        others: Share of the same choices as other annotators made; `None` without any in common.
    """

    labels: int
    skips: int
    left: float | None
    ties: float | None
    seconds: float | None
    consistency: Agreement | None
    others: float | None


@dataclass(frozen=True, kw_only=True)
class People:
    """What people say about policies.

    Attributes:
        baseline: Name of the policy that the others are compared with.
        n_labels: Number of labels in the file.
        n_comparisons: Number of different comparisons with a choice.
        outcomes: Rates of each other policy; intervals are bootstrapped over prompts and
            annotators.
        both_bad: Share of comparisons on which most people find both responses bad.
        between: Agreement of different annotators on the same comparison; `None` without any.
        within: Agreement of annotators with themselves; `None` without a second look.
        annotators: Each annotator by name.
        machines: Agreement of most people with each reward and each criterion of a judge, by name,
            and with the rule that the longer response is better.
        counts: Labels that are no first choice, by reason.
        from_spread: Comparisons that were chosen because reward models disagree. They have no part
            in `outcomes`, which would not be fair to either policy.
    """

    baseline: str
    n_labels: int
    n_comparisons: int
    outcomes: Mapping[str, Outcomes]
    both_bad: float
    between: Agreement | None
    within: Agreement | None
    annotators: Mapping[str, AnnotatorRow]
    machines: Mapping[str, Agreement | None] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    from_spread: int = 0

    @property
    def head_to_heads(self) -> list[HeadToHeads]:
        """Each policy against the baseline, by people."""
        return [HeadToHeads(BY_PEOPLE, self.outcomes)] if self.outcomes else []

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types."""
        report: dict[str, Any] = to_json_types(self)
        return report


def measure_people(
    labels: Sequence[Label],
    *,
    baseline: str | None = None,
    machines: Mapping[str, Mapping[str, Verdict]] | None = None,
    seed: int = 0,
) -> People:
    """Measure what people say about policies.

    Args:
        labels: The labels, at least one.
        baseline: Name of the policy that others are compared with. `None`: the first label's first.
        machines: What rewards and judges say, by their name and by key of a comparison.
        seed: Seed of the bootstrap.
    """
    if not labels:
        raise ValueError("labels: expected at least one label, got none")
    baseline = labels[0].policy_a if baseline is None else baseline
    by_people = [label for label in labels if label.annotator is not None]
    firsts = [label for label in labels if not label.repeat and label.choice != "skip"]
    majority = majority_verdicts(firsts)
    longer = {label.comparison: _longer(label) for label in firsts}
    n_bad = Counter(label.comparison for label in firsts if label.choice == "both_bad")
    n_by_comparison = Counter(label.comparison for label in firsts)
    others = sorted(
        {name for label in labels for name in (label.policy_a, label.policy_b)} - {baseline}
    )
    outcomes = {}
    for policy in others:
        of_pair = [
            label
            for label in firsts
            if {label.policy_a, label.policy_b} == {baseline, policy}
            and label.selection == "random"
        ]
        if of_pair:
            outcomes[policy] = people_outcomes(of_pair, policy, seed)
    return People(
        baseline=baseline,
        n_labels=len(by_people),
        n_comparisons=len(n_by_comparison),
        outcomes=outcomes,
        both_bad=fmean(n_bad[key] > n / 2 for key, n in n_by_comparison.items())
        if n_by_comparison
        else 0.0,
        between=between_annotators(firsts),
        within=within_annotators(by_people),
        annotators={
            name: _describe_annotator(name, by_people)
            for name in sorted({str(label.annotator) for label in by_people})
        },
        machines={
            name: machine_agreement(majority, verdicts)
            for name, verdicts in {**(machines or {}), "longer is better": longer}.items()
        },
        counts={
            "skipped": sum(label.choice == "skip" for label in by_people),
            "second looks": sum(label.repeat for label in by_people),
            "equal responses, shown to nobody": len(labels) - len(by_people),
        },
        from_spread=len({label.comparison for label in firsts if label.selection == "spread"}),
    )


def verdict_of(label: Label) -> Verdict:
    """The better response by one label, which is not a skip."""
    return label.choice if label.choice in ("a", "b") else "tie"


def majority_verdicts(labels: Iterable[Label]) -> dict[str, Verdict]:
    """What most labels of each comparison say; a tie if no verdict has most.

    Args:
        labels: First looks, without skips.
    """
    by_comparison: dict[str, Counter[Verdict]] = defaultdict(Counter)
    for label in labels:
        by_comparison[label.comparison][verdict_of(label)] += 1
    majority: dict[str, Verdict] = {}
    for key, counts in by_comparison.items():
        (best, n_votes), *runners_up = counts.most_common()
        majority[key] = "tie" if runners_up and runners_up[0][1] == n_votes else best
    return majority


def people_outcomes(labels: Sequence[Label], policy: str, seed: int = 0) -> Outcomes:
    """Compute rates at which a policy wins, ties and loses by people.

    Each comparison counts once, as the shares of its labels. Intervals are percentiles of a
    bootstrap that draws prompts and, independently, annotators with replacement. With a single
    annotator it is one over prompts.

    Args:
        labels: First looks at comparisons of the policy with one other, without skips.
        policy: The policy that wins or loses.
        seed: Seed of the bootstrap.
    """
    choices = _read_choices(labels, policy)
    n_prompts = choices.n_prompts
    n_annotators = choices.n_annotators
    win, tie, lose = choices.rates(
        prompt_weights=np.ones(n_prompts), annotator_weights=np.ones(n_annotators)
    ).tolist()
    generator = np.random.default_rng(seed)
    resampled = np.array(
        [
            choices.rates(
                prompt_weights=_count_draws(n_prompts, generator),
                annotator_weights=_count_draws(n_annotators, generator),
            )
            for _ in range(_RESAMPLES)
        ]
    )
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.nanquantile(resampled, [tail, 1 - tail], axis=0)
    intervals = [Interval(float(a), float(b)) for a, b in zip(low, high, strict=True)]
    return Outcomes(
        win=win,
        tie=tie,
        lose=lose,
        win_interval=intervals[0],
        tie_interval=intervals[1],
        lose_interval=intervals[2],
        n=n_prompts,
    )


class _Choices(NamedTuple):
    """Labels of a policy's `C` comparisons with one other, `L` of them by people, as numbers.

    Attributes:
        prompt_of: The prompt of each comparison, `[C]`.
        is_equal: Whether its responses are equal, which nobody was shown, `[C]`.
        comparison_of: The comparison of each label, `[L]`.
        outcome_of: What the label says of the policy, `[L]`: 0 for a win, 1 a tie, 2 a loss.
        annotator_of: Who chose it, `[L]`.
        n_prompts: Number of prompts.
        n_annotators: Number of annotators.
    """

    prompt_of: NDArray[np.int64]
    is_equal: NDArray[np.bool_]
    comparison_of: NDArray[np.int64]
    outcome_of: NDArray[np.int64]
    annotator_of: NDArray[np.int64]
    n_prompts: int
    n_annotators: int

    def rates(
        self, *, prompt_weights: NDArray[np.float64], annotator_weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Rates of wins, ties and losses, `[3]`; NaN if no comparison has a weight.

        Args:
            prompt_weights: How much each prompt counts.
            annotator_weights: How much each annotator counts.
        """
        n_comparisons = len(self.prompt_of)
        cells = 3 * self.comparison_of + self.outcome_of
        weights = annotator_weights[self.annotator_of]
        mass = np.bincount(cells, weights, 3 * n_comparisons).reshape(n_comparisons, 3)
        mass[self.is_equal] = (0.0, 1.0, 0.0)
        totals = mass.sum(axis=1)
        seen = totals > 0  # by annotators that were drawn
        shares = mass[seen] / totals[seen, None]
        of_prompts = prompt_weights[self.prompt_of[seen]]
        total = of_prompts.sum()
        return of_prompts @ shares / total if total > 0 else np.full(3, np.nan)


def _read_choices(labels: Sequence[Label], policy: str) -> _Choices:
    comparisons = _number(label.comparison for label in labels)
    prompts: dict[Turns, int] = _number(label.prompt for label in labels)
    by_people = [label for label in labels if label.annotator is not None]
    annotators = _number(label.annotator for label in by_people)
    prompt_of = np.zeros(len(comparisons), dtype=np.int64)
    is_equal = np.zeros(len(comparisons), dtype=bool)
    for label in labels:
        row = comparisons[label.comparison]
        prompt_of[row] = prompts[label.prompt]
        is_equal[row] |= label.annotator is None
    return _Choices(
        prompt_of=prompt_of,
        is_equal=is_equal,
        comparison_of=np.array([comparisons[x.comparison] for x in by_people], dtype=np.int64),
        outcome_of=np.array([_outcome_of(x, policy) for x in by_people], dtype=np.int64),
        annotator_of=np.array([annotators[x.annotator] for x in by_people], dtype=np.int64),
        n_prompts=len(prompts),
        n_annotators=len(annotators),
    )


def _outcome_of(label: Label, policy: str) -> int:
    """What a label says of the policy: 0 for a win, 1 for a tie, 2 for a loss."""
    verdict = verdict_of(label)
    if verdict == "tie":
        return 1
    winner = label.policy_a if verdict == "a" else label.policy_b
    return 0 if winner == policy else 2


def _count_draws(n: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """How often each of `n` is drawn in `n` draws with replacement."""
    indices = generator.integers(n, size=n) if n else np.zeros(0, dtype=np.int64)
    return np.bincount(indices, minlength=n).astype(np.float64)


def between_annotators(labels: Iterable[Label]) -> Agreement | None:
    """Agreement of different annotators on the same comparisons; `None` without two.

    Kappa is the mean over pairs of annotators, weighted by the comparisons that they share.

    Args:
        labels: First looks, without skips.
    """
    pairs = [pair for of_two in _pairs_by_annotators(labels).values() for pair in of_two]
    if not pairs:
        return None
    kappas = [
        (kappa, len(of_two))
        for of_two in _pairs_by_annotators(labels).values()
        if (kappa := _kappa(of_two)) is not None
    ]
    total = sum(n for _, n in kappas)
    kappa = sum(kappa * n for kappa, n in kappas) / total if total else None
    return _agreement(pairs, kappa)


def within_annotators(labels: Iterable[Label]) -> Agreement | None:
    """Agreement of annotators with themselves, at a second look with the sides swapped."""
    return _agreement_of(_pairs_of_looks(labels))


def machine_agreement(
    majority: Mapping[str, Verdict], verdicts: Mapping[str, Verdict]
) -> Agreement | None:
    """Agreement of a reward or a judge with most people, where these prefer a response.

    Args:
        majority: What most people say, by key of a comparison.
        verdicts: What the machine says; comparisons may be missing.
    """
    return _agreement_of(
        [
            _VerdictPair(verdict, verdicts[key])
            for key, verdict in majority.items()
            if verdict != "tie" and key in verdicts
        ]
    )


class _VerdictPair(NamedTuple):
    """Two verdicts on one comparison.

    Attributes:
        first: The verdict of one side.
        second: The verdict of the other side.
    """

    first: Verdict
    second: Verdict


def _pairs_by_annotators(labels: Iterable[Label]) -> dict[tuple[str, str], list[_VerdictPair]]:
    """Verdicts of each two annotators on what both have seen, by their names in order."""
    by_comparison: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        if label.annotator is not None:
            by_comparison[label.comparison].append(label)
    pairs: dict[tuple[str, str], list[_VerdictPair]] = defaultdict(list)
    for of_comparison in by_comparison.values():
        ordered = sorted(of_comparison, key=lambda label: str(label.annotator))
        for first, second in combinations(ordered, 2):
            names = (str(first.annotator), str(second.annotator))
            pairs[names].append(_VerdictPair(verdict_of(first), verdict_of(second)))
    return pairs


def _pairs_of_looks(labels: Iterable[Label]) -> list[_VerdictPair]:
    """Verdicts of the first and the second look of the same annotators."""
    firsts: dict[tuple[str | None, str], Verdict] = {}
    pairs = []
    for label in labels:
        place = (label.annotator, label.comparison)
        if label.choice == "skip":
            continue
        if not label.repeat:
            firsts[place] = verdict_of(label)
        elif place in firsts:
            pairs.append(_VerdictPair(firsts[place], verdict_of(label)))
    return pairs


def _agreement_of(pairs: Sequence[_VerdictPair]) -> Agreement | None:
    return _agreement(pairs, _kappa(pairs)) if pairs else None


def _agreement(pairs: Sequence[_VerdictPair], kappa: float | None) -> Agreement:
    n_same = sum(pair.first == pair.second for pair in pairs)
    return Agreement(
        n=len(pairs),
        share=n_same / len(pairs),
        interval=wilson_interval(n_same, len(pairs), confidence=_CONFIDENCE),
        kappa=kappa,
    )


def _kappa(pairs: Sequence[_VerdictPair]) -> float | None:
    """Cohen's kappa; `None` if both sides only ever say the same one thing."""
    if len({verdict for pair in pairs for verdict in pair}) < 2:
        return None
    from sklearn.metrics import cohen_kappa_score  # imports scipy, which takes a second

    firsts = [pair.first for pair in pairs]
    seconds = [pair.second for pair in pairs]
    kappa = float(cohen_kappa_score(firsts, seconds, labels=list(_VERDICTS)))
    return kappa if math.isfinite(kappa) else None


def _describe_annotator(name: str, labels: Sequence[Label]) -> AnnotatorRow:
    own_labels = [label for label in labels if label.annotator == name]
    firsts = [label for label in own_labels if not label.repeat and label.choice != "skip"]
    sided = [label for label in own_labels if label.choice in ("a", "b") and label.left is not None]
    seconds = [label.seconds for label in own_labels if label.seconds is not None]
    all_firsts = [label for label in labels if not label.repeat and label.choice != "skip"]
    shared = [
        pair
        for names, pairs in _pairs_by_annotators(all_firsts).items()
        if name in names
        for pair in pairs
    ]
    return AnnotatorRow(
        labels=len(own_labels),
        skips=sum(label.choice == "skip" for label in own_labels),
        left=fmean(label.choice == label.left for label in sided) if sided else None,
        ties=fmean(verdict_of(label) == "tie" for label in firsts) if firsts else None,
        seconds=median(seconds) if seconds else None,
        consistency=_agreement_of(_pairs_of_looks(own_labels)),
        others=fmean(pair.first == pair.second for pair in shared) if shared else None,
    )


def _longer(label: Label) -> Verdict:
    difference = len(label.response_b) - len(label.response_a)
    return "tie" if difference == 0 else ("b" if difference > 0 else "a")


def _number(values: Iterable[Any]) -> dict[Any, int]:
    """Number different values in the order in which they come."""
    return {value: number for number, value in enumerate(dict.fromkeys(values))}
