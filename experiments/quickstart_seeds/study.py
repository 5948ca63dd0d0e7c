"""Fresh seeds of the quickstart, each with one thread, two threads and in bf16.

    python -m experiments quickstart_seeds run      # trains what is missing
    python -m experiments quickstart_seeds page     # writes docs/quickstart_seeds.md and tables

Rounding differs between the three, so a result that hangs on it differs too. The criterion is
`CLAIMS`; each claim was fixed before the first run of the seeds that decide it. `run` adds the
result of each run to `results.jsonl` and repeats none that is there. An
interrupted run continues with its first unfinished stage.

    python -m experiments quickstart_seeds run --arithmetics '[intel]'   # on an Intel processor

repeats the ten seeds of `RECIPE_SEEDS` on another make of processor, with later code. The
repetition decides nothing: the page shows beside the verdicts in how many of its runs each claim
holds, whatever comes out. That was fixed before its first run.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.collapse.study import (
    DETECTOR_SEEDS,
    compare_with_harm,
    detect_collapse,
    scale_thresholds,
)
from experiments.drawing import STYLE, figure_colors, finish_axis
from experiments.frame import DOCS, IMAGES, ROOT, Documents, fill_template
from experiments.processes import command_job, run_missing_jobs
from experiments.results_file import read_runs, table, write_run
from lit_callbacks import default_monitors
from lit_rlhf.files import write_text
from lit_rlhf.tools.commands.quickstart import (
    COLLAPSE_STDS,
    IMPROVEMENT,
    Outcome,
    Quickstart,
    read_outcome,
)

RESULTS = Path(__file__).with_name("results.jsonl")
TABLES = RESULTS.with_suffix(".md")
PAGE = DOCS / "quickstart_seeds.md"
FIGURE = IMAGES / "quickstart_seeds.svg"
PAGE_TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")

RECIPE_SEEDS = (30, 31, 32, 33, 34, 35, 36, 37, 38, 39)
"""Seeds that decide about the recipe, which was chosen on seeds 0, 1 and 24 to 28."""
SEEDS = (*RECIPE_SEEDS, *DETECTOR_SEEDS)
MARGIN = 1.3
"""Factor by which the detector's thresholds may be nearer to their baselines, or farther away."""
FACTORS = (1 / MARGIN, 1.0, MARGIN)


class Arithmetic(NamedTuple):
    """How a run computes.

    Attributes:
        title: Name in the tables.
        threads: Number of threads.
        overlays: Configurations that are added in every stage.
        seeds: Seeds that are run with it.
    """

    title: str
    threads: int
    overlays: tuple[Path, ...] = ()
    seeds: tuple[int, ...] = SEEDS


ARITHMETICS = {
    "1_thread": Arithmetic("1 thread", 1),
    "2_threads": Arithmetic("2 threads", 2),
    "bf16": Arithmetic("bf16", 1, (ROOT / "configs" / "overlays" / "bf16.yaml",)),
}
"""The arithmetics that decide about the claims."""
REPETITION = "intel"
"""Key of the repetition."""
ALL_ARITHMETICS = {**ARITHMETICS, REPETITION: Arithmetic("Intel, 1 thread", 1, seeds=RECIPE_SEEDS)}
"""The arithmetics with the repetition on an Intel processor, which decides nothing."""


class RunResult(NamedTuple):
    """One quickstart, as its line in the file of results.

    Attributes:
        seed: Its seed.
        arithmetic: Key of `ALL_ARITHMETICS`.
        outcome: Gold rewards, scores and shares of well-formed responses.
        metrics: Length, KL and perplexity of each policy.
        flagged_at: For `ppo_vanilla` and `ppo_max` the iteration at which the detector flags a
            collapse with the thresholds of each of `FACTORS`, or None.
        healthy_until: Last iteration of vanilla PPO that the detector calls healthy before it flags
            the collapse, for each of `FACTORS`.
        in_time: Whether vanilla PPO is flagged and no iteration from harm on is called healthy
            before, for each of `FACTORS`.
        harmed_at: First iteration whose gold reward is `COLLAPSE_STDS` below SFT's, or None.
        minutes: Wall time of the stages' commands. Other work on the machine prolongs it.
        versions: Versions of Python and of the libraries.
    """

    seed: int
    arithmetic: str
    outcome: Outcome
    metrics: dict[str, dict[str, float]]
    flagged_at: dict[str, list[int | None]]
    healthy_until: list[int]
    in_time: list[bool]
    harmed_at: int | None
    minutes: float
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**self._asdict(), "outcome": self.outcome._asdict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunResult:
        """The inverse of `as_dict`."""
        return cls(**{**values, "outcome": Outcome(**values["outcome"])})


