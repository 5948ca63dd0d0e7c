"""How the cost of a PPO iteration grows with batch, response length, model size and vocabulary.

    python -m benchmarks.scaling

One size changes at a time, and a line is fitted by least squares: seconds against real tokens where
the number of tokens changes, against useful operations where the network does. Responses are
ragged, with an expected length of half the limit.

Writes `benchmarks/results/scaling.{md,json,png}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown
from transformers.utils.logging import disable_progress_bar

from benchmarks.speed.comparison import keep_turns, our_sides, run_in_turns
from benchmarks.speed.job import Job
from benchmarks.speed.machine import QUIET_CORES
from benchmarks.speed.report import RESULTS, Labels, label_run, scaling_tables, summarize
from benchmarks.speed.workload import Precision, Workload, save_networks
from lit_rlhf.files import write_text


class Line(NamedTuple):
    """A least-squares line `seconds = fixed + slope * x`.

    Attributes:
        fixed: Seconds at 0.
        slope: Seconds per unit of `x`.
        r_squared: Share of the variance that the line explains.
    """

    fixed: float
    slope: float
    r_squared: float


def fit_line(x: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line by least squares.

    Args:
        x: At least three values of the changed size.
        seconds: Seconds of an update at each value.

    Raises:
        ValueError: If there are fewer than three points, through which a line may fit by chance.
    """
    if len(x) < 3:
        raise ValueError(f"x: expected at least 3 points, got {len(x)}")
    sizes = np.asarray(x, dtype=float)
    times = np.asarray(seconds, dtype=float)
    slope, fixed = np.polyfit(sizes, times, 1)
    unexplained = ((times - fixed - slope * sizes) ** 2).sum()
    return Line(
        float(fixed), float(slope), float(1 - unexplained / ((times - times.mean()) ** 2).sum())
    )


def resize(work: Workload, size: str, value: int) -> Workload:
    """Change one size of a workload, and the sizes that depend on it.

    Args:
        work: The workload.
        size: Field of `Workload`.
        value: The field's new value.
    """
    if size == "response":
        return replace(work, response=value, eos_probability=2 / value)
    if size == "hidden":
        # heads stay 32 wide, and the MLP keeps its ratio of 688 to 256, in multiples of 16
        heads = value // 32
        intermediate = round(value * 688 / 256 / 16) * 16
        return replace(work, hidden=value, heads=heads, kv_heads=heads, intermediate=intermediate)
    fields: dict[str, Any] = {size: value}
    return replace(work, **fields)


def sweep_result(
    size: str, values: Sequence[int], rows: dict[tuple[str, int], dict[str, Any]]
) -> dict[str, Any]:
    """The points of one size, and their line.

    Args:
        size: Field of `Workload`.
        values: Its values.
        rows: Summaries by size and value.
    """
    in_tokens = size in ("batch", "response")
    points = [
        {
            "value": value,
            "real_tokens": rows[size, value]["real_tokens"],
            "useful_gflop": rows[size, value]["useful_gflop"],
            "seconds": rows[size, value]["seconds"],
            "ceiling_fraction": rows[size, value]["ceiling_fraction"],
            "peak_memory_mib": rows[size, value]["peak_memory_mib"],
        }
        for value in values
    ]
    against = "real_tokens" if in_tokens else "useful_gflop"
    fit = fit_line([p[against] for p in points], [p["seconds"] for p in points])
    return {"size": size, "against": against, "points": points, **fit._asdict()}


