"""The line at the end of a stage: how good its model is on held-out data."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from lit_callbacks import CollapseDetector, read_run
from lit_rlhf.data import PromptBatch
from lit_rlhf.files import read_manifest
from lit_rlhf.modules import PPOModule
from lit_rlhf.modules.held_out import describe_held_out
from lit_rlhf.ppo import PPO
from lit_rlhf.rewards import Scores
from lit_rlhf.rollout import RolloutBatch
from tests.support import stages
from tests.support.stages import fit_module, ppo_options, prompts, with_algorithm

REWARD = {"val/reward/accuracy": 0.75, "val/reward/longer_accuracy": 0.5, "val/reward/pairs": 100.0}


def described(stage: str, metrics: dict[str, float], *callbacks: Any) -> str | None:
    return describe_held_out(stage, metrics, Trainer(logger=False, callbacks=[*callbacks]))


def test_sft_has_an_interval_and_the_frequencies_beside_it() -> None:
    metrics = {"loss": 2.0, "loss_error": 0.1, "token_accuracy": 0.48}
    metrics |= {"frequency_loss": 5.0, "frequency_accuracy": 0.06}
    logged = {f"val/sft/{key}": value for key, value in metrics.items()}
    # exp(2 - 1.96 * 0.1), exp(2), exp(2 + 1.96 * 0.1), exp(5)
    assert described("sft", logged) == (
        "perplexity 7.39 [6.07, 8.99], token accuracy 0.48; by the frequency of tokens alone 148 "
        "and 0.06: better"
    )
    assert str(described("sft", logged | {"val/sft/frequency_loss": 1.0})).endswith(": worse")
    assert str(described("sft", logged | {"val/sft/frequency_loss": 2.1})).endswith(": no better")
    del logged["val/sft/loss_error"]  # a single dialogue has none
    line = str(described("sft", logged))
    assert line.startswith("perplexity 7.39, token accuracy 0.48; ")
    assert line.endswith(" 148 and 0.06")


@pytest.mark.parametrize(
    ("accuracy", "longer", "end"),
    [
        (0.75, 0.5, '"longer is better" 0.50: better'),
        (0.58, 0.594, '"longer is better" 0.59: no better'),
        (0.75, 0.1, '"shorter is better" 0.90: worse'),
    ],
)
def test_a_reward_model_is_compared_with_a_rule_of_length(
    accuracy: float, longer: float, end: str
) -> None:
    metrics = REWARD | {"val/reward/accuracy": accuracy, "val/reward/longer_accuracy": longer}
    line = described("reward", metrics)
    assert line is not None
    assert line.endswith(f" on 100 pairs; {end}")
    if accuracy == 0.75:  # Wilson: (0.75 + z^2 / 200 -+ z sqrt(0.1875 / 100 + z^2 / 40000)) / ...
        assert line.startswith("accuracy 0.75 [0.66, 0.82] on ")


@pytest.mark.parametrize(
    ("accuracy", "longer", "n_pairs", "end"),
    [
        (0.25, 1.0, 4, "1.00: too few pairs to tell"),  # Wilson: 0.05 to 0.70
        (0.5, 0.95, 20, "0.95: too few pairs to tell"),  # 0.299 to 0.701
        (0.5, 0.95, 22, "0.95: worse"),  # 0.307 to 0.693
        (1.0, 0.5, 6, "0.50: better"),  # 0.610 to 1
    ],
)
def test_a_few_pairs_tell_nothing_unless_they_agree(
    accuracy: float, longer: float, n_pairs: int, end: str
) -> None:
    metrics = {"accuracy": accuracy, "longer_accuracy": longer, "pairs": float(n_pairs)}
    line = described("reward", {f"val/reward/{key}": value for key, value in metrics.items()})
    assert str(line).endswith(f' on {n_pairs} pairs; "longer is better" {end}')


def test_ppo_is_compared_with_its_start_and_has_a_verdict() -> None:
    metrics = {"score": 1.2, "start_score": 0.8, "win_rate": 0.75, "responses": 100.0}
    metrics |= {"kl": 3.1, "response_length": 41.4}
    logged = {f"val/rollout/{key}": value for key, value in metrics.items()}
    line = (
        "score 1.2 (start 0.8), wins 0.75 [0.66, 0.82] of 100 against the start by its own reward; "
        "KL 3.1 nats, length 41.4 tokens"
    )
    assert described("ppo", logged) == line
    assert described("ppo", logged, CollapseDetector()) == f"{line}; verdict: healthy"


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert described("reward", {"reward/accuracy": 0.7}) is None
    assert described("mine", REWARD) is None


@pytest.mark.parametrize("missing", REWARD)
def test_a_metric_that_is_not_logged_is_named(missing: str) -> None:
    metrics = {key: value for key, value in REWARD.items() if key != missing}
    with pytest.warns(UserWarning, match=f"the validation has not logged {missing}"):
        assert described("reward", metrics) is None


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
def test_terminal_card_and_log_have_the_line(
    root: Path, tmp_path: Path, logger: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    module, data = stages.stage("reward", root)
    log = logger(str(tmp_path), name="log", version="")
    fit_module(module, data, tmp_path, logger=log, limit_val_batches=None)
    line = re.search(r"reward, held out: (accuracy .* on 8 pairs; .*)", caplog.text)
    assert line is not None
    folder = module.finished_dir
    assert read_manifest(folder)["made"]["held_out"] == line[1]
    card = (folder / "README.md").read_text("utf-8")
    assert f"## On held-out data\n\nA{line[1][1:]}.\n" in card
    assert read_run("reward", log.log_dir).held_out == line[1]


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_a_run_without_held_out_data_says_so(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    module, _ = stages.stage("reward", root)
    data = stages.preferences(root, val_sources=None)
    fit_module(module, data, tmp_path, limit_val_batches=None)
    assert "reward: no data were held out, so that nothing says how good" in caplog.text
    assert "held_out" not in (module.finished_dir / "README.md").read_text("utf-8")


@pytest.mark.parametrize("rank", [0, 2])
def test_the_start_has_the_scores_of_the_reference(root: Path, tmp_path: Path, rank: int) -> None:
    network = {"lora_rank": rank, "lora_alpha": 4} if rank else {}
    module = PPOModule(**ppo_options(root, network=network))
    data = prompts(root, batch_size=3)  # batches of 3, 3 and 2
    run = stages.trainer(tmp_path, limit_val_batches=None)
    (before,) = run.validate(module, datamodule=data, verbose=False)
    assert before["val/rollout/win_rate"] == 0.5  # it is its start
    assert before["val/rollout/start_score"] == before["val/rollout/score"]
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if parameter.requires_grad and (not rank or "lora_B" in name):
                parameter.add_(torch.randn_like(parameter))
    module._start_scores.clear()  # sampled anew, with another policy
    (after,) = run.validate(module, datamodule=data, verbose=False)
    assert after["val/rollout/start_score"] == before["val/rollout/score"]
    assert after["val/rollout/score"] != before["val/rollout/score"]
    assert after["val/rollout/win_rate"] != 0.5


class OneAgainstTheRow(PPO):
    """Scores each response 1, and the start's response in row n of a batch n."""

    n_starts = 0

    def score(self, rollouts: RolloutBatch, batch: PromptBatch) -> Scores:
        return Scores(torch.ones(len(batch.texts)))

    def score_start(self, batch: PromptBatch, seed: int) -> Tensor:
        self.n_starts += 1
        return torch.arange(float(len(batch.texts)))


