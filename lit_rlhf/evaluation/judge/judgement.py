"""Policies compared by a judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lit_rlhf.data import DataSource, load_records
from lit_rlhf.evaluation.judge.client import Answer, JudgeOptions
from lit_rlhf.evaluation.judge.judge import Judge, Pair, Usage
from lit_rlhf.evaluation.judge.messages import Criterion
from lit_rlhf.evaluation.judge.verdicts import (
    Agreement,
    PairVerdict,
    PositionBias,
    agreement,
    judged_outcomes,
    position_bias,
)
from lit_rlhf.evaluation.outcomes import (
    HeadToHead,
    Outcomes,
    outcomes_table,
    share_with_interval,
)
from lit_rlhf.evaluation.output import print_table, write_json_lines
from lit_rlhf.evaluation.responses import Responses

VERDICTS_FILE = "verdicts.jsonl"


LABELS_FILE = "labels.jsonl"


@dataclass(frozen=True)
class JudgedPolicy:
    """A policy beside the baseline by one criterion.

    Attributes:
        policy: Its name.
        criterion: What was compared by.
        outcomes: Win, tie and lose rates; `None` if there was no valid verdict.
        invalid: Prompts without a valid verdict, which the rates leave out.
        bias: How often the place decided.
    """

    policy: str
    criterion: Criterion
    outcomes: Outcomes | None
    invalid: int
    bias: PositionBias | None


@dataclass(frozen=True)
class Judgement:
    """What the judge says of the policies.

    Attributes:
        model: Name of the judge.
        base_url: Where it was asked; `None` is OpenAI's endpoint.
        baseline: Name of the policy that the others were compared with.
        policies: Results, criterion by criterion.
        agreements: Agreement with human labels by criterion, where there are labels.
        usage: What was asked and spent.
        files: Where verdicts were written.
    """

    model: str
    base_url: str | None
    baseline: str
    policies: list[JudgedPolicy]
    agreements: dict[Criterion, Agreement]
    usage: Usage
    files: list[Path]

    @property
    def head_to_heads(self) -> list[HeadToHead]:
        """Each policy against the baseline, by each criterion."""
        return [HeadToHead(row.policy, row.criterion, row.outcomes) for row in self.policies]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON takes it."""
        return {
            "model": self.model,
            "base_url": self.base_url,
            "policies": [
                {
                    "policy": row.policy,
                    "criterion": row.criterion,
                    "against_baseline": row.outcomes._asdict() if row.outcomes else None,
                    "invalid": row.invalid,
                    "position_bias": row.bias._asdict() if row.bias else None,
                }
                for row in self.policies
            ],
            "agreement": {name: value.as_dict() for name, value in self.agreements.items()},
            "usage": self.usage._asdict()
            | {"now": self.usage.now._asdict(), "in_all": self.usage.in_all._asdict()},
        }


def judge_policies(responses: Responses, options: JudgeOptions, seed: int = 0) -> Judgement:
    """Have a language model compare policies with the first of them, and write its verdicts.

    Args:
        responses: What two or more policies said to the same prompts.
        options: The judge and how it is asked.
        seed: Of the intervals.

    Raises:
        JudgeError: If the judge cannot be asked. What it has answered is kept for the next run.
        RecordError: If a file of labels cannot be used.
        ValueError: If there is nothing to compare, no model or key is given, or the cache is
            damaged.
    """
    baseline, *others = responses.by_policy
    if not others:
        raise ValueError(f"policies: expected two or more for the judge, got {baseline!r} alone")
    if not options.criteria:
        raise ValueError("judge.criteria: expected at least one, got none")
    pairs = {
        (criterion, policy): [
            Pair(criterion, prompt, ours, theirs)
            for prompt, ours, theirs in zip(
                responses.prompts,
                responses.by_policy[policy],
                responses.by_policy[baseline],
                strict=True,
            )
        ]
        for criterion in options.criteria
        for policy in others
    }
    labelled = {
        criterion: read_labelled_pairs(criterion, path, options.max_labels)
        for criterion, path in options.labels.items()
    }
    folder = Path(options.folder)
    with Judge(options) as judge:
        asked = [pair for group in pairs.values() for pair in group]
        given = iter(judge.verdicts(asked, f"verdicts of {options.model}"))
        verdicts = {key: [next(given) for _ in group] for key, group in pairs.items()}
        records = [
            record
            for (_, policy), group in pairs.items()
            for record in _records(group, verdicts[group[0].criterion, policy], policy, baseline)
        ]
        files = [write_json_lines(folder / VERDICTS_FILE, records)]
        by_people = {
            criterion: judge.verdicts(group, f"{options.model} on labels: {criterion}")
            for criterion, group in labelled.items()
        }
        if labelled:
            records = [
                record
                for criterion, group in labelled.items()
                for record in _records(group, by_people[criterion], "chosen", "rejected")
            ]
            files.append(write_json_lines(folder / LABELS_FILE, records))
        usage = judge.usage
    return Judgement(
        model=str(options.model),
        base_url=options.base_url,
        baseline=baseline,
        policies=[
            JudgedPolicy(
                policy,
                criterion,
                judged_outcomes(group, seed),
                sum(verdict.result == "invalid" for verdict in group),
                position_bias(group),
            )
            for (criterion, policy), group in verdicts.items()
        ],
        agreements={name: agreement(group, seed) for name, group in by_people.items()},
        usage=usage,
        files=files,
    )


