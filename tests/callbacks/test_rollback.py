"""RollBack: the restored state, the state that moves on, and the choice of the checkpoint."""

import pickle
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lit_callbacks import (
    AdjustCoefficient,
    CollapseDetector,
    Level,
    RollBack,
    StopTraining,
    Verdict,
)
from lit_callbacks.rollback import SavedWeights
from tests.support.scripted import (
    Scripted,
    above,
    batches,
    fit_batches,
    script_of,
    trainer,
    watching,
)
from tests.support.unpickling import Payload


class Trained(Scripted):
    """A schedule, a coefficient as a buffer, and a count of batches in a child."""

    beta: Tensor

    def __init__(self, levels: Sequence[int], manual: bool = False) -> None:
        super().__init__(script_of(levels), manual=manual)
        self.register_buffer("beta", torch.tensor(0.1))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.inner.get_buffer("count").add_(1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Snapshot(NamedTuple):
    """What there was after a step and all actions."""

    weights: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]]
    settings: dict[str, Any]
    """Settings of the optimizer, the learning rate among them."""
    global_step: int


class Snapshots(Callback):
    """Keeps a snapshot of every step; it stands behind the detector."""

    def __init__(self) -> None:
        self.after: dict[int, Snapshot] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weights, state = deepcopy((pl_module.state_dict(), trainer.optimizers[0].state_dict()))
        moments, settings = state["state"], state["param_groups"][0]
        snapshot = Snapshot(weights, moments, settings, trainer.global_step)
        self.after[trainer.fit_loop.total_batch_idx + 1] = snapshot


def fit_and_snapshot(folder: Path, module: Any, count: int, *actions: Any, **settings: Any) -> Any:
    """Snapshots by step of a run."""
    snapshots = Snapshots()
    trainer(folder, watching(*actions), snapshots, **settings).fit(module, batches(count))
    return snapshots.after


def equal_states(first: Snapshot, second: Snapshot, but: Sequence[str] = ()) -> bool:
    """Whether weights (but some) and moments are equal, bit for bit."""
    assert first.weights.keys() == second.weights.keys()
    assert first.moments.keys() == second.moments.keys() != set()
    pairs = [(first.weights[k], second.weights[k]) for k in first.weights if k not in but]
    for number, moments in first.moments.items():
        pairs += [(value, second.moments[number][key]) for key, value in moments.items()]
    return all(torch.equal(one, other) for one, other in pairs)


def adam_step(start: Snapshot, i: int, rate: float, accumulated: int = 1) -> Tensor:
    """The weight one step of Adam after `start`, by the gradient of the batch with index `i`."""
    weight = torch.nn.Parameter(start.weights["weight"].clone())
    adam = torch.optim.Adam([weight])
    groups = [{**start.settings, "lr": rate}]
    adam.load_state_dict({"state": deepcopy(start.moments), "param_groups": groups})
    # by hand: of the sum of (weight * inputs) squared
    gradient = 2 * weight.detach() * torch.tensor([i + 1.0, 0.5]).square()
    weight.grad = gradient / accumulated
    adam.step()
    return weight.detach()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("manual", [False, True])
def test_weights_and_moments_come_back_and_training_goes_on(tmp_path: Path, manual: bool) -> None:
    module = Trained([0, 0, 0, 0, 0, 2, 0], manual)
    snapshots = fit_and_snapshot(tmp_path, module, 7, RollBack(every_n_steps=2))
    assert files(tmp_path / "healthy") == ["step=1.ckpt", "step=3.ckpt"]
    assert equal_states(snapshots[6], snapshots[3])
    assert not equal_states(snapshots[6], snapshots[5])
    # the trainer's count and the schedule move on
    assert [snapshots[i].global_step for i in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]
    rates = [snapshots[i].settings["lr"] for i in range(3, 8)]
    expected = [0.1 / (1 + i) for i in range(3, 8)] if not manual else [0.1] * 5
    assert rates == pytest.approx(expected)
    # the next step is one from there, on new data
    assert torch.equal(snapshots[7].weights["weight"], adam_step(snapshots[3], 6, rates[3]))


def test_gradients_of_the_weights_that_go_are_dropped(tmp_path: Path) -> None:
    """The collapse comes between the two batches of a step."""
    module = Trained([0, 0, 0, 0, 0, 0, 2, 0])
    action = RollBack(every_n_steps=1)
    snapshots = fit_and_snapshot(tmp_path, module, 8, action, accumulate_grad_batches=2)
    assert equal_states(snapshots[7], snapshots[3])
    rate = snapshots[7].settings["lr"]
    expected = adam_step(snapshots[3], 7, rate, accumulated=2)  # the eighth batch alone
    assert torch.equal(snapshots[8].weights["weight"], expected)


