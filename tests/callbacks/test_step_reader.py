"""What a step logged and returned, on one rank and merged over two."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_callbacks.monitors import StepMetrics
from lit_callbacks.step_reader import StepReader, merge_ranks

NAN = math.nan


def logged(**metrics: float | list[float]) -> Any:
    values = {key.replace("__", "/"): torch.tensor(value) for key, value in metrics.items()}
    return SimpleNamespace(callback_metrics=values, world_size=1)


def test_scalars_and_asked_tensors_are_read() -> None:
    reader = StepReader()
    run = logged(kl=1.0, many=[1.0, 2.0], monitor__level=2.0)
    outputs = {"loss": torch.tensor(3.0), "scores": torch.tensor([[1.0], [2.0]]), "name": "x"}
    read = reader.read(run, outputs, {"scores", "kl", "absent"})
    assert read == StepMetrics({"kl": 1.0}, {"scores": [1.0, 2.0]})
    assert reader.seen == {"kl", "loss", "scores"}


def test_logged_metric_hides_a_tensor_of_its_name() -> None:
    read = StepReader().read(logged(kl=1.0), {"kl": torch.tensor([7.0])}, {"kl"})
    assert read == StepMetrics({"kl": 1.0}, {})


def test_ranks_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    other = StepMetrics({"kl": 3.0, "rare": 4.0, "loss": NAN}, {"scores": [3.0]})

    def gather(parts: list[Any], own: StepMetrics) -> None:
        parts[:] = [own, other]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    run = logged(kl=1.0, loss=1.0)
    run.world_size = 2
    reader = StepReader()
    read = reader.read(run, {"scores": torch.tensor([1.0, 2.0])}, {"scores"})
    assert (read.scalars["kl"], read.scalars["rare"]) == (2.0, 4.0)
    assert read.tensors == {"scores": [1.0, 2.0, 3.0]}
    assert read.non_finite == ("loss",)
    assert reader.seen >= {"kl", "rare", "loss", "scores"}


def test_order_of_ranks_does_not_matter_to_means() -> None:
    parts = [StepMetrics({"a": 1.0}, {}), StepMetrics({"a": 2.0, "b": math.inf}, {})]
    for order in (parts, parts[::-1]):
        merged = merge_ranks(order)
        assert merged.scalars == {"a": 1.5, "b": math.inf}
        assert merged.non_finite == ("b",)
