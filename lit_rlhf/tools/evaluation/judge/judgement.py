"""Policies compared by the judge: from their responses to rates, files of verdicts and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lit_rlhf.data import DataSource, load_records
from lit_rlhf.files import write_json_lines
from lit_rlhf.rewards import redact_url
from lit_rlhf.tools.evaluation.judge.client import JudgeOptions
from lit_rlhf.tools.evaluation.judge.judge import ANSWERS_FILE, Judge, Pair, Usage
from lit_rlhf.tools.evaluation.judge.messages import Criterion
from lit_rlhf.tools.evaluation.judge.verdicts import (
    Agreement,
    PairVerdict,
    PositionBias,
    human_agreement,
    position_bias,
    verdict_rates,
)
from lit_rlhf.tools.evaluation.outcomes import HeadToHead, Outcomes, format_share, outcomes_table
from lit_rlhf.tools.evaluation.output import make_table, print_table, to_json_types
from lit_rlhf.tools.evaluation.responses import Responses

VERDICTS_FILE = "verdicts.jsonl"
LABELS_FILE = "labels.jsonl"


@dataclass(frozen=True)
class JudgedPolicy:
    """One policy against the baseline by one criterion.

    Attributes:
        policy: Name of the policy.
        criterion: What the answers were compared by.
        against_baseline: Win, tie and lose rates; `None` without a valid verdict.
        invalid: Number of prompts without a valid verdict. The rates leave them out.
        position_bias: Position bias.
    """

    policy: str
    criterion: Criterion
    against_baseline: Outcomes | None
    invalid: int
    position_bias: PositionBias | None


@dataclass(frozen=True)
class Judgement:
    """The judge's comparison of policies.

    Attributes:
        model: Name of the judge.
        base_url: Address of its endpoint, without user and password; `None` is OpenAI's.
        baseline: Name of the policy that the others are compared with.
        policies: Results, criterion by criterion.
        agreement: Agreement with human labels, for the criteria that have labels.
        usage: What was asked.
        files: The files of verdicts.
    """

    model: str
    base_url: str | None
    baseline: str
    policies: list[JudgedPolicy]
    agreement: dict[Criterion, Agreement]
    usage: Usage
    files: list[Path]

    @property
    def head_to_heads(self) -> list[HeadToHead]:
        """Each policy against the baseline, by each criterion."""
        return [
            HeadToHead(row.policy, row.criterion, row.against_baseline) for row in self.policies
        ]

    def as_dict(self) -> dict[str, Any]:
        """Convert the result to JSON types."""
        left_out = ("baseline", "files")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        values: dict[str, Any] = to_json_types(fields)
        return values


def judge_policies(responses: Responses, options: JudgeOptions) -> Judgement:
    """Let a language model compare policies with the first of them, and write its verdicts.

    Args:
        responses: Responses of two or more policies to the same prompts.
        options: The judge and how it is asked.

    Raises:
        JudgeError: If the judge cannot be asked. Its answers so far are kept for the next run.
        RecordError: If a file of labels cannot be used.
        ValueError: If there is nothing to compare, no model or key is given, or the cache is
            damaged.
    """
    baseline, *others = responses.by_policy
    if not others:
        raise ValueError(f"policies: expected two or more for the judge, got only {baseline!r}")
    if not options.criteria:
        raise ValueError("judge.criteria: expected at least one, got none")
    pairs = {
        (criterion, policy): [
            Pair(criterion, *texts)
            for texts in zip(
                responses.prompts,
                responses.by_policy[policy],
                responses.by_policy[baseline],
                strict=True,
            )
        ]
        for criterion in options.criteria
        for policy in others
    }
    # read before anything is asked and paid for
    labelled = {
        criterion: read_labelled_pairs(criterion, path, options.max_labels)
        for criterion, path in options.labels.items()
    }
    folder = Path(options.folder)
    with Judge(options) as judge:
        # one call for all groups, so that they share the progress bar and the requests in parallel
        all_verdicts = iter(
            judge.judge_pairs(
                [pair for group in pairs.values() for pair in group],
                f"verdicts of {options.model}",
            )
        )
        verdicts = {key: [next(all_verdicts) for _ in group] for key, group in pairs.items()}
        records = [
            record
            for (criterion, policy), group in pairs.items()
            for record in _build_records(group, verdicts[criterion, policy], policy, baseline)
        ]
        files = [write_json_lines(folder / VERDICTS_FILE, records)]
        on_labels = {
            criterion: judge.judge_pairs(group, f"{options.model} on labels: {criterion}")
            for criterion, group in labelled.items()
        }
        if labelled:
            records = [
                record
                for criterion, group in labelled.items()
                for record in _build_records(group, on_labels[criterion], "chosen", "rejected")
            ]
            files.append(write_json_lines(folder / LABELS_FILE, records))
        usage = judge.usage
    return Judgement(
        model=str(options.model),
        base_url=None if options.base_url is None else redact_url(options.base_url),
        baseline=baseline,
        policies=[
            JudgedPolicy(
                policy,
                criterion,
                verdict_rates(group),
                sum(verdict.result == "invalid" for verdict in group),
                position_bias(group),
            )
            for (criterion, policy), group in verdicts.items()
        ],
        agreement={name: human_agreement(group) for name, group in on_labels.items()},
        usage=usage,
        files=files,
    )


def read_labelled_pairs(criterion: Criterion, path: str, limit: int) -> list[Pair]:
    """Read human preferences as pairs in which the policy's answer is the chosen one.

    Args:
        criterion: What people compared the answers by.
        path: A file of preferences. Records that cannot be used, such as pairs of equal answers,
            are skipped.
        limit: Number of pairs to keep, from the first.

    Raises:
        RecordError: If the file cannot be used.
    """
    records = load_records("preference", [DataSource(path)], on_bad_record="skip").records
    return [
        Pair(criterion, record.prompt, record.chosen, record.rejected) for record in records[:limit]
    ]


def _build_records(
    pairs: Sequence[Pair], verdicts: Sequence[PairVerdict], policy: str, baseline: str
) -> list[dict[str, Any]]:
    """Build one record per pair, with the judge's reasons in both orders."""
    return [
        {
            "criterion": pair.criterion,
            "policy": policy,
            "baseline": baseline,
            "prompt": to_json_types(pair.prompt),
            "response": pair.answer,
            "baseline_response": pair.baseline,
            **to_json_types(verdict),
        }
        for pair, verdict in zip(pairs, verdicts, strict=True)
    ]


