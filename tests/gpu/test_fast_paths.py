"""Packed forwards and the engine on a CUDA device: what they give on a CPU."""

import pytest
import torch

from lit_rlhf.forward import target_logprobs
from lit_rlhf.forward.attention import AttentionInputs, causal_attention
from lit_rlhf.models.prepare import use_fused_kernels
from lit_rlhf.rollout import SamplingOptions, compute_policy_statistics, generate_responses
from tests.support.decoding import EOS_IDS, make_prompts
from tests.support.tiny_models import FAMILIES, PAD_ID, optimized_causal_lm

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_cuda]


def learned() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts padded on the right, their mask, and the mask of all tokens but the first."""
    ids, mask = (tensor.flip(1) for tensor in make_prompts())
    targets = mask.clone()
    targets[:, 0] = False
    return ids, mask, targets


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_slots", [6, 2])
def test_responses_match_the_cpu(family: str, n_slots: int) -> None:
    ids, mask = make_prompts()
    options = SamplingOptions(max_new_tokens=30, do_sample=False)
    model = optimized_causal_lm(family)
    expected = generate_responses(
        model, ids, mask, options, eos_token_ids=EOS_IDS, pad_token_id=PAD_ID, seed=0, batch_size=6
    )
    model = optimized_causal_lm(family).cuda()
    rollouts = generate_responses(
        model,
        ids.cuda(),
        mask.cuda(),
        options,
        eos_token_ids=EOS_IDS,
        pad_token_id=PAD_ID,
        seed=0,
        batch_size=n_slots,
    )
    assert torch.equal(rollouts.response_ids.cpu(), expected.response_ids)
    scored = compute_policy_statistics(model, rollouts)
    torch.testing.assert_close(rollouts.statistics.logprobs, scored.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_match_the_cpu(family: str) -> None:
    (ids, mask, targets), readings = learned(), []
    cpu, gpu = optimized_causal_lm(family), optimized_causal_lm(family).cuda()
    for model, device in ((cpu, "cpu"), (gpu, "cuda")):
        logprobs = target_logprobs(model, ids.to(device), mask.to(device), targets.to(device))
        logprobs.sum().backward()
        readings.append(logprobs.detach().cpu())
    torch.testing.assert_close(readings[0], readings[1], rtol=1e-4, atol=1e-4)
    for one, other in zip(cpu.parameters(), gpu.parameters(), strict=True):
        if one.grad is not None:
            largest = max(float(one.grad.abs().max()), 1.0)
            assert float((one.grad - other.grad.cpu()).abs().max()) <= 1e-3 * largest


def test_fused_kernels_change_nothing_but_the_speed() -> None:
    pytest.importorskip("liger_kernel")
    ids, mask, targets = (tensor.cuda() for tensor in learned())
    plain, fused = optimized_causal_lm().cuda(), use_fused_kernels(optimized_causal_lm()).cuda()
    one, other = (target_logprobs(model, ids, mask, targets) for model in (plain, fused))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_grouped_heads_in_float32_hold_no_matrix_of_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, 4096, 64) for heads in (8, 2, 2))
    query, key, value = (torch.randn(shape, generator=generator).cuda() for shape in shapes)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    causal_attention(AttentionInputs(query, key, value, scale=None, dropout=0.0, window=None))
    used = torch.cuda.max_memory_allocated() - before
    # the scores of all heads would take eight of these matrices
    assert used < 4 * 4096 * 4096 * 4
