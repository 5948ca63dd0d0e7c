"""The built-in chat templates, rendered by transformers alone."""

import pytest
from transformers import PreTrainedTokenizerFast

from lit_rlhf.data import DialogueEncoder, EncodingError, Message, templates
from lit_rlhf.data.templates import CHAT_TEMPLATES, adds_bos, resolve_template
from tests.data.tiny_tokenizers import CHATML, tiny_tokenizer

CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def rendered(tokenizer: PreTrainedTokenizerFast, name: str, turns: int, prompt: bool) -> str:
    template = resolve_template(name, tokenizer)
    return str(
        tokenizer.apply_chat_template(
            CHAT[:turns], chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hh", "\n\nHuman: one\n\nAssistant: two\n\nHuman: three\n\nAssistant: four</s>"),
        ("paper-en", "Human:one</s>Assistant:two</s>Human:three</s>Assistant:four</s>"),
        ("paper-zh", "<|Human|>one</s><|MOSS|>two</s><|Human|>three</s><|MOSS|>four</s>"),
    ],
)
def test_dialogue(tokenizer: PreTrainedTokenizerFast, name: str, expected: str) -> None:
    assert rendered(tokenizer, name, 4, prompt=False) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hh", "\n\nHuman: one\n\nAssistant: two\n\nHuman: three\n\nAssistant:"),
        ("paper-en", "Human:one</s>Assistant:two</s>Human:three</s>Assistant:"),
        ("paper-zh", "<|Human|>one</s><|MOSS|>two</s><|Human|>three</s><|MOSS|>"),
    ],
)
def test_prompt(tokenizer: PreTrainedTokenizerFast, name: str, expected: str) -> None:
    assert rendered(tokenizer, name, 3, prompt=True) == expected


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
def test_system_turn_stands_first_without_a_marker(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    chat = [{"role": "system", "content": "Be kind."}, *CHAT[:1]]
    template = resolve_template(name, tokenizer)
    text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    assert str(text).startswith("Be kind.")


def test_bos_is_written_for_a_tokenizer_that_adds_one() -> None:
    tokenizer = tiny_tokenizer(bos="<s>")
    assert adds_bos(tokenizer)
    assert rendered(tokenizer, "paper-en", 1, prompt=False) == "<s>Human:one</s>"


def test_bos_is_not_written_for_a_tokenizer_that_only_has_one() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token  # GPT-2
    assert not adds_bos(tokenizer)
    assert rendered(tokenizer, "paper-en", 1, prompt=False) == "Human:one</s>"


def test_markers_are_single_tokens_only_where_the_tokenizer_has_them() -> None:
    plain = tiny_tokenizer()
    before = len(plain)
    special = tiny_tokenizer(extra=["<|Human|>", "<|MOSS|>"])
    text = rendered(plain, "paper-zh", 1, prompt=True)
    assert len(plain) == before
    human = special.convert_tokens_to_ids("<|Human|>")
    assert special(text)["input_ids"][0] == human
    assert len(plain("<|Human|>")["input_ids"]) > 1


def test_own_template() -> None:
    assert resolve_template("tokenizer", tiny_tokenizer(chat_template=CHATML)) == CHATML


def test_own_template_among_several() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tools": "x"}
    assert resolve_template("tokenizer", tokenizer) == CHATML


def test_missing_own_template_names_the_built_in_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="'hh', 'paper-en', 'paper-zh'"):
        resolve_template("tokenizer", tokenizer)


def test_unknown_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"expected 'tokenizer' or one of 'hh'.*got 'chatml'"):
        resolve_template("chatml", tokenizer)


SLOW = "{% for a in range(999) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "TEMPLATE_SECONDS", 0.01)
    # it is fast for the short dialogues that an encoder starts with
    template = "{% if 'evil' in messages[0]['content'] %}" + SLOW + "{% endif %}" + CHATML
    coder = DialogueEncoder(tiny_tokenizer(chat_template=template))
    message = r'expected one that renders a dialogue within 0\.01 seconds, got "\{% if'
    with pytest.raises(ValueError, match=message):
        coder.encode_prompt([Message("user", "evil")])
    with pytest.raises(ValueError, match=message):
        coder.contract.render([{"role": "user", "content": "evil"}])


def test_a_dialogue_that_the_template_refuses_is_a_bad_record() -> None:
    refuse = "{% if messages | length > 3 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    coder = DialogueEncoder(tiny_tokenizer(chat_template=refuse))
    turns = [Message("user", "a"), Message("assistant", "b")] * 2
    with pytest.raises(EncodingError, match=r"refuses the dialogue \(too many\)"):
        coder.encode_dialogue(turns)
