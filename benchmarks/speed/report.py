"""From timed updates to figures, tables, and the page `docs/speed.md`.

    python -m benchmarks.speed.report

puts a table of all speed-ups into the page, between `<!-- summary -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.speed.flops import generation_bytes, stage_flops
from benchmarks.speed.job import Job
from benchmarks.speed.machine import QUIET_CORES, folder_name
from benchmarks.speed.workload import Size
from experiments.device import device_name
from experiments.results_file import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = re.compile(r"<!-- summary -->\n.*?<!-- end -->", re.DOTALL)
PHASES = ("rollout", "score", "update", "other")
OURS, PEER = "lit_rlhf", "TRL"
Labels = tuple[str, ...]
"""Case (of PPO a mode, else a stage), precision, and where it is known the side."""


def default_output(name: str, device: str, size: Size) -> str:
    """Path of a benchmark's results without a suffix, in a folder of this processor or GPU.

    The folder of a processor names its instructions, since some with and without AVX-512 have the
    same name.

    Args:
        name: Name of the benchmark.
        device: `cpu` or `cuda`.
        size: Size of networks and batches, which is part of the file's name unless it is `5m`.
    """
    file = name if size == "5m" else f"{name}_{size}"
    folder = folder_name(device_name(device))
    if device == "cpu":
        folder += f"_{torch.backends.cpu.get_cpu_capability().lower()}"
    return str(RESULTS / folder / file)


# Figures


def count_work(update: dict[str, Any], job: Job) -> dict[str, Any]:
    """Count the useful work of an update.

    Args:
        update: Seconds, foreign load and phases, with the lengths of the prompts and responses in
            tokens.
        job: What was run.

    Returns:
        The update, with tokens and operations in place of the lengths.
    """
    prompts, responses = update["prompts"], update["responses"]
    counted = {
        **{key: update[key] for key in ("seconds", "cpu_seconds", "foreign_cores", "phases")},
        "prompt_tokens": sum(prompts),
        "response_tokens": sum(responses),
        "flops": stage_flops(job.stage, job.work, prompts, responses)._asdict(),
    }
    if job.stage == "ppo":
        value_bytes = 4 if job.precision == "fp32" else 2
        counted["generation_bytes"] = generation_bytes(job.work, prompts, responses, value_bytes)
    return counted


def label_run(run: dict[str, Any], labels: Labels, job: Job) -> dict[str, Any]:
    """Label a turn's result with its case and side, and count the work of its updates.

    With one thread on a CPU, seconds are CPU seconds, which other processes change little. Phases
    are timed by the clock on the wall, and so they are left out.

    Args:
        run: What the turn's process wrote.
        labels: Case, precision and side.
        job: What was run.
    """
    case, _, side = labels
    updates = [count_work(update, job) for update in run["updates"]]
    if job.threads == 1 and job.device == "cpu":
        updates = [update | {"seconds": update["cpu_seconds"], "phases": {}} for update in updates]
    return {"case": case, "side": side, **run, "updates": updates}


def is_quiet(update: dict[str, Any], cores: float = QUIET_CORES) -> bool:
    """Whether other processes left the machine alone during an update.

    Args:
        update: A timed update.
        cores: Cores that they may use on average.
    """
    return bool(update["foreign_cores"] <= cores)


def quiet_updates(
    runs: Sequence[dict[str, Any]], what: str, cores: float = QUIET_CORES
) -> list[dict[str, Any]]:
    """The updates of several turns during which nothing else ran.

    Args:
        runs: Results of one side and job.
        what: Side and job in words, for the error.
        cores: Foreign load that an update is used with.

    Raises:
        RuntimeError: If there is none.
    """
    updates = [update for run in runs for update in run["updates"]]
    quiet = [update for update in updates if is_quiet(update, cores)]
    if not quiet:
        least = min((update["foreign_cores"] for update in updates), default=float("nan"))
        raise RuntimeError(
            f"{what}: expected an update with at most {cores} cores of foreign load, "
            f"got {least:.2f} at least. Stop what else runs and try again, or raise --quiet_cores"
        )
    return quiet


def summarize(
    runs: list[dict[str, Any]], ceilings: dict[str, Any], quiet_cores: float
) -> dict[str, Any]:
    """One side's figures in one case and precision: medians over its quiet updates.

    Args:
        runs: Its turns.
        ceilings: What the machine can reach.
        quiet_cores: Foreign load that an update is used with.

    Raises:
        RuntimeError: If no update was quiet.
    """
    first = runs[0]
    used = quiet_updates(
        runs, f"{first['side']}, {first['case']}, {first['precision']}", quiet_cores
    )
    seconds = [update["seconds"] for update in used]
    rate = median(sum(u["flops"].values()) / u["seconds"] for u in used)
    ceiling = ceilings["flops_fp32" if first["precision"] == "fp32" else "flops_bf16"]
    row = {
        **{key: first[key] for key in ("side", "case", "precision")},
        "updates": len(used),
        "updates_dropped": sum(len(run["updates"]) for run in runs) - len(used),
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "cpu_seconds": median(update["cpu_seconds"] for update in used),
        "phases": {
            phase: median(u["phases"][phase] for u in used)
            for phase in PHASES
            if phase in used[0]["phases"]
        },
        "response_tokens": fmean(u["response_tokens"] for u in used),
        "real_tokens": fmean(u["prompt_tokens"] + u["response_tokens"] for u in used),
        "useful_gflops": rate / 1e9,
        "ceiling_fraction": rate / ceiling,
        "peak_memory_mib": max(run["peak_memory_mib"] for run in runs),
        "memory_before_mib": max(run["memory_before_mib"] for run in runs),
    }
    if ceilings["peak_bf16"] is not None:
        row |= gpu_figures(used, ceilings)
    return row


def gpu_figures(used: list[dict[str, Any]], ceilings: dict[str, Any]) -> dict[str, float]:
    """Compute figures of a GPU: utilization in training, and generation against its bandwidth.

    Args:
        used: Quiet updates with their work counted.
        ceilings: What the machine can reach.

    Returns:
        `training_mfu` in [0, 1]; with generation also its tokens per second, and its speed as a
        fraction of what the memory's bandwidth allows.
    """
    update_seconds = [u["phases"].get("update", u["seconds"]) for u in used]
    row = {
        "training_mfu": median(
            update["flops"]["update"] / seconds / ceilings["peak_bf16"]
            for update, seconds in zip(used, update_seconds, strict=True)
        )
    }
    if "generation_bytes" in used[0]:
        bandwidth = ceilings["bytes_per_second"]
        row["generation_tokens_per_second"] = median(
            update["response_tokens"] / update["phases"]["rollout"] for update in used
        )
        row["generation_bound_fraction"] = median(
            update["generation_bytes"] / bandwidth / update["phases"]["rollout"] for update in used
        )
    return row


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the speed and the peak memory of the sides.

    Each of our sides is compared with TRL, in all combinations of precisions, and each source tree
    after the first with the first, in the same precision. `speed_at_equal_work` divides useful
    operations per second instead of seconds: where responses end at random the sides may have
    sampled others, and one had more to do.

    Args:
        rows: Results of `summarize`.
    """
    first = rows[0]["side"]
    return [
        {
            "case": row["case"],
            "side": row["side"],
            "other": other["side"],
            "precision": row["precision"],
            "other_precision": other["precision"],
            "speed": other["seconds"] / row["seconds"],
            "speed_at_equal_work": row["useful_gflops"] / other["useful_gflops"],
            "memory": row["peak_memory_mib"] / other["peak_memory_mib"],
        }
        for row, other in product(rows, rows)
        if row["case"] == other["case"]
        and row["side"] not in (PEER, other["side"])
        and (
            other["side"] == PEER
            or (other["side"] == first and row["precision"] == other["precision"])
        )
    ]