def read_labelled_pairs(criterion: Criterion, path: str, limit: int) -> list[Pair]:
    """Human preferences as pairs, the chosen answer ours; pairs of equal answers are left out.

    Args:
        criterion: What people compared by.
        path: A file of preferences.
        limit: Use only this many of the first pairs.

    Raises:
        RecordError: If the file cannot be used.
    """
    records = load_records("preference", [DataSource(path)], on_bad_record="skip").records
    return [
        Pair(criterion, record.prompt, record.chosen, record.rejected) for record in records[:limit]
    ]


def _records(
    pairs: Sequence[Pair], verdicts: Sequence[PairVerdict], policy: str, baseline: str
) -> list[dict[str, Any]]:
    """One record for each pair, with the judge's reasons in both orders."""
    return [
        {
            "criterion": pair.criterion,
            "policy": policy,
            "baseline": baseline,
            "prompt": [asdict(turn) for turn in pair.prompt],
            "response": pair.ours,
            "baseline_response": pair.theirs,
            "result": verdict.result,
            "policy_as_a": _answer_fields(verdict.shown_first),
            "policy_as_b": _answer_fields(verdict.shown_second),
        }
        for pair, verdict in zip(pairs, verdicts, strict=True)
    ]


def _answer_fields(answer: Answer | None) -> dict[str, Any] | None:
    return None if answer is None else asdict(answer)


def print_judgement(judgement: Judgement) -> None:
    """Print who won, how often the place decided, agreement with labels, and what it took."""
    print_table(outcomes_table(judgement.head_to_heads, judgement.baseline))
    print_table(bias_table(judgement))
    if judgement.agreements:
        print_table(agreement_table(judgement))
    for line in usage_lines(judgement):
        print(line)


def bias_table(judgement: Judgement) -> Table:
    """How often the judge chose a place and not an answer, and how often it had no verdict."""
    table = _table("both orders of a pair", "by", "policy", "first, %", "second, %", "invalid")
    for row in judgement.policies:
        table.add_row(row.criterion, row.policy, *_bias(row.bias), str(row.invalid))
    for criterion, measured in judgement.agreements.items():
        table.add_row(criterion, "(labels)", *_bias(measured.bias), str(measured.invalid))
    table.caption = "first, second: what was shown there was preferred in both orders (a tie)"
    return table


def agreement_table(judgement: Judgement) -> Table:
    """The judge beside human labels."""
    table = _table(
        "agreement with human labels [95 % interval]",
        "by",
        "agrees, %",
        "kappa",
        "ties, %",
        "pairs",
    )
    for criterion, measured in judgement.agreements.items():
        share, rates = measured.share, measured.outcomes
        if share is None or rates is None or measured.kappa is None:
            table.add_row(criterion, "-", "-", "-", "0")
            continue
        table.add_row(
            criterion,
            share_with_interval(share.mean, share.low, share.high),
            f"{measured.kappa:.2f}",
            f"{100 * rates.tie:.0f}",
            str(rates.n),
        )
    table.caption = "a tie agrees by half; guessing agrees in 50 %"
    return table


def usage_lines(judgement: Judgement) -> list[str]:
    """What was asked and spent, what went wrong, and where the reasons are."""
    usage, now = judgement.usage, judgement.usage.now
    lines = [
        f"Judge {judgement.model}: {usage.questions} questions, {usage.from_cache} of them "
        f"answered by an earlier run; {now.requests} requests, {now.prompt_tokens} tokens sent, "
        f"{now.completion_tokens} received"
        + ("" if now.cost is None else f", cost {now.cost:.4f} (in all {usage.in_all.cost:.4f})")
    ]
    if usage.invalid:
        lines.append(
            f"{usage.invalid} questions got no answer that could be read, their pairs are invalid: "
            "see 'malformed' in the verdicts. A model that follows instructions better or a larger "
            "judge.max_tokens helps; delete their lines in answers.jsonl to ask again."
        )
    if usage.shortened:
        lines.append(
            f"{usage.shortened} questions had texts that were cut off after judge.max_characters."
        )
    return [*lines, f"Verdicts and reasons: {', '.join(map(str, judgement.files))}"]


def _table(title: str, *headings: str) -> Table:
    table = Table(box=box.HORIZONTALS, padding=(0, 1), title=title)
    for heading in headings:
        is_text = heading in ("by", "policy")
        table.add_column(heading, overflow="fold", justify="left" if is_text else "right")
    return table


def _bias(bias: PositionBias | None) -> list[str]:
    return ["-", "-"] if bias is None else [f"{100 * share:.0f}" for share in bias]
