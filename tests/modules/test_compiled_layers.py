"""Compiled layers in a run. They are compiled in its first step or iteration, and not again."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lit_rlhf.modules import PPOModule
from lit_rlhf.rollout import decoder
from tests.support.stages import fit_module, ppo_options, prompts, stage

ADAPTED = {"lora_rank": 2, "gradient_checkpointing": True}


class CountGraphs(Callback):
    """Counts the graphs that torch.compile has made up to the end of each iteration."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountGraphs]:
    """Layers that are compiled for decoding too, as on a GPU, and an error where torch gives up."""
    monkeypatch.setattr(decoder, "_without_compiled_layers", nullcontext)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield CountGraphs()
    torch._dynamo.reset()


# torch (2.13) looks at the gradients of a graph's inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:min_new_tokens=6")
@pytest.mark.parametrize(
    ("network", "precision"),
    [
        pytest.param({}, "bf16-mixed", id="plain"),
        pytest.param({}, "32-true", id="plain in float32", marks=pytest.mark.slow),
        pytest.param(ADAPTED, "bf16-mixed", id="adapters", marks=pytest.mark.slow),
        pytest.param(ADAPTED, "32-true", id="adapters in float32", marks=pytest.mark.slow),
    ],
)
def test_later_iterations_compile_nothing(
    root: Path,
    tmp_path: Path,
    network: dict[str, Any],
    precision: str,
    counted: CountGraphs,
) -> None:
    options = ppo_options(
        root,
        network={"torch_compile": "eager", **network},
        # a response that ends before the others leaves a number of rows that was not met before
        sampling={"min_new_tokens": 6},
        minibatches={"micro_batch_size": 2, "ppo_epochs": 1},
    )
    data = prompts(root, batch_size=4)
    fit_module(
        PPOModule(**options), data, tmp_path, max_epochs=1, precision=precision, callbacks=[counted]
    )
    first, *later = counted.counts
    assert first > 0
    assert later == [first]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "name", ["sft", pytest.param("reward", marks=pytest.mark.slow)], ids=["SFT", "reward model"]
)
def test_later_steps_compile_nothing(
    root: Path, tmp_path: Path, name: str, counted: CountGraphs
) -> None:
    module, data = stage(name, root, network={"torch_compile": "eager"}, micro_batch_size=2)
    fit_module(module, data, tmp_path, max_epochs=2, precision="bf16-mixed", callbacks=[counted])
    first, *later = counted.counts
    assert first > 0
    assert later
    assert set(later) == {first}
