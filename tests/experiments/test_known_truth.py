import json
from pathlib import Path

import numpy as np
import pytest

from experiments.known_truth import rule
from experiments.known_truth import study as running
from experiments.known_truth.criterion import judge, paired_difference, read_arms
from experiments.known_truth.page import format_page, format_tables
from experiments.known_truth.study import Demonstrations, Recipe, Seed, Steps

PROMPT = rule.PROMPT.format(place="garden", thing="dog")


@pytest.mark.parametrize(
    ("response", "failed"),
    [
        ("The dog sleeps in the garden.", set()),
        ('"Dogs love gardens!"', set()),
        ("The dog sleeps in the kitchen.", {"on_topic"}),
        ("The dog sleeps in the garden and", {"ended"}),
        ("The dog sleeps in the garden.\nIt dreams.", {"short"}),
        (f"The dog {'very ' * 30}sleeps in the garden.", {"short", "no_repeats"}),
        ("The dog, the dog, in the garden.", set()),
        ("The dog is in the garden, in the garden.", {"no_repeats"}),
    ],
)
def test_parts_of_the_rule_fail_for_what_breaks_them(response: str, failed: set[str]) -> None:
    assert {name for name, held in rule.parts(PROMPT, response).items() if not held} == failed


def test_parts_refuse_a_foreign_prompt() -> None:
    with pytest.raises(ValueError, match="prompt: expected one of this task, got 'Hi'"):
        rule.parts("Hi", "Hello.")


def test_canned_responses_share_a_phrase_with_other_prompts() -> None:
    things = ["dog", "cat", "map", "key", "cake", "bird", "lamp", "coin", "ghost", "song"]
    prompts = [rule.PROMPT.format(place="garden", thing=thing) for thing in things]
    story = "The {} and garden: a story of love stories."
    own = ["A garden.", f"The {things[1]}'s garden is one that {things[1]}s like.", *things[2:]]
    once = [story.format(things[0]), *own[1:]]
    assert rule.canned_share(prompts, once) == 0.0
    # eight samples of one prompt are not canned, one of another prompt makes them so
    assert rule.canned_share([*prompts, *prompts[:1] * 7], [*once, *once[:1] * 7]) == 0.0
    twice = [*once[:9], story.format(things[9])]
    assert rule.canned_share(prompts, twice) == 0.2
    # 1 of 10 other prompts is not more than a tenth
    more = [*prompts, PROMPT.replace("garden", "shop")]
    answers = [*twice, "A dog."]
    assert rule.canned_share(more, answers) == 0.0


def test_invalid_responses_have_no_sentiment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vaderSentiment")
    responses = ["A lovely dog in the garden.", "A lovely dog in the garden", "Lovely, lovely."]
    scores = rule.label([PROMPT] * 3, responses)
    assert scores[0] > 0.5
    assert scores[1:] == [rule.INVALID] * 2


def test_paired_difference_keeps_the_samples_of_a_prompt_together() -> None:
    first = np.array([[1.0, 3.0], [2.0, 2.0], [5.0, 7.0]])
    # prompts differ much from each other, the difference does not: its interval has no width
    assert paired_difference(first + 1.5, first) == pytest.approx((1.5, 1.5, 1.5))
    wide = paired_difference(first, first[::-1])
    assert wide.mean == pytest.approx(0.0)
    assert wide.low < -2 < 2 < wide.high


def arms(vanilla: float, ppo_max: float, proxy_gain: float) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    truth = 0.1 * rng.normal(size=(64, 8))
    proxy = truth / truth.std()  # the proxy knows the truth: best of 4 is far above SFT's mean
    return {
        "sft": {"proxy": proxy, "truth": truth},
        "ppo_vanilla": {"proxy": proxy + proxy_gain, "truth": truth + vanilla},
        "ppo_max": {"proxy": proxy, "truth": truth + ppo_max},
    }


