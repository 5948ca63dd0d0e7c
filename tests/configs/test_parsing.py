"""Every configuration parses, by itself and below each overlay and ablation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_rlhf.modules import PPOModule, merge_options, option_groups
from tests.support import config_parsing
from tests.support.paper_options import PPO_MAX as PPO_MAX_OPTIONS
from tests.support.stages import nested
from tests.support.tiny_runs import CONFIGS, QUICKSTART

MODULES = {"sft": "SFTModule", "reward": "RewardModule", "ppo": "PPOModule"}
DATA = {"sft": "DemonstrationDataModule", "reward": "PreferenceDataModule"}
DATA["ppo"] = "PromptDataModule"
SFT = ("--model.model_path=x", "--data=DemonstrationDataModule", "--data.train_sources=[{path: x}]")
PPO_MAX, VANILLA = QUICKSTART / "ppo_max.yaml", QUICKSTART / "ppo_vanilla.yaml"
OFF = {
    "reward_shaping.kl_coef": 0.0,
    "reward_shaping.scaling": False,
    "reward_shaping.normalization": False,
    "reward_shaping.clip": None,
    "advantages.normalization": False,
    "advantages.clip": None,
    "critic_pretraining.iterations": 0,
    "loss.value_clip": None,
    "loss.policy_objective": "unclipped",
    "loss.ptx_coef": 0.0,
    "policy_optimizer.grad_clip": None,
    "critic_optimizer.grad_clip": None,
    "loss.entropy_coef": 0.0,
}
"""The tricks of Figure 5, all off."""
PPO_OVERLAYS = ("monitors", "vllm", "rloo", "grpo", "dr_grpo", "reinforce_plus_plus", "rollback")
PPO_OVERLAYS += ("dapo", "vapo", "zero2_8xa100", "fsdp2_8xa100")
OF_STAGE = {"sft": "sft.yaml", "reward": "reward.yaml", "ppo": "ppo_max.yaml"}
"""Configuration of the quickstart by stage."""
STAGES_OF_OVERLAY = {"chinese": {"sft"}, **{name: {"ppo"} for name in PPO_OVERLAYS}}
"""Stages that an overlay is for, where it is not for all."""


def stages(overlay: Path) -> set[str]:
    return STAGES_OF_OVERLAY.get(overlay.stem, set(MODULES))


def contains(settings: object, expected: object) -> bool:
    """Whether parsed settings are what a file says, defaults apart."""
    if isinstance(expected, dict) and isinstance(settings, Mapping):
        return all(key in settings and contains(settings[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(settings, list):
        return len(settings) == len(expected) and all(map(contains, settings, expected))
    return settings == expected


def written(config: Path) -> dict[str, Any]:
    """The settings in a file itself, by dotted key."""
    content = config_parsing.flat(yaml.safe_load(config.read_text("utf-8")))
    # `suffix+` appends, which changes `suffix`
    return {"suffix" if key == "suffix+" else key: v for key, v in content.items()}


@pytest.mark.parametrize("config", config_parsing.BASES, ids=config_parsing.name_of)
def test_configuration_parses(config: Path) -> None:
    settings = config_parsing.parse_configs(config)
    stage = config_parsing.stage_of(config)
    assert settings["model.class_path"] == f"lit_rlhf.modules.{MODULES[stage]}"
    assert settings["data.class_path"].endswith(f".{DATA[stage]}")
    assert settings["seed_everything"] == 0
    assert list(Path().iterdir()) == []


def test_files_are_all_tested_here() -> None:
    known = {*config_parsing.BASES, *config_parsing.OVERLAYS, *config_parsing.ABLATIONS, VANILLA}
    assert set(CONFIGS.rglob("*.*")) - known == set()


def test_configurations_write_a_checkpoint_once_and_validate_for_a_tenth_of_a_run() -> None:
    for file in CONFIGS.rglob("*.yaml"):
        text = file.read_text("utf-8")
        assert text.count("save_last") == text.count("save_last: link")
        settings = written(file)
        if isinstance(interval := settings.get("trainer.val_check_interval"), int):
            # its batches are as large, and without updates
            assert settings.get("trainer.limit_val_batches", 0) <= 0.1 * interval


@pytest.mark.parametrize("ablation", config_parsing.ABLATIONS, ids=config_parsing.name_of)
def test_ablation_changes_only_what_it_names(ablation: Path) -> None:
    # the paper's configuration has all tricks of PPO-max on and no other; a value of the paper
    # changes the quickstart, whose values suit a small model, or vanilla PPO
    bases = [[CONFIGS / "ppo" / "paper_7b_en.yaml"], [PPO_MAX], [PPO_MAX, VANILLA]]
    if ablation in config_parsing.REWARD_ABLATIONS:
        bases = [[QUICKSTART / "reward.yaml"]]
    changes = []
    for base in bases:
        before, after = (
            config_parsing.parse_configs(*base),
            config_parsing.parse_configs(*base, ablation),
        )
        changed = config_parsing.changed_keys(before, after)
        assert changed <= written(ablation).keys()
        assert after["suffix"] == [ablation.stem]  # it stands beside a run without it
        changes.append(changed)
        if changed > {"suffix"}:
            break
    assert changes[-1] > {"suffix"}


def test_vanilla_switches_all_tricks_off_and_differs_in_these_and_names_only() -> None:
    settings = config_parsing.parse_configs(PPO_MAX, VANILLA)
    assert {name: settings[f"model.init_args.{name}"] for name in OFF} == OFF
    changed = config_parsing.changed_keys(config_parsing.parse_configs(PPO_MAX), settings)
    names = {"trainer.callbacks", "trainer.logger.init_args.name", "model.init_args.output_dir"}
    assert changed - {f"model.init_args.{name}" for name in OFF} == names


@pytest.mark.parametrize(
    ("overlay", "config"),
    [
        (overlay, QUICKSTART / name)
        for overlay in config_parsing.OVERLAYS
        for stage, name in OF_STAGE.items()
        if stage in stages(overlay)
    ],
    ids=config_parsing.name_of,
)
def test_overlay_changes_only_what_it_names(overlay: Path, config: Path) -> None:
    before, after = (
        config_parsing.parse_configs(config),
        config_parsing.parse_configs(config, overlay),
    )
    expected = written(overlay)
    # every configuration has one logger, the overlay makes a list
    if "trainer.logger+" in expected:
        logger, added = after["trainer.logger"][0], expected.pop("trainer.logger+")
        assert config_parsing.flat(logger, "trainer.logger.").items() <= before.items()
        assert contains(after["trainer.logger"][1:], added)
        after = {**before, **{k: v for k, v in after.items() if k != "trainer.logger"}}
    for key, value in expected.items():
        if key.endswith("+"):
            key = key.removesuffix("+")
            value = [*before[key], *value]
        assert contains(after[key], value), key
    changed = config_parsing.changed_keys(before, after)
    assert changed <= {key.removesuffix("+") for key in expected}


@pytest.mark.parametrize("config", config_parsing.BASES, ids=config_parsing.name_of)
def test_overlays_parse_together_on_each_configuration_that_they_are_for(config: Path) -> None:
    """All at once, which takes a twentieth of the time; the last of them wins."""
    stage = config_parsing.stage_of(config)
    overlays = [overlay for overlay in config_parsing.OVERLAYS if stage in stages(overlay)]
    before = config_parsing.parse_configs(config)
    after = config_parsing.parse_configs(config, *overlays)
    named = {key.removesuffix("+") for overlay in overlays for key in written(overlay)}
    changed = config_parsing.changed_keys(before, after)
    # one logger becomes a list of several
    assert {key for key in changed if not key.startswith("trainer.logger.")} <= named
    last = {key: v for key, v in written(overlays[-1]).items() if not key.endswith("+")}
    assert {key for key, value in last.items() if not contains(after[key], value)} == set()


PPO_BASES = [config for config in config_parsing.BASES if config_parsing.stage_of(config) == "ppo"]


@pytest.mark.parametrize(
    "ablation",
    [a for a in config_parsing.ABLATIONS if a.stem not in config_parsing.OF_THE_QUICKSTART],
    ids=config_parsing.name_of,
)
def test_ablation_fits_any_ppo_configuration(ablation: Path) -> None:
    expected = written(ablation)
    names = {key.removeprefix("model.init_args.") for key in expected}
    # nothing that another configuration would have elsewhere, such as paths
    assert not [name for name in names if name.startswith(("data.", "trainer.", "model_path"))]
    settings = config_parsing.parse_configs(CONFIGS / "ppo" / "paper_7b_en.yaml", ablation)
    assert {key: settings[key] for key in expected} == expected
    for config in PPO_BASES:
        # what parsing both makes of options, which takes longer
        settings = {**config_parsing.parse_configs(config), **expected}
        prefix = "model.init_args."
        options = nested({k.removeprefix(prefix): v for k, v in settings.items() if prefix in k})
        for group in option_groups(PPOModule):
            merge_options(PPOModule, group, options[group])  # refuses what contradicts


PAPER = {
    "sft": {
        "trainer.max_epochs": 2,
        "data.init_args.batch_size": 1024 // 8,
        "model.init_args.optimizer.learning_rate": 9.5e-6,
        "model.init_args.optimizer.lr_scheduler": "cosine_with_min_lr",
        "model.init_args.optimizer.min_lr_ratio": 0.1,
        "model.init_args.optimizer.warmup_ratio": 0.0,
    },
    "reward": {
        "trainer.max_epochs": -1,
        "trainer.max_steps": 1000,
        "data.init_args.min_samples": 1,
        "data.init_args.max_samples": 128 // 8,
        "model.init_args.lm_coef": 1.0,
        "model.init_args.optimizer.learning_rate": 5e-6,
        "model.init_args.optimizer.lr_scheduler": "constant_with_warmup",
        "model.init_args.optimizer.warmup_ratio": 0.1,
        "model.init_args.network.gradient_checkpointing": True,
    },
    "ppo": {
        **{f"model.init_args.{name}": value for name, value in PPO_MAX_OPTIONS.items()},
        "trainer.max_epochs": -1,
        "trainer.max_steps": -1,
        "data.init_args.batch_size": 128 // 8,
        "data.init_args.max_prompt_length": 2048 - 512,
        "model.init_args.minibatches.minibatch_size": 32 // 8,
        # 1000 updates of the policy in minibatches of 32 of 128 rollouts, after critic pre-training
        "model.init_args.max_iterations": 25 + 1000 * 32 // 128,
        "model.init_args.policy_optimizer.beta1": 0.9,
        "model.init_args.policy_optimizer.beta2": 0.95,
        "model.init_args.policy_optimizer.eps": 1e-6,
    },
}
"""The paper's numbers (Sections 4.1, 4.2, 5.1 and 5.4), spread over eight GPUs."""


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("stage", PAPER)
def test_7b_configurations_have_the_papers_values(stage: str, language: str) -> None:
    settings = config_parsing.parse_configs(CONFIGS / stage / f"paper_7b_{language}.yaml")
    assert settings["trainer.devices"] == 8
    assert settings["trainer.strategy"] == "multi_deepspeed_stage_2"
    assert {key: settings[key] for key in PAPER[stage]} == PAPER[stage]
    if stage == "reward":  # from the pre-trained model (Section 4.1)
        sft = config_parsing.parse_configs(CONFIGS / "sft" / f"paper_7b_{language}.yaml")
        for key in ("model.init_args.model_path", "data.init_args.chat_template"):
            assert settings[key] == sft[key]
    if stage == "ppo":
        assert settings["data.init_args.ptx_sources"]
    else:
        assert settings["trainer.enable_checkpointing"] is not False
        checkpoints = [
            callback
            for callback in settings["trainer.callbacks"]
            if "ResumeCheckpoint" in callback["class_path"]
        ]
        assert [callback["init_args"]["every_n_batches"] for callback in checkpoints] == [100]
        assert isinstance(settings["trainer.logger.init_args.version"], str)  # one folder


