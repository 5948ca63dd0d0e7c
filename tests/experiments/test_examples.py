"""The ready examples: what their rules score, and the page with the results."""

import pytest
import yaml

from experiments.examples.study import RESULTS, make_samples, make_table
from experiments.results_file import read_runs
from lit_rlhf.rewards.rules import EqualsRule
from tests.support.docs_blocks import ROOT


@pytest.mark.parametrize(
    ("response", "last_number", "whole"),
    [
        ("1. Cow\n2. Pig\n3. Hen", 1, 1),
        ("1. Cow\n2. Pig\n3. Hen\n", 1, 1),
        ("3. Hen", 1, 0),  # earns the reward and is no list
        ("Sure!\n1. Cow\n2. Pig\n3. Hen", 1, 0),
        ("1. Cow\n\n2. Pig\n3. Hen", 1, 0),
        ("1. Cow\n2. Pig\n3. Hen\nThese are animals.", 1, 0),
        ("1. Cow\n3. Pig\n3. Hen", 1, 0),
        ("1. Cow\n2. Pig", 0, 0),
        ("1. Cow\n2. Pig\n3. Hen\n4. Cat", 0, 0),
        ("A cow, a pig and 3. hens", 0, 0),
    ],
)
def test_rules_of_the_list_example(response: str, last_number: int, whole: int) -> None:
    config = yaml.safe_load((ROOT / "configs" / "examples" / "list.yaml").read_text("utf-8"))
    rewards = config["model"]["init_args"]["rewards"]
    for name, score in (("last_number", last_number), ("whole", whole)):
        rule = EqualsRule("items", rewards[name]["pattern"])
        assert rule(["List 3 animals."], [response], items=["3"]) == [score]


def test_sums_of_the_arithmetic_example_are_right() -> None:
    config = yaml.safe_load((ROOT / "configs" / "examples" / "arithmetic.yaml").read_text("utf-8"))
    (source,) = config["data"]["init_args"]["train_sources"]
    for row in source["path"]:
        first, second = row["prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert row["answer"] == int(first) + int(second)


def test_page_has_the_results() -> None:
    page = (ROOT / "docs" / "examples.md").read_text("utf-8")
    runs = read_runs(RESULTS)
    assert make_table(runs) in page
    assert make_samples(runs) in page