def test_names_to_keep_stay_and_others_do_not(tmp_path: Path) -> None:
    class Drifting(Trained):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.beta += 1.0

    snapshots = fit_and_snapshot(tmp_path, Drifting([0, 0, 0, 2, 0]), 5, RollBack(keep=["count"]))
    assert equal_states(snapshots[4], snapshots[1], but=["inner.count"])
    assert [int(snapshots[i].weights["inner.count"]) for i in (1, 4, 5)] == [1, 4, 5]
    assert [float(snapshots[i].weights["beta"]) for i in (1, 3, 4)] == pytest.approx(
        [1.1, 3.1, 1.1]
    )


def test_a_name_to_keep_that_there_is_not_is_refused_when_training_starts(tmp_path: Path) -> None:
    module = Trained([0])
    expected = "keep: expected names in the state of Trained, got 'ount'"
    with pytest.raises(ValueError, match=expected):
        fit_and_snapshot(tmp_path, module, 1, RollBack(keep=["beta", "ount"]))
    assert module.batches == 0


def test_an_action_that_saves_weights_alone_leaves_its_checkpoints_be(tmp_path: Path) -> None:
    module, snapshots = Trained([0, 0, 0, 1, 0]), Snapshots()
    detector = watching(RollBack(level="suspicious"), StopTraining(every_n_steps=1))
    fit_batches(tmp_path, module, 5, detector, snapshots)
    saved = ["step=1.ckpt", "weights_step=1.ckpt", "weights_step=5.ckpt"]
    assert files(tmp_path / "healthy") == saved
    assert equal_states(snapshots.after[4], snapshots.after[1])


@pytest.mark.parametrize(("keep", "expected"), [([], [0.2, 0.2]), (["beta"], [0.2, 0.4])])
def test_a_raised_coefficient_stays(tmp_path: Path, keep: list[str], expected: list[float]) -> None:
    actions = [RollBack(keep=keep), AdjustCoefficient("beta", 2.0, level="collapsed")]
    snapshots = fit_and_snapshot(tmp_path, Trained([0, 0, 0, 2, 0, 2]), 6, *actions)
    assert [float(snapshots[i].weights["beta"]) for i in (4, 6)] == pytest.approx(expected)


def test_module_may_leave_a_frozen_network_out_of_checkpoints(tmp_path: Path) -> None:
    class Filtered(Trained):
        def __init__(self, levels: list[int]) -> None:
            super().__init__(levels)
            self.reference = torch.nn.Linear(2, 2).requires_grad_(False)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k: v for k, v in state.items() if "reference" not in k}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            frozen = {k: v for k, v in self.state_dict().items() if "reference" in k}
            checkpoint["state_dict"] = frozen | checkpoint["state_dict"]

    snapshots = fit_and_snapshot(tmp_path, Filtered([0, 0, 0, 2]), 4, RollBack())
    saved = torch.load(tmp_path / "healthy" / "step=1.ckpt", weights_only=True)
    assert [key for key in saved["state_dict"] if "reference" in key] == []
    assert equal_states(snapshots[4], snapshots[1])


def test_hyper_parameters_may_be_any_objects(tmp_path: Path) -> None:
    class WithHyperparameters(Trained):
        def __init__(self, levels: list[int], made_by: object) -> None:
            super().__init__(levels)
            self.save_hyperparameters("made_by")

    module = WithHyperparameters([0, 0, 0, 2], Snapshots())  # a class that only this file knows
    snapshots = fit_and_snapshot(tmp_path, module, 4, RollBack())
    assert equal_states(snapshots[4], snapshots[1])


def test_after_a_validation_training_goes_on_from_what_came_back(tmp_path: Path) -> None:
    """No tensor that came back may stem from a mode in which nothing can be trained."""

    class Validated(Trained):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            place = self.trainer.fit_loop.total_batch_idx // 2
            self.log("val/kl", [1.0, 1.0, 1.0, 20.0, 1.0][place])

    snapshots, action = Snapshots(), RollBack()
    detector = CollapseDetector([above(10.0, "val/kl", patience=1)], [action], when="validation")
    run = trainer(tmp_path, detector, snapshots, val_check_interval=2, num_sanity_val_steps=0)
    module = Validated([0] * 10)
    run.fit(module, batches(10), batches(1))
    # saved after batch 2, back after batch 8
    assert action.done == 1
    expected = adam_step(snapshots.after[2], 8, snapshots.after[8].settings["lr"])
    assert torch.equal(snapshots.after[9].weights["weight"], expected)


