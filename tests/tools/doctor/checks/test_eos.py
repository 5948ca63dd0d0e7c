"""The doctor's check of EOS: how probable it is where texts end."""

from pathlib import Path

import pytest
import torch

from lit_rlhf.tools.doctor.checks.eos import _data_eos_probability
from tests.support.doctor_runs import case_of
from tests.support.stages import first_batch, prompts
from tests.support.tiny_models import EOS_ID


@torch.no_grad()
def test_eos_of_ptx_examples_is_as_probable_as_the_policy_says(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path)
    case.batch = first_batch(prompts(root, ptx=True), root)
    assert case.batch.ptx is not None
    logprobs = []
    for ids, real in zip(case.batch.ptx.input_ids, case.batch.ptx.attention_mask, strict=True):
        *before, last = ids[real].tolist()
        if last == EOS_ID:
            logits = case.module.policy(input_ids=torch.tensor([before]), use_cache=False).logits
            logprobs.append(logits[0, -1].double().log_softmax(0)[EOS_ID])
    assert logprobs
    expected = float(torch.stack(logprobs).mean().exp())
    assert _data_eos_probability(case) == pytest.approx(expected, rel=1e-4)
