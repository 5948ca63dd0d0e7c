"""Over-long dialogues lose their oldest turns, never their end."""

import pytest
from transformers import PreTrainedTokenizerFast

from lit_rlhf.data.encoding import DialogueEncoder, ResponseTooLongError
from lit_rlhf.data.records import Message
from tests.data.tiny_tokenizers import tiny_tokenizer

SYSTEM = Message("system", "be kind")
TURNS = [
    Message("user", "first question"),
    Message("assistant", "first answer"),
    Message("user", "second question"),
    Message("assistant", "second answer"),
    Message("user", "third question"),
]
ANSWER = Message("assistant", "third answer")


def length(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> int:
    """Length of the dialogue, measured by an encoder with room for everything."""
    return len(DialogueEncoder(tokenizer, "hh", 2000).encode_dialogue(messages).input_ids)


def test_nothing_is_lost_at_the_exact_length(tokenizer: PreTrainedTokenizerFast) -> None:
    full = [*TURNS, ANSWER]
    coder = DialogueEncoder(tokenizer, "hh", length(tokenizer, full))
    encoded = coder.encode_dialogue(full)
    assert (encoded.dropped_turns, encoded.cut_tokens) == (0, 0)
    assert len(encoded.input_ids) == coder.max_length


@pytest.mark.parametrize(("kept", "dropped"), [(TURNS[2:], 2), (TURNS[4:], 4)])
def test_oldest_turns_go_first(
    tokenizer: PreTrainedTokenizerFast, kept: list[Message], dropped: int
) -> None:
    coder = DialogueEncoder(tokenizer, "hh", length(tokenizer, [*kept, ANSWER]))
    encoded = coder.encode_dialogue([*TURNS, ANSWER])
    assert encoded.dropped_turns == dropped
    assert encoded == coder.encode_dialogue([*kept, ANSWER])._replace(dropped_turns=dropped)


def test_system_turn_is_kept_where_it_fits(tokenizer: PreTrainedTokenizerFast) -> None:
    coder = DialogueEncoder(tokenizer, "hh", length(tokenizer, [SYSTEM, *TURNS[4:], ANSWER]))
    encoded = coder.encode_dialogue([SYSTEM, *TURNS, ANSWER])
    assert encoded.text.startswith("be kind\n\nHuman: third question")
    assert encoded.dropped_turns == 4


def test_system_turn_goes_before_the_last_turn_is_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    coder = DialogueEncoder(tokenizer, "hh", length(tokenizer, [*TURNS[4:], ANSWER]))
    encoded = coder.encode_dialogue([SYSTEM, *TURNS, ANSWER])
    assert encoded.text == "\n\nHuman: third question\n\nAssistant: third answer</s>"
    assert (encoded.dropped_turns, encoded.cut_tokens) == (5, 0)


def test_last_turn_is_cut_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = DialogueEncoder(tokenizer, "hh", 2000).encode_dialogue([TURNS[4], ANSWER])
    coder = DialogueEncoder(tokenizer, "hh", len(whole.input_ids) - 3)
    encoded = coder.encode_dialogue([*TURNS, ANSWER])
    assert encoded.input_ids == whole.input_ids[3:]
    assert encoded.completion_mask == whole.completion_mask[3:]
    assert (encoded.dropped_turns, encoded.cut_tokens) == (4, 3)
    assert encoded.text == tokenizer.decode(encoded.input_ids)


def test_cut_prompt_leaves_the_last_response_to_train_on(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    coder = DialogueEncoder(tokenizer, "hh", 20)
    encoded = coder.encode_dialogue([*TURNS, ANSWER], "all")
    assert encoded.cut_tokens > 0
    assert encoded == coder.encode_dialogue([*TURNS, ANSWER], "last")


def test_cut_prompt_keeps_its_bos() -> None:
    tokenizer = tiny_tokenizer(bos="<s>")
    whole = DialogueEncoder(tokenizer, "hh", 2000).encode_prompt([TURNS[4]])
    cut = DialogueEncoder(tokenizer, "hh", 2000, 6).encode_prompt([TURNS[4]])
    assert cut.input_ids == [whole.input_ids[0], *whole.input_ids[-5:]]
    assert cut.cut_tokens == len(whole.input_ids) - 6


def test_masks_move_with_the_tokens_when_all_turns_are_trained() -> None:
    tokenizer = tiny_tokenizer(bos="<s>")
    messages = [TURNS[0], TURNS[1], TURNS[2], ANSWER]
    limit = length(tokenizer, messages) - 1
    encoded = DialogueEncoder(tokenizer, "hh", limit).encode_dialogue(messages, "all")
    trained = [i for i, m in zip(encoded.input_ids, encoded.completion_mask, strict=True) if m]
    assert tokenizer.decode(trained) == " third answer</s>"  # the first exchange was dropped


def test_response_is_never_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    coder = DialogueEncoder(tokenizer, "hh", 8)
    with pytest.raises(ResponseTooLongError, match="the response alone is longer than max_length"):
        coder.encode_dialogue([TURNS[0], Message("assistant", "word " * 20)])


def test_response_may_leave_room_for_one_prompt_token(tokenizer: PreTrainedTokenizerFast) -> None:
    response = len(tokenizer(" third answer", add_special_tokens=False)["input_ids"]) + 1
    encoded = DialogueEncoder(tokenizer, "hh", response + 1).encode_dialogue([TURNS[4], ANSWER])
    assert encoded.completion_mask == [False] + [True] * response
    with pytest.raises(ResponseTooLongError):
        DialogueEncoder(tokenizer, "hh", response).encode_dialogue([TURNS[4], ANSWER])


def test_pair_is_shortened_alike_for_both_responses(tokenizer: PreTrainedTokenizerFast) -> None:
    long = "a very long answer that goes on and on " * 4
    limit = length(tokenizer, [*TURNS[4:], Message("assistant", long)])
    pair = DialogueEncoder(tokenizer, "hh", limit).encode_pair(TURNS, "short", long)
    assert pair.chosen.dropped_turns == pair.rejected.dropped_turns == 4
    n = pair.chosen.completion_mask.index(True)
    assert pair.chosen.input_ids[:n] == pair.rejected.input_ids[:n]
    assert len(pair.chosen.input_ids) < len(pair.rejected.input_ids) == limit


def test_prompt_limit_holds_for_dialogues_too(tokenizer: PreTrainedTokenizerFast) -> None:
    limit = len(DialogueEncoder(tokenizer, "hh", 2000).encode_prompt(TURNS[2:]).input_ids)
    coder = DialogueEncoder(tokenizer, "hh", 2000, limit)
    prompt, dialogue = coder.encode_prompt(TURNS), coder.encode_dialogue([*TURNS, ANSWER])
    assert prompt.dropped_turns == dialogue.dropped_turns == 2
    assert dialogue.input_ids[:limit] == prompt.input_ids


@pytest.mark.parametrize(
    ("max_length", "max_prompt_length", "message"),
    [(1, None, "at least 2"), (8, 9, "1 to max_length=8, got 9"), (8, 0, "got 0")],
)
def test_lengths_out_of_range_are_refused(
    tokenizer: PreTrainedTokenizerFast, max_length: int, max_prompt_length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DialogueEncoder(tokenizer, "hh", max_length, max_prompt_length)