@pytest.mark.parametrize(
    ("levels", "patience", "saved"),
    [
        # a save is deleted by a level that comes within patience + 1 steps
        ([0, 2], 1, []),
        ([0, 0, 1], 1, []),
        ([0, 0, 0, 1], 1, [1]),
        ([0, 0, 0, 0, 2], 3, []),
        ([0, 0, 0, 0, 0, 2], 3, [1]),
        # and the next healthy step is saved
        ([0, 1, 0], 1, [3]),
        # at least patience + 1 steps apart
        ([0] * 8, 2, [1, 4, 7]),
    ],
)
def test_a_checkpoint_counts_after_patience_and_one_more_healthy_step(
    tmp_path: Path, levels: list[int], patience: int, saved: list[int]
) -> None:
    action = RollBack(every_n_steps=1)
    action.monitors = [above(1.0, patience=1), above(1.0, patience=patience)]
    run = SimpleNamespace(log_dir=str(tmp_path), save_checkpoint=lambda path, weights_only: None)
    run.strategy = SimpleNamespace(remove_checkpoint=lambda path: None)
    module = cast("LightningModule", None)
    for step, level in enumerate(levels, 1):
        action.on_step(cast("Trainer", run), module, Verdict(Level(level), "", step))
    assert [step for step, _ in action.saved] == saved


def test_a_median_of_several_values_is_waited_for() -> None:
    action = RollBack()
    action.monitors = [above(1.0, patience=2, smoothing=5)]
    assert action._confirming_steps() == 1 + 2 + 2


def test_only_healthy_steps_are_saved_and_three_are_kept(tmp_path: Path) -> None:
    module = Trained([0, 1, 0, 1, *[0] * 7])
    fit_and_snapshot(tmp_path, module, 11, RollBack(every_n_steps=1))
    assert files(tmp_path / "healthy") == ["step=11.ckpt", "step=7.ckpt", "step=9.ckpt"]


def test_a_second_collapse_before_a_saving_goes_further_back_until_it_stops(tmp_path: Path) -> None:
    module = Trained([*[0] * 6, 2, 0, 2, 0, 2, 0, 2, 0])
    action = RollBack(times=3, every_n_steps=3)
    snapshots = fit_and_snapshot(tmp_path, module, 14, action)
    assert equal_states(snapshots[7], snapshots[4])
    assert equal_states(snapshots[9], snapshots[1])
    assert equal_states(snapshots[11], snapshots[1])
    assert (module.batches, action.done) == (13, 3)
    assert not equal_states(snapshots[13], snapshots[1])
    assert files(tmp_path / "healthy") == ["step=1.ckpt"]


def test_the_next_saving_waits_as_long_after_a_way_back(tmp_path: Path) -> None:
    """The first steps after it are healthy only because nobody has seen enough of them."""
    module = Trained([0, 0, 0, 0, 0, 2, 0, 2, 0, 0, 0])
    action = RollBack(every_n_steps=2)
    snapshots = fit_and_snapshot(tmp_path, module, 11, action)
    assert equal_states(snapshots[6], snapshots[3])
    assert equal_states(snapshots[8], snapshots[1])
    assert [step for step, _ in action.saved] == [1, 10]


def test_without_a_healthy_step_it_stops(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "lightning.pytorch.lit_callbacks")
    module, action = Trained([1, 2, 0]), RollBack()
    fit_and_snapshot(tmp_path, module, 3, action)
    assert (module.batches, action.done) == (2, 0)
    assert "at step 2: stopped training: there was no checkpoint" in caplog.messages


def test_checkpoints_go_to_the_runs_folder_unless_told_otherwise(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="run", version="one")
    fit_and_snapshot(tmp_path, Trained([0]), 1, RollBack(), logger=logger)
    assert files(tmp_path / "run" / "one" / "healthy") == ["step=1.ckpt"]
    fit_and_snapshot(tmp_path, Trained([0]), 1, RollBack(folder=str(tmp_path / "other")))
    assert files(tmp_path / "other") == ["step=1.ckpt"]


