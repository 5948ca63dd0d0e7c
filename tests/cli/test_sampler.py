"""A sampler of PPO by its class path."""

from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.modules import PPOModule
from lit_rlhf.rollout import generate_responses
from tests.cli import fitting
from tests.modules.stages import ppo_options
from tests.modules.test_ppo_sampler import Nucleus


@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_a_sampler_is_chosen_by_a_configuration(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(class_path: str, **arguments: Any) -> Any:
        options = ppo_options(root, **{"minibatches.minibatch_size": 2}, output_dir="model")
        options["sampler"] = {"class_path": class_path, "init_args": arguments}
        quiet = fitting.QUIET | {"limit_train_batches": 1}
        return fitting.fit(root, stage="PPO", options=options, trainer=quiet)

    Nucleus.calls = 0
    run = fit("tests.modules.test_ppo_sampler.Nucleus", top_p=0.5)
    assert Nucleus.calls == 1
    assert run.model.sampler.top_p == 0.5
    # a checkpoint names no code to be run
    run.trainer.save_checkpoint("last.ckpt")
    loaded = PPOModule.load_from_checkpoint("last.ckpt", rewards={str(root / "reward"): 1.0})
    assert loaded.sampler is generate_responses
    with pytest.raises(SystemExit):
        fit("lit_rlhf.rollout.RolloutMetrics")
    assert "sampler" in capsys.readouterr().err
