"""Groups of options from dataclasses and mappings, in checkpoints, and under wrong names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from lit_rlhf.models import ModelOptions
from lit_rlhf.modules import (
    OptimizerOptions,
    PPOModule,
    RewardModule,
    RewardShapingOptions,
    SFTModule,
    check_names,
)
from lit_rlhf.modules.option_names import RENAMED, option_groups, option_names
from lit_rlhf.rollout import SamplingOptions
from tests.modules.stages import demonstrations, fitted, ppo_options, prompts

STAGES: dict[str, type[Any]] = {"sft": SFTModule, "reward": RewardModule, "ppo": PPOModule}


class FrugalPPO(PPOModule):
    """A user's module: an option of its own, and all others handed on."""

    def __init__(self, model_path: str, token_cost: float = 0.01, **options: Any) -> None:
        super().__init__(model_path, **options)
        self.token_cost = token_cost


def test_a_group_is_a_dataclass_or_a_mapping_over_the_modules_defaults(root: Path) -> None:
    path = str(root / "policy")
    rates = OptimizerOptions(1e-3, lr_scheduler="linear")
    assert SFTModule(path, optimizer=rates).optimizer is rates
    mapped = SFTModule(path, optimizer={"learning_rate": 1e-3})
    assert mapped.optimizer == OptimizerOptions(
        1e-3, lr_scheduler="cosine_with_min_lr", warmup_ratio=0.0
    )
    assert SFTModule(path, network={"dtype": "bfloat16"}).network == ModelOptions("bfloat16")
    with pytest.raises(
        ValueError, match="optimizer: expected OptimizerOptions or a mapping of its"
    ):
        SFTModule(path, optimizer=1e-3)
    with pytest.raises(
        ValueError, match=r"optimizer\.grad_clip: expected a finite number > 0, got -1"
    ):
        SFTModule(path, optimizer={"grad_clip": -1})


def test_a_number_that_yaml_reads_as_text_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate: expected a finite number > 0, got '1e-5'"):
        OptimizerOptions(**yaml.safe_load("learning_rate: 1e-5"))


def checkpoint_of(module: PPOModule, root: Path, folder: Path) -> Path:
    run = fitted(module, prompts(root), folder, logger=TensorBoardLogger(folder, "", ""))
    run.save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt"


