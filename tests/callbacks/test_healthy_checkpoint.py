"""HealthyCheckpoint: the best by a metric, but never one that is out of bounds or collapsed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lit_callbacks.detector import CollapseDetector
from lit_callbacks.healthy_checkpoint import HealthyCheckpoint
from tests.support.scripted import Saver, above, resumes_at_the_next_batch, trainer

NAN, INF = float("nan"), float("inf")


class Scripted(LightningModule):
    """Batch `i` logs the `i`-th score and KL; the weight is the number of batches trained on.

    A validation logs what the batch before it logged.
    """

    def __init__(self, scores: Any = (), kls: Any = (), manual: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.scores, self.kls = scores, kls
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        place = self.trainer.fit_loop.total_batch_idx
        self.log("score", self.scores[place])
        if self.kls:
            self.log("kl", self.kls[place])
        if self.automatic_optimization:
            return -self.weight
        for _ in range(2):
            self.manual_backward(-self.weight / 2)
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        place = self.trainer.fit_loop.total_batch_idx
        self.log_dict({"val/score": self.scores[place], "val/kl": self.kls[place]})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def checkpoint(folder: Path, **options: Any) -> HealthyCheckpoint:
    defaults = {"monitor": "score", "mode": "max", "every_n_train_steps": 1}
    return HealthyCheckpoint(**{"dirpath": folder / "best", **defaults, **options})


def fit_module(
    folder: Path, module: LightningModule, *callbacks: Callback, **arguments: Any
) -> None:
    ckpt_path = arguments.pop("ckpt_path", None)
    options = {"enable_checkpointing": True, "limit_val_batches": 0, **arguments}
    loaders = [DataLoader(torch.zeros(n)) for n in (len(module.scores), 1)]  # type: ignore[arg-type]
    trainer(folder, *callbacks, **options).fit(module, *loaders, ckpt_path=ckpt_path)


def trained_batches(path: str) -> float:
    """How many batches the weights of a checkpoint were trained on."""
    return float(torch.load(path, weights_only=True)["state_dict"]["weight"])


def kept(folder: Path, module: LightningModule, *others: Callback, **options: Any) -> float:
    """The batch after which the best checkpoint was saved; 0 for none."""
    saver = checkpoint(folder, **options)
    # in front of the others, where Lightning does not leave it
    fit_module(folder, module, saver, *others)
    return trained_batches(saver.best_model_path) if saver.best_model_path else 0


SCORES = (1.0, 2.0, 3.0, 2.5, 9.0)  # the last by cheating
KLS = (0.0, 1.0, 30.0, 8.0, 90.0)


@pytest.mark.parametrize(
    ("bounds", "best"),
    [
        (None, 5),
        ({"kl": [None, 100.0]}, 5),
        ({"kl": [None, 10.0]}, 4),
        ({"kl": [None, 8.0]}, 4),  # a bound is allowed itself
        ({"kl": [None, 7.0]}, 2),
        ({"kl": [20, 50]}, 3),
        ({"kl": [None, 10.0], "score": [None, 2.0]}, 2),
        ({"kl": [-2.0, -1.0]}, 0),
    ],
)
def test_the_best_within_the_bounds_is_kept(bounds: Any, best: int, tmp_path: Path) -> None:
    assert kept(tmp_path, Scripted(SCORES, KLS), bounds=bounds) == best
    assert len(list(tmp_path.glob("best/*.ckpt"))) == (best > 0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_never_becomes_best(bad: float, tmp_path: Path) -> None:
    assert kept(tmp_path / "kl", Scripted((1.0, 2.0), (0.0, bad)), bounds={"kl": [None, None]}) == 1
    assert kept(tmp_path / "max", Scripted((bad, 1.0, bad))) == 2
    assert kept(tmp_path / "min", Scripted((bad, 1.0, bad)), mode="min") == 2


@pytest.mark.parametrize(("beside", "level"), [(5.0, "collapsed"), (100.0, "suspicious")])
def test_what_a_detector_finds_is_never_the_best(beside: float, level: str, tmp_path: Path) -> None:
    """It is out at the very batch that crosses the threshold: the detector has judged it before."""
    monitors = [above(5.0, patience=1), above(beside, "score", patience=1)]
    detector = CollapseDetector(monitors, actions=[], votes=2)
    assert kept(tmp_path, Scripted(SCORES, KLS), detector) == 2
    assert detector.verdict.level.word == level


@resumes_at_the_next_batch
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_fit_goes_on_from_its_best(tmp_path: Path) -> None:
    first, resumed = (checkpoint(tmp_path, bounds={"kl": [None, 50.0]}) for _ in range(2))
    fit_module(tmp_path, Scripted(SCORES, KLS), first, Saver(tmp_path))
    assert first.best_model_score == 3.0
    fit_module(tmp_path, Scripted(SCORES, KLS), resumed, ckpt_path=tmp_path / "3.ckpt")
    # the fourth batch is healthy too, but not better
    assert resumed.best_model_score == 3.0
    assert resumed.best_model_path == first.best_model_path
    assert trained_batches(resumed.best_model_path) == 3


@pytest.mark.parametrize("field", ["best_k_models", "kth_best_model_path", "last_model_path"])
def test_received_checkpoint_deletes_nothing_outside_its_folder(tmp_path: Path, field: str) -> None:
    precious = tmp_path / "precious.ckpt"
    precious.touch()
    received = checkpoint(tmp_path, save_last=True)
    path = f"{received.dirpath}/../precious.ckpt"
    state = {**received.state_dict(), "best_model_score": torch.tensor(0.0)}
    state[field] = {path: torch.tensor(0.0)} if field == "best_k_models" else path
    with pytest.warns(UserWarning, match="The dirpath has changed from None"):
        received.load_state_dict(state)
    assert (received.best_k_models, received.last_model_path) == ({}, "")
    fit_module(tmp_path, Scripted([1.0, 2.0]), received)
    assert precious.exists()


WITHIN = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
"""Validations after batches 2 and 4."""


@pytest.mark.parametrize(("high", "best"), [(10.0, 4), (5.0, 2)])
def test_validations_within_an_epoch_save(high: float, best: int, tmp_path: Path) -> None:
    """Also under manual optimization."""
    saver = checkpoint(
        tmp_path, monitor="val/score", bounds={"val/kl": [None, high]}, every_n_train_steps=None
    )
    fit_module(tmp_path, Scripted(SCORES, KLS, manual=True), saver, **WITHIN)
    assert trained_batches(saver.best_model_path) == best


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize(("every", "best"), [(2, 4), (4, 4), (6, 0), (3, 0)])
def test_manual_optimization_counts_all_steps(every: int, best: int, tmp_path: Path) -> None:
    """Two steps a batch: 6 is met at batch 3 alone, which is out of bounds, and 3 there too."""
    module = Scripted(SCORES, KLS, manual=True)
    bounds: Any = {"kl": [None, 10.0]}
    assert kept(tmp_path, module, bounds=bounds, every_n_train_steps=every) == best


def test_last_is_kept_as_it_is(tmp_path: Path) -> None:
    module = Scripted(SCORES, KLS)
    assert kept(tmp_path, module, bounds={"kl": [None, 10.0]}, save_last=True) == 4
    assert trained_batches(str(tmp_path / "best" / "last.ckpt")) == 5


def test_a_linked_last_is_the_best(tmp_path: Path) -> None:
    saver = checkpoint(tmp_path, monitor="val/score", every_n_train_steps=None, save_last="link")
    fit_module(tmp_path, Scripted(SCORES, KLS), saver, **WITHIN)
    link = tmp_path / "best" / "last.ckpt"
    assert link.is_symlink()
    assert trained_batches(str(link)) == trained_batches(saver.best_model_path) == 4


def test_verbose_says_why_one_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        kept(tmp_path, Scripted((1.0, NAN), (5.0, 1.0)), bounds={"kl": [None, 2]}, verbose=True)
    refusals = [m for m in caplog.messages if m.startswith("not kept")]
    assert refusals == ["not kept: kl is 5, not within [-inf, 2]", "not kept: score is nan"]


def test_checkpoint_is_not_saved_if_one_rank_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def reduced(self: Any, decision: bool, all: bool = True) -> bool:
        asked.append(decision)
        return decision and not all

    monkeypatch.setattr(SingleDeviceStrategy, "reduce_boolean_decision", reduced)
    assert kept(tmp_path, Scripted((1.0, 2.0), (5.0, 1.0)), bounds={"kl": [None, 2]}) == 0
    assert asked == [False, True]


def test_bounded_metric_that_nobody_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bounds: expected logged.*got kl, x; logged are score"):
        kept(tmp_path, Scripted(SCORES), bounds={"kl": [0, 1], "x": [0, 1], "score": [0, 1]})