class Claim(NamedTuple):
    """A part of the criterion.

    Attributes:
        text: The claim about one run.
        holds: Whether it holds in a run.
        seeds: The seeds that decide about it.
        allowed_failures: Number of these seeds' 30 runs that may fail it.
    """

    text: str
    holds: Callable[[RunResult], bool]
    seeds: tuple[int, ...]
    allowed_failures: int = 0


CLAIMS = (
    Claim(
        f"vanilla PPO ends at least {COLLAPSE_STDS} SFT standard deviations below SFT in gold, "
        "with a reward-model score above PPO-max's",
        lambda run: run.outcome.exploited,
        RECIPE_SEEDS,
        allowed_failures=1,
    ),
    Claim(
        f"PPO-max ends at least {IMPROVEMENT} above SFT in gold",
        lambda run: run.outcome.improved,
        RECIPE_SEEDS,
    ),
    Claim(
        "the detector flags vanilla PPO and calls no iteration from harm on healthy before, with "
        f"its thresholds as they are, {MARGIN} times nearer to their baselines, and {MARGIN} times "
        "farther away",
        lambda run: all(run.in_time),
        DETECTOR_SEEDS,
    ),
    Claim(
        "the detector does not flag PPO-max with any of these thresholds",
        lambda run: all(step is None for step in run.flagged_at["ppo_max"]),
        DETECTOR_SEEDS,
    ),
)


def run_one(output_dir: str, seed: int, arithmetic: str) -> None:
    """Train and judge one quickstart in this process, from its first unfinished stage on.

    Args:
        output_dir: Folder of the benchmark.
        seed: Seed of the quickstart.
        arithmetic: Key of `ALL_ARITHMETICS`.
    """
    overlays = ALL_ARITHMETICS[arithmetic].overlays
    root = Path(output_dir) / f"seed_{seed}_{arithmetic}"
    stages = Quickstart(root, seed, overwrite=True)
    timings = root / "minutes.json"
    minutes: dict[str, float] = json.loads(timings.read_text()) if timings.is_file() else {}

    def stage(name: str, act: Callable[[], None]) -> None:
        if name in minutes:
            return
        start = time.perf_counter()
        act()
        minutes[name] = (time.perf_counter() - start) / 60
        write_text(timings, json.dumps(minutes))

    root.mkdir(parents=True, exist_ok=True)
    stage("world", stages.write_world)
    stage("sft", lambda: stages.fit(["sft.yaml", *overlays], seeded=["--data.seed"]))
    stage("preferences", stages.label_preferences)
    stage("reward", lambda: stages.fit_reward("reward.yaml", *overlays))
    # named, or the overlay would add its own name to the run's
    vanilla: list[str | Path] = ["ppo_max.yaml", "ppo_vanilla.yaml", *overlays]
    stage("ppo_vanilla", lambda: stages.fit_ppo(vanilla, "--name", "ppo_vanilla"))
    stage("ppo_max", lambda: stages.fit_ppo(["ppo_max.yaml", *overlays], "--name", "ppo_max"))
    stage("evaluation", lambda: stages.evaluate("sft", "ppo_vanilla", "ppo_max"))
    run_result = judge_run(root, seed, arithmetic, sum(minutes.values()))
    write_run(RESULTS, f"seed_{seed}_{arithmetic}", run_result.as_dict())
    print(f"seed {seed}, {arithmetic}: {run_result.outcome.sentence()}", flush=True)


