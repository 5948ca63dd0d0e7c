"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from lit_rlhf.evaluation.reward_report.charts import (
    histogram_chart,
    length_chart,
    reliability_chart,
    scatter_chart,
)
from lit_rlhf.evaluation.reward_report.measures import Accuracy, Correlation
from lit_rlhf.evaluation.reward_report.report import Mistake, RewardReport
from lit_rlhf.evaluation.reward_report.scores import LANGUAGE_MODEL, TRUNK

_ROLES = {"user": "Human", "assistant": "Assistant", "system": "System"}


def report_html(report: RewardReport) -> str:
    """The page as text; all that comes from data is escaped."""
    sources = ", ".join(escape(name) for name in report.sources)
    title = f"Reward model {escape(report.model)}"
    styles = "".join(
        (files(package) / "page.css").read_text("utf-8")
        for package in ("lit_callbacks.report", "lit_rlhf.evaluation.reward_report")
    )
    parts = [
        f"<header><h1>{title}</h1><p>{report.accuracy.pairs:,} preference pairs from {sources}"
        "</p></header>",
        f'<div class="facts">{"".join(_facts(report))}</div>',
        f'<p class="sentence">{verdict(report)}</p>',
        _section("Difference of the scores", _histograms(report)),
        _section("By source", _source_table(report)),
        _section("By length", _length_panels(report)),
        _section("Calibration", _calibration(report)),
        _section("The most confident mistakes", _mistakes(report)),
        f"<footer>{''.join(f'<p>{note}</p>' for note in _notes(report))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{styles}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def verdict(report: RewardReport) -> str:
    """Whether the model has learned more than length, in a sentence without markup."""
    gain = report.gain
    rule = f"preferring the {report.length_baseline} response"
    points = f"{100 * gain.mean:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
    if gain.low > 0:
        return f"The model is right more often than {rule} would be: {points}."
    if gain.high < 0:
        return f"The model is right less often than {rule} would be: {points}."
    return f"That the model is right more often than {rule} would be is not shown: {points}."


def _facts(report: RewardReport) -> Iterator[str]:
    whole = report.accuracy
    baseline = max(whole.longer, 1.0 - whole.longer)
    yield _fact(f"{whole.accuracy:.1%}", f"right [{whole.low:.1%}, {whole.high:.1%}]")
    yield _fact(f"{baseline:.1%}", f"would be right by preferring the {report.length_baseline}")
    yield _fact(f"{report.calibration_error:.3f}", "expected calibration error")
    yield _fact(
        _coefficient(report.difference_by_length.pearson),
        "correlation of score and length differences",
    )
    for reader, found in report.perplexity.items():
        yield _fact(f"{found.all:.2f}", f"perplexity of chosen responses, {reader}")
    yield _fact(f"{report.pairwise_loss:.3f}", "pairwise loss (Eq. 1), nats; 0.693 is guessing")


def _fact(value: str, text: str) -> str:
    return f'<div class="fact"><b>{value}</b><span>{escape(text)}</span></div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _panel(title: str, picture: str, below: str = "") -> str:
    note = f'<p class="faint">{escape(below)}</p>' if below else ""
    return (
        f'<figure class="panel"><figcaption><h3>{escape(title)}</h3></figcaption>{picture}{note}'
        "</figure>"
    )


def _panels(panels: Sequence[str]) -> str:
    return f'<div class="grid-of-panels">{"".join(panels)}</div>'


def _histograms(report: RewardReport) -> str:
    edges, counts = report.histogram
    shown: dict[str, list[int]] = {}
    if len(counts) > 1:
        shown["all sources"] = [sum(bars) for bars in zip(*counts.values(), strict=True)]
    shown |= counts
    return _panels(
        [
            _panel(name, histogram_chart(edges, bars, f"Difference of the scores, {name}"))
            for name, bars in shown.items()
        ]
    )


def _source_table(report: RewardReport) -> str:
    readers = list(report.perplexity)
    rows = {"all": report.accuracy, **report.by_source}
    if len(report.by_source) == 1:
        rows = dict(report.by_source)
    values = {
        escape(name): [
            *_accuracy_cells(found),
            *(
                f"{p.by_source.get(name, p.all):.2f}"
                for p in (report.perplexity[reader] for reader in readers)
            ),
        ]
        for name, found in rows.items()
    }
    heads = ["pairs", "right", "95 % interval", "longer is right", "mean difference"]
    return _table(["", *heads, *(f"perplexity, {reader}" for reader in readers)], values)


def _length_panels(report: RewardReport) -> str:
    between, over = report.difference_by_length, report.score_by_length
    table = _table(
        ["chosen - rejected, tokens", "pairs", "right", "95 % interval"],
        {bucket.label: _accuracy_cells(bucket.accuracy)[:3] for bucket in report.by_length},
    )
    panels = [
        _panel("Accuracy by length difference", length_chart(report.by_length)),
        _panel(
            "Score difference against length difference",
            scatter_chart(report.length_differences, report.differences),
            f"Correlation over pairs: {_both(between)}. Score and length over all responses: "
            f"{_both(over)}.",
        ),
        table,
    ]
    return _panels(panels)


def _calibration(report: RewardReport) -> str:
    table = _table(
        ["sure", "pairs", "right", "95 % interval"],
        {
            f"{found.confidence:.1%}": [
                f"{found.pairs:,}",
                f"{found.accuracy:.1%}",
                f"{found.low:.1%} - {found.high:.1%}",
            ]
            for found in report.reliability
        },
    )
    below = f"Expected calibration error {report.calibration_error:.3f}; dashed: calibrated."
    return _panels([_panel("Reliability", reliability_chart(report.reliability), below), table])


def _table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table; the first cell of each row and all others are markup already."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, cells in rows.items()
    )
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _accuracy_cells(found: Accuracy) -> list[str]:
    return [
        f"{found.pairs:,}",
        f"{found.accuracy:.1%}",
        f"{found.low:.1%} - {found.high:.1%}",
        f"{found.longer:.1%}",
        f"{found.margin:.3f}",
    ]


