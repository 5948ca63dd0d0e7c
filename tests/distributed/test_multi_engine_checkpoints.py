"""Checkpoints of runs with one engine per network, with real engines and processes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.strategies import checkpoint_problem, read_state_dict
from tests.support.strategy_runs import DDP, outcome

STAGE_2 = "multi_deepspeed_stage_2"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of two processes and the checkpoint that it left after 12 of 20 batches."""
    folder = tmp_path_factory.mktemp("two")
    scenarios = ["save", "disk_full", "resume", "kept", "language_models"]
    runs = outcome(folder, STAGE_2, 2, *scenarios)
    return runs, folder / "saved" / "step=19.ckpt"


@pytest.fixture(scope="module")
def one(two: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process does with the checkpoint of two."""
    folder = tmp_path_factory.mktemp("one")
    scenarios = ["resume", "validate", "damaged"]
    return outcome(folder, STAGE_2, 1, *scenarios, environment={"RESUME_FROM": str(two[1])})


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of one process with bf16 and offload, and its checkpoint."""
    folder = tmp_path_factory.mktemp("bf16")
    runs = outcome(folder, f"{STAGE_2}_offload", 1, "save", "resume", precision="bf16-mixed")
    return runs, folder / "saved" / "step=19.ckpt"


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert actual.keys() == expected.keys()
    return all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_resumed_run_ends_as_uninterrupted_one(two: tuple[dict[str, Any], Path]) -> None:
    runs, _ = two
    assert same(runs["resume"]["state"], runs["save"]["state"])
    assert runs["resume"]["records"] == runs["save"]["records"][12:]
    assert runs["resume"]["global_step"] == 5 + 2 * 15


@pytest.mark.slow
def test_checkpoint_of_two_ranks_on_one(two: tuple[Any, Path], one: dict[str, Any]) -> None:
    saved = read_state_dict(two[1])
    assert same(one["resume"]["at_start"], saved)
    assert same(one["validate"]["state"], saved)  # which needs no engines
    for name, weight in two[0]["save"]["state"].items():
        assert torch.allclose(one["resume"]["state"][name], weight, rtol=1e-5, atol=1e-6)
    messages = one["damaged"]
    for damage in ("cut", "flipped"):
        assert "copy.ckpt: second/rank_00001.safetensors is damaged" in messages[damage]
        assert f"{damage}/step=1.ckpt instead" in messages[damage]


def test_killed_save_leaves_checkpoint_before(two: tuple[dict[str, Any], Path]) -> None:
    runs, _ = two
    assert runs["kept"]["before"] == ["batch=12.ckpt", "batch=18.ckpt"]
    assert runs["kept"]["after"] == ["batch=12.ckpt", "batch=18.ckpt"]
    assert same(runs["kept"]["state"], runs["save"]["state"])


def test_last_checkpoint_holds_both_final_weights(two: tuple[dict[str, Any], Path]) -> None:
    runs, checkpoint = two
    last = checkpoint.with_name("last.ckpt")
    assert last.is_symlink()
    assert checkpoint_problem(last) is None
    assert same(read_state_dict(last), runs["save"]["state"])
    names = {f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    assert read_state_dict(last, "second").keys() == names


def test_tied_weights_are_kept_under_both_names(two: tuple[dict[str, Any], Path]) -> None:
    runs, checkpoint = two
    state = read_state_dict(checkpoint.parents[1] / "language_models.ckpt")
    assert same(state, runs["language_models"]["state"])
    assert "first.lm_head.weight" in state


@pytest.mark.slow
def test_language_models_follow_a_device(two: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    actual = two[0]["language_models"]
    expected = outcome(tmp_path, "auto", 1, "language_models")["language_models"]
    for name, weight in expected["state"].items():
        assert (actual["state"][name] - weight).abs().max() <= 1e-4 * weight.abs().max(), name
    norms = [step["norms"] for step in actual["records"]]
    for pair, reference in zip(norms, expected["records"], strict=True):
        assert pair == pytest.approx(reference["norms"], rel=1e-4)


def test_rank_that_cannot_write_keeps_old_checkpoint(two: tuple[dict[str, Any], Path]) -> None:
    runs, checkpoint = two
    assert "another rank could not write its shards of checkpoint" in runs["disk_full"]["told"]
    assert runs["disk_full"]["left"] == ["last.ckpt"]
    old_checkpoint = checkpoint.parents[1] / "full" / "last.ckpt"
    assert same(read_state_dict(old_checkpoint), runs["disk_full"]["state"])


@pytest.mark.slow
def test_bf16_resumes_from_its_fp32_masters_bit_for_bit(bf16: tuple[dict[str, Any], Path]) -> None:
    runs, checkpoint = bf16
    assert same(runs["resume"]["state"], runs["save"]["state"])
    assert runs["resume"]["records"] == runs["save"]["records"][12:]
    masters = read_state_dict(checkpoint)["first.0.weight"]
    assert masters.dtype == torch.float32
    assert not torch.equal(masters, masters.bfloat16().float())


@pytest.mark.slow
def test_one_process_resumes_with_two(bf16: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    runs, checkpoint = bf16
    settings = {"precision": "bf16-mixed", "environment": {"RESUME_FROM": str(checkpoint)}}
    resumed = outcome(tmp_path, STAGE_2, 2, "resume", **settings)["resume"]
    for name, weight in runs["save"]["state"].items():
        # a bf16 weight may round the other way: one unit in the eighth binary digit
        assert torch.allclose(resumed["state"][name].float(), weight.float(), rtol=2**-7, atol=1e-3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A strategy's run and its checkpoint half-way; its processes run once."""

    @cache
    def run(strategy: str, ranks: int) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("saved")
        return outcome(folder, strategy, ranks, "save")["save"], folder / "saved" / "step=19.ckpt"

    return run


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (("fsdp2", 2), ("auto", 1)),
        ((DDP, 2), ("fsdp2", 2)),
        pytest.param(("fsdp2", 2), ("fsdp2", 1), marks=pytest.mark.slow),
        pytest.param(("fsdp2", 2), ("fsdp2", 4), marks=pytest.mark.slow),
        pytest.param(("fsdp2", 2), (STAGE_2, 1), marks=pytest.mark.slow),
        pytest.param(("fsdp2", 1), ("fsdp2", 2), marks=pytest.mark.slow),
        pytest.param((STAGE_2, 2), ("fsdp2", 2), marks=pytest.mark.slow),
        pytest.param((STAGE_2, 2), (DDP, 2), marks=pytest.mark.slow),
        pytest.param(("auto", 1), (STAGE_2, 2), marks=pytest.mark.slow),
    ],
)
def test_strategies_resume_from_each_other(
    saved: Callable[..., Any], tmp_path: Path, writer: tuple[str, int], reader: tuple[str, int]
) -> None:
    whole, checkpoint = saved(*writer)
    environment = {"RESUME_FROM": str(checkpoint)}
    resumed = outcome(tmp_path, *reader, "resume", environment=environment)["resume"]
    assert same(resumed["at_start"], read_state_dict(checkpoint))
    for name, weight in whole["state"].items():
        assert torch.allclose(resumed["state"][name], weight, rtol=1e-5, atol=1e-6), name
    for one, other in zip(resumed["records"], whole["records"][12:], strict=True):
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-4)
        assert one["rates"] == other["rates"]