def print_judgement(judgement: Judgement) -> None:
    """Print who wins, the position bias, the agreement with labels, and what was asked."""
    print_table(outcomes_table(judgement.head_to_heads, judgement.baseline))
    print_table(bias_table(judgement))
    if judgement.agreement:
        print_table(agreement_table(judgement))
    for line in usage_lines(judgement):
        print(line)


def bias_table(judgement: Judgement) -> Table:
    """Build a terminal table of position bias and invalid verdicts."""
    table = make_table(
        "both orders of a pair",
        *("by", "policy", "first, %", "second, %", "invalid"),
        n_names=2,
        caption="first, second: preferred in both orders because of its position; a tie",
    )
    rows = [
        (row.criterion, row.policy, row.position_bias, row.invalid) for row in judgement.policies
    ] + [
        (criterion, "(labels)", found.position_bias, found.invalid)
        for criterion, found in judgement.agreement.items()
    ]
    for criterion, name, bias, invalid in rows:
        cells = ["-", "-"] if bias is None else [f"{100 * share:.0f}" for share in bias]
        table.add_row(criterion, name, *cells, str(invalid))
    return table


def agreement_table(judgement: Judgement) -> Table:
    """Build a terminal table of the agreement with human labels."""
    table = make_table(
        "agreement with human labels [95 % interval]",
        *("by", "agrees, %", "kappa", "ties, %", "pairs"),
        caption="a tie counts half; guessing agrees in 50 %",
    )
    for criterion, agreement in judgement.agreement.items():
        share, interval, rates = agreement.share, agreement.share_interval, agreement.outcomes
        if share is None or interval is None or rates is None or agreement.kappa is None:
            table.add_row(criterion, "-", "-", "-", "0")
            continue
        table.add_row(
            criterion,
            format_share(share, interval),
            f"{agreement.kappa:.2f}",
            f"{100 * rates.tie:.0f}",
            str(rates.n),
        )
    return table


def usage_lines(judgement: Judgement) -> list[str]:
    """Describe what was asked, what went wrong, and where the reasons are."""
    usage = judgement.usage
    lines = [
        f"Judge {judgement.model}: {usage.questions} questions, {usage.from_cache} of them "
        f"answered by an earlier run; {usage.requests} requests, {usage.prompt_tokens} tokens "
        f"sent, {usage.completion_tokens} received"
    ]
    if usage.invalid:
        lines.append(
            f"{usage.invalid} questions got no answer that could be read, their pairs are invalid: "
            "see 'malformed' in the verdicts. A model that follows instructions better or a larger "
            f"judge.max_tokens helps; delete their lines in {ANSWERS_FILE} to ask again."
        )
    if usage.shortened:
        lines.append(
            f"{usage.shortened} questions had texts that were cut off after judge.max_characters."
        )
    return [*lines, f"Verdicts and reasons: {', '.join(map(str, judgement.files))}"]
