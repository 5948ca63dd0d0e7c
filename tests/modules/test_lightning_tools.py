"""Lightning's own tools on the stages: they work, or are refused with words."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner

from lit_callbacks.output import say
from lit_rlhf.modules import RewardModule, SFTModule
from tests.modules.stages import demonstrations, fitted, preferences, trainer

FLAT: dict[str, Any] = {"learning_rate": 1e-2, "lr_scheduler": "constant"}


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_learning_rate_finder_sets_rates(root: Path, tmp_path: Path, stage: str) -> None:
    kind, data = (SFTModule, demonstrations) if stage == "sft" else (RewardModule, preferences)
    module = kind(str(root / "policy"), optimizer=FLAT)
    options: dict[str, Any] = {"num_training": 4, "min_lr": 1e-6, "max_lr": 1e-2}
    options |= {"early_stop_threshold": None, "update_attr": False}
    found = Tuner(trainer(tmp_path, max_epochs=4)).lr_find(module, datamodule=data(root), **options)
    losses, rates = found.results["loss"], found.results["lr"]
    assert len(losses) >= 3
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert rates == sorted(set(rates))


def test_stochastic_weight_averaging_is_refused(root: Path, tmp_path: Path) -> None:
    module, averaging = SFTModule(str(root / "policy")), StochasticWeightAveraging(swa_lrs=1e-3)
    with pytest.raises(ValueError, match=r"callbacks: expected no StochasticWeightAveraging"):
        fitted(module, demonstrations(root), tmp_path, callbacks=[averaging])
    assert not (tmp_path / "model").exists()


# of torch.compile itself, which looks at the module's properties
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_module_is_refused_with_option_that_compiles(root: Path, tmp_path: Path) -> None:
    module: Any = torch.compile(SFTModule(str(root / "policy")))
    with pytest.raises(ValueError, match=r"expected a module that is not compiled.*torch_compile"):
        fitted(module, demonstrations(root), tmp_path)


def test_lines_above_bar(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Speaker(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            say(trainer, "a verdict")

    options = {"callbacks": [RichProgressBar(), Speaker()], "enable_progress_bar": True}
    fitted(SFTModule(str(root / "policy")), demonstrations(root), tmp_path, **options)
    assert (tmp_path / "model/config.json").is_file()
    printed = capsys.readouterr()
    assert "Epoch 0/0" in printed.out
    assert "a verdict\n" in printed.err
