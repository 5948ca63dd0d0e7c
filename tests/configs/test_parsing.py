"""Every configuration parses, alone and together with what goes on top of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentError

from tests.configs.parsing import (
    ABLATIONS,
    BASES,
    OVERLAYS,
    changed_keys,
    cli_parser,
    flat,
    name_of,
    parsed,
    stage_of,
)
from tests.configs.tiny_runs import CONFIGS, QUICKSTART

MODULES = {"sft": "SFTModule", "reward": "RewardModule", "ppo": "PPOModule"}
DATA = {
    "sft": "DemonstrationDataModule",
    "reward": "PreferenceDataModule",
    "ppo": "PromptDataModule",
}
BATCHES = {"batch_size", "tokens_per_batch", "min_samples", "max_samples"}
DATA_OPTIONS = {
    "all": {
        *("train_sources", "val_sources", "test_sources", "val_fraction", "test_fraction", "seed"),
        *("tokenizer", "chat_template", "max_length", "max_prompt_length", "num_workers"),
        "on_bad_record",
    },
    "sft": BATCHES | {"train_on"},
    "reward": BATCHES,
    "ppo": {"batch_size", "samples_per_epoch", "ptx_sources"},
}
PPO_MAX, VANILLA = QUICKSTART / "ppo_max.yaml", QUICKSTART / "ppo_vanilla.yaml"
OFF = {
    "kl_coef": 0.0,
    "reward_scaling": False,
    "reward_normalization": False,
    "reward_clip": None,
    "advantage_normalization": False,
    "advantage_clip": None,
    "critic_pretrain_iterations": 0,
    "value_clip": None,
    "policy_objective": "unclipped",
    "ptx_coef": 0.0,
    "policy_grad_clip": None,
    "critic_grad_clip": None,
    "entropy_coef": 0.0,
}
"""The tricks of Figure 5, all off."""
STAGES_OF_OVERLAY = {
    "chinese": {"sft"},
    "monitors": {"ppo"},
    "rollback": {"ppo"},
    "zero2_8xa100": {"ppo"},
}
"""Stages that an overlay is for, where it is not for all."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a configuration names is there."""
    monkeypatch.chdir(tmp_path)


def stages(overlay: Path) -> set[str]:
    return STAGES_OF_OVERLAY.get(overlay.stem, set(MODULES))


