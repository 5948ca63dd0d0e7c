"""The examples of docs/rewards.md, run from the command line."""

from __future__ import annotations

import json
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.configs.tiny_runs import SMALL, logged, overlay, run
from tests.docs.blocks import ROOT, blocks, commands

PAGE = ROOT / "docs" / "rewards.md"
COMMANDS = [c.words[1:] for block in blocks(PAGE) for c in commands(block)]
LOGS = Path("runs/quickstart/logs")


def fit(words: list[str], folder: Path) -> dict[str, list[float]]:
    """Run a `fit` command of the page, made small; the metrics that it logged."""
    small = overlay(folder, "small", SMALL["ppo"])
    run(*words[:3], "--config", str(small), *words[3:])
    return logged(LOGS / words[words.index("--name") + 1])


def test_all_sources_of_the_page_are_logged_and_add_up(fresh_workspace: Path) -> None:
    metrics = fit(COMMANDS[0], fresh_workspace)

    sources = yaml.safe_load(Path("rewards.yaml").read_text())["model"]["init_args"]["rewards"]
    names = {key.rpartition("/")[2].rpartition(":")[2]: key for key in sources}
    assert {key for key in metrics if key.startswith("rollout/score/")} == {
        f"rollout/score/{name}" for name in names
    }
    total = 0.0
    for name, key in names.items():
        value = sources[key]
        if isinstance(value, dict) and value.get("normalize"):
            continue  # its mean over the first iteration is 0
        weight = value["weight"] if isinstance(value, dict) else value
        total += weight * metrics[f"rollout/score/{name}"][0]
    assert metrics["rollout/score"][0] == pytest.approx(total, abs=1e-5)


def test_pages_service_scores_a_run(fresh_workspace: Path, monkeypatch: Any) -> None:
    from scorer import Scorer  # type: ignore[import-not-found]

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(Scorer, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    config = Path("remote.yaml")
    config.write_text(
        config.read_text().replace("localhost:8000", f"127.0.0.1:{server.server_port}")
    )
    try:
        metrics = fit(COMMANDS[1], fresh_workspace)
    finally:
        server.shutdown()
        server.server_close()
    assert metrics["rollout/score/safety"] == [0.0, 0.0]


def test_evaluation_of_the_page_reports_the_rule(fresh_workspace: Path) -> None:
    run(*COMMANDS[2], "--max_prompts", "2", "--max_new_tokens", "4", "--output", "report.json")

    report = json.loads(Path("report.json").read_text())
    assert report["rewards"]["length"] == {"rule": "length", "longest": 0}
    for policy in report["policies"].values():
        assert policy["rewards"]["length"]["mean"] == -policy["response_length"]
