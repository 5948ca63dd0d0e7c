"""Prompts and demonstrations of the lab's world, drawn from seeds."""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lit_rlhf.lab.gold import GoldParts, Task, gold_parts, prompt_task
from lit_rlhf.lab.lexicon import DANGEROUS, LEXICONS, Language, Lexicon

ChatMessages = tuple[dict[str, str], ...]
"""A dialogue; each turn has ``"role"`` (``"user"`` or ``"assistant"``) and ``"content"``."""

_HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class World:
    """A world: what is asked, how well demonstrators answer, and how labellers are biased.

    Attributes:
        language: ``"en"``, ``"zh"``, or ``"both"`` for prompts of either.
        multi_turn: Share of prompts with an earlier exchange.
        harmful: Share of prompts that must be refused.
        skill: Chance that a demonstrator gets one choice right: each item, each refusal. Rarer
            mistakes (wrong counts, wrong refusals, missing closing marks) fall with it too.
        politeness: Share of demonstrations that end in the polite phrase; a quarter of these
            repeats it once.
        preference_sharpness: Logit of a preference per unit of gold reward.
        length_bias: Logit per word that one response is longer: a declared flaw of the labellers.
        phrase_bias: Logit per polite phrase that one response has more: another such flaw.
        label_noise: Share of labels that are drawn with a fair coin instead.
    """

    language: Literal["en", "zh", "both"] = "en"
    multi_turn: float = 0.25
    harmful: float = 0.25
    skill: float = 0.72
    politeness: float = 0.06
    preference_sharpness: float = 3.5
    length_bias: float = 0.5
    phrase_bias: float = 0.4
    label_noise: float = 0.03

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: If a share lies outside 0 to 1, the sharpness is negative, or the language
                is unknown.
        """
        if self.language not in ("en", "zh", "both"):
            raise ValueError(f"language: expected 'en', 'zh' or 'both', got {self.language!r}")
        for name in ("multi_turn", "harmful", "skill", "politeness", "label_noise"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected 0 to 1, got {getattr(self, name)}")
        if self.preference_sharpness < 0.0:
            raise ValueError(
                f"preference_sharpness: expected at least 0, got {self.preference_sharpness}"
            )

    @property
    def lexicons(self) -> tuple[Lexicon, ...]:
        """The lexicons that this world speaks."""
        languages: tuple[Language, ...] = (
            ("en", "zh") if self.language == "both" else (self.language,)
        )
        return tuple(LEXICONS[language] for language in languages)

    def prompts(self, n: int, seed: int) -> list[ChatMessages]:
        """Draw training prompts.

        Every possible prompt belongs to either the training or the held-out side, about four to
        one, by a checksum of its text: no held-out prompt is ever a training prompt, whatever the
        seeds and the settings of the worlds. Prompts may repeat within one side.

        Args:
            n: How many.
            seed: Seed; the same one yields the same prompts, and a larger ``n`` only adds to them.

        Returns:
            ``n`` dialogues that end with a human turn.
        """
        return self._drawn(n, seed, held_out=False)

    def held_out_prompts(self, n: int, seed: int) -> list[ChatMessages]:
        """Draw prompts that :meth:`prompts` never yields.

        Args:
            n: How many.
            seed: Seed.

        Returns:
            ``n`` dialogues that end with a human turn.
        """
        return self._drawn(n, seed, held_out=True)

    def demonstration(self, prompt: Sequence[dict[str, str]], rng: random.Random) -> str:
        """Answer a prompt as an imperfect demonstrator does.

        With ``e = 1 - skill``, each item is wrong with chance ``e`` (one of another category, or a
        repetition), a harmful request is complied with at chance ``e``, the count is off by one
        with ``e / 3``, and with ``e / 6`` each a helpful request is refused or the closing mark is
        missing.

        Args:
            prompt: A prompt of this world.
            rng: Source of chance.

        Returns:
            The content of the assistant's turn.

        Raises:
            ValueError: If the prompt is not one of the world's.
        """
        task = prompt_task(rendered_prompt(prompt))
        lexicon = LEXICONS[task.language]
        error = 1.0 - self.skill
        if task.harmful:
            refuses = rng.random() >= error
            body = (
                rng.choice(lexicon.refusals)
                if refuses
                else lexicon.recipe.format(
                    items=lexicon.listing(rng.sample(lexicon.categories[DANGEROUS], 2))
                )
            )
        else:
            refuses = rng.random() < error / 6
            body = (
                rng.choice(lexicon.refusals)
                if refuses
                else lexicon.answers.format(items=lexicon.listing(self._items(task, rng)))
            )
        if not refuses and rng.random() < 0.5:
            body = rng.choice(lexicon.openings) + lexicon.space + body
        for chance in (self.politeness, 0.25):
            if rng.random() >= chance:
                break
            body += lexicon.space + lexicon.polite
        return body[:-1] if rng.random() < error / 6 else body

    def gold(
        self, prompt: Sequence[dict[str, str]], response: str, terminated: bool = True
    ) -> GoldParts:
        """Judge a response to a prompt given as messages.

        Args:
            prompt: A prompt of the world.
            response: Decoded text without special tokens.
            terminated: Whether the response ended by itself.

        Returns:
            The terms of the gold reward; ``.total`` is the reward.

        Raises:
            ValueError: If the prompt is not one of the world's.
        """
        return gold_parts(prompt_task(rendered_prompt(prompt)), response, terminated)

    def _items(self, task: Task, rng: random.Random) -> list[str]:
        """Items of an answer, with the demonstrator's mistakes among them."""
        lexicon = LEXICONS[task.language]
        error = 1.0 - self.skill
        count = task.asked
        if rng.random() < error / 3:
            count += rng.choice((-1, 1))
        pool = [item for item in lexicon.categories[task.category] if item not in task.taken]
        right = rng.sample(pool, min(count, len(pool)))
        items: list[str] = []
        for item in right:
            if rng.random() >= error:
                items.append(item)
                continue
            seen = [*items, *sorted(task.taken)]
            if seen and rng.random() < 0.3:
                items.append(rng.choice(seen))
            else:
                others = [name for name in lexicon.topics if name != task.category]
                items.append(rng.choice(lexicon.categories[rng.choice(others)]))
        return items

    def _drawn(self, n: int, seed: int, held_out: bool) -> list[ChatMessages]:
        if n < 0:
            raise ValueError(f"n: expected at least 0 prompts, got {n}")
        stream = self._stream(random.Random(f"{'held out' if held_out else 'train'} {seed}"))
        drawn: list[ChatMessages] = []
        while len(drawn) < n:
            prompt = next(stream)
            if is_held_out(prompt) == held_out:
                drawn.append(prompt)
        return drawn

    def _stream(self, rng: random.Random) -> Iterator[ChatMessages]:
        while True:
            lexicon = rng.choice(self.lexicons)
            history: ChatMessages = ()
            topic = ""
            harmful = rng.random() < self.harmful
            if rng.random() < self.multi_turn:
                history, topic = _exchange(lexicon, rng)
            if harmful:
                request = _harmful_request(lexicon, rng)
            elif topic and rng.random() < 0.5:
                number = rng.choice(list(lexicon.numbers))
                request = rng.choice(lexicon.follow_ups).format(number=number)
            else:
                request = _request(lexicon, rng.choice(lexicon.topics), rng)[0]
            yield (*history, {"role": "user", "content": request})


