"""`lit_rlhf evaluate`: compare policies by rewards, a judge and benchmarks."""

import importlib.util
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_rlhf.checks import check_count, check_fields, check_not_negative
from lit_rlhf.command import Command
from lit_rlhf.paths import check_inputs, check_outputs, is_file_path
from lit_rlhf.terminal import print_line
from lit_rlhf.tools.commands.sampling import SamplingFlags
from lit_rlhf.tools.judge_options import JudgeOptions

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from lit_rlhf.data import DataSource
    from lit_rlhf.tools.evaluation import Comparison, Responses
    from lit_rlhf.tools.evaluation.outcomes import HeadToHeads
    from lit_rlhf.tools.evaluation.people import People
    from lit_rlhf.tools.evaluation.people.measure import Verdict

_NO_JUDGE = JudgeOptions()


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SamplingFlags):
    """Compare policies: sample from each on the same prompts, score or judge the responses.

    Attributes:
        policies: Folders or hub ids of language models, or files (.jsonl) of responses that were
            generated before. The first is the baseline: win, tie, lose and KL are against it.
        rewards: Weights by source; a source is a reward model's folder or hub id, or
            'package.module:function'. A mapping instead of a weight describes a rule
            (docs/rewards.md). Each reward is reported by itself, times its weight, and decides who
            wins.
        judge: A language model that compares the responses too.
        labels: Files of labels that lit_rlhf label wrote. People then decide who wins, too, and the
            report says how far they agree with each other, the rewards and the judge, which are
            asked about the labelled responses.
        page: HTML file for what people say, with labels.
        benchmarks: Tasks or groups of lm-evaluation-harness, for example mmlu ceval-valid cmmlu.
            Their data are downloaded from the hub.
        choices: Files of multiple-choice questions with the fields question, choices and answer.
            Nothing is downloaded.
        shots: Examples before each question of benchmarks and choices. Default: each benchmark's
            own number, none for choices.
        max_questions: Use only this many questions of each task, from the first. Default: all.
        benchmark_batch_size: Texts per forward of benchmarks and choices.
        output: JSON file for the report.
        responses: JSON lines file for all responses with their scores and KL. Finished batches are
            kept beside the file until it is complete, and the same command continues with them.
        chart: File for a chart of win, tie and lose by every reward and criterion. The suffix is
            the format, for example .png or .svg.
        kl_chart: File for a chart of scores against the square root of the KL from the baseline.
        samples_per_prompt: Responses of each policy to each prompt, whose scores are averaged.
            Default: the largest number of best_of, or 1.
        best_of: Sizes for the best of n of the baseline, for example 1 4 16: the first reward
            chooses, and all rewards of the chosen are reported.
        tie_margin: Largest difference of scores (times the weight) that counts as a tie.
        max_prompt_length: Longest prompt in tokens; longer ones lose their oldest turns. Default:
            the longest sequence that the baseline was trained on, or 512.
        batch_size: Prompts per batch. The samples depend on it.
        seed: Seed of the sampling, the same for every policy, and of the bootstrap intervals.
    """

    policies: list[str]
    rewards: dict[str, float | dict[str, Any]] | None = None
    judge: JudgeOptions = _NO_JUDGE
    labels: list[str] | None = None
    page: str | None = None
    benchmarks: list[str] | None = None
    choices: list[str] | None = None
    shots: int | None = None
    max_questions: int | None = None
    benchmark_batch_size: int = 8
    output: str | None = None
    responses: str | None = None
    chart: str | None = None
    kl_chart: str | None = None
    samples_per_prompt: int | None = None
    best_of: list[int] | None = None
    tie_margin: float = 0.0
    max_prompt_length: int | None = None
    batch_size: int = 64
    seed: int = 0

    @property
    def n_samples(self) -> int:
        """Responses of each policy to each prompt."""
        return self.samples_per_prompt or max(self.best_of or [1])


SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "tie_margin",
    "batch_size",
    "seed",
    "dtype",
)
"""Options that a report with responses repeats."""


def evaluate(options: EvaluateOptions) -> dict[str, Any]:
    """Compare policies and return the report, which is also printed and written.

    Args:
        options: What to compare, and how.
    """
    from lit_rlhf.files import lock_outputs

    _check_options(options)
    # Samples are kept until the report on them is written, too.
    with ExitStack() as unfinished:
        if options.judge.model is not None:
            unfinished.enter_context(lock_outputs([options.judge.folder]))
        return _evaluate(options, unfinished)


