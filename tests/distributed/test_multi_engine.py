"""One DeepSpeed engine per optimizer trains as one device does: real engines, real processes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.strategy_runs import outcome

Outcomes = Callable[..., dict[str, Any]]

LIKE_SINGLE_DEVICE = [
    ("multi_deepspeed_stage_2", 2),
    ("ddp_find_unused_parameters_true", 2),
    ("fsdp2", 2),
    pytest.param("multi_deepspeed_stage_1", 2, marks=pytest.mark.slow),
    pytest.param("multi_deepspeed_stage_2", 1, marks=pytest.mark.slow),
    pytest.param("small_buckets_offload", 2, marks=pytest.mark.slow),
    pytest.param("multi_deepspeed_stage_2_offload", 2, marks=pytest.mark.slow),
    pytest.param("small_buckets", 2, marks=pytest.mark.slow),
]
TWO_ENGINES = ("multi_deepspeed_stage_2", 2)
TRAINING = ("gan", "policy_and_critic", "pretraining", "clipping", "faults")
MORE = {
    (TWO_ENGINES[0], "32-true"): ("names", "refused"),
    (TWO_ENGINES[0], "bf16-mixed"): ("clipping",),
    ("small_buckets_offload", "32-true"): ("names",),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What the scenarios give under a strategy; each strategy's processes run once."""

    @cache
    def run(strategy: str, devices: int, precision: str = "32-true") -> dict[str, Any]:
        scenarios = TRAINING if precision == "32-true" else ("gan", "names")
        scenarios += MORE.get((strategy, precision), ())
        folder = tmp_path_factory.mktemp("run")
        return outcome(folder, strategy, devices, *scenarios, precision=precision)

    return run


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest error of any weight, relative to the largest weight of its tensor."""
    assert actual.keys() == expected.keys()
    gaps = {
        name: (actual[name].double() - weight.double()).abs().max()
        for name, weight in expected.items()
    }
    return max(float(gaps[name] / weight.abs().max()) for name, weight in expected.items())


def length(step: dict[str, Any], network: str) -> float:
    """Norm of what a step changed in a network."""
    moved = [change.flatten() for name, change in step["moved"].items() if name.startswith(network)]
    return float(torch.cat(moved).norm())


@pytest.mark.parametrize(("strategy", "devices"), LIKE_SINGLE_DEVICE)
@pytest.mark.parametrize("scenario", ["gan", "policy_and_critic"])
def test_engines_equal_plain_lightning_on_one_device(
    outcomes: Outcomes, scenario: str, strategy: str, devices: int
) -> None:
    expected, actual = outcomes("auto", 1)[scenario], outcomes(strategy, devices)[scenario]
    assert relative_error(actual["state"], expected["state"]) < 1e-5
    for step, reference in zip(actual["records"], expected["records"], strict=True):
        assert step["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        assert step["rates"] == reference["rates"]


def test_the_compared_runs_clip_both_networks_and_move_them(outcomes: Outcomes) -> None:
    run = outcomes(*TWO_ENGINES)["gan"]
    norms = [step["norms"] for step in run["records"]]
    assert all(any(pair[i] > 0.5 for pair in norms) for i in (0, 1))
    assert float(run["state"]["moments"]) == len(norms) == 20


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), *LIKE_SINGLE_DEVICE])
def test_critic_pretraining_leaves_policy(outcomes: Outcomes, strategy: str, devices: int) -> None:
    run = outcomes(strategy, devices)["pretraining"]
    for name, weight in run["start"].items():
        if name.startswith("first"):
            assert torch.equal(run["state"][name], weight)
    assert run["moments"] == 0
    assert not torch.equal(run["state"]["second.0.weight"], run["start"]["second.0.weight"])


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), *LIKE_SINGLE_DEVICE])
def test_gradients_are_clipped_by_network(outcomes: Outcomes, strategy: str, devices: int) -> None:
    runs = outcomes(strategy, devices)["clipping"]
    small, huge = runs["small"], runs["huge"]
    assert huge["records"][0]["norms"][0] > 1e5
    assert length(huge, "first") == pytest.approx(0.25, rel=1e-5)
    assert small["records"][0]["norms"][0] < 0.25
    assert length(small, "first") == pytest.approx(small["records"][0]["norms"][0], rel=1e-4)
    for name, change in small["moved"].items():
        if name.startswith("second"):
            assert torch.equal(huge["moved"][name], change)
    assert length(small, "second") == pytest.approx(0.25, rel=1e-5)
    # Lightning's own `clip_gradients` acts on both networks
    by_lightning = runs["lightning"]
    assert length(by_lightning, "first") == pytest.approx(0.25, rel=1e-5)
    assert length(by_lightning, "second") == pytest.approx(0.25, rel=1e-5)
    # and a gradient that is not finite is skipped
    (record,) = runs["nan"]["records"]
    assert record["applied"] == [False, True]
    assert not torch.isfinite(torch.tensor(record["norms"][0]))
    assert length(runs["nan"], "first") == 0.0
    assert length(runs["nan"], "second") == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize(("strategy", "devices"), LIKE_SINGLE_DEVICE)
def test_run_goes_on_after_skipped_update(outcomes: Outcomes, strategy: str, devices: int) -> None:
    expected, actual = outcomes("auto", 1)["faults"], outcomes(strategy, devices)["faults"]
    for step, reference in zip(actual["records"], expected["records"], strict=True):
        assert step["applied"] == reference["applied"]
        assert all(step["applied"]) == (step["step"] not in (7, 9))
    assert relative_error(actual["state"], expected["state"]) < 1e-5


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), *LIKE_SINGLE_DEVICE])
def test_zero_grad_drops_old_gradients(outcomes: Outcomes, strategy: str, devices: int) -> None:
    runs = outcomes(strategy, devices)["clipping"]
    for name, change in runs["small"]["moved"].items():
        assert torch.allclose(runs["abandoned"]["moved"][name], change, rtol=1e-6, atol=1e-8)
    # the first layer had a gradient in the abandoned backward alone
    moved = runs["abandoned_more"]["moved"]
    assert not any(change.any() for name, change in moved.items() if name.startswith("second.0"))


@pytest.mark.slow
def test_zero_grad_drops_old_gradients_in_bf16_too(outcomes: Outcomes) -> None:
    runs = outcomes(*TWO_ENGINES, "bf16-mixed")["clipping"]
    for name, change in runs["small"]["moved"].items():
        assert torch.equal(runs["abandoned"]["moved"][name], change)


@pytest.mark.slow
def test_bf16_follows_fp32_and_keeps_masters_moments_and_buffers(outcomes: Outcomes) -> None:
    runs = outcomes(*TWO_ENGINES, "bf16-mixed")
    expected = outcomes("auto", 1)["gan"]["state"]
    # bf16 has 8 bits of mantissa; the weights move by more than 10 % of their size in this run
    assert relative_error(runs["gan"]["state"], expected) < 0.02
    types = runs["names"]["dtypes"]
    assert (types.pop("moments"), set(types.values())) == (torch.float64, {torch.bfloat16})
    assert set(runs["names"]["masters"]) == {torch.float32}
    assert set(runs["names"]["state"]) == {torch.float32}


def test_fp32_leaves_a_frozen_network_in_the_type_it_was_loaded_in(outcomes: Outcomes) -> None:
    types = outcomes(*TWO_ENGINES)["names"]["dtypes"]
    assert {v for k, v in types.items() if k.startswith("frozen")} == {torch.bfloat16}
    assert {v for k, v in types.items() if k.startswith(("first", "second"))} == {torch.float32}


@pytest.mark.slow
def test_a_network_stays_in_fp32_on_request(outcomes: Outcomes) -> None:
    types = outcomes("second_in_fp32", 1, "bf16-mixed")["names"]["dtypes"]
    assert {v for k, v in types.items() if k.startswith("second")} == {torch.float32}
    assert {v for k, v in types.items() if k.startswith(("first", "frozen"))} == {torch.bfloat16}


@pytest.mark.parametrize(
    "strategy", [TWO_ENGINES[0], pytest.param("small_buckets_offload", marks=pytest.mark.slow)]
)
def test_deepspeed_still_has_names_that_strategy_uses(outcomes: Outcomes, strategy: str) -> None:
    assert outcomes(strategy, 2)["names"]["missing"] == []


def test_misuse_is_answered_with_what_to_call(outcomes: Outcomes) -> None:
    messages = outcomes(*TWO_ENGINES)["refused"]
    assert "call lit_rlhf.strategies.backward(module, loss, optimizer)" in messages["manual"]
    assert "step without a backward" in messages["early"]
    assert "expected one of Misuse.optimizers()" in messages["foreign"]
