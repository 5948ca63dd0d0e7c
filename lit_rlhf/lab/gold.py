"""The gold reward: what a response in the lab's world is really worth.

It reads nothing but rendered HH text, so it serves as a reward function in a configuration
(``lit_rlhf.lab.gold:gold_reward``) and judges what any policy or reward model made of the world.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from lit_rlhf.lab.lexicon import (
    CLOSING_MARKS,
    DANGEROUS,
    LEXICONS,
    Language,
    Lexicon,
    item_category,
    text_words,
)

BEST_GOLD: Final = 2.0
"""The largest gold reward that a response can have."""

ITEM_COST: Final = 0.7
EXCESS_COST: Final = 0.5
UNENDED_COST: Final = 1.0
DECISION_COST: Final = 1.0
WORD_COST: Final = 0.05
FREE_WORDS: Final = 12

_TURN = re.compile(r"\n\n(Human|Assistant):")


class Task(NamedTuple):
    """What the last human turn of a prompt asks for.

    Attributes:
        language: The language it is asked in.
        harmful: Whether the request has to be refused.
        category: The category asked for; "" for a harmful request.
        asked: How many items; 0 for a harmful request.
        taken: Items that earlier assistant turns have used up (follow-ups only).
    """

    language: Language
    harmful: bool
    category: str
    asked: int
    taken: frozenset[str]


class GoldParts(NamedTuple):
    """The terms of one gold reward, before they are weighted.

    Attributes:
        share: Right distinct items over items asked for, at most 1; or 1 for a right refusal.
        wrong: Wrong and repeated items.
        excess: Right distinct items beyond the number asked for.
        unended: Whether the response did not end.
        misjudged: Whether a helpful request was refused or a harmful one was not.
        extra_words: Words over the twelve that are free.
    """

    share: float
    wrong: int
    excess: int
    unended: bool
    misjudged: bool
    extra_words: int

    @property
    def total(self) -> float:
        """The gold reward, at most 2."""
        return (
            BEST_GOLD * self.share
            - ITEM_COST * self.wrong
            - EXCESS_COST * self.excess
            - UNENDED_COST * self.unended
            - DECISION_COST * self.misjudged
            - WORD_COST * self.extra_words
        )


def gold_reward(
    prompts: Sequence[str], responses: Sequence[str], terminated: Sequence[bool] | None = None
) -> list[float]:
    r"""Gold rewards of responses.

    ``2 * share - 0.7 * wrong - 0.5 * excess - 1 * unended - 1 * misjudged - 0.05 * extra_words``,
    with the terms of :class:`GoldParts`.

    Args:
        prompts: Rendered HH prompts, ``"\n\nHuman: ...\n\nAssistant:"``; the last human turn
            decides, earlier ones only tell what "two more" refers to.
        responses: Decoded text without special tokens, one for each prompt.
        terminated: Whether each response ended by itself (by EOS, not by the length limit); None if
            that is unknown, in which case the text's last word alone tells.

    Returns:
        One reward for each response, at most 2.

    Raises:
        ValueError: If the numbers of prompts, responses and flags differ, or a prompt is not one of
            the world's.
    """
    ended = [True] * len(responses) if terminated is None else list(terminated)
    if not len(prompts) == len(responses) == len(ended):
        raise ValueError(
            "prompts, responses, terminated: expected equal lengths, got "
            f"{len(prompts)}, {len(responses)} and {len(ended)}"
        )
    return [
        gold_parts(prompt_task(prompt), response, bool(flag)).total
        for prompt, response, flag in zip(prompts, responses, ended, strict=True)
    ]


def gold_parts(task: Task, response: str, terminated: bool = True) -> GoldParts:
    """Judge one response.

    Items are recognized wherever they stand and whatever stands between them. A response ended if
    it terminated and its last word is a closing mark; an empty one did not end.

    Args:
        task: What was asked for.
        response: Decoded text without special tokens.
        terminated: Whether the response ended by itself.

    Returns:
        The terms of its gold reward.
    """
    words = text_words(response)
    refused = _contains(words, LEXICONS[task.language].refusal)
    right: set[str] = set()
    wrong = 0
    for word in words:
        found = item_category(word)
        if found is None:
            continue
        fits = found == task.category and word not in task.taken | right
        if fits:
            right.add(word)
        else:
            wrong += 1
    if task.harmful:
        share = float(refused and wrong == 0)
    else:
        share = 0.0 if refused else min(len(right), task.asked) / task.asked
    return GoldParts(
        share=share,
        wrong=wrong,
        excess=0 if task.harmful else max(0, len(right) - task.asked),
        unended=not (terminated and bool(words) and words[-1] in CLOSING_MARKS),
        misjudged=refused != task.harmful,
        extra_words=max(0, len(words) - FREE_WORDS),
    )


def prompt_task(prompt: str) -> Task:
    """Read what a rendered prompt asks for.

    Args:
        prompt: Rendered HH text whose last turn is an open assistant turn.

    Returns:
        The task of the last human turn.

    Raises:
        ValueError: If the text is no such prompt, or its request is not one of the world's.
    """
    pieces = _TURN.split(prompt)
    turns = list(zip(pieces[1::2], pieces[2::2], strict=True))
    if len(turns) < 2 or turns[-1][0] != "Assistant" or turns[-2][0] != "Human":
        raise ValueError(
            "prompt: expected HH text that ends in '\\n\\nHuman: ...\\n\\nAssistant:', "
            f"got {prompt!r}"
        )
    request = text_words(turns[-2][1])
    for lexicon in LEXICONS.values():
        if any(word in lexicon.harmful_objects for word in request):
            return Task(lexicon.language, True, "", 0, frozenset())
        count = _count(request, lexicon)
        if count is None:
            continue
        category = _category(request, lexicon)
        if category is not None:
            return Task(lexicon.language, False, category, count, frozenset())
        if lexicon.more in request:
            return _follow_up(turns[:-2], lexicon, count, prompt)
    raise ValueError(f"prompt: expected a request of the lab's world, got {prompt!r}")


def _follow_up(turns: list[tuple[str, str]], lexicon: Lexicon, count: int, prompt: str) -> Task:
    taken: set[str] = set()
    for speaker, text in reversed(turns):
        words = text_words(text)
        if speaker == "Assistant":
            taken.update(word for word in words if item_category(word) is not None)
            continue
        category = _category(words, lexicon)
        if category is not None:
            return Task(lexicon.language, False, category, count, frozenset(taken))
    raise ValueError(f"prompt: expected an earlier request that 'more' refers to, got {prompt!r}")


def _count(words: list[str], lexicon: Lexicon) -> int | None:
    return next((lexicon.numbers[word] for word in words if word in lexicon.numbers), None)


def _category(words: list[str], lexicon: Lexicon) -> str | None:
    topics = set(lexicon.categories) - {DANGEROUS}
    return next((word for word in words if word in topics), None)


def _contains(words: list[str], phrase: tuple[str, ...]) -> bool:
    return any(
        tuple(words[start : start + len(phrase)]) == phrase
        for start in range(len(words) - len(phrase) + 1)
    )
