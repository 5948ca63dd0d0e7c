"""The loader under Lightning: epochs, resuming, several ranks."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.samplers import FixedBatchSampler, TokenBudgetBatchSampler
from lit_rlhf.errors import end_with_message
from tests.support import scripted


def collate(items: list[int]) -> Tensor:
    return torch.tensor(items)


def make_loader(size: int = 10, workers: int = 0, **settings: Any) -> ResumableLoader[Tensor]:
    sampler = FixedBatchSampler(size, 2, seed=5, **settings)
    return ResumableLoader(range(size), sampler, collate, workers)


class Recorder(LightningModule):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append((self.current_epoch, batch.tolist()))
        output: Tensor = self.layer(batch[:1, None].float())
        return output.sum()

    def validation_step(self, batch: Tensor) -> None:
        self.validated.append(batch.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    return scripted.trainer(folder, *callbacks, **{"max_epochs": None, **settings})


def test_epochs_differ_and_hold_everything_once(tmp_path: Path) -> None:
    module = Recorder()
    trainer(tmp_path, max_epochs=3).fit(module, make_loader())
    epochs = [[i for e, batch in module.seen if e == epoch for i in batch] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_resumed_run_goes_on_with_the_next_batch(tmp_path: Path, stop: int) -> None:
    """Five batches per epoch: stopped within the first, at its end, and within the second."""
    whole, first, second = Recorder(), Recorder(), Recorder()
    trainer(tmp_path, max_steps=12).fit(whole, make_loader())
    path = tmp_path / "stopped.ckpt"

    def save(run: Trainer, *_: object) -> None:
        if run.global_step == stop:
            run.save_checkpoint(path)

    saving = LambdaCallback(on_train_batch_end=save)
    trainer(tmp_path, saving, max_steps=stop).fit(first, make_loader())
    trainer(tmp_path, max_steps=12).fit(second, make_loader(), ckpt_path=path)
    assert first.seen + second.seen == whole.seen


def test_iterators_that_are_thrown_away_change_nothing() -> None:
    loader, other = make_loader(), make_loader()
    loader.load_state_dict({"epoch": 0, "position": 3})
    assert len(loader) == 5  # the length does not shrink
    iter(loader)
    assert [b.tolist() for b in loader] == [b.tolist() for b in other][3:]


def test_position_of_another_epoch_is_forgotten() -> None:
    loader = make_loader()
    loader.load_state_dict({"epoch": 0, "position": 5})
    loader.batch_sampler.set_epoch(1)
    assert (len(list(loader)), loader.state_dict()) == (5, {"epoch": 1, "position": 5})


def test_workers_yield_the_same_batches_and_draw_nothing() -> None:
    before = torch.get_rng_state()
    assert [b.tolist() for b in make_loader(workers=1)] == [b.tolist() for b in make_loader()]
    assert torch.equal(before, torch.get_rng_state())


class EndsItsProcess:
    """Examples that end the process that asks for them, as the system does when memory runs out."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_worker_that_is_killed_ends_the_command_with_a_line() -> None:
    sampler = FixedBatchSampler(10, 2, seed=5)
    loader = ResumableLoader(EndsItsProcess(), sampler, collate, 1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as lost:
        list(loader)
    with pytest.raises(SystemExit) as ended:
        end_with_message(lost.value, "lit_rlhf fit")
    said = str(ended.value.code)
    beginning = "lit_rlhf fit: a process that loads data was ended, perhaps because memory ran out:"
    assert said.startswith(beginning)
    assert said.endswith("With data.num_workers: 0 there are no such processes")


def test_validation_takes_every_batch(tmp_path: Path) -> None:
    module = Recorder()
    trainer(tmp_path).validate(module, make_loader(5, shuffle=False), verbose=False)
    assert module.validated == [[0, 1], [2, 3], [4]]


def test_token_budget_loader_runs_under_lightning(tmp_path: Path) -> None:
    sampler = TokenBudgetBatchSampler([4] * 6 + [12] * 3, 12)
    loader, module = ResumableLoader(range(9), sampler, collate), Recorder()
    trainer(tmp_path, max_epochs=2).fit(module, loader)
    assert len(module.seen) == 2 * len(loader) == 10