def _evaluate(options: EvaluateOptions, unfinished: ExitStack) -> dict[str, Any]:
    """Compare policies, and print and write the report; `unfinished` keeps the samples."""
    from lit_rlhf.files import code_versions, write_text

    report, responses, head_to_heads = _compare(options, unfinished)
    report["versions"] = code_versions()
    if options.judge.model is not None and responses is not None:
        head_to_heads = [*head_to_heads, *_ask_judge(options.judge, responses, report)]
    if options.labels is not None:
        people = _ask_people(options, options.labels)
        report["people"] = people.as_dict()
        report.setdefault("baseline", people.baseline)
        head_to_heads = [*head_to_heads, *people.head_to_heads]
    if options.benchmarks or options.choices:
        report["benchmarks"] = _run_benchmarks(options)
        report.setdefault("settings", {"dtype": options.dtype})
    if options.chart is not None:
        _draw_outcomes(options.chart, head_to_heads, report["baseline"])
    if options.output is not None:
        text = json.dumps(report, indent=2) + "\n"
        print_line(f"Report: {write_text(options.output, text)}")
    return report


class _Compared(NamedTuple):
    """The compared responses, and the report on them so far.

    Attributes:
        report: The report so far.
        responses: The responses; `None` if there are no prompts.
        head_to_heads: How often each policy wins against the baseline, by reward.
    """

    report: dict[str, Any]
    responses: "Responses | None" = None
    head_to_heads: "Sequence[HeadToHeads]" = ()


def _compare(options: EvaluateOptions, unfinished: ExitStack) -> _Compared:
    """Read responses, or sample and score them; without prompts, only note the models.

    Args:
        options: What to compare, and how.
        unfinished: Keeps the samples until it is closed.
    """
    from lit_rlhf.files import check_responses, hash_model
    from lit_rlhf.tools.evaluation import kl_figure, read_responses, save_figure

    if any(is_file_path(policy) for policy in options.policies):
        inputs = {path: check_responses(Path(path)) for path in options.policies}
        responses = read_responses(options.policies, options.max_prompts)
        baseline = next(iter(responses.by_policy))
        n_prompts = len(responses.prompts)
        return _Compared(
            {"inputs": inputs, "baseline": baseline, "n_prompts": n_prompts}, responses
        )
    if options.source is None:
        hashes = {path: hash_model(path) for path in options.policies}
        return _Compared({"inputs": {"policies": hashes}})
    comparison = _sample_and_compare(options, options.source, unfinished)
    report = comparison.as_dict()
    report["settings"] = {name: getattr(options, name) for name in SETTINGS}
    report["settings"]["samples_per_prompt"] = options.n_samples
    if options.kl_chart is not None:
        print_line(f"Chart: {save_figure(kl_figure(comparison), options.kl_chart)}")
    return _Compared(report, comparison.responses, comparison.head_to_heads)


def _ask_judge(
    judge: JudgeOptions, responses: "Responses", report: dict[str, Any]
) -> "Sequence[HeadToHeads]":
    """Let a judge compare the responses, and add its verdicts to the report."""
    from lit_rlhf.tools.evaluation.judge import judge_policies, print_judgement

    judgement = judge_policies(responses, judge)
    print_judgement(judgement)
    report["judge"] = judgement.as_dict()
    return judgement.head_to_heads


def _ask_people(options: EvaluateOptions, paths: Sequence[str]) -> "People":
    """Measure what people say, print it, and write its page."""
    from lit_rlhf.files import write_text
    from lit_rlhf.tools.evaluation.labels import read_labels
    from lit_rlhf.tools.evaluation.loading import choose_device
    from lit_rlhf.tools.evaluation.people import (
        check_labelled_policies,
        judge_labels,
        measure_people,
        people_html,
        print_people,
        score_label_pairs,
    )

    labels = read_labels(*paths)
    baseline = check_labelled_policies(labels, options.policies)
    machines: dict[str, dict[str, Verdict]] = {}
    if options.rewards:
        models = [policy for policy in options.policies if not is_file_path(policy)]
        machines |= score_label_pairs(
            labels,
            options.rewards,
            policy=next(iter(models), None),
            model_options=options.model_options,
            device=choose_device(options.device),
            tie_margin=options.tie_margin,
            chat_template=options.chat_template,
            max_prompt_length=options.max_prompt_length,
        )
    if options.judge.model is not None:
        machines |= judge_labels(labels, options.judge)
    people = measure_people(labels, baseline=baseline, machines=machines, seed=options.seed)
    print_people(people)
    if options.page is not None:
        print_line(f"Page: {write_text(options.page, people_html(people))}")
    return people


def _run_benchmarks(options: EvaluateOptions) -> dict[str, Any]:
    """Run the benchmarks, and print their results."""
    from lit_rlhf.tools.evaluation.benchmarks import print_benchmarks, run_benchmarks
    from lit_rlhf.tools.evaluation.loading import choose_device

    results = run_benchmarks(
        options.policies,
        tasks=options.benchmarks or (),
        choices=options.choices or (),
        model_options=options.model_options,
        device=choose_device(options.device),
        batch_size=options.benchmark_batch_size,
        shots=options.shots,
        max_questions=options.max_questions,
    )
    print_benchmarks(results)
    return asdict(results)


def _draw_outcomes(path: str, head_to_heads: "Sequence[HeadToHeads]", baseline: str) -> None:
    """Draw how often each policy wins, ties and loses."""
    from lit_rlhf.tools.evaluation import outcome_figure, save_figure

    print_line(f"Chart: {save_figure(outcome_figure(head_to_heads, baseline), path)}")


