"""The commands of docs/export.md, run as they are on the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_rlhf.cli.main import main
from lit_rlhf.data import TextContract
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_scalar_model
from tests.configs.tiny_runs import RUNS, SMALL, fit, moved, overlay
from tests.docs.blocks import ROOT, blocks, commands
from tests.docs.running import run_here
from tests.docs.workspace import make_workspace, standing_in
from tests.support.gguf_file import CHAT_TEMPLATE

PAGE = ROOT / "docs" / "export.md"
BLOCKS = [block for block in blocks(PAGE) if block.language == "bash"]
KEEP = {
    "trainer": {
        "enable_checkpointing": True,
        "callbacks+": [
            {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 1}}
        ],
    }
}


@pytest.fixture(scope="module")
def page(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace after a quickstart that kept its checkpoints; it is the current folder."""
    folder = make_workspace(tmp_path_factory.mktemp("export") / "workspace", quickstart)
    own = folder / "own"
    config = moved(ROOT / "configs/quickstart/ppo_max.yaml", own, {RUNS: folder / RUNS})
    fit([config, overlay(own, "small", SMALL["ppo"]), overlay(own, "keep", KEEP)], "--overwrite")
    checkpoints = folder / RUNS / "logs/ppo_max/checkpoints"
    (checkpoints / "batch=2.ckpt").rename(checkpoints / "batch=10.ckpt")
    with standing_in(folder):
        yield folder


def typed(word: str) -> list[list[str]]:
    """The commands of the page that contain a word."""
    found = [command.words for block in BLOCKS for command in commands(block)]
    return [words[1:] for words in found if any(word in part for part in words)]


def check_first_story(page: Path, printed: str) -> None:
    """Both models of the page's first block are there and load."""
    told = [line for line in printed.splitlines() if line.startswith("Exported the")]
    checkpoint = "runs/quickstart/logs/ppo_max/checkpoints/batch=10.ckpt"
    assert [line.partition(" (")[0] for line in told] == [
        f"Exported the {network} of {checkpoint}" for network in ("policy", "critic")
    ]
    finished = page / RUNS / "ppo_max"
    for name, left in (("policy", finished), ("critic", finished / "critic")):
        files = {path.name for path in left.iterdir() if path.is_file()}
        assert {path.name for path in (page / "runs/exported" / name).iterdir()} == files
    AutoModelForCausalLM.from_pretrained(page / "runs/exported/policy")
    AutoModelForSequenceClassification.from_pretrained(page / "runs/exported/critic")


def test_first_story(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(BLOCKS[0]):
        assert run_here(command.words).status == 0
    check_first_story(page, capsys.readouterr().out)


def test_smaller_copy(page: Path) -> None:
    (command,) = typed("exported/half")
    main(command)
    plain = AutoModelForCausalLM.from_pretrained("runs/exported/half")
    assert plain.dtype == torch.bfloat16


@torch.no_grad()
def scores(folder: str) -> torch.Tensor:
    ids = torch.arange(2, 14).reshape(2, 6)
    model = load_scalar_model(folder).eval()
    return sequence_scores(model, ids, torch.ones_like(ids, dtype=torch.bool))


def test_value_head(page: Path) -> None:
    (command,) = typed("reward_trl")
    main(command)
    expected = scores("runs/quickstart/reward")
    torch.testing.assert_close(scores("runs/exported/reward_trl"), expected, rtol=0, atol=1e-6)


def test_papers_reward_model(page: Path) -> None:
    (command,) = typed("downloads/reward_en")
    main([word if word != "bfloat16" else "float32" for word in command])
    contract = TextContract.load("runs/reward_en")
    assert contract.render(({"role": "user", "content": "a"},)) == f"Human:a{contract.eos_token}"
    expected = scores("runs/quickstart/reward")
    torch.testing.assert_close(scores("runs/reward_en"), expected, rtol=1e-4, atol=1e-5)


def test_gguf_file(page: Path) -> None:
    (command,) = typed(".gguf")
    main(command)
    assert TextContract.load("runs/smollm2/base").chat_template == CHAT_TEMPLATE


def test_upload(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: dict[str, Any] = {}

    class Address(str):
        repo_id = "someone/ppo-max"

    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setattr(
        HfApi, "create_repo", lambda *_, **given: uploaded.update(given) or Address()
    )
    monkeypatch.setattr(HfApi, "upload_folder", lambda _, **given: uploaded.update(given))
    (command,) = typed("--push_to_hub")
    main(command)
    assert uploaded["private"]
    assert uploaded["folder_path"] == "runs/exported/ppo_max"


def test_every_command_of_the_page_is_run_here() -> None:
    assert len(typed("export")) == 7
