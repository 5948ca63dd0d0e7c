"""Examples, padding and collation."""

import pytest
import torch

from lit_rlhf.data.examples import (
    PreferenceExample,
    PromptDataset,
    PromptExample,
    TokenExample,
    collate_preferences,
    collate_prompts,
    collate_tokens,
    pad_sequences,
)
from lit_rlhf.data.samplers import IndexPair

IDS = [torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)]


EXAMPLES = [
    TokenExample(IDS[0], torch.tensor([False, True, True])),
    TokenExample(IDS[1], torch.tensor([False])),
]
PROMPTS = [PromptExample(ids, text) for ids, text in zip(IDS, "ab", strict=True)]


def test_token_batch_pads_on_the_right() -> None:
    batch = collate_tokens(EXAMPLES, 9)  # masks come from lengths
    assert batch.input_ids.tolist() == [[7, 8, 9], [5, 9, 9]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.completion_mask.tolist() == [[False, True, True], [False, False, False]]
    assert [tensor.dtype for tensor in batch] == [torch.int64, torch.bool, torch.bool]


def test_preference_batch_pads_each_half_by_itself() -> None:
    batch = collate_preferences([PreferenceExample(*EXAMPLES, margin=2.5, source=1)], 9)
    assert batch.chosen.input_ids.tolist() == [[7, 8, 9]]
    assert batch.rejected.input_ids.tolist() == [[5]]
    assert (batch.margin.tolist(), batch.source.tolist()) == ([2.5], [1])


def test_prompt_batch_pads_on_the_left() -> None:
    dataset = PromptDataset([PROMPTS[1], PROMPTS[1], PROMPTS[0]])
    batch = collate_prompts([dataset[2], dataset[0]], 0)
    assert batch.input_ids.tolist() == [[7, 8, 9], [0, 0, 5]]
    assert batch.attention_mask.tolist() == [[True, True, True], [False, False, True]]
    assert (batch.texts, batch.index.tolist()) == (["a", "b"], [2, 0])
    assert batch.ptx is None


def test_rows_of_a_prompt_batch_are_selected_with_all_columns() -> None:
    dataset = PromptDataset([PROMPTS[0], PROMPTS[1]._replace(fields={"answer": 4})], EXAMPLES)
    batch = collate_prompts([dataset[IndexPair(0, 0)], dataset[IndexPair(1, 0)]], 0)
    assert batch.fields == [{}, {"answer": 4}]
    rows = batch.select([1, 1, 0])
    assert (rows.texts, rows.fields) == (["b", "b", "a"], [{"answer": 4}, {"answer": 4}, {}])
    assert rows.index.tolist() == [1, 1, 0]
    assert rows.input_ids.tolist() == [[0, 0, 5], [0, 0, 5], [7, 8, 9]]
    assert rows.attention_mask.sum(1).tolist() == [1, 1, 3]
    assert rows.ptx.input_ids.tolist() == [[7, 8, 9]] * 3


@pytest.mark.parametrize(
    ("sequences", "message"), [([], "got none"), ([torch.zeros(2, 2)], r"got \(2, 2\)")]
)
def test_unpaddable_sequences_are_refused(sequences: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pad_sequences(sequences, 0)
    with pytest.raises(ValueError, match="expected 3 entries in row 0, got 2"):
        collate_tokens([EXAMPLES[0]._replace(completion_mask=torch.ones(2).bool())], 0)