def judge_run(root: Path, seed: int, arithmetic: str, minutes: float) -> RunResult:
    """The result of a finished quickstart.

    Args:
        root: Its folder.
        seed: Its seed.
        arithmetic: Key of `ALL_ARITHMETICS`.
        minutes: Wall time of its stages.
    """
    evaluation = json.loads((root / "evaluation.json").read_text("utf-8"))
    outcome = read_outcome(evaluation)
    bound = outcome.sft_gold - COLLAPSE_STDS * outcome.sft_std
    detections = {
        name: [
            detect_collapse(
                root / "logs" / name,
                [scale_thresholds(monitor, factor) for monitor in default_monitors()],
            )
            for factor in FACTORS
        ]
        for name in ("ppo_vanilla", "ppo_max")
    }
    harm = [
        compare_with_harm(root / "logs" / "ppo_vanilla", detection, bound)
        for detection in detections["ppo_vanilla"]
    ]
    return RunResult(
        seed=seed,
        arithmetic=arithmetic,
        outcome=outcome,
        metrics={
            name: {key: report[key] for key in ("response_length", "kl", "perplexity")}
            for name, report in evaluation["policies"].items()
        },
        flagged_at={
            name: [detection.flagged_at for detection in detections_of_run]
            for name, detections_of_run in detections.items()
        },
        healthy_until=[comparison["healthy_until"] for comparison in harm],
        in_time=[comparison["in_time"] for comparison in harm],
        harmed_at=harm[0]["harmed_at"],
        minutes=minutes,
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "lightning", "transformers")},
        },
    )


def run(
    output_dir: str = "runs/quickstart_seeds",
    seeds: tuple[int, ...] = SEEDS,
    arithmetics: tuple[str, ...] = tuple(ARITHMETICS),
    parallel: int = 1,
) -> None:
    """Train the runs that have no result yet, each in its own process.

    Args:
        output_dir: Folder for the runs.
        seeds: Seeds to run.
        arithmetics: Keys of `ALL_ARITHMETICS` to run.
        parallel: Number of runs at a time.
    """
    root = Path(output_dir)
    jobs = {
        f"seed_{seed}_{name}": command_job(
            "quickstart_seeds",
            "run_one",
            {"output_dir": root, "seed": seed, "arithmetic": name},
            log=root / f"seed_{seed}_{name}.txt",
            threads=ALL_ARITHMETICS[name].threads,
        )
        for seed in seeds
        for name in arithmetics
        if seed in ALL_ARITHMETICS[name].seeds
    }
    run_missing_jobs(jobs, RESULTS, parallel)


def read_results(path: Path = RESULTS) -> list[RunResult]:
    """Read the results that are there, by seed."""
    runs = [RunResult.from_dict(result) for result in read_runs(path).values()]
    order = list(ALL_ARITHMETICS)
    return sorted(runs, key=lambda run: (run.seed, order.index(run.arithmetic)))


class Judgement(NamedTuple):
    """How a claim does on the runs that there are.

    Attributes:
        verdict: `holds`, `does not hold`, or why it is open.
        planned: Number of runs that decide about it.
        deciding: The runs that there are of these.
        failed: The runs that fail it.
    """

    verdict: str
    planned: int
    deciding: list[RunResult]
    failed: list[RunResult]


def judge_claim(claim: Claim, runs: Sequence[RunResult]) -> Judgement:
    """Judge a claim by the runs of its seeds.

    Args:
        claim: The claim.
        runs: All runs that there are.
    """
    planned = len(claim.seeds) * len(ARITHMETICS)
    deciding = [run for run in runs if run.seed in claim.seeds and run.arithmetic in ARITHMETICS]
    failed = [run for run in deciding if not claim.holds(run)]
    if len(failed) > claim.allowed_failures:
        verdict = "does not hold"
    else:
        verdict = "holds" if len(deciding) == planned else "open: not all runs are done"
    return Judgement(verdict=verdict, planned=planned, deciding=deciding, failed=failed)


