"""docs/metrics.md lists exactly the keys that the stages log."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copytree

import pytest

from tests.support.docs_blocks import ROOT
from tests.support.tiny_runs import CONFIGS, QUICKSTART, RUNS, fit_stage, logged, overlay


def documented() -> set[str]:
    """Keys in the first column of the table."""
    lines = (ROOT / "docs" / "metrics.md").read_text("utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def keys(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Keys that the three stages log, with all options of PPO that add a key."""
    folder = tmp_path_factory.mktemp("everything")
    moves = {RUNS: quickstart, f"{RUNS}/ppo_max": folder / "ppo", f"{RUNS}/logs": folder}
    text = [{"path": f"{RUNS}/world/text.jsonl"}]
    copytree(quickstart / "reward", folder / "second")
    rewards = {f"{RUNS}/reward": 1.0, str(folder / "second"): 0.0}
    model = {"loss": {"ptx_coef": 0.1, "ref_kl_coef": 0.1}, "rewards": rewards}
    model["responses_per_prompt"] = 2
    model["sampler"] = {"class_path": "tests.support.nucleus.Nucleus"}
    init_args = {"model": model, "data": {"ptx_sources": text}}
    ptx = overlay(folder, "ptx", {name: {"init_args": value} for name, value in init_args.items()})
    configs = [QUICKSTART / "ppo_max.yaml", ptx, CONFIGS / "ablations" / "entropy_bonus.yaml"]
    fit_stage("ppo", configs, folder, moves)
    pairs = {"meta_sources": [{"path": f"{RUNS}/world/preferences.jsonl"}]}
    moved = {"model": {"init_args": {"meta_rate": 0.01}}, "data": {"init_args": pairs}}
    meta = overlay(folder, "meta", {**moved, "suffix+": ["meta"]})
    moves = {RUNS: quickstart, f"{RUNS}/reward": folder / "model", f"{RUNS}/logs": folder}
    fit_stage("reward", [QUICKSTART / "reward.yaml", meta], folder, moves)
    logs = quickstart / "logs"
    runs = [logs / "sft", folder / "reward-meta", folder / "ppo_max-entropy_bonus"]
    bare = [key.removeprefix("val/").removeprefix("test/") for run in runs for key in logged(run)]
    return {"/".join(key.split("/")[:2]) for key in bare}  # without names of sources


def test_page_has_the_keys_that_are_logged(keys: set[str]) -> None:
    assert documented() == keys
