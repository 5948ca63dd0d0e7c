"""The chat templates of model families: how responses end, and what docs/data.md says of each."""

from typing import NamedTuple

import pytest

from lit_rlhf.data import DialogueEncoder, EncodingError, Message
from tests.support.docs_blocks import ROOT
from tests.support.published_templates import TEMPLATES

PAGE = ROOT / "docs" / "data.md"
ASK, ANSWER = Message("user", "Which metal rusts?"), Message("assistant", "Iron.")


class Outcome(NamedTuple):
    """A row of the table: a response, whether a system turn is taken, and an earlier turn."""

    response: str
    system: str
    trained: str


def outcome(name: str) -> Outcome:
    """What becomes of a dialogue under a family's template."""
    encoder = DialogueEncoder(TEMPLATES[name].tokenizer())
    ids = encoder.encode_dialogue([ASK, ANSWER]).input_ids.tolist()
    prompt_ids = encoder.encode_prompt([ASK]).input_ids.tolist()
    assert ids[: len(prompt_ids)] == prompt_ids
    return Outcome(
        encoder.tokenizer.decode(ids[len(prompt_ids) :]),
        _encoded(encoder, [Message("system", "Be brief."), ASK, ANSWER]),
        _trained(encoder, [ASK, ANSWER, ASK, ANSWER]),
    )


def _encoded(encoder: DialogueEncoder, messages: list[Message]) -> str:
    try:
        encoder.encode_dialogue(messages)
    except EncodingError:
        return "refused"
    return "yes"


def _trained(encoder: DialogueEncoder, messages: list[Message]) -> str:
    try:
        example = encoder.encode_dialogue(messages, train_on="all")
    except ValueError:
        return ""
    last = encoder.encode_dialogue(messages).completion_mask
    return encoder.tokenizer.decode(example.input_ids[example.completion_mask & ~last])


@pytest.mark.parametrize("name", TEMPLATES)
def test_response_ends_once_and_an_earlier_turn_is_trained(name: str) -> None:
    encoder, recorded = DialogueEncoder(TEMPLATES[name].tokenizer()), outcome(name)
    assert "Iron." in recorded.response
    assert recorded.response.endswith(encoder.eos_token)
    special = set(encoder.tokenizer.all_special_tokens)
    behind = recorded.response.partition("Iron.")[2]
    assert sum(behind.count(token) for token in special) == 1
    head, answer, end = recorded.trained.partition("Iron.")
    assert answer
    assert end.strip() in ("", encoder.eos_token)
    assert head.strip() in ("", "<think></think>", "<|channel|>final<|message|>")


def test_page_lists_the_templates() -> None:
    rows = ["| template | a response | earlier turn, with `all` | system turn |", f"{'|---' * 4}|"]
    for name in TEMPLATES:
        outcome_ = outcome(name)
        trained = code(outcome_.trained) if outcome_.trained else "refused"
        cells = [name, code(outcome_.response), trained, outcome_.system]
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    assert table in PAGE.read_text("utf-8"), f"docs/data.md: expected the table\n{table}"


def code(text: str) -> str:
    """Text as a code span of a table."""
    shown = text.replace("\n", "\\n").replace("|", "\\|")
    return f"`{shown}`"