# Tables


def comparison_tables(comparison: dict[str, Any]) -> str:
    """The tables of `ppo_iteration.py` and `sft_reward.py`.

    Args:
        comparison: Content of the benchmark's JSON file.
    """
    rows = comparison["summary"]
    phases = list(rows[0]["phases"])
    one_thread = comparison["machine"]["threads"] == 1 and not phases
    unit = "CPU seconds of one thread" if one_thread else "seconds"
    names = ("case", "precision", "side")
    parts = [
        table(
            [
                *(*names, f"{unit} per update (min-max)", "CPU seconds"),
                *("useful GFLOP/s", "share of torch.mm"),
                *("peak memory (before), MiB", "updates"),
            ],
            (
                [
                    *(row[name] for name in names),
                    f"{row['seconds']:.2f} ({row['seconds_min']:.2f}-{row['seconds_max']:.2f})",
                    # results of before 2026-11-27 lack it
                    f"{row['cpu_seconds']:.2f}" if "cpu_seconds" in row else "-",
                    *(f"{row['useful_gflops']:.0f}", f"{row['ceiling_fraction']:.0%}"),
                    f"{row['peak_memory_mib']:.0f} ({row['memory_before_mib']:.0f})",
                    f"{row['updates']} of {row['updates'] + row['updates_dropped']}",
                ]
                for row in rows
            ),
        )
    ]
    if len(phases) > 1:
        parts.append(
            table(
                [*names, *(f"{phase}, s" for phase in phases), "response tokens", "tokens/s"],
                (
                    [
                        *(row[name] for name in names),
                        *(f"{row['phases'][phase]:.2f}" for phase in phases),
                        f"{row['response_tokens']:.0f}",
                        f"{row['real_tokens'] / row['seconds']:.0f}",
                    ]
                    for row in rows
                ),
            )
        )
    if comparison["ratios"]:
        parts.append(
            table(
                [
                    *("case", "side / other", "precisions", "speed-up"),
                    *("speed-up at equal useful work", "relative peak memory"),
                ],
                (
                    [
                        *(ratio["case"], f"{ratio['side']} / {ratio['other']}"),
                        f"{ratio['precision']} / {ratio['other_precision']}",
                        f"{ratio['speed']:.2f}",
                        f"{ratio['speed_at_equal_work']:.2f}",
                        f"{ratio['memory']:.2f}",
                    ]
                    for ratio in comparison["ratios"]
                ),
            )
        )
    if "training_mfu" in rows[0]:
        parts.append(
            table(
                ["case", "side", "training MFU", "generated tokens/s", "share of the bound"],
                (
                    [
                        *(row["case"], row["side"], f"{row['training_mfu']:.1%}"),
                        *generation_cells(row),
                    ]
                    for row in rows
                ),
            )
        )
    versions = {run["side"]: run["versions"] for run in comparison["runs"]}
    kernels = {run["side"]: run["kernels"] for run in comparison["runs"] if "kernels" in run}
    return "\n".join(
        [*parts, machine_sentences(comparison["machine"], versions) + kernel_sentences(kernels)]
    )


