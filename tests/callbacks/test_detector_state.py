"""CollapseDetector across a resume, from checkpoints that a Trainer wrote."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lit_callbacks import (
    Action,
    AdjustLearningRate,
    CollapseDetector,
    CollapseEarlyStopping,
    Level,
    Monitor,
    NonFiniteMonitor,
    StopTraining,
    Verdict,
)
from tests.callbacks.scripted import Scripted, Watch, above, fitted

# a baseline of 3 steps, then beyond the threshold from step 6 on, with a patience of 3
SCRIPT = {"kl": [1.0, 2.0, 1.5, 1.5, 2.0, 12.0, 13.0, 14.0, 15.0, 1.0]}
COUNT = len(SCRIPT["kl"])


def monitors() -> list[Monitor]:
    options = {"patience": 3, "baseline_steps": 3, "horizon": 5, "trend_steps": 4}
    return [above(10.0, high_ratio=2.0, **options), NonFiniteMonitor()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Verdict]]:
    """The folder of a run with its checkpoints, and its verdicts."""
    folder, watch = tmp_path_factory.mktemp("uninterrupted"), Watch()
    fitted(folder, Scripted(SCRIPT), COUNT, CollapseDetector(monitors(), [watch]))
    return folder, watch.verdicts


@pytest.mark.parametrize("done", range(1, COUNT))
def test_verdicts_of_a_resumed_run(uninterrupted: tuple[Path, list[Verdict]], done: int) -> None:
    folder, verdicts = uninterrupted
    assert [v.step for v in verdicts if v.level is Level.COLLAPSED] == [8, 9]
    watch = Watch()
    detector = CollapseDetector(monitors(), [watch])
    fitted(folder, Scripted(SCRIPT), COUNT, detector, done=done)
    assert watch.verdicts == verdicts[done:]


def test_the_last_verdict_is_there_before_a_step(uninterrupted: tuple[Path, list[Verdict]]) -> None:
    folder, verdicts = uninterrupted
    seen: list[Verdict] = []

    class AtStart(Watch):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(detector.verdict)

    AtStart.__qualname__ = "Watch"  # which the checkpoint has
    detector = CollapseDetector(monitors(), [AtStart()])
    fitted(folder, Scripted(SCRIPT), COUNT, detector, done=8)
    assert seen == [verdicts[7]]


def test_early_stopping_ends_a_resumed_run_at_the_same_batch(tmp_path: Path) -> None:
    for done in (None, 6):
        module, stopping = Scripted(SCRIPT), CollapseEarlyStopping(monitors())
        run = fitted(tmp_path, module, COUNT, stopping, done=done)
        assert (run.global_step, module.batches) == (8, 8 - (done or 0))


def test_detectors_of_one_run_keep_a_state_each(tmp_path: Path) -> None:
    script = {"kl": [1.0, 20.0, 20.0, 20.0], "size": [1.0, 1.0, 20.0, 20.0]}

    def detectors() -> list[CollapseDetector]:
        return [CollapseDetector([above(10.0, key)], []) for key in ("kl", "size")]

    fitted(tmp_path, Scripted(script), 4, *detectors())
    state = torch.load(tmp_path / "3.ckpt", weights_only=True)["callbacks"]
    levels = {key: value["level"] for key, value in state.items() if "CollapseDetector" in key}
    assert levels == {f"CollapseDetector(train_batch: {k})": n for k, n in (("kl", 2), ("size", 0))}
    resumed = detectors()
    fitted(tmp_path, Scripted(script), 4, *resumed, done=3)
    assert [detector.verdict.level for detector in resumed] == [2, 2]


def test_state_keys_differ_by_what_is_watched_and_when() -> None:
    detectors = [
        CollapseDetector([above(1.0)]),
        CollapseDetector([above(1.0, "size")]),
        CollapseDetector([above(1.0)], when="validation"),
        CollapseDetector([NonFiniteMonitor()]),
        CollapseEarlyStopping([above(1.0)]),
    ]
    assert len({detector.state_key for detector in detectors}) == 5
    assert CollapseDetector([above(2.0)]).state_key == detectors[0].state_key


def test_other_actions_start_anew_while_the_monitors_go_on(tmp_path: Path) -> None:
    """So that a run that collapsed can be resumed with an action against it."""
    script = {"kl": [1.0, 1.0, 20.0, 20.0, 20.0]}
    fitted(tmp_path, Scripted(script), 5, CollapseDetector([above(10.0)], [AdjustLearningRate()]))
    actions: list[Action] = [AdjustLearningRate(level="collapsed"), StopTraining()]
    detector = CollapseDetector([above(10.0)], actions)
    told = "checkpoint has the actions AdjustLearningRate, the run has .*, StopTraining"
    with pytest.warns(UserWarning, match=told):
        run = fitted(tmp_path, Scripted(script), 5, detector, done=3)
    assert run.global_step == 4
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
