"""The lab's world: prompts, demonstrations with people's mistakes, and labels of preferences.

A label is drawn from a Bradley-Terry model of gold differences, declared biases and noise; Eq. 1
of arXiv 2307.04964 is its likelihood. The biases towards long and polite responses matter little
among SFT samples, whose lengths and phrases are alike, and dominate outside of that range. A reward
model that learns them can be exploited.
"""

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple

from lit_rlhf.tools.lab.gold import Request, gold_terms, parse_request
from lit_rlhf.tools.lab.lexicon import DANGEROUS, LEXICONS, Lexicon, split_words

ChatMessages = tuple[dict[str, str], ...]
"""A dialogue; each turn has the keys `"role"` (`"user"` or `"assistant"`) and `"content"`."""

_HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class World:
    """The settings of a world: what is asked, how people answer, and how labellers are biased.

    Attributes:
        language: `"en"`, `"zh"`, or `"both"` for prompts in either language.
        multi_turn: Share of prompts with an earlier exchange.
        harmful: Share of prompts that have to be refused.
        skill: Probability that a demonstrator makes one choice correctly: each item, each refusal.
            Rarer mistakes (wrong number of items, wrong refusal, no closing mark) depend on it too.
        politeness: Share of demonstrations that end with the polite phrase; a tenth of these
            repeat it once.
        preference_sharpness: Logit of a preference per unit of gold reward.
        length_bias: Logit per word by which a response is longer, a flaw of the labellers.
        phrase_bias: Logit per polite phrase that a response has more, another flaw.
        label_noise: Share of labels that are drawn from a fair coin.
        labels_see_form: Whether labellers see the form of a response (`GoldTerms`) like gold, or
            overlook it like hurried people.
    """

    language: Literal["en", "zh", "both"] = "en"
    multi_turn: float = 0.25
    harmful: float = 0.25
    skill: float = 0.72
    politeness: float = 0.06
    preference_sharpness: float = 3.5
    length_bias: float = 0.3
    phrase_bias: float = 0.4
    label_noise: float = 0.03
    labels_see_form: bool = False

    def __post_init__(self) -> None:
        # not by lit_rlhf.checks, which imports torch
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
        """The lexicons of this world's languages."""
        return tuple(LEXICONS.values()) if self.language == "both" else (LEXICONS[self.language],)

    def sample_prompts(self, n: int, *, seed: int, held_out: bool = False) -> list[ChatMessages]:
        """Sample prompts for training, or held-out prompts.

        A checksum of its text assigns every possible prompt to the training side or, for about one
        in five, to the held-out side. A held-out prompt is therefore never a training prompt,
        whatever the seeds and settings.

        Args:
            n: Number of prompts, which may repeat. A larger number appends.
            seed: Seed of the sampling.
            held_out: Whether the prompts are held out.
        """
        if n < 0:
            raise ValueError(f"n: expected at least 0 prompts, got {n}")
        # Each side filters its own stream, so that a larger `n` only appends.
        stream = self._stream(random.Random(f"{'held out' if held_out else 'train'} {seed}"))
        return list(islice((p for p in stream if is_held_out(p) == held_out), n))

    def sample_demonstration(self, prompt: Sequence[dict[str, str]], rng: random.Random) -> str:
        """Answer a prompt with the mistakes of an imperfect demonstrator.

        With `e = 1 - skill`: each item is wrong with probability `e` (from another category, or a
        repetition), a harmful request is answered with probability `e`, and the number of items
        is off by one with probability `e / 3`. A helpful request is refused with probability
        `e / 6`, and the closing mark is missing with the same probability.
        """
        request = parse_request(render_prompt(prompt))
        lexicon = LEXICONS[request.language]
        error = 1.0 - self.skill
        draw = rng.random()
        refuses = draw >= error if request.harmful else draw < error / 6
        if refuses:
            body = rng.choice(lexicon.refusals)
        elif request.harmful:
            items = rng.sample(lexicon.categories[DANGEROUS], 2)
            body = lexicon.harmful_answer.format(items=lexicon.join_items(items))
        else:
            items = self._sample_items(request, rng)
            body = lexicon.answer.format(items=lexicon.join_items(items))
        if not refuses and rng.random() < 0.5:
            body = rng.choice(lexicon.openings) + lexicon.space + body
        for probability in (self.politeness, 0.1):
            if rng.random() >= probability:
                break
            body += lexicon.space + lexicon.polite_phrase
        return body[:-1] if rng.random() < error / 6 else body

    def _sample_items(self, request: Request, rng: random.Random) -> list[str]:
        """Sample the items of an answer, some of them wrong."""
        lexicon = LEXICONS[request.language]
        error = 1.0 - self.skill
        n_items = request.n_items
        if rng.random() < error / 3:
            n_items += rng.choice((-1, 1))
        unused = [
            item for item in lexicon.categories[request.category] if item not in request.used_items
        ]
        # After a long dialogue fewer items may be left than are asked for.
        correct = rng.sample(unused, min(n_items, len(unused)))
        items: list[str] = []
        for item in correct:
            if rng.random() >= error:
                items.append(item)
                continue
            named = [*items, *sorted(request.used_items)]  # sorted: sets have no stable order
            if named and rng.random() < 0.3:
                items.append(rng.choice(named))
            else:
                others = [topic for topic in lexicon.topics if topic != request.category]
                items.append(rng.choice(lexicon.categories[rng.choice(others)]))
        return items

    def _stream(self, rng: random.Random) -> Iterator[ChatMessages]:
        """Sample prompts of both sides without end."""
        while True:
            lexicon = rng.choice(self.lexicons)
            earlier = SampledExchange(turns=(), topic="")
            harmful = rng.random() < self.harmful
            if rng.random() < self.multi_turn:
                earlier = _sample_exchange(lexicon, rng)
            if harmful:
                text = _sample_harmful_request(lexicon, rng)
            elif earlier.topic and rng.random() < 0.5:
                number = rng.choice(list(lexicon.numbers))
                text = rng.choice(lexicon.follow_ups).format(number=number)
            else:
                text = _sample_request(lexicon, rng.choice(lexicon.topics), rng).text
            yield (*earlier.turns, {"role": "user", "content": text})


