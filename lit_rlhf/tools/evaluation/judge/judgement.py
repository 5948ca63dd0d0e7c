"""Policies compared by the judge: from their responses to rates, a file of verdicts and tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lit_rlhf.files import write_json_lines
from lit_rlhf.rewards import redact_url
from lit_rlhf.tools.evaluation.judge.client import JudgeOptions
from lit_rlhf.tools.evaluation.judge.judge import ANSWERS_FILE, Judge, position_bias, verdict_rates
from lit_rlhf.tools.evaluation.judge.messages import Criterion, Question
from lit_rlhf.tools.evaluation.outcomes import HeadToHeads, Outcomes, outcomes_table
from lit_rlhf.tools.evaluation.output import make_table, print_table, to_json_types
from lit_rlhf.tools.evaluation.responses import Responses

_VERDICTS_FILE = "verdicts.jsonl"


@dataclass(frozen=True)
class JudgedPolicy:
    """One policy against the baseline by one criterion.

    The rates leave out `invalid` prompts, those without a valid verdict.
    """

    policy: str
    criterion: Criterion
    against_baseline: Outcomes | None
    invalid: int
    position_bias: dict[str, float] | None


@dataclass(frozen=True)
class Judgement:
    """The judge's comparison of policies, criterion by criterion, which is also in `file`.

    `base_url` has no user or password; `None` is OpenAI's. `usage` is `Judge.count_questions()`.
    """

    model: str
    base_url: str | None
    baseline: str
    policies: list[JudgedPolicy]
    usage: dict[str, int]
    file: Path

    @property
    def head_to_heads(self) -> list[HeadToHeads]:
        """Each policy against the baseline, by each criterion."""
        found: dict[str, dict[str, Outcomes | None]] = {}
        for row in self.policies:
            found.setdefault(row.criterion, {})[row.policy] = row.against_baseline
        return list(found.items())

    def as_dict(self) -> dict[str, Any]:
        """Convert the result to JSON types."""
        left_out = ("baseline", "file")
        return dict(to_json_types({k: v for k, v in vars(self).items() if k not in left_out}))


def judge_policies(responses: Responses, options: JudgeOptions) -> Judgement:
    """Let a language model compare policies with the first of them, and write its verdicts.

    If the judge cannot be asked, its replies so far are kept for the next run.
    """
    baseline, *others = responses.by_policy
    if not others:
        raise ValueError(f"policies: expected two or more for the judge, got only {baseline!r}")
    if not options.criteria:
        raise ValueError("judge.criteria: expected at least one, got none")
    of_baseline = responses.by_policy[baseline]
    groups = [(criterion, policy) for criterion in options.criteria for policy in others]
    pairs = [
        Question(criterion, *texts)
        for criterion, policy in groups
        for texts in zip(responses.prompts, responses.by_policy[policy], of_baseline, strict=True)
    ]
    with Judge(options) as judge:
        # one call for all groups, so that they share the progress bar and the requests in parallel
        verdicts = judge.judge_pairs(pairs, f"verdicts of {options.model}")
        usage = judge.count_questions()
    n = len(responses.prompts)
    by_group = {key: verdicts[i * n : (i + 1) * n] for i, key in enumerate(groups)}
    policies = [policy for _, policy in groups for _ in range(n)]
    file = write_json_lines(
        Path(options.folder) / _VERDICTS_FILE,
        [
            {
                "criterion": pair.criterion,
                "policy": policy,
                "baseline": baseline,
                "prompt": to_json_types(pair.conversation),
                "response": pair.answer_a,
                "baseline_response": pair.answer_b,
                **to_json_types(verdict),
            }
            for policy, pair, verdict in zip(policies, pairs, verdicts, strict=True)
        ],
    )
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
            for (criterion, policy), group in by_group.items()
        ],
        usage=usage,
        file=file,
    )


def print_judgement(judgement: Judgement) -> None:
    """Print who wins, the position bias, what was asked, and where the reasons are."""
    print_table(outcomes_table(judgement.head_to_heads, judgement.baseline))
    print_table(_bias_table(judgement))
    usage = judgement.usage
    print(
        f"Judge {judgement.model}: {usage['questions']} questions, {usage['from_cache']} of them "
        "answered by an earlier run"
    )
    if usage["invalid"]:
        print(
            f"{usage['invalid']} questions got no answer that could be read, their pairs are "
            "invalid: see 'malformed' in the verdicts. A model that follows instructions better or "
            f"a larger judge.max_tokens helps; delete their lines in {ANSWERS_FILE} to ask again."
        )
    if usage["shortened"]:
        print(
            f"{usage['shortened']} questions had texts that were cut off after "
            "judge.max_characters."
        )
    print(f"Verdicts and reasons: {judgement.file}")


def _bias_table(judgement: Judgement) -> Table:
    """Build a terminal table of position bias and invalid verdicts."""
    table = make_table(
        "both orders of a pair",
        *("by", "policy", "first, %", "second, %", "invalid"),
        n_names=2,
        caption="first, second: preferred in both orders because of its position; a tie",
    )
    for row in judgement.policies:
        bias = row.position_bias
        cells = ["-", "-"] if bias is None else [f"{100 * share:.0f}" for share in bias.values()]
        table.add_row(row.criterion, row.policy, *cells, str(row.invalid))
    return table