def draw_sweeps(sweeps: Sequence[dict[str, Any]], output: Path) -> None:
    """Draw the points and the line of each sweep.

    Args:
        sweeps: Four results of `sweep_result`.
        output: The picture; its suffix is its format.
    """
    drawing = Figure(figsize=(9, 6.5), layout="constrained")
    for axes, sweep in zip(drawing.subplots(2, 2).flat, sweeps, strict=True):
        x = [point[sweep["against"]] for point in sweep["points"]]
        axes.plot(x, [point["seconds"] for point in sweep["points"]], "o", color="#0072B2")
        ends = np.array([0.0, max(x)])
        axes.plot(ends, sweep["fixed"] + sweep["slope"] * ends, color="#0072B2", alpha=0.5)
        for point, position in zip(sweep["points"], x, strict=True):
            axes.annotate(
                f"{point['value']}",
                (position, point["seconds"]),
                xytext=(-4, 6),
                textcoords="offset points",
                ha="right",
            )
        axes.set_title(f"{sweep['size']}, R² = {sweep['r_squared']:.3f}", loc="left", fontsize=10)
        unit = "real tokens" if sweep["against"] == "real_tokens" else "useful GFLOP"
        top = 1.2 * max(point["seconds"] for point in sweep["points"])  # room for the last label
        axes.set(xlabel=unit, ylabel="seconds per iteration", xlim=(0, None), ylim=(0, top))
        axes.grid(alpha=0.3)
    drawing.savefig(output, dpi=120)


def scaling(
    *,
    output: str = str(RESULTS / "scaling"),
    batch: tuple[int, ...] = (32, 64, 128, 256),
    response: tuple[int, ...] = (16, 32, 64, 128),
    hidden: tuple[int, ...] = (128, 256, 512),
    vocab: tuple[int, ...] = (1024, 4096, 16384),
    precision: Precision = "fp32",
    rounds: int = 1,
    updates: int = 3,
    threads: int = 2,
    wait: float = 600.0,
    quiet_cores: float = QUIET_CORES,
) -> None:
    """Measure every size, print the tables and write the results.

    Args:
        output: Path of the results, without `.md`, `.json` and `.png`.
        batch: Prompts per iteration.
        response: Longest responses, in tokens. The expected length is about half.
        hidden: Hidden sizes, with heads 32 wide.
        vocab: Sizes of the vocabulary.
        precision: Precision of weights and computation.
        rounds: Number of turns of every size.
        updates: Timed iterations of a turn. Two more come before them.
        threads: Number of threads of the process.
        wait: Seconds to wait for a quiet machine before a turn, at most.
        quiet_cores: Foreign load, in cores, that an iteration is used with.
    """
    values = {"batch": batch, "response": response, "hidden": hidden, "vocab": vocab}
    works = {
        (size, value): resize(Workload(), size, value)
        for size, of_size in values.items()
        for value in of_size
    }
    # saving the networks would show one
    disable_progress_bar()  # type: ignore[no-untyped-call]
    # the default, which all sweeps share, is measured once
    cases: dict[Labels, Job] = {
        (str(number), precision): Job(work, precision=precision, updates=updates, threads=threads)
        for number, work in enumerate(dict.fromkeys(works.values()))
    }
    sides = our_sides("benchmarks.speed.ours")
    with (
        keep_turns(output, cases, sides) as progress,
        TemporaryDirectory(prefix="speed_") as folder,
    ):
        jobs = {labels: job.in_folder(Path(folder) / labels[0]) for labels, job in cases.items()}
        for job in jobs.values():
            save_networks(job.work, Path(job.folder), precision)
        ceilings, turns = run_in_turns(
            jobs, sides, rounds=rounds, wait=wait, cores=quiet_cores, progress=progress
        )
        of_work: dict[Workload, dict[str, Any]] = {}
        for labels, runs in turns.items():
            job = jobs[labels[:2]]
            row = summarize([label_run(run, labels, job) for run in runs], ceilings, quiet_cores)
            row["useful_gflop"] = row["useful_gflops"] * row["seconds"]
            of_work[job.work] = row
        rows = {key: of_work[work] for key, work in works.items()}
        measured = {
            "machine": {**ceilings, "cores": os.cpu_count(), "threads": threads},
            "precision": precision,
            "versions": next(iter(turns.values()))[0]["versions"],
            "sweeps": [sweep_result(size, of_size, rows) for size, of_size in values.items()],
        }
        write_text(f"{output}.json", json.dumps(measured, indent=1) + "\n")
        write_text(f"{output}.md", scaling_tables(measured))
        draw_sweeps(measured["sweeps"], Path(f"{output}.png"))
        Console().print(Markdown(scaling_tables(measured)))


if __name__ == "__main__":
    auto_cli(scaling)