@pytest.mark.parametrize("done", [5, 6, 7, 10])
def test_a_resumed_run_goes_back_to_where_a_whole_one_does(tmp_path: Path, done: int) -> None:
    levels = [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0, 2, 0]
    actions = [RollBack(2, every_n_steps=2, folder=str(tmp_path / "own")) for _ in range(2)]
    straight, resumed = Snapshots(), Snapshots()
    fit_batches(tmp_path, Trained(levels), 14, watching(actions[0]), straight)
    assert equal_states(straight.after[6], straight.after[3])
    assert equal_states(straight.after[11], straight.after[8])
    fit_batches(tmp_path, Trained(levels), 14, watching(actions[1]), resumed, done=done)
    assert list(resumed.after) == list(range(done + 1, 14))  # the third collapse stops it
    assert all(equal_states(resumed.after[i], straight.after[i]) for i in resumed.after)
    assert (actions[1].done, actions[1].saved) == (2, actions[0].saved)


def test_a_checkpoint_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    action = RollBack()
    for name in ("step=1.ckpt", "step=6.ckpt"):
        (tmp_path / name).touch()
        action.saved.append(SavedWeights(int(name[5]), name))
    state = action.state_dict()
    (tmp_path / "step=6.ckpt").unlink()
    restored = RollBack(folder=str(tmp_path))
    restored.load_state_dict(state)
    restored.on_train_start(trainer(tmp_path), Trained([0]))
    assert restored.saved == [SavedWeights(1, "step=1.ckpt")]


def test_a_received_checkpoint_names_no_file_to_load_or_delete(tmp_path: Path) -> None:
    folder, mark = tmp_path / "own", tmp_path / "mark"
    (tmp_path / "precious").mkdir()
    torch.save(Payload(mark), tmp_path / "step=9.ckpt")
    names = ("precious", "step=9.ckpt")
    paths = [f"{place}/{name}" for place in ("..", tmp_path) for name in names]
    action = RollBack(every_n_steps=1, folder=str(folder))
    state = {"last": None, "done": 0, "restored": "", "since": 0}
    action.load_state_dict({**state, "saved": [[9, path] for path in paths]})
    module = Trained([2, 0, 0, 0, 0, 0])
    fit_and_snapshot(tmp_path, module, 6, action)
    assert (module.batches, action.saved) == (1, [])  # it had nothing to go back to
    assert not mark.exists()
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "step=9.ckpt").exists()


def test_its_own_checkpoints_are_read_as_plain_data(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    class Replacing(Callback):
        """Puts another file into the place of a checkpoint."""

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 1:
                torch.save(Payload(mark), tmp_path / "healthy" / "step=1.ckpt")

    run = trainer(tmp_path, watching(RollBack()), Replacing())
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run.fit(Trained([0, 0, 0, 2]), batches(4))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, "kept the learning rates"), (0.5, "by 0.5")]
)
def test_learning_rates_are_kept_or_cut_at_a_rollback(
    tmp_path: Path, caplog: Any, factor: float, expected: str
) -> None:
    caplog.set_level("INFO", "lightning.pytorch.lit_callbacks")
    levels = [0] * 6 + [2, 0]
    action = RollBack(every_n_steps=1, lr_factor=factor, folder=str(tmp_path / "saved"))
    snapshots = fit_and_snapshot(tmp_path, Trained(levels), len(levels), action)
    # a schedule of 0.1 / (1 + step), which moves on, times the factor from the restore on
    assert snapshots[8].settings["lr"] == pytest.approx(0.1 / 9 * factor)
    (line,) = [text for text in caplog.messages if "went back" in text]
    assert "at step 7: went back to the weights of step 3 (1 of 3 times)" in line
    assert expected in line


def test_a_detector_of_epochs_says_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch.lit_callbacks")
    levels = [level for level in (0, 0, 0, 0, 2, 2) for _ in range(3)]
    action = RollBack(every_n_steps=1, folder=str(tmp_path / "saved"))
    detector = CollapseDetector(watching().monitors, [action], when="train_epoch")
    run = trainer(tmp_path, detector, max_epochs=6)
    run.fit(Scripted(script_of(levels), on_epoch=True), batches(3))
    messages = [text for text in caplog.messages if "epoch " in text]
    assert [text.split(":")[0] for text in messages[:2]] == ["collapsed at epoch 5", "at epoch 5"]
    assert "went back to the weights of epoch 1" in messages[1]
