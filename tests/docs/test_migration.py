"""docs/migration.md: its tables name options that exist, and its script trains as TRL's did."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lit_rlhf.data import PromptDataModule
from lit_rlhf.models import load_causal_lm
from lit_rlhf.modules import PPOModule
from tests.configs.parsing import cli_parser, flat
from tests.docs.blocks import ROOT, blocks
from tests.modules.stages import ANSWERS, QUESTIONS, write_models

PAGE = ROOT / "docs" / "migration.md"
OPTION = re.compile(r"`(?P<name>(?:model|data|trainer)\.[\w.]+)`(?:, (?P<default>[^|`]+?) *$)?")


def rows(section: str) -> Iterator[list[str]]:
    """Cells of the tables of options below a heading."""
    text = PAGE.read_text("utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (
            line.startswith("|")
            and len(cells) == 3
            and cells[0] != "---"
            and "here" not in cells[1]
        ):
            yield cells


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """Defaults of PPO's options, by the names of the page."""
    data, model = "lit_rlhf.data.PromptDataModule", "lit_rlhf.modules.PPOModule"
    required = ["--model.model_path", "a", "--model.rewards", "{b: 1}"]
    words = ["fit", "--data", data, "--data.train_sources", "[{path: c}]", "--model", model]
    parser = cli_parser()
    settings = flat(parser.parse_args([*words, *required]).fit.as_dict())
    return {name.replace(".init_args.", ".", 1): value for name, value in settings.items()}


@pytest.mark.parametrize("section", ["From TRL's PPOTrainer", "From OpenRLHF", "From MOSS-RLHF"])
def test_each_of_our_names_is_an_option(section: str, defaults: dict[str, Any]) -> None:
    names = [match["name"] for row in rows(section) for match in OPTION.finditer(" ".join(row[1:]))]
    assert len(names) > 30
    groups = {name.rpartition(".")[0] for name in defaults}
    unknown = [name for name in names if name not in defaults and name not in groups]
    assert unknown == []


def test_each_default_of_ours_is_the_options(defaults: dict[str, Any]) -> None:
    shown = [
        (match["name"], match["default"])
        for _, cell, _ in rows("From TRL's PPOTrainer")
        for match in OPTION.finditer(cell)
        if match["default"] is not None
    ]
    assert len(shown) > 30
    assert [(name, default) for name, default in shown if default != word(defaults[name])] == []


def word(value: object) -> str:
    """A value of an option as the page has it."""
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def script(title: str) -> str:
    (block,) = (block for block in blocks(PAGE) if block.title == title)
    return block.text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a TRL user: `models/sft`, `models/reward` and `prompts.jsonl`."""
    write_models(tmp_path / "models")
    shutil.move(tmp_path / "models" / "policy", tmp_path / "models" / "sft")
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": question}], "answer": answer})
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow  # a run with Lightning's progress bar and logger
@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_script_trains_what_trls_does(folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(script("lit_ppo.py"), "lit_ppo.py", "exec"), names)

    module, trainer = names["module"], names["trainer"]
    assert isinstance(module, PPOModule)
    assert isinstance(trainer, Trainer)
    assert isinstance(names["data"], PromptDataModule)
    assert int(module.iteration) == 2
    # two epochs of one minibatch in each iteration, at rates that fall to a quarter of the first
    assert int(module.ppo_step) == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-6 / 4)
    # prompts are TRL's: the ids of apply_chat_template
    example = names["data"].examples["train"][0]
    rendered = module.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, return_dict=False
    )
    assert example.input_ids.tolist() == rendered
    assert load_causal_lm(folder / "models" / "ppo").can_generate()


def test_reward_function_of_trls_gives_the_same_here() -> None:
    names: dict[str, Any] = {}
    exec(compile(script("my_reward.py"), "my_reward.py", "exec"), names)
    texts, answers = ["iron, I think", "no"], ["iron", "Mars"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert names["trl_reward"](["a", "b"], completions, answers, trainer_state=None) == [1.0, 0.0]
    assert names["reward"](["a", "b"], texts, answers) == [1.0, 0.0]
