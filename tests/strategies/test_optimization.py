from types import SimpleNamespace
from typing import cast

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from lit_rlhf.strategies import backward, clipped_step, optimization
from tests.support.toy_modules import Probe


def step_sgd(parameter: torch.Tensor, max_norm: float | None) -> tuple[torch.Tensor, bool]:
    """Make a step of gradient descent with learning rate 1; return the norm, and if it was made."""
    return clipped_step(cast("LightningOptimizer", torch.optim.SGD([parameter], lr=1.0)), max_norm)


@pytest.mark.parametrize(
    ("first", "max_norm", "moved"),
    [
        (-3.0, None, [3.0, 4.0]),
        (-3.0, 10.0, [3.0, 4.0]),
        (-3.0, 2.5, [1.5, 2.0]),
        *((not_finite, 1.0, None) for not_finite in (torch.nan, torch.inf)),
    ],
)
def test_step_is_clipped_or_skipped_and_clears_gradients(
    first: float, max_norm: float | None, moved: list[float] | None
) -> None:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.tensor([first, -4.0])
    norm, applied = step_sgd(parameter, max_norm)
    assert (float(norm) == 5.0, applied) == (moved is not None, moved is not None)
    assert parameter.tolist() == pytest.approx(moved or [0.0, 0.0])
    assert parameter.grad is None


def test_arguments_that_would_train_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for max_norm in (0.0, -1.0, torch.nan):
        with pytest.raises(ValueError, match="max_norm: expected a positive number or None"):
            step_sgd(torch.zeros(1, requires_grad=True), max_norm)
    monkeypatch.setattr(Probe, "trainer", SimpleNamespace(scaler=object(), precision="16-mixed"))
    with pytest.raises(ValueError, match=r"trainer\.precision: .* got 16-mixed"):
        backward(Probe(1.0), torch.zeros(()), cast("LightningOptimizer", None))


def test_gradients_of_all_buckets_and_dtypes_average(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []

    def add_other_rank(flat: torch.Tensor) -> None:
        reduced.append(len(flat))
        flat += 2.0  # its gradients are 4, halved

    monkeypatch.setattr(optimization, "BUCKET_SIZE", 5)
    monkeypatch.setattr(optimization, "world_size", lambda: 2)
    monkeypatch.setattr(optimization, "global_sum", lambda used: 2 * used)
    monkeypatch.setattr(optimization.distributed, "all_reduce", add_other_rank)
    sizes, dtypes = (3, 2, 7, 1, 2, 2), [torch.float32] * 5 + [torch.float64]
    parameters = [torch.zeros(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 2.0 * i)
    optimization.average_gradients(parameters)
    assert reduced == [5, 7, 3, 2]  # the last has another type
    for i, parameter in enumerate(parameters):
        assert parameter.grad.tolist() == [i + 2.0] * sizes[i]
