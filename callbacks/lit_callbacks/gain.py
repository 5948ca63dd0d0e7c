"""Explains a rise of the score by length, cut-off responses, openings and repetition.

The file has a JSON object for each response, with `step`, `response`, `score` and, if known,
`length` (tokens) and `truncated`, as `SampleTimeline` writes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_callbacks.formats import read_samples
from lit_callbacks.words import format_number, printable, printable_line

OPENING_WORDS = 2
"""Number of words that make an opening."""
COMPARED_SHARE = 0.25
"""Share of the steps, at the start and at the end, that are compared."""
SMALLEST_SHARE = 0.05
"""Smallest share of the gain that is named."""
SHARE_ERROR = 0.1
"""How far shares may lie outside 0 to 1, by the error of their estimates, and still be told."""
PARTS = {
    "truncated": ("fewer cut-off responses", "more cut-off responses"),
    "length": ("shorter responses", "longer responses"),
    "opening": ("rarer use of the commonest opening", "the commonest opening"),
    "repetition": ("less repetition", "repetition"),
}
"""Words for a fall and a rise of each property."""


class Change(NamedTuple):
    """Means of a property at both ends of a run.

    Attributes:
        first: Mean over the responses of the first steps.
        last: Mean over the responses of the last steps.
    """

    first: float
    last: float


class Gain(NamedTuple):
    """A rise of the mean score, and what explains it.

    Attributes:
        total: The rise, in units of the score.
        parts: What each property explains of it, in units of the score.
        changes: How each property has changed.
        opening: The commonest opening in the last steps.
    """

    total: float
    parts: dict[str, float]
    changes: dict[str, Change]
    opening: str

    @property
    def rest(self) -> float:
        """The part that the properties do not explain, in units of the score."""
        return self.total - sum(self.parts.values())

    @property
    def adds_up(self) -> bool:
        """Whether the parts are shares of a rise: none is clearly below 0 or above all of it."""
        if self.total <= 0:
            return False
        shares = [part / self.total for part in (*self.parts.values(), self.rest)]
        return all(-SHARE_ERROR < share < 1 + SHARE_ERROR for share in shares)

    def sentence(self) -> str:
        """In a line, for example `81 % of the gain of 0.25 is fewer cut-off responses`."""
        if self.total <= 0:
            return f"the score did not rise ({format_number(self.total)})"
        if not self.adds_up:
            gain = format_number(self.total)
            return f"the gain of {gain} cannot be divided, since some of its parts are negative"
        shares = sorted(
            ((part / self.total, name) for name, part in self.parts.items()), reverse=True
        )
        explained = []
        for share, name in shares:
            if share >= SMALLEST_SHARE:
                words = PARTS[name][self.changes[name].last > self.changes[name].first]
                words += f" ({self.opening!r})" if name == "opening" else ""
                explained.append(f"{share:.0%} is {words}")
        explanation = (
            ", ".join(explained).replace("%", " %") or "nothing of it is length, form or opening"
        )
        unexplained = f"{self.rest / self.total:.0%}".replace("%", " %")
        return f"of the gain of {format_number(self.total)}, {explanation}; {unexplained} remains"

    def table(self) -> str:
        """The parts as lines of text."""
        lines = [f"{'':14}{'first':>8}{'last':>8}{'explains':>10}"]
        lines += [
            f"{name:14}{first:8.3g}{last:8.3g}{self.parts[name]:10.3g}"
            for name, (first, last) in self.changes.items()
        ]
        return "\n".join([*lines, f"{'rest':30}{self.rest:10.3g}", f"{'all':30}{self.total:10.3g}"])


def explain_gain(samples: Sequence[Mapping[str, Any]]) -> Gain:
    """Explain the rise of the mean score from the first quarter of the steps to the last.

    The score is regressed on the properties of the responses, with an intercept for each step, so
    that a common trend explains nothing. A property explains its coefficient times its change.

    Args:
        samples: Responses with `step`, `response` (a text) and `score`, and perhaps `length` and
            `truncated`. A property that any of them lacks is left out, and so are responses without
            a finite score.

    Raises:
        ValueError: For fewer than two steps, or too few responses for the properties.
    """
    samples = [sample for sample in samples if _has_score(sample)]
    steps = sorted({int(sample["step"]) for sample in samples})
    if len(steps) < 2:
        raise ValueError(f"samples: expected responses of at least two steps, got {len(steps)}")
    count = max(1, round(COMPARED_SHARE * len(steps)))
    first = set(steps[:count])
    last = set(steps[-count:])
    openings = Counter(opening_of(s["response"]) for s in samples if s["step"] in last)
    opening = openings.most_common(1)[0][0]
    columns = _read_properties(samples, opening)
    if len(samples) < 3 * len(columns) + len(steps):
        raise ValueError(
            f"samples: expected at least {3 * len(columns) + len(steps)} responses for "
            f"{len(columns)} properties and {len(steps)} steps, got {len(samples)}"
        )
    rows = [*columns.values(), [float(s["score"]) for s in samples]]
    values = torch.tensor(rows, dtype=torch.float64)
    sample_steps = torch.tensor([int(s["step"]) for s in samples])
    first_means = values[:, torch.isin(sample_steps, torch.tensor([*first]))].mean(1)
    last_means = values[:, torch.isin(sample_steps, torch.tensor([*last]))].mean(1)
    coefficients = _regress_within_steps(values, sample_steps)
    changes = {
        name: Change(float(first_means[n]), float(last_means[n])) for n, name in enumerate(columns)
    }
    parts = {
        name: (changes[name].last - changes[name].first) * coefficient
        for name, coefficient in zip(columns, coefficients, strict=True)
    }
    return Gain(
        total=float(last_means[-1] - first_means[-1]),
        parts=parts,
        changes=changes,
        opening=" ".join(opening),
    )


def _read_properties(
    samples: Sequence[Mapping[str, Any]], opening: tuple[str, ...]
) -> dict[str, list[float]]:
    """Read the properties that all responses have, by name.

    Args:
        samples: The responses.
        opening: The opening whose use is a property.
    """
    columns = {
        "truncated": [float(s["truncated"]) for s in samples if "truncated" in s],
        "length": [float(s.get("length", len(s["response"].split()))) for s in samples],
        "opening": [float(opening_of(s["response"]) == opening) for s in samples],
        "repetition": [repetition_of(s["response"]) for s in samples],
    }
    return {name: column for name, column in columns.items() if len(column) == len(samples)}


def _regress_within_steps(values: Tensor, steps: Tensor) -> list[float]:
    """Regress the scores on the properties, with an intercept for each step.

    Args:
        values: A row for each property and the scores in the last one, `[P + 1, N]`.
        steps: The step of each response, `[N]`.

    Returns:
        The coefficient of each property.
    """
    # subtracting each step's means is the same as an intercept for each step
    centered = values.clone()
    for step in set(steps.tolist()):
        at_step = steps == step
        centered[:, at_step] -= centered[:, at_step].mean(1, keepdim=True)
    # "gelsd" gives the solution with the least norm where a property does not vary or two are alike
    solved = torch.linalg.lstsq(centered[:-1].T, centered[-1:].T, rcond=1e-9, driver="gelsd")
    coefficients: list[float] = solved.solution[:, 0].tolist()
    return coefficients


def _has_score(sample: Mapping[str, Any]) -> bool:
    return math.isfinite(sample.get("score", math.nan))


def opening_of(text: str) -> tuple[str, ...]:
    """The first words of a text, in lower case."""
    return tuple(text.lower().split()[:OPENING_WORDS])


def repetition_of(text: str) -> float:
    """Share of a text's pairs of neighbouring words that repeat an earlier pair, in [0, 1)."""
    words = text.lower().split()
    pairs = list(pairwise(words))
    return 1 - len(set(pairs)) / len(pairs) if pairs else 0.0


def main(files: Sequence[str]) -> None:
    """Print what the gain in each file of samples is made of."""
    for file in files:
        samples = read_samples(Path(file))
        gain = explain_gain(samples)
        left_out = sum(not _has_score(sample) for sample in samples)
        if left_out:
            print(
                f"{printable_line(file)}: {left_out} of {len(samples)} responses have no finite "
                "score and are left out"
            )
        print(printable(f"{printable_line(file)}: {gain.sentence()}\n{gain.table()}"))