@pytest.mark.parametrize("module_class", [PPOModule, FrugalPPO])
def test_a_checkpoint_holds_plain_data_and_builds_the_groups_again(
    root: Path, tmp_path: Path, module_class: type[PPOModule]
) -> None:
    shaping = RewardShapingOptions(kl_coef=0.2, clip=None)
    module = module_class(**ppo_options(root) | {"reward_shaping": shaping, "seed": 3})
    checkpoint = checkpoint_of(module, root, tmp_path)

    saved = torch.load(checkpoint, weights_only=True)["hyper_parameters"]
    assert saved["reward_shaping"]["kl_coef"] == 0.2
    assert saved["sampling"] == {
        **{"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        **{"repetition_penalty": 1.0, "do_sample": True, "min_new_tokens": 0},
    }
    logged = yaml.safe_load((tmp_path / "hparams.yaml").read_text("utf-8"))
    rewards = ", ".join(f"{path}: {weight}" for path, weight in saved["rewards"].items())
    assert logged == {**saved, "rewards": rewards}  # loggers get the mapping as text
    assert "| `reward_shaping.kl_coef` | 0.2 |" in (tmp_path / "model/README.md").read_text("utf-8")

    again = module_class.load_from_checkpoint(checkpoint, weights_only=True)
    assert again.reward_shaping == shaping
    assert (again.sampling, again.loss, again.seed) == (module.sampling, module.loss, 3)
    cooler = SamplingOptions(max_new_tokens=2, temperature=0.5)
    again = module_class.load_from_checkpoint(checkpoint, weights_only=True, sampling=cooler)
    assert (again.sampling, again.reward_shaping) == (cooler, shaping)


@pytest.mark.parametrize(
    ("stage", "name", "told"),
    [
        ("ppo", "policy_lr", "it is now policy_optimizer.learning_rate"),
        ("ppo", "kl_coef", "it is now reward_shaping.kl_coef"),
        ("ppo", "lora_rank", "it is now network.lora_rank"),
        (
            *("ppo", "warmup_ratio"),
            "it is now policy_optimizer.warmup_ratio and critic_optimizer.warmup_ratio",
        ),
        ("sft", "learning_rate", "it is now optimizer.learning_rate"),
        ("reward", "grad_clip", "it is now optimizer.grad_clip"),
        ("ppo", "kl_coeff", r"did you mean reward_shaping.kl_coef\?"),
        ("ppo", "samplng", r"did you mean sampling\?"),
        ("sft", "ouput_dir", r"did you mean output_dir\?"),
        ("sft", "zzz", "of SFTModule"),
    ],
)
def test_a_wrong_keyword_names_the_right_one(root: Path, stage: str, name: str, told: str) -> None:
    module_class = STAGES[stage]
    with pytest.raises(
        TypeError, match=f"^{module_class.__name__}: {name}: no such option.*{told}"
    ):
        module_class(str(root / "policy"), **{name: 1})


def test_a_wrong_field_of_a_mapping_names_the_right_one(root: Path) -> None:
    for group, field, told in (
        ("sampling", "temprature", r"did you mean sampling.temperature\?"),
        ("reward_shaping", "gamma", "it is now advantages.gamma"),
    ):
        with pytest.raises(ValueError, match=rf"^{group}\.{field}: no such option; {told}"):
            PPOModule(**ppo_options(root) | {group: {field: 1}})


def test_a_module_that_takes_any_keyword_may_use_it_itself(root: Path) -> None:
    class Popping(SFTModule):
        def __init__(self, model_path: str, **options: Any) -> None:
            self.cost = options.pop("token_cost")
            super().__init__(model_path, **options)

    assert Popping(str(root / "policy"), token_cost=2.0).cost == 2.0
    with pytest.raises(TypeError, match=r"Popping: lora_rank: .* it is now network\.lora_rank"):
        Popping(str(root / "policy"), token_cost=2.0, lora_rank=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'token_price'"):
        FrugalPPO(**ppo_options(root), token_price=1.0)


def test_old_names_in_a_checkpoint_are_refused(root: Path, tmp_path: Path) -> None:
    run = fitted(SFTModule(str(root / "policy")), demonstrations(root), tmp_path)
    run.save_checkpoint(tmp_path / "new.ckpt")
    content = torch.load(tmp_path / "new.ckpt", weights_only=True)
    content["hyper_parameters"] = {"model_path": str(root / "policy"), "lora_rank": 0}
    torch.save(content, tmp_path / "old.ckpt")
    told = r"SFTModule: lora_rank: no such option; it is now network\.lora_rank"
    with pytest.raises(ValueError, match=told):
        SFTModule.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=told):
        fitted(
            SFTModule(str(root / "policy")),
            demonstrations(root),
            tmp_path,
            ckpt_path=tmp_path / "old.ckpt",
        )


def test_every_renamed_option_is_there_under_its_new_name() -> None:
    there = {name for stage in STAGES.values() for name in option_names(stage)}
    assert {new for names in RENAMED.values() for new in names} <= there
    assert RENAMED.keys().isdisjoint(name.rpartition(".")[2] for name in there)


def test_names_of_a_subclass_are_its_own_and_its_bases() -> None:
    assert {"token_cost", "sampling.top_p", "network.dtype"} <= set(option_names(FrugalPPO))
    check_names(FrugalPPO, ["token_cost", "seed"])
    check_names(SFTModule, ["anything"], others_allowed=True)
    with pytest.raises(ValueError, match="SFTModule: anything: no such option of SFTModule"):
        check_names(SFTModule, ["anything"])


def test_a_subclass_may_have_other_defaults(root: Path) -> None:
    @dataclass(frozen=True)
    class More(OptimizerOptions):
        beta: float = 0.9

    class Slow(SFTModule):
        def __init__(
            self,
            model_path: str,
            optimizer: OptimizerOptions = More(1e-7),
            **options: Any,
        ) -> None:
            super().__init__(model_path, optimizer=optimizer, **options)

    assert option_groups(Slow)["optimizer"] == More(1e-7)
    assert Slow(str(root / "policy"), optimizer={"beta": 0.5}).optimizer == More(1e-7, beta=0.5)
