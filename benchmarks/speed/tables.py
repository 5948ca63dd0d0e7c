"""Results as Markdown: what the scripts print and `docs/speed.md` quotes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def comparison_tables(result: dict[str, Any]) -> str:
    """The tables of `ppo_iteration.py` and `sft_reward.py`.

    Args:
        result: What the script writes as JSON.
    """
    rows = result["summary"]
    phases = list(rows[0]["phases"])
    names = ("case", "precision", "side")
    parts = [
        table(
            [
                *(*names, "seconds per update (min-max)", "useful GFLOP/s", "of torch.mm"),
                *("peak memory (before), MiB", "updates"),
            ],
            (
                [
                    *(row[name] for name in names),
                    f"{row['seconds']:.2f} ({row['seconds_min']:.2f}-{row['seconds_max']:.2f})",
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
    if result["ratios"]:
        parts.append(
            table(
                [
                    *("case", "precision: lit_rlhf / TRL", "times as fast"),
                    *("at equal useful work", "peak memory / TRL's"),
                ],
                (
                    [
                        r["case"],
                        f"{r['precision']} / {r['peer_precision']}",
                        f"{r['speed']:.2f}",
                        f"{r['speed_at_equal_work']:.2f}",
                        f"{r['memory']:.2f}",
                    ]
                    for r in result["ratios"]
                ),
            )
        )
    if "training_mfu" in rows[0]:
        parts.append(
            table(
                ["case", "side", "MFU of training", "tokens/s of generation", "of the bound"],
                (
                    [
                        *(r["case"], r["side"], f"{r['training_mfu']:.1%}"),
                        *generation(r),
                    ]
                    for r in rows
                ),
            )
        )
    versions = {run["side"]: run["versions"] for run in result["runs"]}
    return "\n".join([*parts, machine_line(result["machine"], versions)])


def generation(row: dict[str, Any]) -> tuple[str, str]:
    """A row's cells on generation; a stage without it has none."""
    if "generation_tokens_per_second" not in row:
        return "-", "-"
    tokens, bound = row["generation_tokens_per_second"], row["generation_bound_fraction"]
    return f"{tokens:.0f}", f"{bound:.1%}"


def scaling_tables(result: dict[str, Any]) -> str:
    """The tables of `scaling.py`: the points, then the lines through them.

    Args:
        result: What the script writes as JSON.
    """
    points = table(
        [
            *("size", "value", "real tokens", "useful GFLOP", "seconds"),
            *("of torch.mm", "peak memory, MiB"),
        ],
        (
            [
                *(sweep["size"], str(point["value"]), f"{point['real_tokens']:.0f}"),
                *(f"{point['useful_gflop']:.0f}", f"{point['seconds']:.2f}"),
                f"{point['ceiling_fraction']:.0%}",
                f"{point['peak_memory_mib']:.0f}",
            ]
            for sweep in result["sweeps"]
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
            for sweep in result["sweeps"]
        ),
    )
    stated = machine_line(result["machine"], {"lit_rlhf": result["versions"]})
    return "\n".join([points, lines, stated])


def machine_line(machine: dict[str, Any], versions: dict[str, dict[str, str]]) -> str:
    """Machine, ceilings and versions, in a sentence each.

    Args:
        machine: The ceilings with cores and threads.
        versions: By side.
    """
    stated = "; ".join(
        f"{side}: " + ", ".join(f"{name} {number}" for name, number in of_side.items())
        for side, of_side in versions.items()
    )
    onednn = machine.get("flops_fp32_onednn")  # not in results of before it was measured
    return (
        f"Machine: {machine['device']}, {machine['cores']} cores, {machine['threads']} threads. "
        f"Fastest torch.mm: {machine['flops_fp32'] / 1e9:.0f} GFLOP/s in fp32"
        + (f" (by oneDNN: {onednn / 1e9:.0f})" if onednn is not None else "")
        + f", {machine['flops_bf16'] / 1e9:.0f} in bf16; reading memory: "
        f"{machine['bytes_per_second'] / 1e9:.0f} GB/s. {stated}.\n"
    )
