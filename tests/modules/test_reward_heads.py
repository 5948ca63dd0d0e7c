"""Several heads on one trunk: how they are trained and saved, and what each use makes of them."""

import zlib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from lit_rlhf.export import load_checkpoint_model, load_folder_model
from lit_rlhf.forward import count_heads, scalar_head_of, sequence_scores, unwrap_model
from lit_rlhf.micro_batches import slice_batch
from lit_rlhf.models import ModelOptions, load_scalar_model
from lit_rlhf.modules import PPOModule, RewardModule
from lit_rlhf.rewards import ModelReward
from tests.support import stages
from tests.support.saved_runs import saved_run

IDS = torch.arange(4, 40).reshape(3, 12)


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run leaves that has trained three heads."""
    return str(saved_run("reward", root, tmp_path_factory.mktemp("heads"), heads=3).finished)


def plain_scores(path: str | Path) -> Tensor:
    """Scores of a folder by transformers alone, `[B, K]`."""
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    logits: Tensor = plain(input_ids=IDS).logits.detach()
    return logits


@pytest.mark.parametrize("n_heads", [2, 3])
def test_each_head_leaves_out_the_pairs_of_another_fold(root: Path, n_heads: int) -> None:
    model = RewardModule(str(root / "policy"), lm_coef=0.0, label_smoothing=0.1, heads=n_heads)
    batch = stages.first_batch(stages.preferences(root, batch_size=8), root)
    batch = batch._replace(margin=torch.linspace(0.0, 1.0, 8))
    lengths = [mask.tolist().index(True) for mask in batch.chosen.completion_mask]
    prompts = [ids[:n] for ids, n in zip(batch.rejected.input_ids, lengths, strict=True)]
    folds = [zlib.crc32(prompt.numpy().tobytes()) % n_heads for prompt in prompts]
    assert len(set(folds)) > 1
    sides = [sequence_scores(model.model, *side[:2]) for side in (batch.chosen, batch.rejected)]
    ahead = (sides[0] - sides[1]).detach().double()
    losses = []
    for row, fold in enumerate(folds):
        for head in {*range(n_heads)} - {fold}:
            z = ahead[row, head] - batch.margin[row]
            losses.append(float(-0.9 * logsigmoid(z) - 0.1 * logsigmoid(-z)))
    of_means = [fmean(row) for row in ahead.tolist()]
    expected = {
        "reward/pairwise_loss": fmean(losses),
        "reward/accuracy": fmean(difference > 0 for difference in of_means),
        "reward/margin": fmean(of_means),
    }
    order: Any = torch.tensor([6, 2, 7, 0, 3, 1, 5, 4])
    for micro_batches in ([slice(0, 8)], [slice(0, 3), slice(3, 8)], [order[:5], order[5:]]):
        parts = [slice_batch(batch, rows) for rows in micro_batches]
        outputs = [model(part, torch.tensor(8.0), torch.tensor(1.0)) for part in parts]
        for key, value in expected.items():
            total = sum(float(metrics[key].detach()) for metrics, _ in outputs)
            assert total == pytest.approx(value, rel=1e-4, abs=1e-5), key
    for row, fold in enumerate(folds):
        model.zero_grad()
        part = slice_batch(batch, slice(row, row + 1))
        model(part, torch.tensor(1.0), torch.tensor(1.0)).metrics["reward/loss"].backward()
        trained = model.model.score.weight.grad.any(1).tolist()
        assert trained == [head != fold for head in range(n_heads)]


def test_one_folder_holds_all_heads(folder: str) -> None:
    config = load_scalar_model(folder, heads=None).config
    assert config.id2label == {0: "reward_0", 1: "reward_1", 2: "reward_2"}
    assert config.label2id == {"reward_0": 0, "reward_1": 1, "reward_2": 2}
    assert "mean of the 3 logits" in (Path(folder) / "README.md").read_text("utf-8")
    expected = plain_scores(folder)
    for heads, scores in ((None, expected), (3, expected), (1, expected.mean(1))):
        model = load_scalar_model(folder, heads=heads).eval()
        assert len(model.score.weight) == model.config.num_labels == (heads or 3)
        torch.testing.assert_close(sequence_scores(model, IDS, IDS > 0), scores)
    half = load_scalar_model(folder, ModelOptions(dtype="bfloat16"), heads=1)
    assert half.score.weight.dtype == torch.bfloat16
    assert RewardModule(folder, lm_coef=0.0, heads=3).model.score.weight.shape[0] == 3
    with pytest.raises(ValueError, match=r"heads: expected 1 or 3 for .* got 2"):
        RewardModule(folder, lm_coef=0.0, heads=2)
    with pytest.raises(ValueError, match="heads: expected an integer >= 1, got 0"):
        RewardModule(folder, heads=0)


def test_a_critic_on_shared_weights_has_the_mean_of_the_heads(folder: str) -> None:
    options = ModelOptions(lora_rank=2)
    reward = ModelReward(folder, options)
    heads = sequence_scores(reward.model, IDS, IDS > 0)
    critic = load_scalar_model("not read", options, base=reward.find_base(options)).eval()
    assert count_heads(unwrap_model(critic).config) == 1
    torch.testing.assert_close(sequence_scores(critic, IDS, IDS > 0), heads.mean(1))
    assert torch.equal(sequence_scores(reward.model, IDS, IDS > 0), heads)  # it still has them


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_export_of_a_folder_makes_one_head(root: Path, tmp_path: Path, lora_rank: int) -> None:
    run = saved_run("reward", root, tmp_path, heads=3, network={"lora_rank": lora_rank})
    saved, expected = load_checkpoint_model(run.checkpoint), plain_scores(run.finished)
    saved.save(tmp_path / "heads")
    if lora_rank:
        saved.save_adapters(tmp_path / "adapters")
        load_folder_model(tmp_path / "adapters").save(tmp_path / "heads")
    torch.testing.assert_close(plain_scores(tmp_path / "heads"), expected)
    with pytest.raises(ValueError, match="expected transformers for a model of 3 heads, got trl"):
        saved.save(tmp_path / "trl", format="trl")
    assert load_folder_model(run.finished).card is None or lora_rank
    load_folder_model(tmp_path / "heads").save(tmp_path / "one", format="openrlhf")
    torch.testing.assert_close(plain_scores(tmp_path / "one"), expected.mean(1, keepdim=True))
    unwrap_model(saved.model).config.id2label = {0: "helpful", 1: "correct", 2: "verbose"}
    with pytest.raises(ValueError, match=r"expected a scalar model .*, 3 labels"):
        scalar_head_of(saved.model)


def test_ppo_learns_from_the_heads_of_one_model(folder: str, root: Path, tmp_path: Path) -> None:
    shaping = {"ensemble": "min", "spread_coef": 0.5}
    options = stages.ppo_options(root, rewards={folder: 1.0}, reward_shaping=shaping)
    module = PPOModule(**options)
    torch.testing.assert_close(module.critic.score.weight, load_scalar_model(folder).score.weight)
    run = stages.fit_module(module, stages.prompts(root), tmp_path)
    assert float(run.callback_metrics["rollout/score_spread"]) > 0
    assert load_scalar_model(tmp_path / "model" / "critic", heads=None).config.num_labels == 1
