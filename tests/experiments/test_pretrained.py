"""The benchmark of a pretrained model: its steps, what it keeps and its page."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments.pretrained import study as pretrained
from experiments.pretrained.page import draw, find_harm, format_tables
from experiments.pretrained.study import FILES, Benchmark, Sizes, correlate_scores
from experiments.processes import Step
from experiments.results_file import read_runs
from lit_rlhf.tools.lab import World
from tests.support.experiment_steps import options_of
from tests.support.tiny_runs import write_preferences, write_tiny_world

SETTINGS = {
    "sizes": {"max_response": 96},
    "split": {part: dict.fromkeys(FILES, 7) for part in ("all", "gold", "proxy", "val", "test")},
    "machine": {"cores": 2, "processor": "processor"},
    "precision": "32-true",
}
TINY = Sizes(
    gold_pairs=48,
    proxy_pairs=24,
    val_pairs=6,
    test_pairs=24,
    iterations=6,
    prompts=4,
    max_new_tokens=4,
)


def test_agreement_of_proxy_and_gold_is_of_ranks() -> None:
    scores = {"runs/sft": [(1, 10), (2, 1000), (3, 100)], "runs/ppo": [(1, 3), (2, 2), (3, 1)]}
    pairs = [(policy, *pair) for policy, of in scores.items() for pair in of]
    rows = [{"policy": p, "scores": {"reward": float(x), "gold": float(y)}} for p, x, y in pairs]
    # 1 - 6 * (0 + 1 + 1) / (3 * 8), where the ranks of two responses differ by 1
    assert correlate_scores(rows, "sft") == pytest.approx(0.5, abs=1e-5)
    assert correlate_scores(rows, "ppo") == pytest.approx(-1.0, abs=1e-5)


def test_steps_are_commands_that_the_command_line_knows(tmp_path: Path) -> None:
    steps = Benchmark(tmp_path, "base", "hh", TINY).steps([3])
    fast, lora, vanilla = options_of(steps, "ppo_fast_3", "reward_lora", "ppo_vanilla_3")
    assert list(fast["rewards"].values()) == [1.0, 0.0]  # never trained on gold
    rates = [fast[f"{name}_optimizer"]["learning_rate"] for name in ("policy", "critic")]
    assert rates == pytest.approx([5e-5, 1.5e-4])
    assert vanilla["policy_optimizer"]["learning_rate"] == pytest.approx(1e-5)
    assert (fast["seed"], fast["reward_shaping"]["kl_coef"]) == (3, 0.0)
    assert fast["policy_optimizer"]["grad_clip"] is None
    assert lora["network"]["lora_rank"] == 16
    assert lora["optimizer"]["learning_rate"] == pytest.approx(1e-3)
    assert "proxy" in lora["train_sources"][0]["path"]


def test_harm_is_a_gold_score_that_stays_low() -> None:
    start = [0.0, 0.1, -0.1, 0.1, -0.1]  # half of 0.4 below 0: the bound is -0.2
    assert find_harm([*start, -0.19, -0.19, -0.19], std=0.4) is None
    assert find_harm([*start, -0.3, -0.3, 0.0, -0.3, -0.3, -0.3], std=0.4) == 9
    # the spread is the SFT model's, without iterations that already fall
    assert find_harm([0.5, 0.4, 0.1, -0.2, -0.8, -1.0, -1.2], std=1.0) == 5


def test_no_step_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    figures = {"perplexity": 9.0, "low": 8.0, "high": 10.0}
    ran: list[str] = []

    def run_step(step: Step, folder: Path, threads: int) -> dict[str, Any]:
        if step.name == "perplexity_sft":
            raise RuntimeError("interrupted")
        ran.append(step.name)
        row = dict.fromkeys(("minutes", "cpu_minutes", "peak_gib", "load", "threads"), 1.0)
        return {**row, "part": 1, "resumed": False, "result": figures}

    def write_data(self: Benchmark) -> None:
        self.path("data").mkdir(exist_ok=True)
        self.path("data", "split.json").write_text(json.dumps(SETTINGS["split"]))

    monkeypatch.setattr(Benchmark, "write_data", write_data)
    monkeypatch.setattr("experiments.processes.run_step", run_step)
    file = tmp_path / "results.jsonl"
    run = partial(pretrained.run, "base", "hh", output_dir=str(tmp_path), results=str(file))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted"):
            run(sizes=TINY, parts=(1,))
    assert ran == ["perplexity_base", "sft"]
    assert "| pretrained | 9.00 [8.00, 10.00] |" in format_tables(read_runs(file))
    assert f"{tmp_path.name}: sft took 1.0 minutes" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"sizes: expected .*, as in .* got"):
        run(sizes=Sizes(), parts=(1,))
    with pytest.raises(ValueError, match=r"precision: expected 32-true, .* got bf16-mixed"):
        run(sizes=TINY, precision="bf16-mixed")


@pytest.mark.slow
def test_all_parts_run_on_a_tiny_model(tmp_path: Path) -> None:
    world = World()
    write_tiny_world(tmp_path / "world", world)
    write_preferences(tmp_path / "pairs.jsonl", world, 72)
    (tmp_path / "hh").mkdir()
    for file in FILES.values():
        with gzip.open(tmp_path / "hh" / file, "wt", encoding="utf-8") as pairs:
            pairs.write((tmp_path / "pairs.jsonl").read_text("utf-8"))
    file = tmp_path / "results.jsonl"
    pretrained.run(
        str(tmp_path / "world" / "base"),
        str(tmp_path / "hh"),
        output_dir=str(tmp_path / "run"),
        sizes=TINY,
        seeds=(0,),
        threads=1,
        results=str(file),
    )
    tables = format_tables(read_runs(file))
    assert "not run yet)" not in tables.split("## 1.")[1]
    assert tables.count("ppo_max_0") >= 3
    assert draw(read_runs(file)).axes
