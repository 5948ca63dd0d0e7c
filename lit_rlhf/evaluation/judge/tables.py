"""What a judge said, and how far it can be trusted, for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from lit_rlhf.evaluation.judge.judgement import Judgement
from lit_rlhf.evaluation.judge.verdicts import PositionBias
from lit_rlhf.evaluation.tables import outcomes_table, print_table, share_with_interval


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
