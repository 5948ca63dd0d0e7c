"""SFT: what the loss counts, and the schedule it is trained with."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from lit_rlhf.modules import SFTModule
from tests.support.stages import demonstrations, first_batch, fit_module, token_nll, trainer
from tests.support.tiny_models import EOS_ID


def module(root: Path, **options: object) -> SFTModule:
    return SFTModule(str(root / "policy"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_loss_is_the_mean_over_all_completion_tokens(
    request: pytest.FixtureRequest, tmp_path: Path, pad_is_eos: bool
) -> None:
    root = request.getfixturevalue("pad_is_eos_root" if pad_is_eos else "root")
    model, batch = module(root), first_batch(demonstrations(root, batch_size=8), root)
    eos = model.tokenizer.eos_token_id
    assert (model.tokenizer.pad_token_id == eos) is pad_is_eos
    # EOS is a target, and padding is none
    assert batch.input_ids[torch.arange(8), batch.attention_mask.sum(1) - 1].eq(eos).all()
    assert batch.completion_mask[torch.arange(8), batch.attention_mask.sum(1) - 1].all()
    assert not batch.attention_mask.all()
    assert len(set(batch.completion_mask.sum(1).tolist())) > 3
    losses = []  # one per completion token, row by row without padding, float64
    for ids, real, is_target in zip(*batch, strict=True):
        losses.append(token_nll(model.model, ids[real])[is_target[real][1:]])
    expected = torch.cat(losses).mean()
    # batches of 3, 3 and 2 sequences, of unlike numbers of tokens
    data, run = demonstrations(root, batch_size=3), trainer(tmp_path, limit_val_batches=None)
    (held_out,) = run.validate(model, datamodule=data, verbose=False)
    assert held_out["val/sft/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert held_out["val/sft/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    # the error over dialogues, and a model that only knows how often each token occurs
    n_tokens = [len(loss) for loss in losses]
    residuals = [float(loss.sum() - expected * len(loss)) for loss in losses]
    error = math.sqrt(8 / 7 * sum(r**2 for r in residuals)) / sum(n_tokens)
    assert held_out["val/sft/loss_error"] == pytest.approx(error, rel=1e-4)
    (again,) = run.validate(model, datamodule=data, verbose=False)
    assert again == held_out
    counts = Counter(batch.input_ids[batch.completion_mask].tolist())
    shares = [count / sum(n_tokens) for count in counts.values()]
    entropy = -sum(share * math.log(share) for share in shares)
    assert held_out["val/sft/frequency_loss"] == pytest.approx(entropy, rel=1e-6)
    assert held_out["val/sft/frequency_accuracy"] == pytest.approx(max(shares))
    logged = fit_module(model, demonstrations(root, batch_size=8), tmp_path).callback_metrics
    assert float(logged["sft/loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(logged["sft/perplexity"]) == pytest.approx(math.exp(expected), rel=1e-4)


def test_token_accuracy_counts_completion_tokens_ranked_first(root: Path) -> None:
    model = module(root)
    with torch.no_grad():
        model.model.lm_head.weight[EOS_ID] *= 1e3  # EOS or its opposite is certain: some are right
    batch = first_batch(demonstrations(root, batch_size=8), root)
    hits, tokens = 0, 0
    for ids, real, is_target in zip(*batch, strict=True):
        logits = model.model(input_ids=ids[real].unsqueeze(0), use_cache=False).logits[0]
        for position in range(1, int(real.sum())):
            if is_target[position]:
                tokens += 1
                hits += int(logits[position - 1].argmax()) == int(ids[position])
    assert 0 < hits < tokens
    share = model(batch, torch.tensor(float(tokens)))["sft/token_accuracy"]
    assert float(share) == pytest.approx(hits / tokens)
    # a micro-batch is a share in the mean of a step with more tokens
    part = model(batch, torch.tensor(4.0 * tokens))["sft/token_accuracy"]
    assert float(part) == pytest.approx(hits / tokens / 4)


def test_an_endless_run_cannot_have_a_schedule_with_an_end(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lr_scheduler: 'cosine_with_min_lr' needs the length"):
        fit_module(module(root), demonstrations(root), tmp_path, max_epochs=-1)
    with pytest.raises(ValueError, match=r"warmup_ratio: expected a number in \[0, 1\], got 2"):
        fit_module(module(root, optimizer={"warmup_ratio": 2.0}), demonstrations(root), tmp_path)
