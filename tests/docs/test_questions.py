"""Fifteen questions of new users, each answered at most two clicks from the index."""

from __future__ import annotations

import os
import re
from functools import cache

import pytest

from tests.docs.blocks import ROOT

LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+\.md)")

QUESTIONS = {
    "How do I install it with and without CUDA?": ("docs/index.md", "download.pytorch.org/whl/cpu"),
    "What do I run first on my own data?": ("docs/first_run.md", "lit_rlhf start"),
    "Can the data be a CSV file?": ("docs/data.md", "The first line of a `.csv`"),
    "What of TRL's SFT and reward scripts?": (
        "docs/migration.md",
        "## From TRL's SFTTrainer and RewardTrainer",
    ),
    "How do I train on prompts without a template?": ("docs/migration.md", "### Raw prompts"),
    "How do I write a reward of my own?": ("docs/extending.md", "reward"),
    "How do I resume an interrupted run?": ("docs/resume.md", "--ckpt_path last"),
    "Why is a run slow?": ("docs/diagnosis.md", "## A run is slow"),
    "What helps when memory runs out?": ("docs/diagnosis.md", "## Out of memory"),
    "How do I train with LoRA?": ("docs/models.md", "## LoRA"),
    "How do I train on several GPUs?": ("docs/scale.md", "## Launching"),
    "How do I stop a run that collapses?": ("callbacks/README.md", "StopTraining"),
    "How do I watch GRPO of TRL, or another trainer?": ("callbacks/README.md", "WatchCallback"),
    "How do I load the model elsewhere?": ("docs/export.md", "## For users of other projects"),
    "How do I compare two policies?": ("docs/judging.md", "lit_rlhf evaluate"),
}
"""Page and text of the answer by question."""


@cache
def clicks() -> dict[str, int]:
    """Pages by the number of links between the index and them, up to two."""
    found, latest = {"docs/index.md": 0}, ["docs/index.md"]
    for distance in (1, 2):
        targets = {
            os.path.normpath(os.path.join(os.path.dirname(page), link))
            for page in latest
            for link in LINK.findall((ROOT / page).read_text("utf-8"))
        }
        latest = [t for t in targets if t not in found and (ROOT / t).is_file()]
        found |= dict.fromkeys(latest, distance)
    return found


@pytest.mark.parametrize("question", QUESTIONS)
def test_answer_is_two_clicks_from_the_index(question: str) -> None:
    page, text = QUESTIONS[question]
    assert clicks().get(page, 3) <= 2
    assert text in (ROOT / page).read_text("utf-8")