def rendered_prompt(messages: Sequence[dict[str, str]]) -> str:
    r"""Render a dialogue as HH text up to where the assistant is to speak.

    Args:
        messages: Turns with ``"role"`` and ``"content"``; the last one is the human's.

    Returns:
        ``"\n\nHuman: ...\n\nAssistant:"``.

    Raises:
        ValueError: If the last turn is not the human's.
    """
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("messages: expected a dialogue whose last turn is the user's")
    speakers = {"user": "Human", "assistant": "Assistant"}
    turns = "".join(f"\n\n{speakers[turn['role']]}: {turn['content']}" for turn in messages)
    return turns + "\n\nAssistant:"


def is_held_out(prompt: Sequence[dict[str, str]]) -> bool:
    """Whether a prompt belongs to the held-out side.

    Args:
        prompt: A dialogue that ends with a human turn.

    Returns:
        True for about one prompt in five, by a checksum of the rendered text.
    """
    return zlib.crc32(rendered_prompt(prompt).encode()) % _HELD_OUT_EVERY == 0


def _request(lexicon: Lexicon, topic: str, rng: random.Random) -> tuple[str, int]:
    number = rng.choice(list(lexicon.numbers))
    frame = rng.choice(lexicon.requests)
    return frame.format(number=number, category=topic), lexicon.numbers[number]


def _harmful_request(lexicon: Lexicon, rng: random.Random) -> str:
    return rng.choice(lexicon.harmful_requests).format(
        verb=rng.choice(lexicon.harmful_verbs), object=rng.choice(lexicon.harmful_objects)
    )


def _exchange(lexicon: Lexicon, rng: random.Random) -> tuple[ChatMessages, str]:
    """An earlier request with a right answer, and its topic ("" if it was harmful)."""
    if rng.random() < 0.2:
        topic, request, answer = "", _harmful_request(lexicon, rng), lexicon.refusals[0]
    else:
        topic = rng.choice(lexicon.topics)
        request, count = _request(lexicon, topic, rng)
        items = rng.sample(lexicon.categories[topic], count)
        answer = lexicon.answers.format(items=lexicon.listing(items))
    turns = ({"role": "user", "content": request}, {"role": "assistant", "content": answer})
    return turns, topic
