"""Control text: text that no turn may contain, because it would be read as part of the template.

A template joins turns to one text. A turn that contains the end of a turn, or the start of another,
would become one: a user could speak for the assistant, and a model would learn to.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_rlhf.data.records import Message

PROBE_TURNS = (
    Message("user", "first question"),
    Message("assistant", "first answer"),
    Message("user", "second question"),
)
"""A dialogue that shows what a template writes around turns."""


@dataclass(frozen=True)
class ControlText:
    r"""The control text of a tokenizer and its template.

    Attributes:
        tokens: Matches the text of control tokens: special tokens, and other added tokens that the
            template writes.
        text: Matches control tokens, and turn markers that are plain text, such as `"\n\nHuman:"`.
        ids: Ids of the control tokens.
    """

    tokens: re.Pattern[str]
    text: re.Pattern[str]
    ids: frozenset[int]

    def count_ids(self, ids: Sequence[int]) -> int:
        """Number of control tokens among token ids."""
        return sum(token in self.ids for token in ids)


def find_control_text(
    tokenizer: PreTrainedTokenizerBase, render_prompt: Callable[[Sequence[Message]], str]
) -> ControlText:
    """Find the control text of a tokenizer and its template.

    Args:
        tokenizer: The tokenizer.
        render_prompt: Renders a dialogue with the template, up to where the assistant speaks.
    """
    written = _find_written_text(render_prompt(PROBE_TURNS))
    # Added tokens that are not special and that the template does not write, such as `<think>`,
    # are text that a turn may have.
    tokens = set(tokenizer.all_special_tokens) | {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or any(token.content in text for text in written)
    }
    tokens = {token for token in tokens if token.strip()}
    control_tokens = match_any(tokens)
    # A marker with a special token in it needs no pattern: nothing reads like it without the
    # token. One without a letter or digit would match ordinary text.
    markers = {
        text.rstrip()
        for text in written[1:]
        if re.search(r"\w", text) and not control_tokens.search(text)
    }
    ids: set[Any] = {tokenizer.convert_tokens_to_ids(token) for token in tokens}
    if tokenizer.unk_token_id != tokenizer.eos_token_id:
        # text that the tokenizer does not know is not an attack
        ids.discard(tokenizer.unk_token_id)
    return ControlText(tokens=control_tokens, text=match_any(tokens | markers), ids=frozenset(ids))


def _find_written_text(rendered: str) -> list[str]:
    """What a template writes before, between and after `PROBE_TURNS`."""
    written = []
    remaining = rendered
    for turn in PROBE_TURNS:
        text_before, _, remaining = remaining.partition(turn.content)
        written.append(text_before)
    return [*written, remaining]


def match_any(texts: set[str]) -> re.Pattern[str]:
    """Make a pattern that matches any of some literal texts, the longest that fits."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
