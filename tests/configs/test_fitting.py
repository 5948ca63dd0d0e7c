"""Every configuration that a CPU can run really fits, for a step or two on a tiny world."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_rlhf.data import TextContract
from tests.support.config_parsing import (
    OF_THE_QUICKSTART,
    OVERLAYS,
    PPO_ABLATIONS,
    name_of,
)
from tests.support.tiny_runs import CONFIGS, QUICKSTART, RUNS, fit_stage, logged, overlay

PPO_MAX = QUICKSTART / "ppo_max.yaml"


def has_learned(folder: Path, start: Path) -> bool:
    """Whether any weight differs from the model that the stage started from."""
    before, after = (load_file(f / "model.safetensors") for f in (start, folder))
    return any(not torch.equal(after[name], before[name]) for name in after.keys() & before)


def finite(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """The same, if all values are finite."""
    assert {key: v for key, v in metrics.items() if not all(map(math.isfinite, v))} == {}
    return metrics


def fit_ppo(root: Path, folder: Path, *overlays: Path) -> dict[str, list[float]]:
    """PPO-max with overlays, on the models of `root`; leaves everything in `folder`."""
    moves = {RUNS: root, f"{RUNS}/ppo_max": folder / "ppo", f"{RUNS}/logs": folder / "logs"}
    fit_stage("ppo", [PPO_MAX, *overlays], folder, moves)
    (log,) = (folder / "logs").iterdir()  # an overlay may add to the name
    return finite(logged(log))


@pytest.mark.parametrize(
    ("stage", "start", "metric"),
    [
        ("sft", "world/base", "sft/loss"),
        ("reward", "sft", "reward/accuracy"),
        ("ppo_max", "sft", "rollout/gold"),
        ("ppo_vanilla", "sft", "rollout/gold"),
    ],
)
def test_quickstart_stages_fit(quickstart: Path, stage: str, start: str, metric: str) -> None:
    metrics = finite(logged(quickstart / "logs" / stage))
    assert len(metrics[metric]) == 2
    assert any(key.startswith("val/") for key in metrics)
    assert has_learned(quickstart / stage, quickstart / start)


def test_ppo_runs_start_from_the_same_responses(quickstart: Path) -> None:
    runs = [logged(quickstart / "logs" / name) for name in ("ppo_max", "ppo_vanilla")]
    for key in ("rollout/score", "rollout/gold", "rollout/response_length", "rollout/kl"):
        assert runs[0][key][0] == runs[1][key][0]


# The others set options of PPO alone: each option by itself is tried in `test_ppo_switches`, and
# each ablation is parsed on all configurations in `test_parsing`.
FITTED_ABLATIONS = (*OF_THE_QUICKSTART, "no_critic_pretraining")


@pytest.mark.parametrize(
    "ablation",
    [
        pytest.param(path, marks=() if path.stem in FITTED_ABLATIONS else pytest.mark.slow)
        for path in PPO_ABLATIONS
    ],
    ids=name_of,
)
def test_ablation_trains_the_policy(world: Path, tmp_path: Path, ablation: Path) -> None:
    metrics = fit_ppo(world, tmp_path, ablation)
    # beside the model of a run without the overlay
    model = tmp_path / f"ppo-{ablation.stem}"
    start = world / "world/base" if ablation.stem == "policy_without_sft" else world / "sft"
    pretraining = 0 if ablation.stem == "no_critic_pretraining" else 1
    assert len(metrics["ppo/value_loss"]) == 2
    assert len(metrics["ppo/policy_loss"]) == 2 - pretraining
    assert has_learned(model, start)


FURTHER_ESTIMATORS = ("dapo", "dr_grpo", "reinforce_plus_plus", "rloo", "vapo")
"""Overlays of estimators but for one; each estimator's update is followed by hand elsewhere."""


