"""docs/migration.md: its tables name options that exist, and its script trains as TRL's did."""

from __future__ import annotations

import json
import re
import shutil
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
OPTION = re.compile(r"`((?:model|data|trainer)\.[\w.]+)`(?:, ([^|`]+?) +\|)?")


def test_options_of_the_page_exist_with_their_defaults() -> None:
    data, model = "lit_rlhf.data.PromptDataModule", "lit_rlhf.modules.PPOModule"
    words = ["fit", "--data", data, "--data.train_sources", "[{path: c}]", "--model", model]
    required = ["--model.model_path", "a", "--model.rewards", "{b: 1}"]
    settings = flat(cli_parser().parse_args([*words, *required]).fit.as_dict())
    defaults = {name.replace(".init_args.", ".", 1): value for name, value in settings.items()}
    groups = {name.rpartition(".")[0] for name in defaults}
    named = OPTION.findall(PAGE.read_text("utf-8"))
    assert len(named) > 100
    assert [name for name, _ in named if name not in defaults.keys() | groups] == []
    with_defaults = PAGE.read_text("utf-8").partition("\n## From OpenRLHF\n")[0]
    shown = [(name, default) for name, default in OPTION.findall(with_defaults) if default]
    told = [(name, str(defaults[name])) for name, _ in shown]
    assert len(shown) > 30
    plain = {"None": "none", "True": "true", "False": "false"}
    assert shown == [(name, plain.get(default, default)) for name, default in told]


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
