"""The built-in chat templates, rendered by transformers alone."""

import resource
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from lit_rlhf import sandbox
from lit_rlhf.data import DialogueEncoder, EncodingError, Message
from lit_rlhf.data.templates import CHAT_TEMPLATES, TEMPLATE_DATE, adds_bos, resolve_template
from tests.support.tiny_tokenizers import CHATML, tiny_tokenizer

ROLES, WORDS = ("user", "assistant") * 2, ("one", "two", "three", "four")
CHAT = [{"role": role, "content": word} for role, word in zip(ROLES, WORDS, strict=True)]


def rendered(tokenizer: Tokenizer, name: str, turns: int, prompt: bool) -> str:
    options = {"chat_template": resolve_template(name, tokenizer), "add_generation_prompt": prompt}
    return str(tokenizer.apply_chat_template(CHAT[:turns], tokenize=False, **options))


@pytest.mark.parametrize(
    ("name", "expected", "next_prompt"),
    [
        ("hh", "\n\nHuman: one\n\nAssistant: two\n\nHuman: three\n\nAssistant:", " four</s>"),
        ("paper-en", "Human:one</s>Assistant:two</s>Human:three</s>Assistant:", "four</s>"),
        ("paper-zh", "<|Human|>one</s><|MOSS|>two</s><|Human|>three</s><|MOSS|>", "four</s>"),
        ("none", "onetwothree", "four</s>"),
    ],
)
def test_prompt_and_dialogue(
    tokenizer: Tokenizer, name: str, expected: str, next_prompt: str
) -> None:
    assert rendered(tokenizer, name, 3, prompt=True) == expected
    assert rendered(tokenizer, name, 4, prompt=False) == expected + next_prompt


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
def test_system_turn_stands_first_without_marker(tokenizer: Tokenizer, name: str) -> None:
    chat = [{"role": "system", "content": "Be kind."}, *CHAT[:1]]
    template = resolve_template(name, tokenizer)
    text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    assert str(text).startswith("Be kind.")


def test_bos_is_written_for_a_tokenizer_that_adds_one() -> None:
    tokenizer = tiny_tokenizer(bos="<s>")
    assert adds_bos(tokenizer)
    assert rendered(tokenizer, "paper-en", 1, prompt=False) == "<s>Human:one</s>"
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token  # GPT-2 has one, and does not add it
    assert not adds_bos(tokenizer)
    assert rendered(tokenizer, "paper-en", 1, prompt=False) == "Human:one</s>"


def test_template_none_joins_prompt_response_and_eos(tokenizer: Tokenizer) -> None:
    encoder = DialogueEncoder(tokenizer, "none")
    example = encoder.encode_dialogue([Message("user", "two TL;DR:"), Message("assistant", " x")])
    prompt, response = (tokenizer(text)["input_ids"] for text in ("two TL;DR:", " x"))
    assert example.input_ids.tolist() == [*prompt, *response, tokenizer.eos_token_id]
    assert int(example.completion_mask.sum()) == len(response) + 1


def test_template_of_a_tokenizer_or_a_file_is_resolved(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="'hh', 'paper-en', 'paper-zh'"):
        resolve_template("tokenizer", tokenizer)
    with pytest.raises(ValueError, match=r"expected 'tokenizer', one of 'hh'.*got 'chatml'"):
        resolve_template("chatml", tokenizer)
    (tmp_path / "mine.jinja").write_text(CHATML, "utf-8")
    assert resolve_template(str(tmp_path / "mine.jinja"), tokenizer) == CHATML
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"latin.jinja: expected text in UTF-8"):
        resolve_template(str(tmp_path / "latin.jinja"), tokenizer)
    for stored in (CHATML, {"default": CHATML, "tools": "x"}):
        tokenizer.chat_template = stored
        assert resolve_template("tokenizer", tokenizer) == CHATML


DATED = (
    "{{ strftime_now('%A %d %b %Y') }} {{ ['a', 'b', 'c', 'd', 'e'] | random }}{{ lipsum(n=1) }}"
    + CHATML
)


def test_template_that_writes_the_date_writes_the_same_one_on_every_day(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The clock of the process that renders is not asked, and neither is its random state."""
    tokenizer = tiny_tokenizer(chat_template=DATED)
    caplog.set_level("INFO")
    encoder = DialogueEncoder(tokenizer)
    first = encoder.render_prompt([Message("user", "x")])
    assert first.startswith("Friday 26 Jul 2024 ")
    assert TEMPLATE_DATE == "2024-07-26"
    sandbox._SANDBOX.stop()  # the next one renders in another process
    restarted = DialogueEncoder(tokenizer)
    assert restarted.render_prompt([Message("user", "x")]) == first
    assert encoder.contract.template_date == restarted.contract.template_date == "2024-07-26"
    messages = [record.message for record in caplog.records if "2024-07-26" in record.message]
    assert len(messages) == 1
    assert "writes today's date" in messages[0]


def test_template_without_a_date_has_none_in_its_contract(tokenizer: Tokenizer) -> None:
    assert DialogueEncoder(tokenizer, "hh").contract.template_date is None
    tokenizer.chat_template = CHATML
    assert DialogueEncoder(tokenizer).contract.template_date is None


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ATTACKS = {
    "powers": "{% set n = messages | length + 8 %}{% set x = n ** (n ** n) %}",
    "powers of constants": "{{ 9 ** (9 ** 9) }}",
    "repetition": "{% set x = 'a' * 6000000000 %}",
    "product": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "wide field": "{{ '%5000000000d' % 3 }}",
    "wide format": "{{ '{:5000000000d}'.format(3) }}",
    "wide filter": "{{ 'a' | center(5000000000) }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "long text": "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "attribute": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_foreign_template_is_refused_before_it_takes_long_or_much(name: str) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ValueError, match=r"^chat_template: expected one that renders a dialogue w"):
        DialogueEncoder(tiny_tokenizer(chat_template=ATTACKS[name] + CHATML))
    assert time.monotonic() - start < 9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_foreign_template_is_ended_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # it is fast for the short dialogues that an encoder starts with
    template = "{% if 'evil' in messages[0]['content'] %}" + ENDLESS + "{% endif %}" + CHATML
    coder = DialogueEncoder(tiny_tokenizer(chat_template=template))
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    message = r'expected one that renders a dialogue within 0\.3 seconds and 1024 MiB.*"\{% if'
    with pytest.raises(ValueError, match=message):
        coder.encode_prompt([Message("user", "evil")])
    with pytest.raises(ValueError, match=message):
        coder.contract.render([{"role": "user", "content": "evil"}])
    monkeypatch.undo()
    assert "good" in coder.encode_prompt([Message("user", "good")]).text


def test_dialogue_that_the_template_refuses_is_a_bad_record() -> None:
    refuse = "{% if messages | length > 3 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    coder = DialogueEncoder(tiny_tokenizer(chat_template=refuse))
    turns = [Message("user", "a"), Message("assistant", "b")] * 2
    with pytest.raises(EncodingError, match=r"refuses the dialogue \(too many\)"):
        coder.encode_dialogue(turns)