WorldName = Literal["biased", "extrapolation"]

WORLDS: Final[dict[WorldName, World]] = {
    "biased": World(),
    "extrapolation": World(length_bias=0.0, phrase_bias=0.0, labels_see_form=True),
}
"""The named worlds, which fail in two different ways.

In `biased` the labels are wrong: labellers like long and polite responses and overlook form, so
even a perfect reward model wants endless text. In `extrapolation` the labels follow gold: the
reward model is right where it was trained and wrong outside of it, the failure of Section 5.2 of
arXiv 2307.04964.
"""


def render_prompt(messages: Sequence[dict[str, str]]) -> str:
    r"""Render a dialogue as an HH prompt, `"\n\nHuman: ...\n\nAssistant:"`."""
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(
            "messages: expected a dialogue whose last turn is the user's, got "
            f"{messages[-1] if messages else 'no turn'}"
        )
    speakers = {"user": "Human", "assistant": "Assistant"}
    turns = "".join(f"\n\n{speakers[turn['role']]}: {turn['content']}" for turn in messages)
    return turns + "\n\nAssistant:"


def is_held_out(prompt: Sequence[dict[str, str]]) -> bool:
    """Whether a prompt belongs to the held-out side. By a checksum, about one in five does."""
    return zlib.crc32(render_prompt(prompt).encode()) % _HELD_OUT_EVERY == 0


class SampledRequest(NamedTuple):
    """A request for items.

    Attributes:
        text: The request.
        n_items: Number of items that it asks for.
    """

    text: str
    n_items: int


class SampledExchange(NamedTuple):
    """An earlier exchange of a prompt.

    Attributes:
        turns: The user's and the assistant's turn; empty for no exchange.
        topic: What it is about; "" for a harmful request or no exchange.
    """

    turns: ChatMessages
    topic: str


