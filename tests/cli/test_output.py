"""What commands print, line by line: nothing of another library but what is listed here."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_runs import QUICKSTART, RUNS, SMALL, overlay, write_moved_config

pytestmark = pytest.mark.slow  # starts each command in a process of its own

BAR = r"(?:sft|SFT|reward model|ppo|PPO-max) +(?:\d+/\d+|training starts).*"
LIGHTNING = [
    r"Seed set to \d+",
    r"GPU available: \w+(?: \(\w+\))?, used: \w+",
    r"`Trainer\.fit` stopped: `max_epochs=\d+` reached\.",
]
PHASES = [
    r"fit took [\d:]+ for \d+ batch(?:es)?, .*tokens per second \d+",
    r"phase +total +share +mean, s +slowest, s +peak, GiB",
    r"(?:rollout|score|estimate|update|validation|other) +[\d:]+ +\d+%.*",
]
TABLE = r" .*"
PRINTED = {
    "start": [
        r"pairs\.csv: 40 records that serve as preferences, 0 equal an earlier one",
        r"Columns that are read: prompt, chosen, rejected",
        r"Base model in runs/pairs/base: .* untrained weights, .* tokens, 512 positions",
        r"Examples; what is trained on is between \[\[ and \]\]:",
        r"(?:chosen|rejected):",
        r"  \| .*",
        r"fits 128 tokens: 40 of 40 \(100 %\)",
        r"Time here, roughly: SFT .*, the reward model .*, PPO .*",
        r"Written to runs/pairs: sft\.yaml, reward\.yaml, ppo\.yaml, heldout\.jsonl and "
        r"heldout_pairs\.jsonl",
        r"Next, in this order:",
        r"  lit_rlhf (?:fit|report|evaluate) .*",
    ],
    "fit": [
        r"LlamaForCausalLM from \S+: packed forward, chunked logits",
        r"Encoding (?:train|val): .*",
        BAR,
        *LIGHTNING,
        *PHASES,
        r"sft, held out: perplexity .*, token accuracy .*; by the frequency of tokens alone .*",
        r"sft: saved the model to \S+",
    ],
    "fit reward": [
        r"LlamaForSequenceClassification from \S+: packed forward",
        r"Encoding (?:train|val): .*",
        BAR,
        *LIGHTNING,
        *PHASES,
        r"reward, held out: accuracy .* on \d+ pairs; \"(?:longer|shorter) is better\" .*",
        r"reward: saved the model to \S+",
    ],
    "fit ppo": [
        r"(?:policy|reference): LlamaForCausalLM from \S+: packed forward, chunked logits",
        r"(?:reward model|critic): LlamaForSequenceClassification from \S+: packed forward",
        r"Encoding (?:train|val): .*",
        BAR,
        *LIGHTNING,
        *PHASES,
        r"preset: chat \(others: short answers, checkable reward\)",
        r"thresholds: .*; two of these \d+ signals make a collapse \(votes: 2\)",
        r"(?:healthy|suspicious) at step \d+: .*",
        r"votes: 1 would have called it collapsed at step \d+: .*",
        r"\d+ steps were too few for a baseline to judge explained variance",
        r"ppo, held out: score .*, wins .* against the start by its own reward; .*; verdict: \w+",
        r"ppo: saved the model to \S+",
    ],
    "report reward": [
        r"LlamaForSequenceClassification from \S+: packed forward",
        r"pairs scored .* elapsed, .* left",
        TABLE,
        r"(?:preferring the shorter|preferring the longer) response would be .*",
        r"Numbers: \S+\.json",
        r"Page: \S+\.html",
    ],
    "evaluate": [
        r"(?:reward model: )?Llama\w+ from \S+: packed forward(?:, chunked logits)?",
        r"responses of \w+ .* elapsed, .* left",
        TABLE,
        r"KL and perplexity are measured on samples with .*",
        r"Report: \S+\.json",
    ],
    "generate": [
        r"LlamaForCausalLM from sft: packed forward, chunked logits",
        r"responses of sft .* elapsed, .* left",
        r"user: hi",
        r"sft: .*",
        r"\(cut off at 4 tokens\)",
    ],
    "report": [
        r"mean of the last tenth +sft",
        r"[\w/]+/\w+ +-?[\d.e+-]+",
        r"highest level +[\w-]+",
        r"sft, held out: perplexity .*",
        r"Report: page\.html",
    ],
}
"""Patterns of the lines of each command."""


def lines_of(folder: Path, *words: str) -> list[str]:
    """Run a command in a process of its own; the lines that it prints, bars included."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    ran = subprocess.run(
        [sys.executable, "-m", "lit_rlhf", *words],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return [line for line in re.split(r"[\r\n]+", ran.stdout) if line.strip()]


def unexpected(command: str, lines: list[str]) -> list[str]:
    return [line for line in lines if not any(re.fullmatch(p, line) for p in PRINTED[command])]


def test_start_prints_its_own_lines(tmp_path: Path) -> None:
    rows = "".join(f"what is {n}?,it is {n},no idea\n" for n in range(40))
    (tmp_path / "pairs.csv").write_text(f"prompt,chosen,rejected\n{rows}")
    assert unexpected("start", lines_of(tmp_path, "start", "pairs.csv")) == []


def test_fit_generate_and_report_print_their_own_lines(world: Path, tmp_path: Path) -> None:
    moves = {RUNS: world, f"{RUNS}/logs": tmp_path / "logs", f"{RUNS}/sft": tmp_path / "sft"}
    config = write_moved_config(QUICKSTART / "sft.yaml", tmp_path / "configs", moves)
    small = overlay(tmp_path / "configs", "small", SMALL["sft"])
    words = ["fit", "--config", str(config), "--config", str(small)]
    assert unexpected("fit", lines_of(tmp_path, *words)) == []
    words = ["generate", "hi", "--models", "sft", "--max_new_tokens", "4", "--seed", "1"]
    assert unexpected("generate", lines_of(tmp_path, *words)) == []
    words = ["report", "logs/sft", "--output", "page.html"]
    assert unexpected("report", lines_of(tmp_path, *words)) == []


def test_the_commands_that_start_prints_print_their_own_lines(tmp_path: Path) -> None:
    rows = "".join(f"what is {n}?,it is {n},no idea\n" for n in range(40))
    (tmp_path / "pairs.csv").write_text(f"prompt,chosen,rejected\n{rows}")
    lines = lines_of(tmp_path, "start", "pairs.csv")
    place = lines.index("Next, in this order:") + 1
    names = ("fit", "fit reward", "report reward", "fit ppo", "evaluate")
    for name, line in zip(names, lines[place:], strict=True):
        assert unexpected(name, lines_of(tmp_path, *shlex.split(line)[1:])) == [], name
