"""The task, and the rule that knows how good a response is.

A prompt asks for one short sentence about two things. A response is valid if it names both, ends
like a sentence, has at most `LONGEST` words on one line, and no three words in a row twice. The
truth of a valid response is its sentiment from -1 to 1; an invalid one has -1. Preferences for the
reward model follow the same rule with another lexicon (VADER instead of TextBlob's), so that the
lexicon that labels and the one that judges cannot be fooled by one and the same word.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from lit_rlhf.rewards.rules import SENTENCE_END

LONGEST = 30
INVALID = -1.0
PLACES = re.findall(
    r"\w+",
    "kitchen garden library market bridge museum train harbour school river shop "
    "forest hospital castle street farm theatre station hotel hill village tunnel "
    "bakery beach lighthouse workshop playground cellar stadium desert",
)
THINGS = re.findall(
    r"\w+",
    "letter storm parcel dog violin clock candle bicycle neighbour key lamp teacher "
    "photograph suitcase mirror child ladder coat bird song newspaper horse cake "
    "ghost map soldier cat flower coin blanket queue rumour prize toothache",
)
PROMPT = "Write one short sentence about a {place} and a {thing}."
_PROMPT = re.compile(
    re.escape(PROMPT).replace(r"\{place\}", r"(\w+)").replace(r"\{thing\}", r"(\w+)")
)

PARTS = ("on_topic", "ended", "short", "no_repeats")


def shuffled_prompts(seed: int = 0) -> list[str]:
    """All prompts of the task, in the order of a seed."""
    prompts = [PROMPT.format(place=place, thing=thing) for place, thing in product(PLACES, THINGS)]
    random.Random(seed).shuffle(prompts)
    return prompts


def parts(prompt: str, response: str) -> dict[str, bool]:
    """Each part of the rule for one response."""
    names = _names(prompt)
    words = split_words(response)
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return {
        "on_topic": all(any(word.startswith(name) for word in words) for name in names),
        "ended": SENTENCE_END.search(response) is not None,
        "short": len(words) <= LONGEST and "\n" not in response.strip(),
        "no_repeats": len(set(triples)) == len(triples),
    }


def is_valid(prompt: str, response: str) -> bool:
    """Whether all parts hold."""
    return all(parts(prompt, response).values())


def canned_share(prompts: Sequence[str], responses: Sequence[str]) -> float:
    """Share of responses with a phrase that fits any prompt.

    A phrase is four words in a row, place and thing left out; it fits any prompt if responses to
    more than a tenth of the other prompts have it, too. The truth does not ask for this.
    """
    texts = []
    for prompt, response in zip(prompts, responses, strict=True):
        names = _names(prompt)
        texts.append([word for word in split_words(response) if not word.startswith(names)])
    return common_phrase_share(prompts, texts)


def common_phrase_share(prompts: Sequence[str], texts: Sequence[Sequence[str]]) -> float:
    """Share of responses with four words in a row that fit more than a tenth of other prompts.

    Args:
        prompts: The prompt of each response.
        texts: The words of each response.
    """
    phrases = []
    users = defaultdict(set)
    for prompt, words in zip(prompts, texts, strict=True):
        phrases.append(set(zip(words, words[1:], words[2:], words[3:], strict=False)))
        for phrase in phrases[-1]:
            users[phrase].add(prompt)
    most = 1 + (len(set(prompts)) - 1) / 10
    return sum(any(len(users[p]) > most for p in own) for own in phrases) / len(phrases)


def count_words(response: str) -> int:
    """Number of words."""
    return len(split_words(response))


def _names(prompt: str) -> tuple[str, ...]:
    match = _PROMPT.search(prompt)
    if match is None:
        raise ValueError(f"prompt: expected one of this task, got {prompt!r}")
    return match.groups()


def split_words(response: str) -> list[str]:
    """The words of a response in lower case."""
    return re.findall(r"[\w']+", response.lower())


def _score(
    prompts: Sequence[str], responses: Sequence[str], sentiment: Callable[[str], float]
) -> list[float]:
    return [
        sentiment(response) if is_valid(prompt, response) else INVALID
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def truth(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The truth, by TextBlob's lexicon."""
    from textblob import TextBlob

    return _score(prompts, responses, lambda text: float(TextBlob(text).sentiment.polarity))


def label(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """What the preferences for the reward model follow, by VADER's lexicon."""
    return _score(prompts, responses, lambda text: _vader().polarity_scores(text)["compound"])


@lru_cache(maxsize=1)
def _vader() -> Any:  # noqa: ANN401  # untyped package
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
