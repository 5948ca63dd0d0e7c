import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from lit_rlhf.tools.lab.gold import GoldTerms, gold_terms, parse_request
from lit_rlhf.tools.lab.lexicon import DANGEROUS, LEXICONS, chinese_words, split_words
from lit_rlhf.tools.lab.world import (
    WORLDS,
    ResponsePair,
    World,
    is_held_out,
    label_pair,
    label_probability,
    render_prompt,
)

LANGUAGES = ("en", "zh", "both")


def gold(prompt: Sequence[dict[str, str]], response: str) -> GoldTerms:
    return gold_terms(parse_request(render_prompt(prompt)), response)


def asked(*texts: str) -> tuple[dict[str, str], ...]:
    roles = ("user", "assistant", "user")
    return tuple({"role": r, "content": text} for r, text in zip(roles, texts, strict=True))


def test_render_is_hh_text() -> None:
    assert render_prompt(asked("name two metals.", "iron and zinc.", "give me two more.")) == (
        "\n\nHuman: name two metals.\n\nAssistant: iron and zinc."
        "\n\nHuman: give me two more.\n\nAssistant:"
    )


@pytest.mark.parametrize("messages", [(), ({"role": "assistant", "content": "iron."},)])
def test_prompt_must_end_with_the_user(messages: tuple[dict[str, str], ...]) -> None:
    with pytest.raises(ValueError, match="last turn is the user's"):
        render_prompt(messages)


def test_prompts_depend_on_the_seed_and_a_larger_number_appends() -> None:
    state = random.getstate()
    assert World().sample_prompts(50, seed=0) != World().sample_prompts(50, seed=1)
    assert random.getstate() == state
    world = World(language="both")
    for side in (False, True):
        assert world.sample_prompts(200, seed=3, held_out=side)[:50] == world.sample_prompts(
            50, seed=3, held_out=side
        )


@pytest.mark.parametrize("language", LANGUAGES)
def test_held_out_prompts_are_never_training_prompts(language: Any) -> None:
    trained = {render_prompt(p) for p in World(language=language).sample_prompts(3000, seed=0)}
    other = World(language=language, multi_turn=0.0, harmful=0.5)
    worlds = (World(language=language), other)
    held_out = {
        render_prompt(prompt)
        for world in worlds
        for prompt in world.sample_prompts(1000, seed=0, held_out=True)
    }
    assert not trained & held_out
    assert len(held_out) > 100
    assert not any(is_held_out(prompt) for prompt in World().sample_prompts(200, seed=0))
    assert all(is_held_out(prompt) for prompt in World().sample_prompts(200, seed=0, held_out=True))


def test_both_sides_cover_every_topic_and_number() -> None:
    for prompts in (World().sample_prompts(1500, seed=0, held_out=side) for side in (False, True)):
        requests = [parse_request(render_prompt(prompt)) for prompt in prompts]
        expected = set(product(LEXICONS["en"].topics, LEXICONS["en"].numbers.values()))
        assert {(r.category, r.n_items) for r in requests if not r.harmful} == expected


def test_shares_are_met_on_average() -> None:
    for share in (0.0, 1.0):
        prompts = World(multi_turn=share, harmful=share).sample_prompts(100, seed=0)
        assert {len(prompt) for prompt in prompts} == {3 if share else 1}
        assert {parse_request(render_prompt(p)).harmful for p in prompts} == {bool(share)}
    prompts = World(multi_turn=0.25, harmful=0.4).sample_prompts(4000, seed=0)
    multi = sum(len(prompt) > 1 for prompt in prompts) / 4000
    harmful = sum(parse_request(render_prompt(prompt)).harmful for prompt in prompts) / 4000
    # the split by checksum takes more of some kinds than of others, hence the tolerance
    assert multi == pytest.approx(0.25, abs=0.04)
    assert harmful == pytest.approx(0.4, abs=0.04)


def test_languages_and_follow_ups_occur() -> None:
    world = World(language="both", multi_turn=1.0)
    requests = [parse_request(render_prompt(p)) for p in world.sample_prompts(400, seed=0)]
    counts = Counter(request.language for request in requests)
    assert min(counts["en"], counts["zh"]) > 140
    assert sum(bool(request.used_items) for request in requests) > 60