def _sample_request(lexicon: Lexicon, topic: str, rng: random.Random) -> SampledRequest:
    """Sample a request for a topic."""
    number = rng.choice(list(lexicon.numbers))
    template = rng.choice(lexicon.requests)
    return SampledRequest(
        text=template.format(number=number, category=topic), n_items=lexicon.numbers[number]
    )


def _sample_harmful_request(lexicon: Lexicon, rng: random.Random) -> str:
    return rng.choice(lexicon.harmful_requests).format(
        verb=rng.choice(lexicon.harmful_verbs), object=rng.choice(lexicon.harmful_objects)
    )


def _sample_exchange(lexicon: Lexicon, rng: random.Random) -> SampledExchange:
    """Sample an earlier exchange with a correct answer."""
    if rng.random() < 0.2:
        topic = ""
        text = _sample_harmful_request(lexicon, rng)
        answer = lexicon.refusals[0]
    else:
        topic = rng.choice(lexicon.topics)
        text, n_items = _sample_request(lexicon, topic, rng)
        items = rng.sample(lexicon.categories[topic], n_items)
        answer = lexicon.answer.format(items=lexicon.join_items(items))
    return SampledExchange(
        turns=({"role": "user", "content": text}, {"role": "assistant", "content": answer}),
        topic=topic,
    )


class ResponsePair(NamedTuple):
    """Two decoded responses to one prompt.

    Attributes:
        first: The first response.
        second: The second response.
        first_terminated: Whether the first ended with EOS.
        second_terminated: Whether the second ended with EOS.
    """

    first: str
    second: str
    first_terminated: bool = True
    second_terminated: bool = True

    @property
    def is_usable(self) -> bool:
        """Whether the responses differ, and neither is empty or contains a turn marker."""
        first = self.first.strip()
        second = self.second.strip()
        return first != second and all(
            text and "\n\nHuman:" not in text and "\n\nAssistant:" not in text
            for text in (first, second)
        )


def label_probability(prompt: str, pair: ResponsePair, world: World) -> float:
    """Compute the probability that a labeller prefers the first response.

    `noise / 2 + (1 - noise) * sigmoid(sharpness * gold difference + length_bias * difference in
    words + phrase_bias * difference in polite phrases)`. Labellers who overlook form see only the
    content of gold.

    Args:
        prompt: The rendered HH prompt.
        pair: The responses.
        world: The world, with the labellers' biases.
    """
    logit = _utility(prompt, pair.first, pair.first_terminated, world) - _utility(
        prompt, pair.second, pair.second_terminated, world
    )
    sigmoid = 0.5 * (1.0 + math.tanh(0.5 * logit))  # this form of it cannot overflow
    return 0.5 * world.label_noise + (1.0 - world.label_noise) * sigmoid


def label_pair(prompt: str, pair: ResponsePair, world: World, rng: random.Random) -> dict[str, str]:
    """Draw the label of two responses, with one random number.

    Args:
        prompt: The rendered HH prompt.
        pair: The responses, which have to be usable.
        world: The world, with the labellers' biases.
        rng: Source of the random number.

    Returns:
        An HH record: the dialogues with the `chosen` and with the `rejected` response.
    """
    if not pair.is_usable:
        raise ValueError(
            "pair: expected two different responses, neither empty nor with a turn marker, "
            f"got {pair.first!r} and {pair.second!r}"
        )
    first_wins = rng.random() < label_probability(prompt, pair, world)
    chosen, rejected = (pair.first, pair.second) if first_wins else (pair.second, pair.first)
    return {"chosen": f"{prompt} {chosen.strip()}", "rejected": f"{prompt} {rejected.strip()}"}


def _utility(prompt: str, response: str, terminated: bool, world: World) -> float:
    """The value of a response to a biased labeller, as a logit."""
    request = parse_request(prompt)
    n_polite = response.count(LEXICONS[request.language].polite_phrase)
    terms = gold_terms(request, response, terminated)
    return (
        world.preference_sharpness * (terms.total if world.labels_see_form else terms.content)
        + world.length_bias * len(split_words(response))
        + world.phrase_bias * n_polite
    )