def format_verdicts(runs: Sequence[RunResult]) -> str:
    """The claims with the number of runs in which they hold, as a Markdown table."""
    rows = []
    for claim in CLAIMS:
        judged = judge_claim(claim, runs)
        n_deciding = len(judged.deciding)
        places = (f"seed {r.seed}, {ALL_ARITHMETICS[r.arithmetic].title}" for r in judged.failed)
        rows.append(
            [
                claim.text,
                f"{claim.seeds[0]} to {claim.seeds[-1]}",
                f"{judged.planned - claim.allowed_failures} of {judged.planned}",
                f"{n_deciding - len(judged.failed)} of {n_deciding}",
                "; ".join(places) or "-",
                judged.verdict,
            ]
        )
    head = ["claim", "decided on seeds", "required", "holds in", "fails in", "verdict"]
    return table(head, rows)


def format_outcomes(runs: Iterable[RunResult]) -> str:
    """Format the outcomes, as a Markdown table with a row for each run."""
    rows = []
    for run in runs:
        outcome = run.outcome
        metrics = run.metrics
        shares = (outcome.sft_well_formed, outcome.vanilla_well_formed, outcome.max_well_formed)
        lengths = (metrics[name]["response_length"] for name in ("sft", "ppo_vanilla", "ppo_max"))
        rows.append(
            [
                run.seed,
                ALL_ARITHMETICS[run.arithmetic].title,
                f"{outcome.sft_gold:.2f} ({outcome.sft_std:.2f}) / {outcome.vanilla_gold:.2f} / "
                f"{outcome.max_gold:.2f}",
                " / ".join(f"{100 * share:.0f}" for share in shares),
                f"{outcome.vanilla_score:.2f} / {outcome.max_score:.2f}",
                " / ".join(f"{length:.1f}" for length in lengths),
                f"{metrics['ppo_vanilla']['kl']:.1f} / {metrics['ppo_max']['kl']:.1f}",
            ]
        )
    head = ["seed", "arithmetic", "gold: SFT (std) / vanilla / PPO-max"]
    head += ["well-formed, %: SFT / vanilla / PPO-max", "RM: vanilla / PPO-max"]
    head += ["length: SFT / vanilla / PPO-max", "KL: vanilla / PPO-max"]
    return table(head, rows)


def format_detections(runs: Iterable[RunResult]) -> str:
    """Format the detections, as a Markdown table with a row for each run."""

    def shown(*steps: int | None) -> str:
        return ", ".join("-" if step is None else str(step) for step in steps)

    head = ["seed", "arithmetic", "vanilla harmed at", "vanilla healthy until"]
    head += ["vanilla flagged at", "PPO-max flagged at"]
    rows = [
        [
            *(run.seed, ALL_ARITHMETICS[run.arithmetic].title, shown(run.harmed_at)),
            shown(*run.healthy_until),
            *(shown(*run.flagged_at[name]) for name in ("ppo_vanilla", "ppo_max")),
        ]
        for run in runs
    ]
    return table(head, rows)


HISTORY = (
    ("b18e902, 11-22 19:14", "the criterion", "0 to 2", "20 to 29"),
    ("25586c1, 13ac3cf, 11-22 20:47", "clip of rewards, weight of the KL penalty", "0 to 2", ""),
    ("4dfd80a, 11-22 22:16", '"in time" allows a flag after harm', "20 to 23", "24 to 33"),
    (
        "622b174, 11-23 00:51",
        "the *world* (a tenth of polite demonstrations repeat the phrase, not a quarter), learning "
        "rates and number of iterations",
        "24 to 28",
        "30 to 39",
    ),
    ("d25329a, 11-23 12:21", "five thresholds of the detector", "30 to 39", "60 to 69"),
)
"""Commits of 2026 (UTC), what they changed, the seeds that had been seen, and those that decide."""


