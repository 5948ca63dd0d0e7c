import math
import random
from dataclasses import replace

import pytest

from lit_rlhf.tools.lab.world import WORLDS, ResponsePair, World, label_pair, label_probability

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
