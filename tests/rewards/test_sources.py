"""What a configuration may say of reward sources, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from lit_rlhf.rewards import LengthRule, RemoteScorer, parse_reward_sources, source_names


def test_a_number_is_a_weight_and_a_mapping_describes_a_source() -> None:
    sources = parse_reward_sources(
        {
            "runs/reward": 1.0,
            "my.rules:polite": {"weight": -0.5, "normalize": True},
            "brevity": {"rule": "length", "weight": 0.1, "longest": 60, "unit": "words"},
            "safe.v2": {"rule": "http", "url": "http://localhost/", "timeout": 5},
        }
    )
    model, function, rule, remote = sources
    assert [source.name for source in sources] == ["reward", "polite", "brevity", "safe.v2"]
    assert [source.weight for source in sources] == [1.0, -0.5, 0.1, 1.0]
    assert [source.normalize for source in sources] == [False, True, False, False]
    assert [source.is_model for source in sources] == [True, False, False, False]
    assert (model.path, function.path) == ("runs/reward", "my.rules:polite")
    assert rule.rule == LengthRule(longest=60, unit="words")
    assert remote.rule == RemoteScorer("http://localhost/", timeout=5.0)


def test_a_mapping_of_the_configuration_is_left_as_it_is() -> None:
    rewards: dict[str, Any] = {"brevity": {"rule": "length", "weight": 0.1, "longest": 60}}
    parse_reward_sources(rewards)
    assert rewards == {"brevity": {"rule": "length", "weight": 0.1, "longest": 60}}


def test_names_are_short_where_that_tells_them_apart() -> None:
    assert source_names(["runs/a/reward", "my.rules:polite", "hub/b"]) == {
        "runs/a/reward": "reward",
        "my.rules:polite": "polite",
        "hub/b": "b",
    }
    assert list(source_names(["a/reward", "b/reward"]).values()) == ["a/reward", "b/reward"]
    # a rule's name is a name already
    assert source_names(["x:y"], whole=["x:y"]) == {"x:y": "x:y"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("a", {"rule": "lenght"}, "rewards.a.rule: expected one of length, format, regex, http, g"),
        (
            "a",
            {"rule": "length", "longst": 3},
            r"rewards.a: Option 'longst' is not accepted \(rule: length takes shortest, longest, "
            r"unit, weight, normalize\)",
        ),
        ("a", {"rule": "length", "longest": "x"}, "rewards.a: .*longest.*\n.*rule: length takes"),
        ("a", {"rule": "length"}, "rewards.a: shortest, longest: expected at least one of them"),
        ("a", {"rule": "regex"}, "rewards.a: .*pattern.* .rule: regex takes pattern, absent, time"),
        ("a", {"rule": "http", "url": "x"}, "rewards.a: url: expected http://host"),
        ("a", {"rule": "length", "longest": 3, "weight": None}, "rewards.a: expected a finite num"),
        ("a", {"rule": "length", "longest": 3, "normalize": 1}, "rewards.a.normalize: expected tr"),
        ("runs/a", {"weight": 1.0, "longest": 3}, "rewards.runs/a: expected weight, normalize and"),
        ("runs/a", float("nan"), "rewards.runs/a: expected a finite number as weight, got nan"),
        ("runs/a", True, "rewards.runs/a: expected a finite number as weight, got True"),
        ("runs/a", "1", "rewards.runs/a: expected a finite number as weight, got '1'"),
    ],
)
def test_a_source_that_is_described_wrongly_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        parse_reward_sources({key: value})
