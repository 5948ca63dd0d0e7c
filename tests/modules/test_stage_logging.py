"""What TensorBoard shows: every documented key, against the module's own step, and sample text."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_callbacks.output import say
from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from tests.support.stages import demonstrations, fit_module, ppo_options, preferences, prompts

# logged once the policy is trained; docs/test_metrics.py compares all keys with the page's
POLICY = {
    *("ppo/policy_loss", "ppo/ptx_loss", "ppo/entropy_loss", "ppo/approx_kl", "ppo/ratio"),
    *("ppo/ratio_first", "ppo/clip_fraction", "ppo/policy_grad_norm"),
}


def logged(module: Any, data: Any, folder: Path) -> EventAccumulator:
    """The events of a fit with validation."""
    logger = TensorBoardLogger(folder, name="", version="")
    fit_module(module, data, folder, logger=logger, limit_val_batches=None, max_epochs=2)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def steps(events: EventAccumulator, key: str) -> list[int]:
    return [event.step for event in events.Scalars(key)]


@pytest.fixture(scope="module")
def ppo_events(root: Path, tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    """Four iterations, the first of them critic pre-training."""
    options: dict[str, Any] = {
        "gold_reward": "tests.support.reward_functions:length",
        "critic_pretraining": {"iterations": 1},
        "loss": {"ptx_coef": 0.1, "entropy_coef": 0.01},
    }
    module = PPOModule(**ppo_options(root, sampled_texts=3, **options))
    return logged(module, prompts(root, ptx=True, batch_size=4), tmp_path_factory.mktemp("ppo"))


def keys_of(events: EventAccumulator, *groups: str) -> set[str]:
    """The keys that were logged in these groups, such as `ppo/` and `val/rollout/`."""
    return {key for key in events.Tags()["scalars"] if key.startswith(groups)}


ITERATION = ("rollout/", "ppo/", "time/", "memory/", "throughput/")
"""Groups of the metrics of an iteration."""


def test_ppo_logs_every_key_at_every_iteration(ppo_events: EventAccumulator) -> None:
    keys = keys_of(ppo_events, *ITERATION)
    assert keys > POLICY
    for key in keys:
        assert steps(ppo_events, key) == ([2, 3, 4] if key in POLICY else [1, 2, 3, 4]), key


def test_ppo_validates_by_generating_and_scoring(ppo_events: EventAccumulator) -> None:
    validated = keys_of(ppo_events, "val/")
    # the reward that PPO optimizes has the KL of training
    trained = keys_of(ppo_events, "rollout/") - {"rollout/reward"}
    of_the_start = {"rollout/start_score", "rollout/win_rate"}
    assert validated == {f"val/{key}" for key in trained | of_the_start}
    for key in validated:
        # after each epoch of two iterations
        assert steps(ppo_events, key) == [2, 4], key
    lengths = [event.value for event in ppo_events.Scalars("val/rollout/response_length")]
    assert all(1 <= length <= 6 for length in lengths)


def test_ppo_shows_sample_responses_with_reward_kl_and_length(ppo_events: EventAccumulator) -> None:
    events = ppo_events.Tensors("val/samples/text_summary")
    assert [event.step for event in events] == [2, 4]
    for event in events:
        lines = event.tensor_proto.string_val[0].decode().split("\n")
        assert [line.count(" | ") for line in lines[2:]] == [5] * 3
        # the same held-out prompts each time
        assert ["Human: hi" in lines[2], "Human: how are you today" in lines[3]] == [True] * 2


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_other_stages_log_every_key_by_their_steps(root: Path, tmp_path: Path, stage: str) -> None:
    module, data = (SFTModule, demonstrations) if stage == "sft" else (RewardModule, preferences)
    events = logged(module(str(root / "policy")), data(root), tmp_path)
    for key in keys_of(events, f"{stage}/", "time/", "memory/", "throughput/"):
        assert steps(events, key) == [0, 1, 2, 3], key
    of_pairs = {"val/reward/calibration_error", "val/reward/accuracy/preferences"}
    validated = keys_of(events, "val/")
    assert f"val/{stage}/loss" in validated
    assert of_pairs <= validated or stage == "sft"
    for key in validated:
        assert len(steps(events, key)) == 2, key


def test_lines_of_callbacks_stay_out_of_the_progress_bar(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = LambdaCallback(on_train_batch_end=lambda run, *_: say(run, "a verdict"))
    options = {"callbacks": [RichProgressBar(), speaker], "enable_progress_bar": True}
    fit_module(SFTModule(str(root / "policy")), demonstrations(root), tmp_path, **options)
    assert (tmp_path / "model/config.json").is_file()
    printed = capsys.readouterr()
    assert "Epoch 0/0" in printed.out
    assert "a verdict\n" in printed.err
