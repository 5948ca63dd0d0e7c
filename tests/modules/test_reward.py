"""Reward modelling: the two losses, what they count, the text that is read, and MetaRM."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from lit_rlhf.data import DialogueEncoder, Message, PreferenceBatch, PreferenceDataModule
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_causal_lm, load_scalar_model, load_tokenizer, read_lm_head
from lit_rlhf.modules import RewardModule
from lit_rlhf.modules.meta_rm import check_meta_rate
from lit_rlhf.rewards import ModelReward
from lit_rlhf.rollout import RolloutBatch
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy, ShardedStrategy
from tests.support import stages

META_RATE = 0.3


def module(root: Path, **options: Any) -> RewardModule:
    return RewardModule(str(root / "policy"), **options)


def read_scores(model: RewardModule, batch: PreferenceBatch) -> Tensor:
    """Scores `[B, 2]`, each read at the last token of one unpadded row."""
    scores = []
    for side in (batch.chosen, batch.rejected):
        for ids, real, _ in zip(*side, strict=True):
            hidden = model.model.base_model(input_ids=ids[real].unsqueeze(0), use_cache=False)
            scores.append(model.model.score(hidden.last_hidden_state[0, -1])[0])
    return torch.stack(scores).view(2, -1).T.detach().double()


def lm_losses(model: RewardModule, batch: PreferenceBatch, policy: torch.nn.Module) -> Tensor:
    """Loss of each chosen completion token under the language model it starts from, float64."""
    rows = zip(*batch.chosen, strict=True)
    nlls = [stages.token_nll(policy, ids[real])[target[real][1:]] for ids, real, target in rows]
    return torch.cat(nlls)


def shares(model: RewardModule, batch: PreferenceBatch) -> dict[str, Tensor]:
    pairs, tokens = torch.tensor(8.0), batch.chosen.completion_mask.sum().float()
    metrics, _ = model(batch, pairs, tokens)
    return dict(metrics)


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_losses_accuracy_and_margin_of_a_ragged_batch(
    request: pytest.FixtureRequest, pad_is_eos: bool
) -> None:
    root = request.getfixturevalue("pad_is_eos_root" if pad_is_eos else "root")
    model = module(root, lm_coef=0.3)
    batch = stages.first_batch(stages.preferences(root, batch_size=8), root)
    eos, rows = model.tokenizer.eos_token_id, torch.arange(8)
    assert (model.tokenizer.pad_token_id == eos) is pad_is_eos
    for side in (batch.chosen, batch.rejected):  # ends with EOS, at which the score is read
        assert side.input_ids[rows, side.attention_mask.sum(1) - 1].eq(eos).all()
        assert side.completion_mask[rows, side.attention_mask.sum(1) - 1].all()
        assert not side.attention_mask.all()
    metrics, scores = shares(model, batch), read_scores(model, batch)
    difference = scores[:, 0] - scores[:, 1]
    pairwise = -logsigmoid(difference).mean()
    lm_loss = lm_losses(model, batch, load_causal_lm(root / "policy")).mean()
    for key, expected in (
        ("reward/pairwise_loss", pairwise),
        ("reward/lm_loss", lm_loss),
        ("reward/loss", pairwise + 0.3 * lm_loss),
        ("reward/accuracy", (difference > 0).double().mean()),
        ("reward/margin", difference.mean()),
    ):
        value = float(metrics[key].detach())
        assert value == pytest.approx(float(expected), rel=1e-5, abs=1e-6), key


def test_a_margin_of_the_data_has_to_be_beaten(root: Path) -> None:
    model = module(root, lm_coef=0.0, label_smoothing=0.2, center_coef=0.1)
    batch = stages.first_batch(stages.preferences(root, batch_size=8), root)
    margin, scores = torch.linspace(0.0, 3.0, 8), read_scores(model, batch)
    ahead = scores[:, 0] - scores[:, 1] - margin
    smoothed = 0.8 * logsigmoid(ahead) + 0.2 * logsigmoid(-ahead)
    expected = (0.1 * scores.sum(1).square() - smoothed).mean()
    loss = shares(model, batch._replace(margin=margin))["reward/pairwise_loss"]
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_imitation_can_be_left_out(root: Path, tmp_path: Path) -> None:
    model = module(root, lm_coef=0.0)
    assert model.lm_head is None
    logged = stages.fit_module(model, stages.preferences(root), tmp_path).callback_metrics
    assert float(logged["reward/loss"]) == float(logged["reward/pairwise_loss"])
    assert not any("lm_loss" in key for key in logged)
    assert read_lm_head(tmp_path / "model") is None
    with pytest.raises(ValueError, match="lm_coef: expected a finite number >= 0, got -1"):
        module(root, lm_coef=-1.0)


def test_the_folder_keeps_the_trained_output_layer(root: Path, tmp_path: Path) -> None:
    model = module(root, optimizer={"learning_rate": 0.1})
    before = model.lm_head.weight.detach().clone()
    stages.fit_module(model, stages.preferences(root), tmp_path)
    saved = read_lm_head(tmp_path / "model")
    assert torch.equal(saved.weight, model.lm_head.weight)
    assert not torch.equal(saved.weight, before)
    load_scalar_model(tmp_path / "model")  # which does not mind the file


def test_validation_weighs_pairs_and_tokens_anew(root: Path, tmp_path: Path) -> None:
    model = module(root, lm_coef=0.3)
    batch = stages.first_batch(stages.preferences(root, batch_size=8), root)
    run = stages.trainer(tmp_path, limit_val_batches=None)
    lm_loss = float(lm_losses(model, batch, load_causal_lm(root / "policy")).mean())
    pairwise = []
    for factor in (1.0, -2.0, 0.0):
        with torch.no_grad():
            model.model.score.weight *= factor
        # batches of 3, 3 and 2 pairs
        data = stages.preferences(root, batch_size=3)
        (logged,) = run.validate(model, datamodule=data, verbose=False)
        scores = read_scores(model, batch)
        difference = scores[:, 0] - scores[:, 1]
        pairwise.append(float(-logsigmoid(difference).mean()))
        assert logged["val/reward/lm_loss"] == pytest.approx(lm_loss, rel=1e-5)
        assert logged["val/reward/pairwise_loss"] == pytest.approx(pairwise[-1], rel=1e-5)
        assert logged["val/reward/loss"] == pytest.approx(pairwise[-1] + 0.3 * lm_loss, rel=1e-5)
        assert logged["val/reward/margin"] == pytest.approx(float(difference.mean()), abs=1e-6)
        hits = (difference > 0).double()  # a tie is a miss
        for key in ("val/reward/accuracy", "val/reward/accuracy/preferences"):
            assert logged[key] == pytest.approx(float(hits.mean()))
        longer = batch.chosen.completion_mask.sum(1) - batch.rejected.completion_mask.sum(1)
        wins = [1.0 if n > 0 else 0.5 if n == 0 else 0.0 for n in longer.tolist()]
        assert logged["val/reward/longer_accuracy"] == pytest.approx(sum(wins) / 8)
        assert logged["val/reward/pairs"] == 8
        # confidence in the preferred response against how often it is right, in 15 bins
        confidence = difference.abs().sigmoid()
        bins = (confidence * 15).long()
        error = sum(
            float((confidence[bins == bin_index].mean() - hits[bins == bin_index].mean()).abs())
            * float((bins == bin_index).double().mean())
            for bin_index in bins.unique()
        )
        assert logged["val/reward/calibration_error"] == pytest.approx(error, rel=1e-4)
    assert abs(pairwise[0] - pairwise[1]) > 1e-3


def test_the_ids_of_a_rollout_are_those_that_the_reward_model_was_trained_on(root: Path) -> None:
    preferred = stages.first_batch(stages.preferences(root, batch_size=8), root)
    prompted = stages.first_batch(stages.prompts(root), root)
    encoder = DialogueEncoder(load_tokenizer(str(root / "policy")), "hh", 64)
    reward = ModelReward(str(root / "reward"), module(root).network)
    trained = RewardModule(str(root / "reward"), lm_coef=0.0)
    for row, (question, answer) in enumerate(zip(stages.QUESTIONS, stages.ANSWERS, strict=True)):
        dialogue = encoder.encode_dialogue(
            [Message("user", question), Message("assistant", answer)]
        )
        prompt = prompted.input_ids[row][prompted.attention_mask[row]]
        response = dialogue.input_ids.long()[len(prompt) :]
        rollouts = RolloutBatch(
            prompt_ids=prompted.input_ids[row : row + 1],
            prompt_mask=prompted.attention_mask[row : row + 1],
            response_ids=response.unsqueeze(0),
            response_mask=torch.ones(1, len(response), dtype=torch.bool),
            terminated=torch.tensor([True]),
        )
        ids = rollouts.sequence_ids[rollouts.sequence_mask]
        chosen = preferred.chosen.input_ids[row][preferred.chosen.attention_mask[row]]
        assert ids.tolist() == chosen.tolist()
        with torch.no_grad():
            in_training = sequence_scores(trained.model, *preferred.chosen[:2])[row]
        in_rollout = reward(rollouts, prompted.texts[row : row + 1], None)[0]
        assert float(in_rollout) == pytest.approx(float(in_training), rel=1e-4)


class Observed(RewardModule):
    """Keeps its batch, and its weights at the start of a step and in its forward."""

    error: Exception | None = None

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        self.batch, self.start = batch, stages.copy_state(self)
        return super().training_step(batch, batch_idx)

    def forward(self, *arguments: Any) -> Any:
        self.moved = stages.copy_state(self)
        if self.error is not None:
            raise self.error
        return super().forward(*arguments)


def build(root: Path, **options: Any) -> Observed:
    usual = {"meta_rate": META_RATE, "lm_coef": 0.3, "optimizer": {"grad_clip": None}}
    return Observed(str(root / "policy"), **usual | options)


def fit(module: Observed, root: Path, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """The data of a run of one step, and the gradients that it was made with."""
    sources = stages.source(root, "preferences") if module.meta_rate else None
    recorder, data = stages.StepRecorder(), stages.preferences(root, meta_sources=sources)
    stages.fit_module(module, data, folder, callbacks=[recorder], limit_train_batches=1)
    return data, recorder.steps["networks"][0]


def unpadded(side: Any) -> list[tuple[Tensor, Tensor]]:
    return [(ids[real][None], target[real][1:]) for ids, real, target in zip(*side, strict=True)]


def differences(model: RewardModule, batch: PreferenceBatch) -> Tensor:
    """Score of the chosen response minus score of the rejected one, row by row."""
    scores = [
        torch.cat([model.model.score(model.model.base_model(ids)[0][0, -1]) for ids, _ in rows])
        for rows in map(unpadded, (batch.chosen, batch.rejected))
    ]
    return scores[0] - scores[1]


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_the_gradient_is_that_of_the_loss_at_moved_weights(
    root: Path, tmp_path: Path, micro_batch_size: int | None
) -> None:
    module = build(root, micro_batch_size=micro_batch_size)
    data, actual = fit(module, root, tmp_path)
    model = RewardModule(str(root / "policy"), lm_coef=0.3).double()
    weights = dict(model.named_parameters())
    apart = differences(model, data.draw_meta_pairs(4, epoch=0, batch_idx=0)).abs()
    j = (1 / (1 + (-apart).exp())).mean()
    logged = module.trainer.callback_metrics["reward/difference_loss"]
    assert float(logged) == pytest.approx(float(j.detach()), rel=1e-5)
    moves = torch.autograd.grad(j, list(weights.values()), allow_unused=True)
    with torch.no_grad():
        for weight, move in zip(weights.values(), moves, strict=True):
            weight += 0 if move is None else META_RATE * move
    loss = torch.log1p((-differences(model, module.batch)).exp()).mean()
    nlls = []
    for ids, is_target in unpadded(module.batch.chosen):
        logits = model.lm_head(model.model.base_model(ids)[0][0, :-1])
        nlls.append(cross_entropy(logits, ids[0, 1:], reduction="none")[is_target])
    gradients = torch.autograd.grad(loss + 0.3 * torch.cat(nlls).mean(), list(weights.values()))
    assert actual.keys() == weights.keys()
    for name, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(actual[name].double(), gradient, rtol=1e-4, atol=1e-6)
    # the move is not lost in the tolerance
    plain = build(root, meta_rate=0.0)
    assert stages.distance(fit(plain, root, tmp_path / "plain")[1], actual) > 1e-3
    assert "reward/difference_loss" not in plain.trainer.callback_metrics


@pytest.mark.parametrize("network", [{}, {"lora_rank": 2}])
@pytest.mark.parametrize("error", [None, KeyError("in the forward")])
def test_weights_move_for_the_loss_and_come_back_to_the_bit(
    root: Path, tmp_path: Path, network: dict[str, Any], error: Exception | None
) -> None:
    # a rate at which the step itself changes no bit
    module = build(root, network=network, optimizer={"learning_rate": 1e-50})
    module.error = error
    with nullcontext() if error is None else pytest.raises(KeyError):
        fit(module, root, tmp_path)
    stages.assert_equal_states(stages.copy_state(module), module.start)
    changed = {n for n, old in module.start.items() if not torch.equal(old, module.moved[n])}
    assert changed
    assert all("lora_" in name or "score" in name for name in changed) == bool(network)
    assert not any("lm_head" in name for name in changed)  # J does not depend on it


def test_meta_rate_is_checked_where_the_module_and_the_run_begin(
    root: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="meta_rate: expected a finite number >= 0, got -1"):
        build(root, meta_rate=-1.0)
    with pytest.raises(ValueError, match=r"or neither, got 0\.3 and 0 sources"):
        stages.fit_module(build(root), stages.preferences(root), tmp_path)


@pytest.mark.parametrize(
    ("limits", "n_rows"),
    [({"micro_batch_size": 3}, [3, 1]), ({"micro_batch_tokens": 8}, [2, 2])],
)
def test_micro_batches_have_the_rows_and_tokens_of_the_options(
    root: Path, limits: dict[str, int], n_rows: list[int]
) -> None:
    parts = build(root, **limits).micro_batches(torch.tensor([4, 4, 4, 4]))
    assert [len(range(4)[rows]) for rows, _ in parts] == n_rows


def test_draws_follow_the_place_in_the_run(root: Path) -> None:
    data = stages.preferences(root, meta_sources=stages.source(root, "preferences"))
    stages.first_batch(data, root)
    draws = [
        data.draw_meta_pairs(6, epoch=epoch, batch_idx=index).chosen.input_ids.tolist()
        for epoch, index in ((1, 2), (1, 2), (1, 3), (0, 2))
    ]
    assert [rows == draws[0] for rows in draws] == [True, True, False, False]


def test_steps_draw_pairs_for_their_epoch_and_batch(root: Path, tmp_path: Path) -> None:
    data = stages.preferences(root, meta_sources=stages.source(root, "preferences"))
    unchanged = PreferenceDataModule.draw_meta_pairs
    with patch.object(
        PreferenceDataModule, "draw_meta_pairs", autospec=True, side_effect=unchanged
    ) as draw:
        stages.fit_module(build(root), data, tmp_path, max_epochs=2)
    places = [(call.kwargs["epoch"], call.kwargs["batch_idx"]) for call in draw.call_args_list]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("rate", "n_sources", "strategy", "dtype", "message"),
    [
        (0.0, 1, SingleDeviceStrategy, torch.float32, "or neither, got 0.0 and 1 sources"),
        (META_RATE, 0, SingleDeviceStrategy, torch.float32, "or neither, got 0.3 and 0 sources"),
        (META_RATE, 1, MultiEngineDeepSpeedStrategy, torch.float32, "got MultiEngineDeepSpeed"),
        (META_RATE, 1, ShardedStrategy, torch.float32, "got ShardedStrategy and torch.float32"),
        (META_RATE, 1, DDPStrategy, torch.bfloat16, "got DDPStrategy and torch.bfloat16"),
    ],
)
def test_meta_rate_that_cannot_be_exact_is_refused(
    rate: float, n_sources: int, strategy: Any, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(rate, n_sources, strategy, dtype)


@pytest.mark.parametrize(
    ("rate", "strategy", "dtype"),
    [
        (0.0, MultiEngineDeepSpeedStrategy, torch.bfloat16),
        (META_RATE, SingleDeviceStrategy, torch.float64),
        (META_RATE, DDPStrategy, torch.float32),
    ],
)
def test_meta_rate_that_is_exact_or_absent_is_accepted(
    rate: float, strategy: Any, dtype: torch.dtype
) -> None:
    check(rate, int(rate > 0), strategy, dtype)


def check(rate: float, n_sources: int, strategy: Any, dtype: torch.dtype) -> None:
    weights = torch.nn.Linear(1, 1, dtype=dtype).parameters()
    check_meta_rate(rate, n_sources, strategy=strategy.__new__(strategy), weights=weights)
