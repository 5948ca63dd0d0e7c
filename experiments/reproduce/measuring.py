"""Measurements of a run: curves, samples over its course, and the verdicts of its monitors."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.collapse.study import detect_collapse
from experiments.reproduce.table import Arm, Foundation
from lit_callbacks import Monitor, default_monitors, read_logged_steps
from lit_rlhf.tools.lab import gold_reward, parse_request, read_world, render_prompt, well_formed

CURVES = {
    "score": "rollout/score",
    "gold": "rollout/gold",
    "kl": "rollout/kl",
    "response_length": "rollout/response_length",
    "perplexity": "rollout/perplexity",
    "entropy": "rollout/entropy",
    "policy_loss": "ppo/policy_loss",
    "value_loss": "ppo/value_loss",
    "explained_variance": "ppo/explained_variance",
}
"""Keys of the logged metrics by the name of the measure."""
POINTS = 70
"""Points of a curve; a longer run is averaged over equal parts."""
BINS = 24
TEST_PAIRS = 1000
TEXTS = 200


def rounded(values: Sequence[float]) -> list[float | None]:
    """Numbers with five digits; `None` for those that are not finite, which JSON lacks."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def averaged(values: Sequence[float]) -> list[float]:
    """Means over at most `POINTS` equal parts."""
    parts = np.array_split(np.asarray(values, float), min(POINTS, len(values)))
    return [float(part.mean()) for part in parts]


# --- PPO runs


def measure_run(root: Path, arm: Arm, seed: int) -> dict[str, Any]:
    """Measure a finished PPO run.

    Args:
        root: Folder of its foundation.
        arm: The run's arm.
        seed: Its seed.
    """
    log = root / "logs" / arm.name
    measured: dict[str, Any] = {
        "curves": read_curves(log),
        "samples": summarize_samples(log / "samples.jsonl", read_prompts(root)),
        **replay_monitors(log),
    }
    if "preferences" in arm.evaluations:
        measured["preferences"] = compare_responses(root / arm.name / "responses.jsonl")
    if "language" in arm.evaluations:
        texts = unseen_texts(root, seed)
        folders = {"sft": "sft", "policy": arm.name}
        folders |= {"start": "pretrained"} if arm.pretrained else {}
        measured["text_perplexity"] = {
            name: measure_perplexity(root / folder, texts) for name, folder in folders.items()
        }
    return measured


def read_curves(log: Path) -> dict[str, list[float | None]]:
    """The logged metrics over the iterations."""
    steps = {n: s for n, s in read_logged_steps(str(log)).items() if CURVES["score"] in s}
    curves = {"iteration": rounded(averaged(list(steps)))}
    for name, key in CURVES.items():
        # while only the critic is trained there is no policy loss
        values = [scalars.get(key, math.nan) for scalars in steps.values()]
        curves[name] = rounded(averaged(values))
    return curves


def read_prompts(root: Path) -> list[str]:
    """The held-out prompts as the models read them."""
    lines = (root / "world" / "prompts_heldout.jsonl").read_bytes().splitlines()
    return [render_prompt(json.loads(line)["prompt"]) for line in lines]


def summarize_samples(path: Path, prompts: Sequence[str]) -> dict[str, Any]:
    """Gold, wins against the policy at the start, and scores, over the course of a run.

    Args:
        path: File of a `SampleTimeline`, whose first samples are from the SFT policy.
        prompts: The prompts as the models read them.
    """
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    steps = {step: list(rows) for step, rows in groupby(lines, lambda line: line["step"])}
    scores = [line["score"] for line in lines]
    edges = np.linspace(min(scores), max(scores) + 1e-6, BINS + 1)
    columns: dict[str, list[Any]] = {"iteration": list(steps)}
    histograms = []
    start: list[float] | None = None
    for rows in steps.values():
        asked_prompts = [prompts[row["prompt_index"]] for row in rows]
        responses = [row["response"] for row in rows]
        gold = gold_reward(asked_prompts, responses, [not row["truncated"] for row in rows])
        start = start or gold
        score = [row["score"] for row in rows]
        outcomes = count_outcomes(gold, start)
        values = {
            "gold": fmean(gold),
            "gold_std": float(np.std(gold)),
            "well_formed": fmean(well_formed(asked_prompts, responses)),
            "score": fmean(score),
            "score_skewness": skewness(score),
            "kl": fmean(row["kl"] for row in rows),
            "response_length": fmean(row["length"] for row in rows),
            **outcomes,
        }
        for name, value in values.items():
            columns.setdefault(name, []).extend(rounded([value]))
        histograms.append(np.histogram(score, edges)[0].tolist())
    return {**columns, "histogram_edges": rounded(edges.tolist()), "histograms": histograms}


