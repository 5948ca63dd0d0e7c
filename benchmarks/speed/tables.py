"""Results as Markdown: what the scripts print and `docs/speed.md` quotes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

PHASES = ("rollout", "score", "update", "other")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ppo_tables(result: dict[str, Any]) -> str:
    """The tables of `ppo_iteration.py`.

    Args:
        result: What the script writes as JSON.
    """
    rows = result["summary"]
    parts = [
        table(
            [
                *("responses", "precision", "side", "seconds per iteration (min-max)"),
                *(f"{phase}, s" for phase in PHASES),
                *("useful GFLOP/s", "of the ceiling", "peak memory (before), MiB", "updates"),
            ],
            (
                [
                    *(r["mode"], r["precision"], r["side"]),
                    f"{r['seconds']:.2f} ({r['seconds_min']:.2f}-{r['seconds_max']:.2f})",
                    *(f"{r['phases'][phase]:.2f}" for phase in PHASES),
                    f"{r['useful_gflops']:.0f}",
                    f"{r['ceiling_fraction']:.0%}",
                    f"{r['peak_memory_mib']:.0f} ({r['memory_before_mib']:.0f})",
                    f"{r['updates']} of {r['updates'] + r['updates_dropped']}",
                ]
                for r in rows
            ),
        )
    ]
    if result["ratios"]:
        parts.append(
            table(
                ["responses", "precision: lit_rlhf / TRL", "times as fast", "memory / TRL's"],
                (
                    [
                        r["mode"],
                        f"{r['precision']} / {r['peer_precision']}",
                        f"{r['speed']:.2f}",
                        f"{r['memory']:.2f}",
                    ]
                    for r in result["ratios"]
                ),
            )
        )
    if "training_mfu" in rows[0]:
        parts.append(
            table(
                ["responses", "side", "MFU of training", "tokens/s of generation", "of the bound"],
                (
                    [
                        *(r["mode"], r["side"], f"{r['training_mfu']:.1%}"),
                        f"{r['generation_tokens_per_second']:.0f}",
                        f"{r['generation_bound_fraction']:.1%}",
                    ]
                    for r in rows
                ),
            )
        )
    return "\n".join([*parts, machine_line(result)])


def machine_line(result: dict[str, Any]) -> str:
    """Machine, ceilings and versions, in a sentence each."""
    machine = result["machine"]
    versions: dict[str, dict[str, str]] = {r["side"]: r["versions"] for r in result["runs"]}
    stated = "; ".join(
        f"{side}: " + ", ".join(f"{name} {number}" for name, number in of_side.items())
        for side, of_side in versions.items()
    )
    return (
        f"Machine: {machine['device']}, {machine['cores']} cores, {machine['threads']} threads. "
        f"Fastest matrix product: {machine['flops_fp32'] / 1e9:.0f} GFLOP/s in fp32, "
        f"{machine['flops_bf16'] / 1e9:.0f} in bf16; reading memory: "
        f"{machine['bytes_per_second'] / 1e9:.0f} GB/s. {stated}.\n"
    )