def generation_cells(row: dict[str, Any]) -> tuple[str, str]:
    """Format a row's cells on generation, which are dashes for a stage without it."""
    if "generation_tokens_per_second" not in row:
        return "-", "-"
    tokens, share = row["generation_tokens_per_second"], row["generation_bound_fraction"]
    return f"{tokens:.0f}", f"{share:.1%}"


def scaling_tables(scaling: dict[str, Any]) -> str:
    """The tables of `scaling.py`: the points, then the lines through them.

    Args:
        scaling: Content of the benchmark's JSON file.
    """
    points = table(
        [
            *("size", "value", "real tokens", "useful GFLOP", "seconds"),
            *("share of torch.mm", "peak memory, MiB"),
        ],
        (
            [
                *(sweep["size"], str(point["value"]), f"{point['real_tokens']:.0f}"),
                *(f"{point['useful_gflop']:.0f}", f"{point['seconds']:.2f}"),
                f"{point['ceiling_fraction']:.0%}",
                f"{point['peak_memory_mib']:.0f}",
            ]
            for sweep in scaling["sweeps"]
            for point in sweep["points"]
        ),
    )
    units = {"real_tokens": ("1,000 real tokens", 1000), "useful_gflop": ("100 useful GFLOP", 100)}
    lines = table(
        ["size", "fixed, s", "slope, s", "R²"],
        (
            [
                *(sweep["size"], f"{sweep['fixed']:.2f}"),
                f"{sweep['slope'] * units[sweep['against']][1]:.2f} "
                f"per {units[sweep['against']][0]}",
                f"{sweep['r_squared']:.3f}",
            ]
            for sweep in scaling["sweeps"]
        ),
    )
    return "\n".join(
        [points, lines, machine_sentences(scaling["machine"], {OURS: scaling["versions"]})]
    )


