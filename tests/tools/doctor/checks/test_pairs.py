"""The doctor's check of known pairs, on pairs that a reward model has labelled itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import DataSource
from lit_rlhf.functional import wilson_interval
from lit_rlhf.tools.doctor import Finding
from lit_rlhf.tools.doctor.checks.pairs import _read_pairs
from lit_rlhf.tools.evaluation.reward_report import score_pairs
from tests.support.doctor_runs import findings, module_of
from tests.support.stages import ANSWERS, QUESTIONS, first_batch, preferences, source


def write_pairs(root: Path, path: Path, n_wrong: int) -> list[DataSource]:
    """Pairs of which the reward model prefers the chosen response, but for `n_wrong`."""
    pairs = [
        {"prompt": question, "chosen": first, "rejected": second}
        for place, question in enumerate(QUESTIONS)
        for first, second in [(ANSWERS[place], ANSWERS[place - 3])]
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    scored = score_pairs(str(root / "reward"), [DataSource(str(path))])
    for place, pair in enumerate(pairs):
        is_wrong = scored.chosen[place] < scored.rejected[place]
        if is_wrong != (place < n_wrong):
            pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [DataSource(str(path))]


def finding_on(root: Path, folder: Path, sources: list[DataSource], **options: Any) -> Finding:
    data = {"train_sources": sources, "val_sources": sources, "batch_size": 4}
    return findings(root, folder, module_of(root, **options), data=data).findings["known pairs"]


@pytest.mark.parametrize(("n_wrong", "status"), [(0, "ok"), (3, "warning")])
def test_a_reward_model_near_one_half_is_warned_of(
    root: Path, tmp_path: Path, n_wrong: int, status: str
) -> None:
    finding = finding_on(root, tmp_path, write_pairs(root, tmp_path / "pairs.jsonl", n_wrong))
    assert finding.status == status
    low, high = wilson_interval(8 - n_wrong, 8)
    accuracy = f"accuracy {1 - n_wrong / 8:.2f} [{low:.2f}, {high:.2f}]"
    assert f"on held-out pairs: {accuracy} on 8 pairs; " in finding.observation
    assert ("near one half" in finding.change) is (status == "warning")


def test_held_out_pairs_are_those_of_the_runs_own_split(root: Path) -> None:
    data = preferences(root, val_sources=None, val_fraction=0.5, test_fraction=0.25)
    first_batch(data, root)  # sets it up
    held_out = [example.chosen.input_ids.tolist() for example in data.examples["val"]]
    assert len(held_out) > 2  # as many as the test fraction would take
    assert data.encoder is not None
    examples = _read_pairs(data, data.encoder)
    assert [example.chosen.input_ids.tolist() for example in examples] == held_out


def test_prompts_are_not_checked(root: Path, tmp_path: Path) -> None:
    finding = finding_on(root, tmp_path, source(root, "prompts"))
    assert finding.status == "not checked"
    assert "report reward` takes pairs" in finding.observation


def test_rewards_without_a_model_are_not_checked(root: Path, tmp_path: Path) -> None:
    options = {"rewards": ["tests.support.reward_functions:length"], "critic_init": "policy"}
    finding = finding_on(root, tmp_path, source(root, "preferences"), **options)
    assert finding.status == "not checked"
