from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from lit_rlhf import models
from lit_rlhf.models import ModelCardInfo, save_model_folder
from lit_rlhf.models.card import render_model_card
from lit_rlhf.models.heads import build_scalar_model
from tests.support.hostile_yaml import BOMB
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

SETTINGS, METRICS = {"learning_rate": 1e-5, "pipe": "a|b"}, {"reward/accuracy": 0.71}
CARD = ModelCardInfo("reward", "owner/base", SETTINGS, METRICS, "lit_rlhf fit")


LIBRARY = {"library_name": "transformers"}
TEXT, SCORE = ({"pipeline_tag": f"text-{task}"} for task in ("generation", "classification"))


def metadata(card: str) -> object:
    """The block between the first two lines of dashes, as the hub reads it."""
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_in_a_folder_says_how_the_model_was_made(tmp_path: Path) -> None:
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), tmp_path / "m", card=CARD)
    text = (tmp_path / "m" / "README.md").read_text()
    rows = ("`learning_rate` | 1e-05", "`pipe` | a\\|b", "`reward/accuracy` | 0.71")
    for row in (*rows, f"`torch` | {version('torch')}"):
        assert f"| {row} |" in text
    assert "lit_rlhf fit" in text


def test_the_hubs_metadata_names_task_tags_and_base_model() -> None:
    tags = {"base_model": "owner/base", "tags": ["rlhf", "reward"]}
    assert metadata(render_model_card(CARD.manifest(), scalar=True)) == LIBRARY | SCORE | tags
    # any name of a stage is valid, and a local base model stays out
    for path in (".", "runs/with/three/parts"):
        info = ModelCardInfo(stage="my: stage", base_model=path)
        card = render_model_card(info.manifest(), scalar=False)
        assert metadata(card) == LIBRARY | TEXT | {"tags": ["rlhf", "my: stage"]}
        assert "# my: stage" in card


def folder_with_card(folder: Path, text: str) -> str:
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(text, "utf-8")
    return str(folder)


def test_base_model_licence_and_datasets_are_inherited_over_stages(tmp_path: Path) -> None:
    head = "---\nlicense: apache-2.0\nbase_model: owner/base\ndatasets: [owner/first]\n---\n# SFT\n"
    sft = folder_with_card(tmp_path / "runs" / "sft", head)
    info = ModelCardInfo("reward", sft, datasets=["owner/second", "owner/first"], files=["pairs"])
    card = render_model_card(info.manifest(), scalar=True)
    again = ModelCardInfo("critic", folder_with_card(tmp_path / "runs" / "reward", card))
    last = metadata(render_model_card(again.manifest(), scalar=True))
    inherited = {"base_model": "owner/base", "datasets": ["owner/first", "owner/second"]}
    inherited |= {"license": "apache-2.0"}  # type: ignore[dict-item]
    assert metadata(card) == LIBRARY | SCORE | inherited | {"tags": ["rlhf", "reward"]}
    assert last == LIBRARY | inherited | {"tags": ["rlhf", "critic"]}
    assert "from `sft`. The base model is `owner/base`." in card
    assert "Training data: `owner/second`, `owner/first`, `pairs`." in card


def test_hub_models_data_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "---\nlicense: mit\ndatasets: [their/data]\n---\n"
    cached = Path(folder_with_card(tmp_path / "cache", head)) / "README.md"
    monkeypatch.setattr(models.card, "try_to_load_from_cache", lambda *_: str(cached))
    entries = metadata(
        render_model_card(ModelCardInfo("sft", "owner/base").manifest(), scalar=False)
    )
    theirs = {"base_model": "owner/base", "license": "mit", "tags": ["rlhf", "sft"]}
    assert entries == LIBRARY | TEXT | theirs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Only words\n",
        "---\nlicense: [\n---\n",
        f"---\n{BOMB}license: *a11\n---\n",
        f"---\nlicense: {'[' * 100_000}{']' * 100_000}\n---\n",
        "---\nlicense: {a: [b]}\n---\n",
        "---\n- [license, mit]\n---\n",
    ],
    ids=["empty", "words", "broken", "bomb", "deep", "mapping", "list"],
)
def test_a_card_without_metadata_passes_nothing_on(tmp_path: Path, text: str) -> None:
    start = folder_with_card(tmp_path / "sft", text)
    with pytest.warns(UserWarning, match="cannot be read") if "[" in text else nullcontext():
        card = render_model_card(ModelCardInfo("ppo", start).manifest(), scalar=False)
    assert metadata(card) == LIBRARY | TEXT | {"tags": ["rlhf", "ppo"]}


def test_settings_commands_and_metrics_tell_nothing_of_the_machine(tmp_path: Path) -> None:
    config = {
        "_class_path": "lit_rlhf.modules.PPOModule",
        "model_path": str(tmp_path),
        "output_dir": str(tmp_path / "out"),
        "rewards": {"runs/hh/reward": 1.0, "my.rules:brevity": 0.1, "owner/reward": 2.0},
        "loss.ratio_clip": 0.2,
    }
    command = f"lit_rlhf export --checkpoint={tmp_path}/last.ckpt --base {tmp_path}"
    info = ModelCardInfo("ppo", "runs/hh/sft", config, {"rollout/kl": 1.5}, command)
    card = render_model_card(info.manifest(), scalar=False)
    assert str(tmp_path) not in card
    assert f"lit_rlhf export --checkpoint=last.ckpt --base {tmp_path.name}" in card
    assert f"| `model_path` | {tmp_path.name} |" in card
    assert "| `rewards` | {'reward': 1.0, 'my.rules:brevity': 0.1, 'owner/reward': 2.0} |" in card
    assert "from `sft`" in card
    assert [word for word in ("_class_path", "output_dir") if word in card] == []


@pytest.mark.parametrize("stage", ["reward", "critic", None])
def test_label_says_what_the_number_is(tmp_path: Path, stage: str | None) -> None:
    label = "value" if stage == "critic" else "reward"
    card = None if stage is None else ModelCardInfo(stage, "owner/base")
    model = build_scalar_model(tiny_causal_lm())
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m", card=card)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["id2label"], config["label2id"]) == ({"0": label}, {label: 0})
    if stage == "critic":
        assert "# PPO critic" in (tmp_path / "m" / "README.md").read_text()