def _sample_and_compare(
    options: EvaluateOptions, prompts: "DataSource", unfinished: ExitStack
) -> "Comparison":
    """Let the policies respond to prompts, and print how they compare.

    Args:
        options: What to compare, and how.
        prompts: Where the prompts are.
        unfinished: Keeps the samples until it is closed.
    """
    from lit_rlhf.tools.evaluation import compare_policies, print_comparison
    from lit_rlhf.tools.evaluation.loading import choose_device

    comparison = compare_policies(
        options.policies,
        prompts,
        options.rewards or {},
        sampling=options.sampling,
        model_options=options.model_options,
        device=choose_device(options.device),
        batch_size=options.batch_size,
        tie_margin=options.tie_margin,
        chat_template=options.chat_template,
        max_prompt_length=options.max_prompt_length,
        max_prompts=options.max_prompts,
        on_bad_record=options.on_bad_record,
        seed=options.seed,
        responses=options.responses,
        samples_per_prompt=options.n_samples,
        best_of=options.best_of or (),
        keep_until=unfinished,
    )
    if comparison.shortened:
        print_line(f"{comparison.shortened} prompts were shortened to fit max_prompt_length.")
    print_comparison(comparison)
    if options.sampling.off_policy_options:
        changed = ", ".join(options.sampling.off_policy_options)
        print_line(
            f"KL and perplexity are measured on samples with {changed}. To measure "
            "the policies themselves: --temperature 1 --top_p 1 --repetition_penalty 1"
        )
    if options.responses is not None:
        print_line(f"Responses: {options.responses}")
    return comparison


def _check_options(options: EvaluateOptions) -> None:
    """Refuse options that do not fit together, before hours of work."""
    _check_outputs(options)
    check_fields(check_count, options, "samples_per_prompt", "max_prompts", "max_questions")
    check_count("benchmark_batch_size", options.benchmark_batch_size)
    if options.shots is not None:
        check_count("shots", options.shots, minimum=0)
    check_not_negative("tie_margin", options.tie_margin)
    models = [policy for policy in options.policies if not is_file_path(policy)]
    if options.rewards is None and (options.kl_chart or options.best_of):
        raise ValueError("rewards: expected at least one with best_of or kl_chart, got none")
    if len(models) < len(options.policies):
        if models:
            raise ValueError(
                "policies: expected only models or only files of responses, got both; let "
                f"{models[0]!r} respond to the same prompts first, with `lit_rlhf generate`"
            )
        for name in ("prompts", "rewards", "responses", "best_of", "samples_per_prompt"):
            value = getattr(options, name)
            if value is not None and not (name == "rewards" and options.labels):
                raise ValueError(
                    f"{name}: expected none with files of responses, which a judge compares as "
                    f"they are, got {value!r}; give the models' folders as policies to sample and "
                    "score"
                )
        if options.judge.model is None and not options.labels:
            raise ValueError(
                "judge.model: expected a judge to compare files of responses, got none"
            )
    elif options.prompts is None:
        comparison_options = {
            name: getattr(options, name)
            for name in (("responses",) if options.labels else ("rewards", "responses", "chart"))
        }
        if not options.labels:
            comparison_options["judge.model"] = options.judge.model
        unused = [name for name, value in comparison_options.items() if value is not None]
        if unused:
            raise ValueError(
                f"prompts: expected a file of prompts or a dataset's id with {', '.join(unused)}, "
                "got none"
            )
        if not (options.benchmarks or options.choices or options.labels):
            raise ValueError(
                "prompts: expected a file of prompts or a dataset's id, to compare responses; or "
                "benchmarks or choices, got none of them"
            )
    if options.labels and importlib.util.find_spec("sklearn") is None:
        raise ImportError("labels need scikit-learn: pip install scikit-learn")
    if options.page is not None and not options.labels:
        raise ValueError(f"labels: expected files of labels for the page, got none: {options.page}")
    check_inputs(
        {"policies": options.policies, "rewards": options.rewards},
        [*(options.labels or []), *(options.choices or []), options.prompts],
    )


def _check_outputs(options: EvaluateOptions) -> None:
    """Refuse files that cannot be written."""
    outputs = {name: getattr(options, name) for name in OUTPUTS}
    check_outputs(outputs, [options.prompts, *options.policies, *(options.labels or [])])
    for name in ("chart", "kl_chart"):
        file = getattr(options, name)
        if file is not None:
            from matplotlib.figure import Figure

            suffixes = sorted(Figure().canvas.get_supported_filetypes())
            if Path(file).suffix.removeprefix(".") not in suffixes:
                raise ValueError(f"{name}: expected one of the suffixes {suffixes}, got {file}")


LISTS = ("policies", "labels", "benchmarks", "best_of", "choices")
OUTPUTS = ("output", "responses", "chart", "kl_chart", "page")
COMMAND = Command(EvaluateOptions, lists=LISTS, then=evaluate, writes=OUTPUTS)
