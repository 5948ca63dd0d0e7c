from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_rlhf.forward import sequence_scores, token_logits, token_values
from lit_rlhf.forward.attention import ATTENTION_NAME
from lit_rlhf.forward.outputs import response_logits
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model
from tests.support.tiny_models import EOS_ID, FAMILIES, PAD_ID, VOCAB_SIZE, tiny_causal_lm

LENGTHS = (12, 7, 3)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator) for n in LENGTHS]


def padded(rows: list[Tensor], left: list[int], width: int, pad: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, left[i] : left[i] + len(row)] = row
        mask[i, left[i] : left[i] + len(row)] = True
    return ids, mask


LAYOUTS = {"left": [2, 7, 11], "right": [0, 0, 0], "both": [1, 3, 5]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pad", [PAD_ID, EOS_ID, 17])
def test_padding_changes_no_logits(family: str, layout: str, pad: int) -> None:
    model, rows = tiny_causal_lm(family), sequences()
    ids, mask = padded(rows, LAYOUTS[layout], 14, pad)
    with torch.no_grad():
        logits = token_logits(model, ids, mask)
        for i, row in enumerate(rows):
            alone = model(row.unsqueeze(0)).logits[0]
            torch.testing.assert_close(logits[i][mask[i]], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_scores_ignore_padding(
    family: str, layout: str, scalar_folder: Callable[[str], Path]
) -> None:
    model, rows = load_scalar_model(scalar_folder(family)).eval(), sequences()
    ids, mask = padded(rows, LAYOUTS[layout], 14, PAD_ID)
    with torch.no_grad():
        values, scores = token_values(model, ids, mask), sequence_scores(model, ids, mask)
        for i, row in enumerate(rows):
            alone = token_values(model, row[None], torch.ones(1, len(row), dtype=torch.bool))[0]
            torch.testing.assert_close(values[i][mask[i]], alone, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(scores[i], alone[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])  # Gemma 2 caps its logits
def test_response_logits_are_read_one_position_before_the_token(family: str) -> None:
    model, seen = tiny_causal_lm(family), list[int]()
    ids, mask = padded(sequences()[:1], [0], 12, PAD_ID)
    head = model.get_submodule("lm_head")
    head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    with torch.no_grad():
        logits = response_logits(model, ids, mask, response_length=4)
        assert seen == [5]  # nothing of the prompt but its last token
        for t in range(4):
            before = model(ids[:, : 8 + t]).logits[:, -1]
            torch.testing.assert_close(logits[:, t], before, rtol=1e-4, atol=1e-5)


def test_attention_implementations_agree(family: str, causal_folder: Callable[[str], Path]) -> None:
    ids, mask = padded(sequences(), LAYOUTS["both"], 14, PAD_ID)
    options = [ModelOptions(attn_implementation=name) for name in ("eager", "sdpa")]
    eager, sdpa = (load_causal_lm(causal_folder(family), o).eval() for o in options)
    names = [model.config._attn_implementation for model in (eager, sdpa)]
    assert names == ["eager", ATTENTION_NAME]  # sdpa, which also takes packed tokens
    with torch.no_grad():
        actual, expected = (token_logits(model, ids, mask)[mask] for model in (eager, sdpa))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_values_and_scores_of_bf16_models_are_float32(scalar_folder: Callable[[str], Path]) -> None:
    model = load_scalar_model(scalar_folder("llama"), ModelOptions(dtype="bfloat16"))
    ids, mask = padded(sequences(), LAYOUTS["left"], 14, PAD_ID)
    assert token_values(model, ids, mask).dtype == torch.float32
    assert sequence_scores(model, ids, mask).dtype == torch.float32


def test_a_row_without_real_tokens_has_no_score(scalar_folder: Callable[[str], Path]) -> None:
    model = load_scalar_model(scalar_folder("llama"))
    ids, mask = padded(sequences(), LAYOUTS["right"], 12, PAD_ID)
    mask[1] = False
    with pytest.raises(ValueError, match="mask: expected at least one True"):
        sequence_scores(model, ids, mask)


IDS, MASK = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (IDS.float(), MASK, "input_ids: expected an integer dtype, got torch.float32"),
        (IDS[0], MASK, "input_ids: expected 2 dimensions"),
        (IDS, MASK.long(), "mask: expected dtype torch.bool, got torch.int64"),
        (IDS, MASK[:, :4], r"mask: expected shape \(2, 5\)"),
    ],
)
def test_wrong_tensors_are_named(ids: Tensor, mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logits(tiny_causal_lm(), ids, mask)


def test_other_lengths_and_kinds_of_models_are_refused() -> None:
    for length in (0, 5):
        with pytest.raises(ValueError, match="response_length: expected a number from 1 to 4"):
            response_logits(tiny_causal_lm(), IDS, MASK, length)
    with pytest.raises(ValueError, match="expected a scalar model"):
        token_values(tiny_causal_lm(), IDS, MASK)
    with pytest.raises(ValueError, match=r"expected a transformers PreTrainedModel.*Linear"):
        token_logits(nn.Linear(2, 2), IDS, MASK)  # type: ignore[arg-type]