def test_win_rate_counts_scores_above_those_of_the_start_of_each_set(
    root: Path, tmp_path: Path
) -> None:
    module = with_algorithm(OneAgainstTheRow)(**ppo_options(root))
    # starts 0, 1, 2; 0, 1, 2; 0, 1
    data = prompts(root, batch_size=3, test_sources=stages.source(root, "prompts"))
    run = stages.trainer(tmp_path, limit_val_batches=None)
    (validated,) = run.validate(module, datamodule=data, verbose=False)
    assert validated["val/rollout/start_score"] == 7 / 8
    assert validated["val/rollout/win_rate"] == (3 + 3 / 2) / 8
    assert module.ppo.n_starts == 3
    run.validate(module, datamodule=data, verbose=False)
    assert module.ppo.n_starts == 3
    run.test(module, datamodule=data, verbose=False)  # another set has starts of its own
    assert module.ppo.n_starts == 6


def test_the_comparison_with_the_start_leaves_training_as_it_is(root: Path, tmp_path: Path) -> None:
    states = []
    for batches in (0, None):  # without and with validation
        module = PPOModule(**ppo_options(root))
        data = prompts(root, batch_size=4)
        fit_module(module, data, tmp_path / str(batches), max_epochs=2, limit_val_batches=batches)
        states.append(stages.copy_state(module))
    stages.assert_equal_states(*states)