def machine_sentences(machine: dict[str, Any], versions: dict[str, dict[str, str]]) -> str:
    """Machine, ceilings and versions, in a sentence each.

    Args:
        machine: The ceilings with cores and threads.
        versions: Versions of packages by side.
    """
    stated = "; ".join(
        f"{side}: " + ", ".join(f"{name} {number}" for name, number in of_side.items())
        for side, of_side in versions.items()
    )
    onednn = machine.get("flops_fp32_onednn")  # older results lack it
    return (
        f"Machine: {machine['device']}, {machine['cores']} cores, {machine['threads']} threads. "
        f"Fastest torch.mm: {machine['flops_fp32'] / 1e9:.0f} GFLOP/s in fp32"
        + (f" (by oneDNN: {onednn / 1e9:.0f})" if onednn is not None else "")
        + f", {machine['flops_bf16'] / 1e9:.0f} in bf16; reading memory: "
        f"{machine['bytes_per_second'] / 1e9:.0f} GB/s. {stated}.\n"
    )


def kernel_sentences(kernels: dict[str, dict[str, Any]]) -> str:
    """What each side computed with, in a sentence each.

    Args:
        kernels: The result of `machine.kernels` by side.
    """
    return "".join(
        f"{side} computed with {used['capability']} kernels, MKL {used['mkl']}, "
        f"oneDNN {used['onednn']}, {used['threads']} threads, {', '.join(used['libraries'])}"
        + "".join(f", {name}={value}" for name, value in used["variables"].items())
        + ".\n"
        for side, used in kernels.items()
    )


# The page


MACHINES = {"amd_epyc_avx2": "AMD", "intel_xeon_avx512": "Intel"}
"""Processors in the table of the page, by the folder of their results."""
COMPARISONS = ("ppo_iteration", "sft_reward", "ppo_iteration_135m", "sft_reward_135m")


def summary_table(results: Path) -> str:
    """A Markdown table of all processors: seconds, speed-up over TRL and relative memory.

    Only cases where both sides have the same precision are in it.

    Args:
        results: Folder with a folder of JSON files for each of `MACHINES`.
    """
    rows: dict[Labels, dict[str, list[str]]] = {}
    for machine, name in product(MACHINES, COMPARISONS):
        file = results / machine / f"{name}.json"
        if not file.is_file():
            continue
        comparison = json.loads(file.read_text("utf-8"))
        seconds = {
            (r["case"], r["precision"], r["side"]): r["seconds"] for r in comparison["summary"]
        }
        what = "PPO, {}" if name.startswith("ppo") else "{}"
        suffix = " at 135M" if name.endswith("135m") else ""
        suffix += ", CPU s of a thread" if comparison["machine"]["threads"] == 1 else ""
        for ratio in comparison["ratios"]:
            case, precision, side = ratio["case"], ratio["precision"], ratio["side"]
            if ratio["other"] == PEER and precision == ratio["other_precision"]:
                times = (f"{seconds[case, precision, name]:.2f}" for name in (side, PEER))
                # a side with other kernels than torch's has their name behind its own
                kind = precision + side.removeprefix(OURS).replace(" ", ", ")
                rows.setdefault((what.format(case) + suffix, kind), {})[machine] = [
                    " / ".join(times),
                    f"{ratio['speed']:.2f}",
                    f"{ratio['memory']:.2f}",
                ]
    measured = [machine for machine in MACHINES if (results / machine).is_dir()]
    head = ["case", "precision"]
    for machine in measured:
        name = MACHINES[machine]
        head += [f"{name}: seconds, lit_rlhf / TRL", f"{name}: speed-up", f"{name}: memory"]
    missing = ["-"] * 3
    return table(
        head,
        (
            [*labels, *(cell for machine in measured for cell in of_case.get(machine, missing))]
            for labels, of_case in rows.items()
        ),
    )


def fill_page(page: str, results: Path) -> str:
    """The page with its table as the results say.

    Args:
        page: Markdown.
        results: Folder of the JSON files.
    """
    filled = f"<!-- summary -->\n\n{summary_table(results)}\n<!-- end -->"
    return SUMMARY.sub(lambda _: filled, page)


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text("utf-8"), RESULTS), "utf-8")
