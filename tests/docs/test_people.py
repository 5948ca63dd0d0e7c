"""The story of docs/people.md: people label, a reward model and PPO learn, people judge blind.

The people are a script on the other side of the real page. It prefers the response with the higher
gold, and errs in a tenth of its choices.
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import DataSource, load_records
from lit_rlhf.tools.evaluation.labels import Label, read_labels
from lit_rlhf.tools.lab import gold_reward
from tests.support.docs_blocks import ROOT
from tests.support.docs_running import read_page_commands
from tests.support.labelling import Answer, Browser, end_process, label_all, start_label_command
from tests.support.tiny_runs import run

ERRORS = 0.1


def golds_of(page: Answer) -> tuple[float, float]:
    """Gold of the left and of the right response, from what the page shows."""
    roles = re.findall(r'<div class="turn (\w+)">', page.text)
    speakers = {"user": "Human", "assistant": "Assistant"}
    turns = zip(roles, page.texts, strict=False)
    prompt = "".join(f"\n\n{speakers[role]}: {text}" for role, text in turns) + "\n\nAssistant:"
    left, right = gold_reward([prompt] * 2, [page.left, page.right])
    return left, right


def make_annotator(seed: int) -> Callable[[Answer], str]:
    """Somebody who follows gold with errors."""
    errors = random.Random(seed)

    def choose(page: Answer) -> str:
        left, right = golds_of(page)
        if left == right:
            return "tie"
        return "left" if (left > right) != (errors.random() < ERRORS) else "right"

    return choose


def label_by_script(words: list[str], folder: Path, seed: int) -> list[Label]:
    """Run a `label` command of the page, and label all that it shows."""
    started = start_label_command([*words, "--port", "0"], folder)
    try:
        browser = Browser(started.port)
        label_all(browser, browser.enter("script", started.token), make_annotator(seed))
    finally:
        end_process(started.process)
    return read_labels(str(folder / words[words.index("--output") + 1]))


@pytest.mark.slow  # trains three stages of the quickstart: minutes
def test_policy_that_learned_from_people_wins_by_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(
        *("lab", "world", "--output_dir", "runs/quickstart/world"),
        *("--world", "extrapolation", "--n_heldout_prompts", "512"),
    )
    run("fit", "--config", "quickstart/sft")
    labelling, fit_reward, fit_ppo = [
        words
        for words in read_page_commands("people.md")
        if "pairs.jsonl" in words or any("_people" in word for word in words)
    ][:3]
    labels = label_by_script(labelling[1:], tmp_path, seed=1)
    n_preferences = len(load_records("preference", [DataSource("pairs.jsonl")]))
    assert n_preferences > 500
    run(*fit_reward)
    run(*fit_ppo)
    judged = label_by_script(
        [
            *("--policies", "runs/quickstart/sft", "runs/quickstart/ppo_people"),
            *("--prompts", "runs/quickstart/world/prompts_heldout.jsonl", "--max_prompts", "200"),
            *("--max_new_tokens", "48", "--temperature", "1", "--top_p", "1"),
            *("--repetition_penalty", "1", "--output", "labels.jsonl"),
        ],
        tmp_path,
        seed=2,
    )
    run(
        *("evaluate", "--policies", "runs/quickstart/sft", "runs/quickstart/ppo_people"),
        *("--labels", "labels.jsonl", "--rewards", "{runs/quickstart/reward_people: 1.0}"),
        *("--output", "people.json", "--page", "people.html"),
    )
    people: dict[str, Any] = json.loads(Path("people.json").read_text("utf-8"))["people"]
    outcomes = people["outcomes"]["ppo_people"]
    print(
        f"{len(labels)} and {len(judged)} labels, {n_preferences} preferences; "
        f"{json.dumps(outcomes)}; {json.dumps(people['machines'])}; {people['within']}"
    )
    assert outcomes["win_interval"][0] > outcomes["lose_interval"][1]
    assert "Against sft" in Path("people.html").read_text("utf-8")


def test_fields_of_the_page_are_the_fields_of_a_label() -> None:
    text = (ROOT / "docs/people.md").read_text("utf-8")
    table = text.partition("| field | value |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]*)", table, re.MULTILINE)))
    assert named == list(Label.__dataclass_fields__)
