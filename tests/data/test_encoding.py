"""One code path: dialogue ids are prompt ids, response ids and EOS."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from lit_rlhf.data.encoding import DialogueEncoder, EncodingError
from lit_rlhf.data.examples import collated_tokens, token_example
from lit_rlhf.data.records import Message
from tests.data.tiny_tokenizers import CHATML, tiny_tokenizer

SINGLE = [Message("user", "name two metals"), Message("assistant", "iron and copper")]
MULTI = [
    *SINGLE,
    Message("user", "one more, please"),
    Message("assistant", "zinc\n\nis a metal too. "),
]
CHINESE = [
    Message("system", "你是一个助手。"),
    Message("user", "你好，请介绍一下自己。"),
    Message("assistant", "我是一个助手。"),
    Message("user", "再见"),
    Message("assistant", "再见！"),
]
DIALOGUES = [SINGLE, MULTI, CHINESE]


def encoder(
    tokenizer: PreTrainedTokenizerFast, template: str, length: int = 512
) -> DialogueEncoder:
    if template == "own":
        tokenizer.chat_template = tokenizer.chat_template or CHATML
        template = "tokenizer"
    return DialogueEncoder(tokenizer, template, length)


@pytest.mark.parametrize("messages", DIALOGUES, ids=["single", "multi", "chinese"])
@pytest.mark.parametrize("template", ["hh", "paper-en", "paper-zh", "own"])
def test_dialogue_is_prompt_and_response(
    any_tokenizer: PreTrainedTokenizerFast, template: str, messages: list[Message]
) -> None:
    coder = encoder(any_tokenizer, template)
    prompt = coder.encode_prompt(messages[:-1])
    dialogue = coder.encode_dialogue(messages)
    n = len(prompt.input_ids)
    response = dialogue.input_ids[n:]
    assert dialogue.input_ids[:n] == prompt.input_ids
    assert dialogue.completion_mask == [False] * n + [True] * len(response)
    assert response.count(coder.eos_token_id) == 1
    assert response[-1] == coder.eos_token_id
    assert coder.decode_response(response) == messages[-1].content.strip()


@pytest.mark.parametrize("template", ["hh", "paper-en", "paper-zh", "own"])
def test_text_is_what_the_saved_template_renders(
    any_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    coder = encoder(any_tokenizer, template)
    chat = [{"role": m.role, "content": m.content} for m in MULTI]
    full = str(any_tokenizer.apply_chat_template(chat, tokenize=False))
    encoded = coder.encode_dialogue(MULTI)
    assert encoded.text == full.rstrip("\n")  # ChatML writes a newline behind its EOS
    assert any_tokenizer.decode(encoded.input_ids) == encoded.text


def test_prompt_ids_are_those_of_transformers(any_tokenizer: PreTrainedTokenizerFast) -> None:
    coder = encoder(any_tokenizer, "hh")
    chat = [{"role": m.role, "content": m.content} for m in MULTI[:-1]]
    rendered: Any = any_tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert coder.encode_prompt(MULTI[:-1]).input_ids == rendered["input_ids"]


def test_bos_is_written_once() -> None:
    coder = encoder(tiny_tokenizer(bos="<s>"), "hh")
    ids = coder.encode_dialogue(SINGLE).input_ids
    assert ids.count(int(coder.tokenizer.bos_token_id)) == 1
    assert ids[0] == coder.tokenizer.bos_token_id


def test_hh_response_starts_with_a_space(tokenizer: PreTrainedTokenizerFast) -> None:
    coder = encoder(tokenizer, "hh")
    prompt, dialogue = coder.encode_prompt(SINGLE[:1]), coder.encode_dialogue(SINGLE)
    assert prompt.text == "\n\nHuman: name two metals\n\nAssistant:"
    response = dialogue.input_ids[len(prompt.input_ids) :]
    assert tokenizer.decode(response) == " iron and copper</s>"


def trained_text(coder: DialogueEncoder, messages: list[Message], train_on: str) -> str:
    encoded = coder.encode_dialogue(messages, train_on)  # type: ignore[arg-type]
    marked = zip(encoded.input_ids, encoded.completion_mask, strict=True)
    return str(coder.tokenizer.decode([i for i, trained in marked if trained]))


@pytest.mark.parametrize(
    ("template", "last", "everything"),
    [
        ("hh", " four</s>", " two four</s>"),
        ("paper-en", "four</s>", "two</s>four</s>"),
        ("paper-zh", "four</s>", "two</s>four</s>"),
    ],
)
def test_trained_tokens(
    tokenizer: PreTrainedTokenizerFast, template: str, last: str, everything: str
) -> None:
    coder = encoder(tokenizer, template)
    pairs = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages = [Message(role, content) for role, content in pairs]
    assert trained_text(coder, messages, "last") == last
    assert trained_text(coder, messages, "all") == everything


def test_trained_tokens_of_a_tokenizers_own_template() -> None:
    tokenizer = tiny_tokenizer("<|im_end|>", extra=["<|im_start|>"], chat_template=CHATML)
    text = trained_text(encoder(tokenizer, "own"), MULTI, "all")
    assert text == "iron and copper<|im_end|>zinc\n\nis a metal too. <|im_end|>"


def test_ids_do_not_depend_on_what_is_trained(any_tokenizer: PreTrainedTokenizerFast) -> None:
    coder = encoder(any_tokenizer, "own")
    assert (
        coder.encode_dialogue(MULTI, "all").input_ids
        == coder.encode_dialogue(MULTI, "last").input_ids
    )


def test_eos_is_trained_when_it_is_the_pad_token() -> None:
    tokenizer = tiny_tokenizer(pad=None)
    coder = encoder(tokenizer, "hh")
    assert coder.pad_token_id == coder.eos_token_id
    short = [Message("user", "a"), Message("assistant", "b")]
    batch = collated_tokens(
        [token_example(coder.encode_dialogue(m)) for m in (SINGLE, short)], coder.pad_token_id
    )
    logits = torch.zeros(*batch.input_ids.shape, len(tokenizer), requires_grad=True)
    loss = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch.input_ids[:, 1:], reduction="none"
    )
    (loss * batch.completion_mask[:, 1:]).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    pulls = logits.grad[..., coder.eos_token_id] < 0  # cross entropy pushes the target's logit up
    assert pulls.sum(dim=1).tolist() == [1, 1]


def test_pair_shares_its_prompt_ids(any_tokenizer: PreTrainedTokenizerFast) -> None:
    coder = encoder(any_tokenizer, "own")
    pair = coder.encode_pair(MULTI[:-1], "zinc", "there are no more metals")
    n = len(coder.encode_prompt(MULTI[:-1]).input_ids)
    assert pair.chosen.input_ids[:n] == pair.rejected.input_ids[:n]
    assert pair.chosen == coder.encode_dialogue([*MULTI[:-1], Message("assistant", "zinc")])


def test_decode_stops_at_the_first_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    coder = encoder(tokenizer, "hh")
    ids = tokenizer(" yes</s> no", add_special_tokens=False)["input_ids"]
    assert coder.decode_response(ids) == "yes"


def test_plain_text_becomes_blocks(tokenizer: PreTrainedTokenizerFast) -> None:
    coder = encoder(tokenizer, "hh", 5)
    blocks = coder.encode_text("Paris is the capital of France.")
    joined = [token for block in blocks for token in block]
    assert all(len(block) == 5 for block in blocks[:-1])
    assert tokenizer.decode(joined) == "Paris is the capital of France.</s>"


def test_block_without_a_target_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    n = len(tokenizer("Paris", add_special_tokens=False)["input_ids"])
    assert len(encoder(tokenizer, "hh", n).encode_text("Paris")) == 1


def test_template_that_does_not_continue_its_prompt_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    coder = DialogueEncoder(tokenizer)
    with pytest.raises(ValueError, match=r"(?s)prompt:.*metals\]<think>.*dialogue:.*\]\[iron"):
        coder.encode_dialogue(SINGLE)


def test_text_of_the_eos_token_in_a_turn_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    coder = encoder(tokenizer, "hh")
    with pytest.raises(EncodingError, match="a turn contains the text of the EOS token"):
        coder.encode_dialogue([SINGLE[0], Message("assistant", "one</s>two")])
    with pytest.raises(EncodingError, match="EOS"):
        coder.encode_prompt([Message("user", "what is </s>?")])


def test_dialogue_must_end_with_the_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="assistant turn at the end"):
        encoder(tokenizer, "hh").encode_dialogue(MULTI[:-1])


def test_tokenizer_without_eos_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="EOS"):
        DialogueEncoder(tokenizer, "hh")