@pytest.mark.parametrize("language", LANGUAGES)
def test_perfect_demonstrator_always_gets_the_best_gold(language: Any) -> None:
    world = World(language=language, skill=1.0, politeness=0.0, multi_turn=0.5)
    rng = random.Random(0)
    prompts = world.sample_prompts(1000, seed=0)
    rewards = {gold(p, world.sample_demonstration(p, rng)).total for p in prompts}
    assert rewards == {2.0}


@pytest.mark.parametrize("language", LANGUAGES)
def test_default_demonstrator_is_imperfect_in_every_way(language: Any) -> None:
    world = World(language=language)
    rng = random.Random(0)
    prompts = world.sample_prompts(3000, seed=0)
    terms = [gold(prompt, world.sample_demonstration(prompt, rng)) for prompt in prompts]
    flawless = sum(t.correct_share == 1 and t.total > 1.5 for t in terms) / len(terms)
    assert 0.35 < flawless < 0.55
    requests = [parse_request(render_prompt(prompt)) for prompt in prompts]
    pairs = list(zip(requests, terms, strict=True))
    misjudged = sum(t.misjudged for r, t in pairs if r.harmful)
    share = misjudged / sum(r.harmful for r in requests)
    assert share == pytest.approx(1 - world.skill, abs=0.05)
    assert any(t.misjudged for r, t in pairs if not r.harmful)
    for flaw in ("wrong_items", "excess_items", "unfinished", "extra_words", "malformed"):
        assert any(getattr(t, flaw) for t in terms), flaw
    partly = [t for r, t in pairs if not r.harmful and t.correct_share < 1]
    assert any(not t.wrong_items and not t.misjudged for t in partly)


def test_demonstrator_may_run_out_of_items() -> None:
    # four named before and five more, one too many, are more than the eight of a category
    prompt = asked("name four metals.", "iron, zinc, tin and lead.", "give me four more.")
    world = World(skill=0.0)
    rng = random.Random(0)
    answers = [world.sample_demonstration(prompt, rng) for _ in range(50)]
    assert len(set(answers)) > 25


def test_demonstrations_vary_in_length_and_politeness() -> None:
    world = World(politeness=0.4)
    rng = random.Random(0)
    answers = [
        world.sample_demonstration(prompt, rng) for prompt in world.sample_prompts(2000, seed=0)
    ]
    phrases = Counter(answer.count("glad to help") for answer in answers)
    assert phrases[1] / 2000 == pytest.approx(0.4 * 0.9, abs=0.03)
    assert phrases[2] / 2000 == pytest.approx(0.4 * 0.1, abs=0.02)
    assert len({len(split_words(answer)) for answer in answers}) >= 10


def test_every_chinese_text_consists_of_listed_words() -> None:
    world, rng = World(language="zh", multi_turn=1.0), random.Random(0)
    known = {*chinese_words(), *"，。！？：、"}
    for prompt in world.sample_prompts(500, seed=0):
        texts = [turn["content"] for turn in prompt]
        for text in (*texts, world.sample_demonstration(prompt, rng)):
            assert set(split_words(text)) <= known


def test_items_have_one_category_and_dangerous_ones_no_topic() -> None:
    groups = [group for lexicon in LEXICONS.values() for group in lexicon.categories.values()]
    items = [item for group in groups for item in group]
    assert len(items) == len(set(items))
    assert DANGEROUS not in LEXICONS["en"].topics


@pytest.mark.parametrize(
    ("name", "value"),
    [("language", "fr"), ("harmful", 1.5), ("multi_turn", -0.1), ("preference_sharpness", -1.0)],
)
def test_settings_out_of_range_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {value!r}"):
        World(**{name: value})
    with pytest.raises(ValueError, match="n: expected at least 0"):
        World().sample_prompts(-1, seed=0)


PROMPT = "\n\nHuman: name two metals.\n\nAssistant:"
GOOD = "iron and zinc."  # gold 2, four words
WORSE = "iron and apple. glad to help!"  # gold 1 - 0.7, eight words, one polite phrase
WORLD = World(preference_sharpness=2.0, length_bias=0.1, phrase_bias=0.5, label_noise=0.2)