def count_outcomes(scores: Sequence[float], baseline_scores: Sequence[float]) -> dict[str, float]:
    """Shares of prompts on which the first is better, equal and worse."""
    pairs = list(zip(scores, baseline_scores, strict=True))
    return {
        "win": fmean(a > b for a, b in pairs),
        "tie": fmean(a == b for a, b in pairs),
        "lose": fmean(a < b for a, b in pairs),
    }


def skewness(values: Sequence[float]) -> float:
    """Third standardized moment; 0 for equal values."""
    centred = np.asarray(values, float) - fmean(values)
    spread = float(centred.std())
    return float((centred**3).mean() / spread**3) if spread > 0 else 0.0


def replay_monitors(log: Path) -> dict[str, Any]:
    """First iteration at which each monitor, and the detector, is beyond its threshold."""
    of_signal: dict[str, list[Monitor]] = {}
    for monitor in default_monitors():
        of_signal.setdefault(monitor.vote, []).append(monitor)
    return {
        "flagged_at": detect_collapse(log, default_monitors()).flagged_at,
        "first_warning": {
            signal: detect_collapse(log, monitors, votes=1).flagged_at
            for signal, monitors in of_signal.items()
        },
    }


def compare_responses(path: Path) -> dict[str, dict[str, float]]:
    """Wins of a policy against SFT by gold, for helpful and harmful requests."""
    by_policy: dict[str, dict[str, list[float]]] = {}
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        harmful = parse_request(render_prompt(record["prompt"])).harmful
        kind = "harmless" if harmful else "helpful"
        (gold,) = (v for name, v in record["scores"].items() if name.endswith("gold_reward"))
        by_policy.setdefault(record["policy"], {}).setdefault(kind, []).append(gold)
    sft, policy = by_policy.values()
    return {kind: count_outcomes(policy[kind], sft[kind]) for kind in ("helpful", "harmless")}


# --- language


def unseen_texts(root: Path, seed: int) -> list[str]:
    """Dialogues of the world that no stage has seen."""
    world = read_world(root / "world")
    rng = random.Random(f"unseen {seed}")
    return [
        f"{render_prompt(prompt)} {world.sample_demonstration(prompt, rng)}"
        for prompt in world.sample_prompts(TEXTS, seed=seed + 1, held_out=True)
    ]


def measure_perplexity(folder: Path, texts: Sequence[str]) -> float:
    """Perplexity per token of a language model on texts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.train(False)
    nats = tokens = 0.0
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            nats += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
            tokens += ids.shape[1] - 1
    return float(f"{math.exp(nats / tokens):.5g}")


# --- reward models


def measure_foundation(
    root: Path, foundation: Foundation, seed: int, trial: bool = False
) -> dict[str, Any]:
    """Measure a reward model: accuracy over its training, and differences on unseen pairs.

    Args:
        root: Folder of the foundation.
        foundation: What it is.
        seed: Its seed.
        trial: Whether a few pairs are enough.
    """
    from lit_rlhf.data import DataSource
    from lit_rlhf.tools.commands.lab import sample_preferences
    from lit_rlhf.tools.evaluation.reward_report import score_pairs

    pairs = root / "world" / "preferences_test.jsonl"
    if not pairs.is_file():
        # labels of prompts that the training pairs have too, with other responses
        size = 16 if trial else TEST_PAIRS
        policy = str(root / "sft")
        test_seed = seed + 1_000_000
        sample_preferences(policy, f"{root}/world", str(pairs), pairs=size, seed=test_seed)
    model = str(root / "reward")
    sources = [DataSource(str(pairs))]
    scored = score_pairs(model, sources)
    differences = scored.chosen - scored.rejected
    limit = float(np.abs(differences).max()) + 1e-6
    edges = np.linspace(-limit, limit, BINS + 1)
    steps = read_logged_steps(str(root / "logs" / "reward"))
    accuracy = [(n, s[k]) for n, s in steps.items() if (k := "reward/accuracy") in s]
    return {
        "accuracy": float(np.mean(differences > 0)),
        "histogram": np.histogram(differences, edges)[0].tolist(),
        "histogram_edges": rounded(edges.tolist()),
        "curves": {
            "step": rounded([step for step, _ in accuracy]),
            "accuracy": rounded([value for _, value in accuracy]),
        },
    }
