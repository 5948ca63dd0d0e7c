"""Kernels and CUDA graphs of rollouts, against what other devices compute."""

import pytest
import torch

from benchmarks.gpu import varlen_smoke
from lit_rlhf.forward import optimize_forward
from lit_rlhf.rollout import SamplingOptions, generate_responses, graphs
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_cuda]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("window", [None, 50])
def test_packed_rows_and_their_gradients_match_groups(window: int | None) -> None:
    for check in varlen_smoke.compare_packed(CUDA, window, ""):
        assert check.passed, check


@pytest.mark.parametrize("window", [None, 50])
def test_token_attends_to_its_own_keys_in_the_cache(window: int | None) -> None:
    assert varlen_smoke.compare_decode(CUDA, window) < varlen_smoke.TOLERANCE


def test_replayed_steps_sample_the_same_tokens() -> None:
    assert varlen_smoke.compare_replay(CUDA) == 0


@pytest.mark.parametrize("seen", [True, False], ids=["seen by torch", "found at capture"])
def test_step_that_waits_falls_back_and_leaves_the_device_usable(seen: bool) -> None:
    model = optimize_forward(tiny_causal_lm().to(torch.bfloat16)).cuda()
    ids = torch.randint(4, 288, (4, 9), device=CUDA)
    mask = torch.ones_like(ids, dtype=torch.bool)
    options = SamplingOptions(max_new_tokens=20)
    expected = generate_responses(
        model, ids, mask, options, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, seed=3
    )
    assert model.base_model not in graphs._NOT_CAPTURABLE

    def wait(*_: object) -> None:
        ids.sum().item()

    model.base_model.layers[0].register_forward_hook(wait)
    if seen:
        graphs._NEVER_WAITS.discard(model.base_model)
    stream = torch.cuda.current_stream()
    rollouts = generate_responses(
        model, ids, mask, options, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, seed=3
    )
    assert model.base_model in graphs._NOT_CAPTURABLE
    assert torch.cuda.current_stream() == stream
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert torch.rand(4, device=CUDA).shape == (4,)  # by the generator that every capture records
    torch.cuda.synchronize()


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_weights_that_changed_are_seen_by_the_next_graphs(precision: torch.dtype) -> None:
    model = optimize_forward(tiny_causal_lm().to(precision)).cuda().requires_grad_(True)
    ids = torch.randint(4, 288, (4, 9), device=CUDA)
    mask = torch.ones_like(ids, dtype=torch.bool)
    options = SamplingOptions(max_new_tokens=20, do_sample=False)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.float32):
        before = generate_responses(
            model, ids, mask, options, eos_token_ids=[], pad_token_id=PAD_ID, seed=0
        ).response_ids
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(-parameter)
        after = generate_responses(
            model, ids, mask, options, eos_token_ids=[], pad_token_id=PAD_ID, seed=0
        ).response_ids
    assert not torch.equal(before, after)
