"""Checkpoints of runs with one engine per network, with real engines and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.strategies import checkpoint_problem, plain_state_dict
from tests.strategies.runs import outcome

STAGE_2 = "multi_deepspeed_stage_2"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of two processes and the checkpoint that it left after 12 of 20 batches."""
    folder = tmp_path_factory.mktemp("two")
    result = outcome(folder, STAGE_2, 2, "save", "disk_full")
    return result, folder / "saved" / "step=19.ckpt"


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The same with one process, bf16 and offload."""
    folder = tmp_path_factory.mktemp("bf16")
    result = outcome(folder, f"{STAGE_2}_offload", 1, "save", precision="bf16-mixed")
    return result, folder / "saved" / "step=19.ckpt"


def resumed(
    folder: Path, checkpoint: Path, devices: int, scenario: str = "resume", **arguments: str
) -> dict[str, Any]:
    environment = {"RESUME_FROM": str(checkpoint)}
    strategy = arguments.pop("strategy", STAGE_2)
    result = outcome(folder, strategy, devices, scenario, environment=environment, **arguments)
    return dict(result[scenario])


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert actual.keys() == expected.keys()
    return all(torch.equal(actual[key], value) for key, value in expected.items())


def test_a_resumed_run_ends_as_the_uninterrupted_one_bit_for_bit(
    two: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    result, checkpoint = two
    again = resumed(tmp_path, checkpoint, 2)
    assert same(again["state"], result["save"]["state"])
    assert again["records"] == result["save"]["records"][12:]
    assert again["global_step"] == 5 + 2 * 15


def test_a_run_of_two_processes_resumes_with_one(
    two: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    result, checkpoint = two
    again = resumed(tmp_path, checkpoint, 1)
    for key, value in result["save"]["state"].items():
        assert torch.allclose(again["state"][key], value, rtol=1e-5, atol=1e-6)


def test_weights_are_there_when_fit_starts_as_under_other_strategies(
    two: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    _, checkpoint = two
    assert same(resumed(tmp_path, checkpoint, 1)["at_start"], plain_state_dict(checkpoint))


def test_validation_reads_a_checkpoint_without_engines(
    two: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    _, checkpoint = two
    result = resumed(tmp_path, checkpoint, 1, "validate")
    assert same(result["state"], plain_state_dict(checkpoint))


def test_the_last_checkpoint_holds_the_final_weights_of_both_networks(
    two: tuple[dict[str, Any], Path],
) -> None:
    result, checkpoint = two
    last = checkpoint.with_name("last.ckpt")
    assert checkpoint_problem(last) is None
    assert same(plain_state_dict(last), result["save"]["state"])
    assert plain_state_dict(last, "second").keys() == {
        f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }


def test_a_rank_that_cannot_write_ends_the_save_and_the_old_checkpoint_stays(
    two: tuple[dict[str, Any], Path],
) -> None:
    result, checkpoint = two
    assert "another rank could not write its shards of checkpoint" in result["disk_full"]["told"]
    assert result["disk_full"]["left"] == ["last.ckpt"]
    kept = checkpoint.parents[1] / "full" / "last.ckpt"
    assert same(plain_state_dict(kept), result["disk_full"]["state"])


def test_bf16_resumes_from_its_fp32_masters_bit_for_bit(
    bf16: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    result, checkpoint = bf16
    strategy = f"{STAGE_2}_offload"
    again = resumed(tmp_path, checkpoint, 1, precision="bf16-mixed", strategy=strategy)
    assert same(again["state"], result["save"]["state"])
    assert again["records"] == result["save"]["records"][12:]
    masters = plain_state_dict(checkpoint)["first.0.weight"]
    assert masters.dtype == torch.float32
    assert not torch.equal(masters, masters.bfloat16().float())


def test_a_run_of_one_process_resumes_with_two(
    bf16: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    result, checkpoint = bf16
    again = resumed(tmp_path, checkpoint, 2, precision="bf16-mixed")
    for key, value in result["save"]["state"].items():
        # a bf16 weight may round the other way: one unit in the eighth binary digit
        assert torch.allclose(again["state"][key].float(), value.float(), rtol=2**-7, atol=1e-3)


def test_resuming_a_damaged_checkpoint_names_the_file(
    two: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    damaged = "second/rank_00001.safetensors"
    _, checkpoint = two
    copy = tmp_path / "copy.ckpt"
    for file in checkpoint.rglob("*"):
        target = copy / file.relative_to(checkpoint)
        if file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    (copy / damaged).write_bytes((copy / damaged).read_bytes()[:-10])
    with pytest.raises(AssertionError, match=f"copy.ckpt: {damaged} is damaged"):
        resumed(tmp_path, copy, 1)
