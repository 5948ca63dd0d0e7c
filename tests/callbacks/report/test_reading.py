"""What a page shows beside the curves: responses, phases, and runs of other trainers."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_callbacks import Level
from lit_callbacks.report import write_report
from lit_callbacks.report.reading import read_any_run, read_phases, read_responses
from tests.callbacks.reports import COLLAPSE, write_run


def sample(step: int, prompt: str, score: float, response: str = "") -> str:
    shown = {"response": response or f"{prompt} at {step}", "score": score}
    return json.dumps({"step": step, "prompt": prompt, **shown}) + "\n"


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    folder = tmp_path / "sampled"
    write_run(folder, {"rollout/kl": [0.1] * 8, "time/update": [1.0, 3.0]}, {4: COLLAPSE})
    lines = [sample(step, p, step + 10 * (p == "b")) for step in (0, 2, 5, 7, 9) for p in "ab"]
    (folder / "samples.jsonl").write_text("".join([*lines, '{"step": 9, "pro']))  # being written
    return folder


def test_responses_before_at_and_after_a_verdict(sampled: Path) -> None:
    told = read_responses(read_any_run("run", str(sampled)))
    assert told is not None
    (moment,) = told.moments
    assert [verdict.step for verdict in moment.verdicts] == [4]
    assert moment.steps == [2, 5, 7]
    assert [row[1][5]["response"] for row in moment.rows] == ["a at 5", "b at 5"]
    assert [s["score"] for s in told.ranked["Best-scored"]] == [19, 17, 15, 12, 10]
    assert [s["score"] for s in told.ranked["Worst-scored"]] == [0, 2, 5, 7, 9]
    text = write_report([str(sampled)], sampled / "page.html").read_text()
    assert "Best-scored of 10 responses" in text
    assert "a at 5" in text


def test_bad_line_of_responses_is_named(sampled: Path) -> None:
    (sampled / "samples.jsonl").write_text(sample(1, "a", 0.0) + "[]\n")
    with pytest.raises(ValueError, match=r"samples.jsonl:2: expected a JSON object"):
        read_responses(read_any_run("run", str(sampled)))


def test_phases_are_means_with_peaks(tmp_path: Path) -> None:
    series = {"time/update": [1.0, 3.0], "memory/update": [2.0, 1.5], "time/score": [0.5]}
    run = read_any_run("run", write_run(tmp_path, series))
    assert read_phases(run) == {"update": (2.0, 2.0), "score": (0.5, None)}


def test_log_of_another_trainer_is_judged_afterwards(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": n, "kl": 0.02 if n < 20 else 5.0, "entropy": 1.0 if n < 20 else 0.1}
        for n in range(1, 41)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_any_run("run", str(log))
    assert run.judged_afterwards
    assert run.spans[0].level is Level.HEALTHY
    assert run.verdicts[0].step >= 20
    page = write_report([str(log)], tmp_path / "page.html").read_text()
    assert "No detector ran" in page
