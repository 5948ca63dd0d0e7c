"""The benchmark of a pretrained model: its steps, what it keeps and its page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pretrained
from benchmarks.pretrained import FILES, Benchmark, Sizes, Step, find_harm, first_responses
from benchmarks.pretrained_page import ESTIMATES, format_page, quarter_means
from lit_rlhf.data import CHAT_TEMPLATES
from lit_rlhf.lab import World, write_world
from tests.configs.parsing import cli_parser
from tests.configs.tiny_runs import write_preferences

SETTINGS = {
    "sizes": {"max_response": 96},
    "split": {part: dict.fromkeys(FILES, 7) for part in ("all", "gold", "proxy", "val", "test")},
    "machine": {"cores": 2, "processor": "processor"},
    "precision": "32-true",
}
TINY = Sizes(48, 24, 6, 24, iterations=4, prompts=4, max_new_tokens=4)


def test_parts_without_results_say_so() -> None:
    page = format_page({"settings": SETTINGS})

    sections = page.split("\n## ")[3:]
    assert [text[0] for text in sections] == ["1", "2", "3", "4", "5", "T"]
    assert all("not run yet" in text for text in sections)
    assert "| gold | 7 | 7 | 7 | 21 |" in page


def test_the_page_is_that_of_the_results() -> None:
    page = format_page(pretrained.read_results(pretrained.RESULTS))
    assert pretrained.PAGE.read_text("utf-8") == page


def test_responses_are_shown_by_prompt() -> None:
    rows = [
        {
            "policy": policy,
            "prompt": [],
            "prompt_text": prompt,
            "response": f"{policy[5:]} {prompt}",
        }
        for policy in ("runs/sft", "runs/ppo")
        for prompt in "abc"
    ]
    shown = first_responses(rows, prompts=2)
    assert [entry["responses"] for entry in shown] == [
        {"sft": "sft a", "ppo": "ppo a"},
        {"sft": "sft b", "ppo": "ppo b"},
    ]


def test_every_step_has_an_estimate(tmp_path: Path) -> None:
    steps = Benchmark(tmp_path, "base", "hh", TINY).steps([0, 1])

    assert {step.name.rstrip("_01") for step in steps} == set(ESTIMATES)
    assert len({step.name for step in steps}) == len(steps)


def test_steps_are_commands_that_the_command_line_knows(tmp_path: Path) -> None:
    steps = {s.name: s for s in Benchmark(tmp_path, "base", "hh", TINY).steps([3])}

    def options(name: str) -> dict[str, Any]:
        words = steps[name].command[2:]
        fit = cli_parser().parse_args(words).fit.as_dict()
        return {**fit["data"]["init_args"], **fit["model"]["init_args"]}

    fast, lora = options("ppo_fast_3"), options("reward_lora")
    assert list(fast["rewards"].values()) == [1.0, 0.0]  # never trained on gold
    assert fast["policy_optimizer"]["learning_rate"] == pytest.approx(5e-5)
    assert fast["policy_optimizer"]["grad_clip"] is None
    assert fast["reward_shaping"]["kl_coef"] == 0.0
    assert fast["seed"] == 3
    assert lora["network"]["lora_rank"] == 16
    assert lora["optimizer"]["learning_rate"] == pytest.approx(3e-4)
    assert "proxy" in lora["train_sources"][0]["path"]


def test_harm_is_a_gold_score_that_stays_low() -> None:
    start = [0.0, 0.1, -0.1, 0.1, -0.1]  # deviation 0.1, of a response 0.4: the bound is -0.2
    assert find_harm([*start, -0.19, -0.19, -0.19]) is None
    assert find_harm([*start, -0.3, -0.3, 0.0, -0.3, -0.3, -0.3]) == 9


def test_quarters_are_of_the_iterations() -> None:
    assert quarter_means([1, 3, 5, 5, 0, 0, 2, 4]) == [2, 5, 0, 3]


def test_finished_steps_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"perplexity": 9.0, "low": 8.0, "high": 10.0}
    ran: list[str] = []

    def run_step(step: Step, folder: Path, threads: int) -> dict[str, Any]:
        if step.name == "perplexity_sft":
            raise RuntimeError("interrupted")
        ran.append(step.name)
        row = dict.fromkeys(("minutes", "cpu_minutes", "peak_gib", "load", "threads"), 1.0)
        return {**row, "part": 1, "resumed": False, "result": figures}

    split = SETTINGS["split"]
    monkeypatch.setattr(
        Benchmark,
        "write_data",
        lambda self: (
            self.path("data").mkdir(exist_ok=True)
            or self.path("data", "split.json").write_text(json.dumps(split))
        ),
    )
    monkeypatch.setattr(pretrained, "run_step", run_step)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted"):
            pretrained.run("base", "hh", str(tmp_path), TINY, parts=(1,))
    assert ran == ["perplexity_base", "sft"]
    assert "| pretrained | 9.00 [8.00, 10.00] |" in (tmp_path / "pretrained.md").read_text("utf-8")
    assert "[2/3] part 1: sft took 1.0 minutes" in capsys.readouterr().err
    with pytest.raises(ValueError, match="sizes: expected that of the results in"):
        pretrained.run("base", "hh", str(tmp_path), Sizes(), parts=(1,))
    with pytest.raises(ValueError, match=r"precision: .*, 32-true, .* got bf16-mixed"):
        pretrained.run("base", "hh", str(tmp_path), TINY, precision="bf16-mixed")


@pytest.mark.slow
def test_all_parts_run_on_a_tiny_model(tmp_path: Path) -> None:
    world = World()
    write_world(tmp_path / "world", world, 0, CHAT_TEMPLATES["hh"], 48, 48, 8, 16)
    write_preferences(tmp_path / "pairs.jsonl", world, 48)
    (tmp_path / "hh").mkdir()
    for file in FILES.values():
        with gzip.open(tmp_path / "hh" / file, "wt", encoding="utf-8") as pairs:
            pairs.write((tmp_path / "pairs.jsonl").read_text("utf-8"))
    root = tmp_path / "run"

    pretrained.run(
        *(str(tmp_path / "world" / "base"), str(tmp_path / "hh"), str(root)),
        TINY,
        seeds=(0,),
        threads=1,
    )

    page = (root / "pretrained.md").read_text("utf-8")
    assert "not run yet)" not in page.split("## 1.")[1]
    assert page.count("ppo_max_0") >= 3