def format_page(runs: Sequence[RunResult]) -> str:
    """Format the page: the claims and whether they hold."""
    n_all = len(SEEDS) * len(ARITHMETICS)
    n_done = sum(run.arithmetic in ARITHMETICS for run in runs)
    holding = sum(judge_claim(claim, runs).verdict == "holds" for claim in CLAIMS)
    return fill_template(
        PAGE_TEMPLATE,
        answer=f"{holding} of {len(CLAIMS)} claims about it hold.",
        done=f"{n_done} of {n_all} runs are done.",
        verdicts=format_verdicts(runs),
        repetition=format_repetition(runs),
        in_time=format_others(runs),
    )


def format_tables(runs: Sequence[RunResult]) -> str:
    """Format the tables of all runs, as Markdown."""
    versions = sorted(
        {", ".join(f"{name} {number}" for name, number in run.versions.items()) for run in runs}
    )
    return fill_template(
        TABLES_TEMPLATE,
        outcomes=format_outcomes(runs),
        detections=format_detections(run for run in runs if run.seed in DETECTOR_SEEDS),
        collapse=COLLAPSE_STDS,
        margin=MARGIN,
        history=table(["commit", "change", "seeds seen by then", "decides on"], HISTORY),
        made=f"The runs used {'; '.join(versions)} on a CPU." if runs else "No results yet.",
    )


def format_others(runs: Sequence[RunResult]) -> str:
    """Format what the table of verdicts leaves out."""
    watched = [run for run in runs if run.seed in DETECTOR_SEEDS and run.arithmetic in ARITHMETICS]
    in_time = sum(run.in_time[FACTORS.index(1.0)] for run in watched)
    exploited, improved = (sum(map(claim.holds, watched)) for claim in CLAIMS[:2])
    return (
        f"With its thresholds as they are, the detector is in time in {in_time} of {len(watched)} "
        f"runs. On seeds {DETECTOR_SEEDS[0]} to {DETECTOR_SEEDS[-1]} the first claim holds in "
        f"{exploited} and the second in {improved} of {len(watched)} runs."
    )


def format_repetition(runs: Sequence[RunResult]) -> str:
    """Format in how many runs of the repetition each claim holds, and the ranges of gold."""
    repeated = [run for run in runs if run.arithmetic == REPETITION]
    if not repeated:
        return "No run of it is done."
    counts = ", ".join(f"{sum(map(claim.holds, repeated))}" for claim in CLAIMS)
    ranges = []
    for label, field in POLICIES.items():
        golds = [getattr(run.outcome, field) for run in repeated]
        ranges.append(f"{min(golds):.2f} to {max(golds):.2f} ({label})")
    n_repeated = len(repeated)
    return (
        f"{n_repeated} of {len(RECIPE_SEEDS)} runs are done. The claims of the table hold in "
        f"{counts} of {n_repeated}, in its order. Gold ends at {', '.join(ranges)}."
    )


POLICIES = {"SFT": "sft_gold", "vanilla PPO": "vanilla_gold", "PPO-max": "max_gold"}
"""Field of `Outcome` with the gold of each policy."""


def draw(runs: Sequence[RunResult]) -> Figure:
    """Draw the gold of the policies, with a point for each run that decides."""
    deciding = [run for run in runs if run.arithmetic in ARITHMETICS]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 2.8))
        axis = figure.subplots()
        colors = figure_colors(POLICIES)
        for label, field in POLICIES.items():
            values = [getattr(run.outcome, field) for run in deciding]
            axis.plot(range(len(deciding)), values, ".", color=colors[label], label=label)
        axis.set_yscale("symlog", linthresh=1.0)
        axis.yaxis.set_major_formatter("{x:g}")
        firsts = range(0, len(deciding), 2 * len(ARITHMETICS))
        axis.set_xticks(firsts, [str(deciding[first].seed) for first in firsts])
        axis.set_xlabel("seed, with 1 thread, 2 threads and bf16")
        axis.set_ylabel("gold reward")
        axis.legend(fontsize=8, loc="lower left", ncols=3)
        finish_axis(axis)
        return figure


def documents() -> Documents:
    """The page, its figure and the tables of all runs, from the committed results."""
    runs = read_results()
    return {PAGE: format_page(runs), TABLES: format_tables(runs), FIGURE: lambda: draw(runs)}


COMMANDS = (run, run_one)
