"""docs/migration.md: its tables name options that exist, and its script trains as TRL's did."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from lit_rlhf.data import CHAT_TEMPLATES, PromptDataModule
from lit_rlhf.models import load_causal_lm, load_tokenizer
from lit_rlhf.modules import PPOModule
from tests.support.config_parsing import cli_parser, flat
from tests.support.docs_blocks import ROOT, blocks
from tests.support.stages import ANSWERS, QUESTIONS, write_models
from tests.support.tiny_models import tiny_config
from tests.support.tiny_runs import run

PAGE = ROOT / "docs" / "migration.md"
OPTION = re.compile(r"`((?:model|data|trainer)\.[\w.]+)`(?:, ([^|`]+?) +\|)?")
SUPERVISED = "\n## From TRL's SFTTrainer and RewardTrainer\n"
FOREIGN = "\n## From axolotl and LLaMA-Factory\n"


def options_of(module: str, data: str, *required: str) -> dict[str, Any]:
    """Options by dotted name, with their defaults."""
    classes = ["--data", f"lit_rlhf.data.{data}", "--model", f"lit_rlhf.modules.{module}"]
    words = ["fit", *classes, "--data.train_sources", "[{path: c}]", "--model.model_path", "a"]
    settings = flat(cli_parser().parse_args([*words, *required]).fit.as_dict())
    return {name.replace(".init_args.", ".", 1): value for name, value in settings.items()}


def test_options_of_the_page_exist_with_their_defaults() -> None:
    page = PAGE.read_text("utf-8")
    ppo_part, _, rest = page.partition(SUPERVISED)
    supervised, _, foreign = rest.partition(FOREIGN)
    ppo = options_of("PPOModule", "PromptDataModule", "--model.rewards", "{b: 1}")
    sft = options_of("SFTModule", "DemonstrationDataModule")
    reward = options_of("RewardModule", "PreferenceDataModule")
    sft_part, _, reward_part = supervised.partition("| RewardConfig, default |")
    plain = {"None": "none", "True": "true", "False": "false"}
    parts = [(ppo_part, ppo, 100), (sft_part, sft, 10), (reward_part, reward, 4)]
    for text, defaults, least in [*parts, (foreign, ppo | sft | reward, 15)]:
        groups = {name.rpartition(".")[0] for name in defaults}
        named = OPTION.findall(text)
        assert len(named) >= least
        assert [name for name, _ in named if name not in defaults.keys() | groups] == []
        if text is foreign:
            continue
        matches = OPTION.findall(text.partition("\n## From OpenRLHF\n")[0])
        shown = [(name, _number(default)) for name, default in matches if default]
        assert len(shown) >= least // 4
        actual_defaults = [(name, str(defaults[name])) for name, _ in shown]
        assert shown == [
            (name, _number(plain.get(default, default))) for name, default in actual_defaults
        ]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def script(title: str) -> str:
    (block,) = (block for block in blocks(PAGE) if block.title == title)
    return block.text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a TRL user: `models/sft`, `models/reward` and `prompts.jsonl`."""
    write_models(tmp_path / "models")
    shutil.move(tmp_path / "models" / "policy", tmp_path / "models" / "sft")
    rows = zip(QUESTIONS, ANSWERS, strict=True)
    asked = [({"role": "user", "content": question}, answer) for question, answer in rows]
    lines = [json.dumps({"prompt": [turn], "answer": answer}) for turn, answer in asked]
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
    assert int(module.ppo.iteration) == 2
    # two epochs of one minibatch in each iteration, at rates that fall to a quarter of the first
    assert int(module.ppo.ppo_step) == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-6 / 4)
    # prompts are TRL's: the ids of apply_chat_template
    example = names["data"].examples["train"][0]
    asked, options = [{"role": "user", "content": QUESTIONS[0]}], {"return_dict": False}
    rendered = module.tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)
    assert example.input_ids.tolist() == rendered
    assert load_causal_lm(folder / "models" / "ppo").can_generate()


@pytest.mark.slow  # runs of PPO
@pytest.mark.filterwarnings("ignore:.*has no text_contract.json")
@pytest.mark.parametrize("example", ["tldr", "continuations"])
def test_raw_prompts_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path, tiny_config("gpt_neox"))
    for folder in (Path("policy"), Path("reward")):  # as released: no template, no pad token
        (folder / "lit_rlhf.json").unlink()
        (folder / "text_contract.json").unlink()
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        del settings["pad_token"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    prompts = [f"SUBREDDIT: r/a\n\nPOST: {question}\n\nTL;DR:" for question in QUESTIONS]
    rows = [{"prompt": prompt, "completion": " It is."} for prompt in prompts]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = ["tldr"] if example == "tldr" else ["tldr", "continuations"]
    words = []
    for name in configs:
        config = yaml.safe_load(script(f"{name}.yaml"))
        options, loaded = config["model"]["init_args"], config["data"]["init_args"]
        options |= {"model_path": "policy", "max_iterations": 1}
        options |= {"minibatches": {"minibatch_size": 4}, "sampling": {"max_new_tokens": 8}}
        if name == "tldr":
            options["rewards"] = {"reward": 1.0}
        loaded |= {"batch_size": 4, "max_length": 128, "max_prompt_length": 100}
        for part in ("train_sources", "val_sources"):
            loaded[part] = [{"path": "rows.jsonl", "name": part}]
        Path(f"{name}.yaml").write_text(yaml.safe_dump(config))
        words += ["--config", f"{name}.yaml"]
    run("fit", *words, "--trainer.accelerator", "cpu", "--name", "ppo")
    tokenizer = load_tokenizer(f"runs/{example}/ppo")
    assert tokenizer.chat_template == CHAT_TEMPLATES["none"]
    turn = [{"role": "user", "content": prompts[0]}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == prompts[0]


def test_reward_function_of_trls_gives_the_same_here() -> None:
    names: dict[str, Any] = {}
    exec(compile(script("my_reward.py"), "my_reward.py", "exec"), names)
    texts, answers = ["iron, I think", "no"], ["iron", "Mars"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert names["trl_reward"](["a", "b"], completions, answers, trainer_state=None) == [1.0, 0.0]
    assert names["reward"](["a", "b"], texts, answers) == [1.0, 0.0]
