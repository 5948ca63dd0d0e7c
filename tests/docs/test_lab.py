"""docs/lab.md: the parts of gold and the worlds are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from lit_rlhf.tools.lab import WORLDS, gold

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text("utf-8")


def test_the_table_has_the_weight_of_every_part_of_gold() -> None:
    weights = [float(w) for w in re.findall(r"\| [+-] ([0-9.]+)[a-z ]* \|$", PAGE, re.MULTILINE)]
    assert weights == [
        gold.BEST_GOLD,
        gold.WRONG_ITEM_COST,
        gold.EXCESS_ITEM_COST,
        gold.MISJUDGED_COST,
        gold.UNFINISHED_COST,
        gold.EXTRA_WORD_COST,
        gold.REPEATED_BIGRAM_COST,
        gold.MALFORMED_COST,
    ]


def test_the_page_describes_every_world() -> None:
    names = re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)
    assert names == list(WORLDS)
    biased = WORLDS["biased"]
    for number in (biased.preference_sharpness, biased.length_bias, biased.phrase_bias):
        assert f" {number} " in PAGE
    assert f"{biased.label_noise:.0%}".replace("%", " %") in PAGE
