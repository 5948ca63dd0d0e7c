"""The words and sentence templates of the lab's world, in English and in Chinese.

Every item belongs to exactly one category, so the words of a response tell whether it is correct.
Ingredients of dangerous things are a separate category, which no request asks for by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

Language = Literal["en", "zh"]

DANGEROUS: Final = "dangerous"
"""The category of the items that an answer to a harmful request lists."""


@dataclass(frozen=True)
class Lexicon:
    """One language of the world. Templates have the fields that `str.format` fills.

    Attributes:
        language: The language.
        numbers: Numbers of items by their word.
        categories: Items by category. One of the categories is `DANGEROUS`.
        harmful_objects: Words that make a request harmful.
        harmful_verbs: What a harmful request asks to do with them.
        requests: Templates with `{number}` and `{category}`.
        follow_ups: Templates with `{number}`.
        harmful_requests: Templates with `{verb}` and `{object}`.
        more_word: A word in each follow-up and in no other request.
        openings: Sentences before an answer.
        answer: Template of an answer, with `{items}`.
        harmful_answer: Template of an answer to a harmful request, with `{items}`.
        refusals: Sentences that refuse.
        refusal_words: Words that occur in a row in every refusal and in no other sentence.
        polite_phrase: A sentence that may end a response.
        comma: Separates items but the last two.
        conjunction: Separates the last two items.
        space: Separates sentences.
    """

    language: Language
    numbers: dict[str, int]
    categories: dict[str, tuple[str, ...]]
    harmful_objects: tuple[str, ...]
    harmful_verbs: tuple[str, ...]
    requests: tuple[str, ...]
    follow_ups: tuple[str, ...]
    harmful_requests: tuple[str, ...]
    more_word: str
    openings: tuple[str, ...]
    answer: str
    harmful_answer: str
    refusals: tuple[str, ...]
    refusal_words: tuple[str, ...]
    polite_phrase: str
    comma: str
    conjunction: str
    space: str

    @property
    def topics(self) -> tuple[str, ...]:
        """The categories that a request may name."""
        return tuple(name for name in self.categories if name != DANGEROUS)

    def join_items(self, items: Sequence[str]) -> str:
        """Join at least one item; in English `"a"`, `"a and b"`, `"a, b and c"` and so on."""
        *first, last = items
        return self.comma.join(first) + (self.conjunction if first else "") + last


def _read_lexicon(language: Language, entries: dict[str, Any]) -> Lexicon:
    lists = {name: tuple(v) for name, v in entries.items() if isinstance(v, list)}
    categories = {name: tuple(items) for name, items in entries["categories"].items()}
    return Lexicon(language=language, **{**entries, **lists, "categories": categories})


LEXICONS: Final[dict[Language, Lexicon]] = {
    language: _read_lexicon(language, entries)
    for language, entries in yaml.safe_load(
        Path(__file__).with_name("lexicons.yaml").read_text("utf-8")
    ).items()
}
"""The lexicon of each language."""

ENGLISH: Final = LEXICONS["en"]
CHINESE: Final = LEXICONS["zh"]

_CHINESE_FUNCTION_WORDS: Final = (
    *("说出", "请", "列举", "能", "给", "我", "种", "吗", "告诉", "需要", "你", "知道", "哪", "再"),
    *("说", "怎么", "帮", "好的", "当然", "抱歉", "不能", "帮忙", "很", "高兴", "和"),
)
"""Words of the Chinese templates, listed because written Chinese puts no spaces between words."""

CLOSING_MARKS: Final = frozenset(".!?。！？")
"""Punctuation marks that end a complete response."""


def chinese_words() -> tuple[str, ...]:
    """List the Chinese words of the world, longest first: an alternation tries them in order."""
    items = [item for category in CHINESE.categories.values() for item in category]
    words = {
        *items,
        *CHINESE.topics,
        *CHINESE.numbers,
        *CHINESE.harmful_objects,
        *CHINESE.harmful_verbs,
        *_CHINESE_FUNCTION_WORDS,
    }
    return tuple(sorted(words, key=lambda word: (-len(word), word)))


_WORD = re.compile("|".join([*chinese_words(), r"[A-Za-z]+", r"[0-9]+", r"\S"]))


def split_words(text: str) -> list[str]:
    """Split English, Chinese or mixed text into words.

    Every punctuation mark, and every character outside known words, is a separate word.
    """
    return _WORD.findall(text)


_CATEGORY_OF: Final = {
    item: category
    for lexicon in LEXICONS.values()
    for category, items in lexicon.categories.items()
    for item in items
}


def item_category(word: str) -> str | None:
    """Look up the category of a word of `split_words`; `None` if it is not an item."""
    return _CATEGORY_OF.get(word)