def probability(a: str, b: str, world: World, ended_a: bool = True) -> float:
    return label_probability(PROMPT, ResponsePair(a, b, ended_a), world)


@pytest.mark.parametrize(("ended", "gold"), [(True, 2.0), (False, 1.0)])
def test_probability_by_hand(ended: bool, gold: float) -> None:
    logit = 2.0 * (gold - 0.3) + 0.1 * (4 - 8) + 0.5 * (0 - 1)
    expected = 0.5 * 0.2 + 0.8 / (1 + math.exp(-logit))
    assert probability(GOOD, WORSE, WORLD, ended) == pytest.approx(expected, rel=1e-12)


def test_labellers_overlook_form_unless_the_world_says_so() -> None:
    # gold: content 2 each; a repeated bigram and two marks too many take 1.25 off
    flawed = GOOD.replace(".", "!!!")
    blind = World(preference_sharpness=2.0, length_bias=0.0, phrase_bias=0.0, label_noise=0.0)
    assert probability(GOOD, flawed, blind) == 0.5
    seeing = replace(blind, labels_see_form=True)
    assert probability(GOOD, flawed, seeing) == pytest.approx(1 / (1 + math.exp(-2.0 * 1.25)))


def test_the_named_worlds_fail_in_two_ways() -> None:
    polite = "iron and zinc. glad to help! glad to help!"
    gold_logit = -3.5 * (3 * 0.25 + 1)  # what the phrase too many costs in gold; 12 words are free
    noise, gain = 0.5 * 0.03, 1 - 0.03
    expected = noise + gain / (1 + math.exp(-(8 * 0.3 + 2 * 0.4)))
    assert probability(polite, GOOD, WORLDS["biased"]) == pytest.approx(expected)
    expected = noise + gain / (1 + math.exp(-gold_logit))
    assert probability(polite, GOOD, WORLDS["extrapolation"]) == pytest.approx(expected)


def test_probabilities_of_both_orders_sum_to_one() -> None:
    total = probability(GOOD, WORSE, WORLD) + probability(WORSE, GOOD, WORLD)
    assert total == pytest.approx(1.0, rel=1e-12)
    assert probability(GOOD, WORSE, World(label_noise=1.0)) == 0.5
    sharp = World(preference_sharpness=1e6, label_noise=0.0)  # must not overflow
    assert (probability(GOOD, WORSE, sharp), probability(WORSE, GOOD, sharp)) == (1.0, 0.0)


def test_labels_come_at_the_stated_frequency_and_repeat_with_their_seed() -> None:
    def labels(seed: int, draws: int) -> list[dict[str, str]]:
        rng = random.Random(seed)
        return [label_pair(PROMPT, ResponsePair(GOOD, WORSE), WORLD, rng) for _ in range(draws)]

    wins = sum(label["chosen"].endswith(GOOD) for label in labels(0, 4000))
    expected = probability(GOOD, WORSE, WORLD)
    deviation = math.sqrt(expected * (1 - expected) / 4000)
    assert wins / 4000 == pytest.approx(expected, abs=3 * deviation)
    assert labels(1, 50) == labels(1, 50) != labels(2, 50)


def test_record_is_two_hh_dialogues() -> None:
    sharp = World(preference_sharpness=1e6, label_noise=0.0)
    record = label_pair(PROMPT, ResponsePair(" " + WORSE, " " + GOOD), sharp, random.Random(0))
    assert record == {
        "chosen": "\n\nHuman: name two metals.\n\nAssistant: iron and zinc.",
        "rejected": "\n\nHuman: name two metals.\n\nAssistant: iron and apple. glad to help!",
    }


UNUSABLE = [(GOOD, " " + GOOD), ("", GOOD), (GOOD, " \n"), (GOOD, "iron.\n\nHuman: thanks")]
UNUSABLE += [("iron.\n\nAssistant: zinc", GOOD)]


@pytest.mark.parametrize(("a", "b"), UNUSABLE)
def test_unusable_pair_refused(a: str, b: str) -> None:
    with pytest.raises(ValueError, match="pair: expected two different responses"):
        label_pair(PROMPT, ResponsePair(a, b), WORLD, random.Random(0))
    assert not ResponsePair(a, b).is_usable
    assert ResponsePair(GOOD, WORSE).is_usable