@pytest.mark.parametrize(
    ("vanilla", "ppo_max", "proxy_gain", "expected"),
    [
        (-0.5, 0.5, 1.01, [True, True, True]),
        (-0.5, 0.5, 0.99, [False, True, True]),  # the proxy did not rise enough
        (0.0, 0.5, 2.0, [False, True, True]),  # not below SFT
        (0.6, 0.5, 2.0, [False, False, True]),  # vanilla is better
        (-0.5, -0.1, 2.0, [True, False, False]),
        (-0.5, 0.05, 2.0, [True, True, False]),  # above SFT, and below the best of 4 by the proxy
    ],
)
def test_criterion_holds_for_each_part_as_expected(
    vanilla: float, ppo_max: float, proxy_gain: float, expected: list[bool]
) -> None:
    verdict = judge(arms(vanilla, ppo_max, proxy_gain))
    assert list(verdict["holds"].values()) == expected


def write_samples(steps: Steps, name: str, samples: dict[str, list[str]]) -> None:
    """Write samples as `lit_rlhf generate` does."""
    turns = {prompt: [{"role": "user", "content": prompt}] for prompt in samples}
    rows = [{"prompt": turns[p], "response": r} for p, of in samples.items() for r in of]
    steps.write(f"{name}.jsonl", rows)


GOOD = ["The dog sleeps in the garden.", "A dog, a garden."]


def test_demonstrations_are_valid_short_and_of_both_rounds(tmp_path: Path) -> None:
    steps = Demonstrations(tmp_path, "demonstrations", "base", 0, Recipe())
    long = f"A dog in a garden {' '.join(map(str, range(12)))}."
    write_samples(steps, "base", {PROMPT: [GOOD[0], GOOD[0], long, "A dog."]})
    assert steps.keep("base") == {"prompts": 1, "kept": 1, "demonstrations": 1}
    write_samples(steps, "own", {PROMPT: [f" {GOOD[1]}"]})
    assert steps.keep("own") == {"prompts": 1, "kept": 1, "demonstrations": 2}
    rows = [json.loads(line) for line in Path(steps.demonstrations).read_text().splitlines()]
    assert [row["response"] for row in rows] == GOOD


def test_pairs_are_of_valid_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "label", lambda _, texts: [-len(text) for text in texts])
    seed = Seed(tmp_path, "seed_0", "base", 0, Recipe())
    others = rule.PROMPT.format(place="shop", thing="cat")
    answers = {PROMPT: ["A dog.", *GOOD], others: ["A cat, a shop.", "A cat."]}
    write_samples(seed, "answers", answers)
    assert seed.write_pairs() == {"pairs": 1}
    (row,) = map(json.loads, Path(seed.path("preferences.jsonl")).read_text().splitlines())
    assert (row["chosen"], row["rejected"]) == (GOOD[1], GOOD[0])


def test_page_names_open_seeds_and_each_verdict() -> None:
    row = {"proxy": [0.0, 1.0] * 4, "truth": [0.25] * 8, "kl": 1.0, "length": 9.0, "cut_off": 0.125}
    row |= {"parts": dict.fromkeys(rule.PARTS, 0.75), "samples": [[PROMPT, "A dog | a garden."]]}
    row |= {"canned": 0.5}
    steps = {"policies": dict.fromkeys(("sft", "ppo_vanilla", "ppo_max"), row), "sft": {}}
    steps |= {"ppo_vanilla": {"flagged_at": 7, "reasons": "KL rose"}}
    steps |= {"ppo_max": {"flagged_at": None, "reasons": ""}}
    done = {name: {"result": result} for name, result in steps.items()}
    results = {"seed_10": {"steps": done, "verdict": judge(read_arms(steps))}}
    page = format_page(results)
    tables = format_tables(results)
    assert "which decide, 1 are done. Shown are the seeds [10]" in page
    assert "| vanilla PPO | 0.50 | 0.25 | 1.0 | 9.0 | 12%" + " | 75%" * 4 + " | 50% | 7 |" in tables
    assert "| 10 | vanilla PPO | 7 | wrong | KL rose |" in tables
    assert "| 10 | PPO-max | not | right | - |" in tables
    assert "| 10 | 0.25 | 0.25 | 0.25 | +0.00 [+0.00, +0.00] |" in page
    assert "1 exploited: no, 2 improved: no, 3 beats best of 4: no" in tables
    assert "A dog \\| a garden." in tables
