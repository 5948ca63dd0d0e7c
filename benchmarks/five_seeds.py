"""The quickstart with several seeds: whether PPO-max improves the policy and vanilla PPO cheats.

    python benchmarks/five_seeds.py --output_dir runs/five_seeds

Each seed is `lit_rlhf quickstart --seed N` in a process of its own, two at a time with one thread
each. Prints a table and writes it, with every number, to `<output_dir>/five_seeds.{md,json}`, anew
whenever a seed has finished.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from lit_rlhf.files import write_text

GOLD = "lit_rlhf.lab.gold:gold_reward"


def run_seed(root: Path, seed: int) -> dict[str, Any]:
    """Run the quickstart with a seed, unless its evaluation exists, and read the evaluation."""
    folder = root / f"seed_{seed}"
    result = folder / "evaluation.json"
    if not result.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("w") as log:
            subprocess.run(
                [
                    *(sys.executable, "-m", "lit_rlhf.cli.main", "quickstart"),
                    *("--output_dir", str(folder), "--seed", str(seed)),
                    # a run that was interrupted starts anew
                    *("--overwrite", "true"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
            )
    evaluation: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return evaluation


def summarize_seed(seed: int, evaluation: dict[str, Any]) -> dict[str, Any]:
    """The figures of one seed, and whether they bear out the claims in the table's caption."""
    sft, vanilla, ppo_max = evaluation["policies"].values()
    gold = {
        name: report["rewards"]["gold_reward"]
        for name, report in (("sft", sft), ("vanilla", vanilla), ("ppo_max", ppo_max))
    }
    deviation = gold["sft"]["std"]
    score = {
        name: next(r["mean"] for key, r in report["rewards"].items() if key != "gold_reward")
        for name, report in (("vanilla", vanilla), ("ppo_max", ppo_max))
    }
    against = {name: gold[name]["against_baseline"] for name in ("vanilla", "ppo_max")}
    gain = (gold["ppo_max"]["mean"] - gold["sft"]["mean"]) / deviation
    return {
        "seed": seed,
        "sft_gold": gold["sft"]["mean"],
        "sft_gold_std": deviation,
        "vanilla_gold": gold["vanilla"]["mean"],
        "ppo_max_gold": gold["ppo_max"]["mean"],
        "gain_in_std": gain,
        "vanilla_score": score["vanilla"],
        "ppo_max_score": score["ppo_max"],
        "ppo_max_win": against["ppo_max"]["win"],
        "ppo_max_tie": against["ppo_max"]["tie"],
        "ppo_max_lose": against["ppo_max"]["lose"],
        "vanilla_win": against["vanilla"]["win"],
        "vanilla_lose": against["vanilla"]["lose"],
        **{
            f"{name}_{key}": report[key]
            for name, report in (("sft", sft), ("vanilla", vanilla), ("ppo_max", ppo_max))
            for key in ("response_length", "kl", "perplexity")
        },
        "ppo_max_improves": gain >= 0.3 and against["ppo_max"]["win"] > against["ppo_max"]["lose"],
        "vanilla_cheats": (
            gold["vanilla"]["mean"] < gold["sft"]["mean"] and score["vanilla"] > score["ppo_max"]
        ),
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """The seeds as a Markdown table."""
    lines = [
        "| seed | gold: SFT (std) / vanilla / PPO-max | PPO-max gain, std | win / tie / lose, % | "
        "RM: vanilla / PPO-max | length: SFT / vanilla / PPO-max | KL: vanilla / PPO-max | "
        "perplexity: SFT / vanilla / PPO-max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['seed']} "
        f"| {r['sft_gold']:.2f} ({r['sft_gold_std']:.2f}) / {r['vanilla_gold']:.2f} / "
        f"{r['ppo_max_gold']:.2f} "
        f"| {r['gain_in_std']:+.2f} "
        f"| {r['ppo_max_win'] * 100:.0f} / {r['ppo_max_tie'] * 100:.0f} / "
        f"{r['ppo_max_lose'] * 100:.0f} "
        f"| {r['vanilla_score']:.2f} / {r['ppo_max_score']:.2f} "
        f"| {r['sft_response_length']:.1f} / {r['vanilla_response_length']:.1f} / "
        f"{r['ppo_max_response_length']:.1f} "
        f"| {r['vanilla_kl']:.1f} / {r['ppo_max_kl']:.1f} "
        f"| {r['sft_perplexity']:.2f} / {r['vanilla_perplexity']:.2f} / "
        f"{r['ppo_max_perplexity']:.2f} |"
        for r in rows
    ]
    improves, cheats = (sum(r[key] for r in rows) for key in ("ppo_max_improves", "vanilla_cheats"))
    lines += [
        "",
        f"In {improves} of {len(rows)} seeds, PPO-max gains at least 0.3 SFT standard deviations "
        f"of gold and wins more often than it loses. In {cheats} of {len(rows)}, vanilla PPO ends "
        "below SFT in gold with a higher reward-model score than PPO-max.",
    ]
    return "\n".join(lines) + "\n"


def five_seeds(
    output_dir: str = "runs/five_seeds", seeds: tuple[int, ...] = (0, 1, 2, 3, 4), parallel: int = 2
) -> None:
    """Run the quickstart with each seed, and write and print a table.

    Args:
        output_dir: Folder for the runs. A seed that is finished there is not run again.
        seeds: Seeds to run.
        parallel: Number of seeds that run at a time.
    """
    root = Path(output_dir)
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(parallel) as pool:
        runs = {pool.submit(run_seed, root, seed): seed for seed in seeds}
        for run in as_completed(runs):
            if run.exception() is not None:
                continue  # raised below, when the other seeds have been written
            rows.append(summarize_seed(runs[run], run.result()))
            rows.sort(key=lambda row: seeds.index(row["seed"]))
            write_text(root / "five_seeds.json", json.dumps(rows, indent=2) + "\n")
            write_text(root / "five_seeds.md", format_table(rows))
            finished = f"seed {runs[run]} has finished, {len(rows)} of {len(seeds)}"
            print(finished, file=sys.stderr, flush=True)
    for run in runs:
        run.result()
    print(format_table(rows))


if __name__ == "__main__":
    auto_cli(five_seeds)
