"""CollapseDetector and its actions in several real processes, and with DeepSpeed engines."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lit_callbacks import Action, AdjustCoefficient, CollapseDetector, RollBack, StopTraining
from lit_callbacks.monitors import Monitor
from lit_callbacks.signals import NonFiniteMonitor
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy
from tests.support.ranks import run_on_ranks
from tests.support.scripted import Scripted, Watch, above, batches, trainer
from tests.support.toy_modules import PolicyAndCritic

pytestmark = pytest.mark.slow

RANKS = 2
NAN = math.nan


class OfRank(Scripted):
    """Every rank logs its own script, returns its own tensors and trains on its own data."""

    def __init__(self, rank: int, scripts: Sequence[Any], scores: Sequence[Any] = ()) -> None:
        super().__init__(scripts[rank], {"scores": scores[rank]} if scores else None)
        self.beta = 0.1
        self.rank = rank

    def loss(self, i: int) -> Tensor:
        return super().loss(i * (1 + self.rank))


def outcome(rank: int, folder: Path, scripts: Any, monitor: Monitor, scores: Any = ()) -> Any:
    """What one rank came to, with actions at a collapse."""
    watch, module = Watch(), OfRank(rank, scripts, scores)
    actions: list[Action] = [watch, AdjustCoefficient("beta", 2.0), StopTraining()]
    detector = CollapseDetector([monitor], actions)
    run = trainer(folder, detector, strategy=DDPStrategy(), devices=RANKS)
    run.fit(module, batches(RANKS * len(next(iter(scripts[0].values())))))
    seen = {"verdicts": watch.verdicts, "history": monitor.history}
    return {**seen, "beta": module.beta, "batches": module.batches}


class Weights(Callback):
    """The weights after each step, behind the detector."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.after.append({k: v.detach().clone() for k, v in pl_module.state_dict().items()})


def rolled_back(rank: int, folder: Path) -> dict[str, Any]:
    """Weights of one rank by step: saved after the first, back after the fourth."""
    scripts = [{"kl": [1.0] * 5}, {"kl": [1.0, 1.0, 1.0, 30.0, 1.0]}]
    weights, module = Weights(), OfRank(rank, scripts)
    detector = CollapseDetector([above(10.0, patience=1)], [RollBack()])
    run = trainer(folder, detector, weights, strategy=DDPStrategy(), devices=RANKS)
    run.fit(module, batches(RANKS * 5))
    return {"weights": weights.after, "files": sorted(p.name for p in folder.glob("healthy/*"))}


def on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Every scenario of two ranks: a spawn takes longer than all of them."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    low, high = {"kl": [1.0] * 6}, {"kl": [1.0, 1.0, 30.0, 30.0, 30.0, 30.0]}
    broken = {"kl": [1.0, 1.0, 1.0, NAN, NAN, 1.0]}
    silent: dict[str, list[float | None]] = {"other": [1.0] * 6}
    scores = ([[1.0, 2.0]] * 6, [[3.0], [3.0], [3.0], [30.0], [30.0], [3.0]])
    return {
        "collapse": outcome(rank, folder, [low, high], above(10.0)),
        "nan": outcome(rank, folder, [low, broken], NonFiniteMonitor(patience=2)),
        "missing": outcome(rank, folder, [high, silent], above(10.0)),
        "tensor": outcome(rank, folder, [silent, silent], above(10.0, "scores"), scores),
        "rollback": rolled_back(rank, folder),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(on_a_rank, RANKS, folder, folder)


@pytest.mark.parametrize(
    ("scenario", "history", "stopped"),
    [
        ("collapse", [1.0, 1.0, 15.5, 15.5], 4),
        ("nan", [0.0, 0.0, 0.0, 1.0, 1.0], 5),
        ("missing", [1.0, 1.0, 30.0, 30.0], 4),
        # the mean over the numbers of both ranks, of which rank 0 has two
        ("tensor", [2.0, 2.0, 2.0, 11.0, 11.0], 5),
    ],
)
def test_ranks_that_disagree_come_to_one_verdict_act_alike_and_stop_together(
    ranks: list[dict[str, Any]], scenario: str, history: list[float], stopped: int
) -> None:
    for rank in ranks:
        seen = rank[scenario]
        assert seen["history"] == history
        assert [int(verdict.level) for verdict in seen["verdicts"]] == [0] * (stopped - 1) + [2]
        assert (seen["batches"], seen["beta"]) == (stopped, 0.2)
    assert ranks[0][scenario]["verdicts"] == ranks[1][scenario]["verdicts"]


def test_both_ranks_roll_back_to_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["rollback"]["weights"] for rank in ranks)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["weight"], other["weight"])
    assert torch.equal(first[3]["weight"], first[0]["weight"])
    assert not torch.equal(first[3]["weight"], first[2]["weight"])
    assert not torch.equal(first[4]["weight"], first[3]["weight"])
    assert ranks[0]["rollback"]["files"] == ["step=1.ckpt"]


# --- engines

SAVED, COLLAPSED, BATCHES = 3, 6, 9  # steps; the first one is saved too


class Logging(PolicyAndCritic):
    """Logs a collapse at one step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.log("kl", 20.0 if batch_idx + 1 == COLLAPSED else 1.0)


class CopiedBack(Callback):
    """Does by hand what RollBack does with a checkpoint: copies into the tensors that there are."""

    def __init__(self) -> None:
        self.copies: list[Tensor] = []

    def tensors(self, trainer: Trainer) -> list[Tensor]:
        """Weights and buffers, the optimizers' master weights and their moments."""
        values = list(trainer.lightning_module.state_dict().values())
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                (master,) = group["params"]
                values += [master.data, *optimizer.state.get(master, {}).values()]
        return values

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == SAVED:
            self.copies = [tensor.clone() for tensor in self.tensors(trainer)]
        if trainer.fit_loop.total_batch_idx + 1 == COLLAPSED:
            for tensor, copy in zip(self.tensors(trainer), self.copies, strict=True):
                tensor.copy_(copy)


def with_engines(rank: int, folder: Path, precision: Any) -> list[list[dict[str, Tensor]]]:
    """Weights by step of a run with RollBack, and of one that copies by hand."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    results = []
    detector = CollapseDetector([above(10.0, patience=1)], [RollBack(every_n_steps=SAVED - 1)])
    for callback in (detector, CopiedBack()):
        weights, engines = Weights(), MultiEngineDeepSpeedStrategy(stage=2)
        options = {"precision": precision, "use_distributed_sampler": False}
        run = trainer(folder, callback, weights, strategy=engines, **options)
        run.fit(Logging(pretraining=1), batches(BATCHES))
        results.append(weights.after)
    return results


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_engines_roll_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (result,) = run_on_ranks(with_engines, 1, tmp_path, tmp_path, precision)
    by_rollback, by_hand = result
    for key, saved in by_hand[SAVED - 1].items():
        assert torch.equal(by_rollback[COLLAPSED - 1][key], saved)
        # masters or moments that did not come back would show in the steps that follow
        for after in range(COLLAPSED, BATCHES):
            assert torch.equal(by_rollback[after][key], by_hand[after][key]), (key, after)
    moved = [k for k, v in by_hand[-1].items() if not torch.equal(v, by_hand[COLLAPSED - 1][k])]
    assert {key.partition(".")[0] for key in moved} == {"first", "second", "moments"}