def _mistakes(report: RewardReport) -> str:
    if not report.mistakes:
        return "<p>None.</p>"
    shown = "".join(_mistake(number, m) for number, m in enumerate(report.mistakes, 1))
    return f"<p>{len(report.mistakes)} of {report.n_mistakes:,} mistakes.</p>{shown}"


def _mistake(number: int, mistake: Mistake) -> str:
    turns = "".join(
        f'<div class="turn"><b>{escape(_ROLES.get(turn.role, turn.role))}</b>'
        f'<div class="text">{escape(turn.content)}</div></div>'
        for turn in mistake.prompt
    )
    answers = "".join(
        f'<div class="answer {kind}"><b>{kind}, score {score:.2f}, {length} tokens</b>'
        f'<div class="text">{escape(text)}</div></div>'
        for kind, text, score, length in (
            ("chosen", mistake.chosen, mistake.chosen_score, mistake.chosen_length),
            ("rejected", mistake.rejected, mistake.rejected_score, mistake.rejected_length),
        )
    )
    return (
        f'<article class="mistake"><h3>{number}. {mistake.probability:.1%} sure of the rejected '
        f'response <span class="where">{escape(mistake.source)}, {escape(mistake.location)}</span>'
        f'</h3>{turns}<div class="answers">{answers}</div></article>'
    )


def _notes(report: RewardReport) -> Iterator[str]:
    yield (
        "Right: the chosen response scores higher; a tie is a miss. Intervals hold the true share "
        "in 95 % of cases (Wilson); that of the gain over length is a bootstrap over pairs."
    )
    yield (
        "Sure: the probability that the model gives to the response it prefers, the logistic "
        "function of the difference. Lengths are tokens of the response, EOS counted."
    )
    yield _perplexity_note(report)
    lost = (("could not be read", report.skipped), ("were left out", report.left_out))
    for what, reasons in lost:
        if reasons:
            counts = ", ".join(f"{count} x {escape(why)}" for why, count in reasons.items())
            yield f"{sum(reasons.values())} pairs {what}: {counts}."
    if report.shortened:
        yield f"The prompts of {report.shortened} pairs were shortened to fit."


def _perplexity_note(report: RewardReport) -> str:
    if not report.perplexity:
        return (
            "No perplexity: the model's folder holds no output layer (lm_head.safetensors), and no "
            "language_model was given to lend one."
        )
    note = f"Perplexity of the {TRUNK}: its trunk with the output layer from "
    note += f"<code>{escape(report.lm_head)}</code>."
    if LANGUAGE_MODEL in report.perplexity:
        note += f" Perplexity of the {LANGUAGE_MODEL}: before it became a reward model."
    return note


def _both(found: Correlation) -> str:
    return f"Pearson {_coefficient(found.pearson)}, Spearman {_coefficient(found.spearman)}"


def _coefficient(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