@pytest.mark.parametrize(
    "overlay",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in FURTHER_ESTIMATORS else ())
        for path in OVERLAYS
        if path.stem not in ("chinese", "gpu", "zero2_8xa100", "fsdp2_8xa100")
    ],
    ids=name_of,
)
def test_overlay_fits_ppo(
    world: Path, tmp_path: Path, overlay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overlay.stem in ("mlflow", "vllm", "wandb"):
        pytest.importorskip(overlay.stem)
        monkeypatch.chdir(tmp_path)  # where the trackers write
        monkeypatch.setenv("WANDB_MODE", "offline")
    fit_ppo(world, tmp_path, overlay)
    (model,) = tmp_path.glob("ppo*")
    assert has_learned(model, world / "sft")


def test_lora_and_gradient_checkpointing_go_together(world: Path, tmp_path: Path) -> None:
    overlays = CONFIGS / "overlays"
    moves = {RUNS: world, f"{RUNS}/reward": tmp_path / "reward", f"{RUNS}/logs": tmp_path / "logs"}
    configs = [QUICKSTART / "reward.yaml"]
    configs += [overlays / "lora.yaml", overlays / "gradient_checkpointing.yaml"]
    fit_stage("reward", configs, tmp_path, moves | {f"{RUNS}/sft": world / "sft"})
    assert has_learned(tmp_path / "reward", world / "sft")


def test_chinese_template_goes_into_the_sft_models_folder(world: Path, tmp_path: Path) -> None:
    configs = [QUICKSTART / "sft.yaml", CONFIGS / "overlays" / "chinese.yaml"]
    moves = {RUNS: world, f"{RUNS}/sft": tmp_path / "sft", f"{RUNS}/logs": tmp_path / "logs"}
    fit_stage("sft", configs, tmp_path, moves)
    assert "<|MOSS|>" in TextContract.load(tmp_path / "sft").chat_template


def test_ppo_refuses_a_template_unknown_to_its_reward_model(world: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not read what the policy writes"):
        fit_ppo(world, tmp_path, CONFIGS / "overlays" / "chinese.yaml")


@pytest.fixture(scope="module")
def hh_root(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base model and the data files that the HH-RLHF configurations name."""
    root = tmp_path_factory.mktemp("hh")
    (root / "runs").mkdir()
    (root / "runs" / "base").symlink_to(world / "world" / "base")
    lines = (world / "world" / "preferences.jsonl").read_text("utf-8").splitlines()
    bad = json.dumps({"chosen": "", "rejected": "\n\nHuman: a\n\nAssistant: b"})
    for name, part in (("helpful", lines[::2]), ("harmless", [*lines[1::2], bad])):
        with gzip.open(root / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(part) + "\n")
    return root


def assert_stages_learned(runs: Path, base: Path) -> None:
    starts = {"sft": base, "reward": runs / "sft", "ppo": runs / "sft"}
    assert all(has_learned(runs / stage, start) for stage, start in starts.items())


def test_hh_configurations_fit_one_after_the_other(hh_root: Path, tmp_path: Path) -> None:
    runs = hh_root / "runs"
    moves = {"runs/hh": runs, "data/hh": hh_root}
    budget = {"data": {"init_args": {"tokens_per_batch": 512}}}
    two_batches = overlay(tmp_path, "two_batches", budget)
    for stage, others in (("sft", [two_batches]), ("reward", [two_batches]), ("ppo", [])):
        fit_stage(stage, [CONFIGS / stage / "hh_cpu.yaml", *others], tmp_path, moves)
    assert_stages_learned(runs, runs / "base")
    accuracies = [key for key in logged(runs / "logs" / "reward") if "accuracy/" in key]
    assert set(accuracies) <= {f"val/reward/accuracy/{name}" for name in ("helpful", "harmless")}
    assert accuracies != []


@pytest.mark.slow
def test_smollm2_configurations_fit_one_after_the_other(hh_root: Path, tmp_path: Path) -> None:
    runs = tmp_path / "smollm2"
    moves = {"runs/smollm2/base": hh_root / "runs" / "base", "runs/smollm2": runs}
    for stage in ("sft", "reward", "ppo"):
        config = CONFIGS / "smollm2" / f"{stage}.yaml"
        fit_stage(stage, [config], tmp_path, {**moves, "data/hh": hh_root})
    assert_stages_learned(runs, hh_root / "runs" / "base")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reward"), [("arithmetic", "right"), ("list", "whole"), ("sentiment", "cheerful")]
)
def test_example_trains_the_policy(name: str, reward: str, world: Path, tmp_path: Path) -> None:
    if name == "sentiment":
        pytest.importorskip("vaderSentiment", reason="needs the extra `sentiment`")
    base = world / "world" / "base"
    moves = {"runs/smollm2/base": base, "runs/examples": tmp_path}
    fit_stage("ppo", [CONFIGS / "examples" / f"{name}.yaml"], tmp_path, moves)
    metrics = finite(logged(tmp_path / "logs" / name))
    assert len(metrics[f"rollout/score/{reward}"]) == 2
    assert has_learned(tmp_path / name, base)