def contains(settings: object, wanted: object) -> bool:
    """Whether parsed settings are what a file says, defaults apart."""
    if isinstance(wanted, dict) and isinstance(settings, Mapping):
        return all(key in settings and contains(settings[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list) and isinstance(settings, list):
        return len(settings) == len(wanted) and all(map(contains, settings, wanted))
    return settings == wanted


def written(config: Path) -> dict[str, Any]:
    """What a file itself says, by dotted key."""
    return flat(yaml.safe_load(config.read_text("utf-8")))


@pytest.mark.parametrize("config", BASES, ids=name_of)
def test_every_configuration_parses(config: Path) -> None:
    settings = parsed(config)

    stage = stage_of(config)
    assert settings["model.class_path"] == f"lit_rlhf.modules.{MODULES[stage]}"
    assert settings["data.class_path"].endswith(f".{DATA[stage]}")
    assert settings["seed_everything"] == 0
    assert list(Path().iterdir()) == []


def test_there_is_no_file_that_these_tests_pass_over() -> None:
    known = {*BASES, *OVERLAYS, *ABLATIONS, VANILLA}

    assert set(CONFIGS.rglob("*.*")) - known == set()


@pytest.mark.parametrize("ablation", ABLATIONS, ids=name_of)
def test_an_ablation_changes_what_it_names_and_nothing_else(ablation: Path) -> None:
    before, after = parsed(PPO_MAX), parsed(PPO_MAX, ablation)

    changed = changed_keys(before, after)
    assert changed != set()
    assert changed <= written(ablation).keys()


@pytest.mark.parametrize("ablation", ABLATIONS, ids=name_of)
def test_an_ablation_begins_with_the_number_of_its_trick(ablation: Path) -> None:
    table = (CONFIGS.parent / "docs" / "tricks.md").read_text("utf-8").splitlines()
    number = ablation.read_text("utf-8").removeprefix("# ").partition(".")[0]

    (row,) = (line for line in table if f"`{ablation.stem}`" in line and line.startswith("| "))
    assert row.startswith(f"| {number} |")


def test_vanilla_switches_all_tricks_off() -> None:
    settings = parsed(PPO_MAX, VANILLA)

    assert {name: settings[f"model.init_args.{name}"] for name in OFF} == OFF


def test_vanilla_differs_in_its_tricks_and_names_only() -> None:
    changed = changed_keys(parsed(PPO_MAX), parsed(PPO_MAX, VANILLA))

    names = {"trainer.callbacks", "trainer.logger.init_args.name", "model.init_args.output_dir"}
    assert changed - {f"model.init_args.{name}" for name in OFF} == names


@pytest.mark.parametrize(
    ("overlay", "config"),
    [
        (overlay, config)
        for overlay in OVERLAYS
        for config in BASES
        if stage_of(config) in stages(overlay)
    ],
    ids=name_of,
)
def test_an_overlay_fits_every_configuration_that_it_is_for(overlay: Path, config: Path) -> None:
    before, after = parsed(config), parsed(config, overlay)

    wanted = written(overlay)
    for key, value in wanted.items():
        if key.endswith("+"):
            key = key.removesuffix("+")
            value = [*before[key], *value]
        assert contains(after[key], value), key
    changed = changed_keys(before, after)
    assert changed <= {key.removesuffix("+") for key in wanted}


@pytest.mark.parametrize(
    "overlay", [o for o in OVERLAYS if o.stem in STAGES_OF_OVERLAY], ids=name_of
)
def test_an_overlay_that_is_not_for_all_stages_says_so(overlay: Path) -> None:
    head = overlay.read_text("utf-8").splitlines()[0].lower()

    assert {stage for stage in MODULES if f"for {stage}" in head} == stages(overlay)


@pytest.mark.parametrize(
    # the other two name files of the quickstart's world
    "ablation",
    [a for a in ABLATIONS if a.stem not in ("policy_from_base", "ptx")],
    ids=name_of,
)
def test_an_ablation_goes_on_top_of_any_ppo_configuration(ablation: Path) -> None:
    settings = parsed(CONFIGS / "ppo" / "paper_7b_en.yaml", ablation)

    wanted = written(ablation)
    assert {key: settings[key] for key in wanted} == wanted


@pytest.mark.parametrize("stage", DATA)
def test_the_help_of_a_datamodule_lists_what_its_bases_take_too(
    capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    with pytest.raises(SystemExit):
        cli_parser().parse_args(["fit", "--data.help", DATA[stage]])
    shown = " ".join(capsys.readouterr().out.split())

    assert set(re.findall(r"--data\.(\w+) ", shown)) == DATA_OPTIONS["all"] | DATA_OPTIONS[stage]
    assert '--data.chat_template CHAT_TEMPLATE `"tokenizer"` for the tokenizer\'s own' in shown


def test_a_misspelt_option_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model: {init_args: {kl_coeff: 0.1}}", "utf-8")

    with pytest.raises((SystemExit, ArgumentError)):
        parsed(PPO_MAX, wrong)


@pytest.mark.parametrize("strategy", ["DDPStrategy", "MultiEngineDeepSpeedStrategy"])
def test_the_time_limit_of_collectives_is_set_in_a_configuration(
    tmp_path: Path, strategy: str
) -> None:
    limit = {"class_path": strategy, "init_args": {"timeout": "0:05:00"}}
    overlay = tmp_path / "limit.yaml"
    overlay.write_text(yaml.safe_dump({"trainer": {"strategy": limit}}))
    settings = parsed(QUICKSTART / "sft.yaml", overlay)
    assert settings["trainer.strategy.class_path"].endswith(strategy)
    assert settings["trainer.strategy.init_args.timeout"] == timedelta(minutes=5)