def overlay_of(folder: Path, name: str, **options: Any) -> Path:
    """An overlay with options of the module."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"model": {"init_args": options}}), "utf-8")
    return path


def test_overlays_of_one_group_leave_its_other_options(tmp_path: Path) -> None:
    cooler = overlay_of(tmp_path, "cooler", sampling={"temperature": 0.7})
    shaped = overlay_of(tmp_path, "shaped", reward_shaping={"clip": None}, sampling={"top_k": 9})
    before, after = (
        config_parsing.parse_configs(PPO_MAX),
        config_parsing.parse_configs(PPO_MAX, cooler, shaped),
    )
    changed = {key: after[key] for key in config_parsing.changed_keys(before, after)}
    sampling = {"model.init_args.sampling.temperature": 0.7, "model.init_args.sampling.top_k": 9}
    assert changed == sampling | {"model.init_args.reward_shaping.clip": None}
    assert after["model.init_args.sampling.max_new_tokens"] == 48  # the configuration's


def test_overlay_keeps_the_modules_defaults_of_a_group(tmp_path: Path) -> None:
    path = overlay_of(tmp_path, "rates", optimizer={"weight_decay": 0.1})
    words = ["fit", "--model=SFTModule", f"--config={path}", *SFT]
    optimizer = config_parsing.flat(config_parsing.cli_parser().parse_args(words))
    assert optimizer["fit.model.init_args.optimizer.weight_decay"] == 0.1
    assert optimizer["fit.model.init_args.optimizer.learning_rate"] == 9.5e-6
    assert optimizer["fit.model.init_args.optimizer.lr_scheduler"] == "cosine_with_min_lr"


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (["--model.policy_optimizer.eps", "1e-5"], {"policy_optimizer.eps": 1e-5}),
        (["--model.init_args.sampling.temperature", "0.7"], {"sampling.temperature": 0.7}),
        (["--model.sampling.temperature=0.7"], {"sampling.temperature": 0.7}),
        (["--model.loss.value_clip", "null"], {"loss.value_clip": None}),
        (["--model.loss", "{value_clip: 0.1}"], {"loss.value_clip": 0.1}),
        (["--model.init_args.output_dir", "null"], {"output_dir": None}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flag_sets_one_option_of_a_group(flags: list[str], changed: dict[str, Any]) -> None:
    settings = config_parsing.cli_parser().parse_args(["fit", "--config", str(PPO_MAX), *flags])
    before, after = (
        config_parsing.parse_configs(PPO_MAX),
        config_parsing.flat(settings.fit.as_dict()),
    )
    keys = config_parsing.changed_keys(before, after) - {"config"}
    assert {key.removeprefix("model.init_args."): after[key] for key in keys} == changed


@pytest.mark.parametrize(
    ("options", "suggestion"),
    [
        ({"lora_rank": 8}, "network.lora_rank"),
        ({"sampling": {"temprature": 0.7}}, "sampling.temperature"),
        ({"advantages": {"kl_coef": 0.7}}, "reward_shaping.kl_coef"),
        ({"qqzzx": 1}, ""),
    ],
)
@pytest.mark.parametrize("how", ["overlay", "configuration", "flag", "long flag"])
def test_wrong_option_is_refused_and_the_right_one_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, options: Any, suggestion: str
) -> None:
    ((name, value),) = config_parsing.flat(options).items()
    wrong = ["--config", str(overlay_of(tmp_path, "wrong", **options))]
    if how == "configuration":
        content = yaml.safe_load(PPO_MAX.read_text("utf-8"))
        content["model"]["init_args"] |= options
        Path(wrong[1]).write_text(yaml.safe_dump(content), "utf-8")
    elif how != "overlay":
        prefix = "--model" if how == "flag" else "--model.init_args"
        wrong = [f"{prefix}.{name}", str(value)]
    with pytest.raises(SystemExit):
        config_parsing.cli_parser().parse_args(["fit", "--config", str(PPO_MAX), *wrong])
    file = f"{wrong[1]}: " if wrong[0] == "--config" else ""
    advice = f"; did you mean model.{suggestion}?" if suggestion else ""
    assert f"error: {file}model.{name}: no such option{advice}\n" in capsys.readouterr().err
