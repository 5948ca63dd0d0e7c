"""Groups of options from dataclasses and mappings, in checkpoints, and under wrong names."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from lit_rlhf.models import ModelOptions
from lit_rlhf.modules import PPOModule, RewardShapingOptions, SFTModule
from lit_rlhf.modules.option_names import check_names, option_groups, option_names, plain_values
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.rollout import SamplingOptions
from tests.support.stages import demonstrations, fit_module, ppo_options, prompts


class FrugalPPO(PPOModule):
    """A user's module: an option of its own, and all others handed on."""

    def __init__(self, model_path: str, token_cost: float = 0.01, **options: Any) -> None:
        super().__init__(model_path, **options)
        self.token_cost = token_cost


def test_plain_values_are_what_a_file_holds() -> None:
    values = {"betas": (0.9, 0.95), "folder": Path("runs/sft"), "group": {"rank": 2}}
    expected = {"betas": [0.9, 0.95], "folder": "runs/sft", "group": {"rank": 2}}
    assert plain_values(values) == expected


def test_a_group_is_a_dataclass_or_a_mapping_over_the_modules_defaults(root: Path) -> None:
    path, rates = str(root / "policy"), OptimizerOptions(1e-3, lr_scheduler="linear")
    assert SFTModule(path, optimizer=rates).optimizer is rates
    mapped = SFTModule(path, optimizer={"learning_rate": 1e-3})
    given = {"lr_scheduler": "cosine_with_min_lr", "warmup_ratio": 0.0}
    assert mapped.optimizer == OptimizerOptions(1e-3, **given)
    assert SFTModule(path, network={"dtype": "bfloat16"}).network == ModelOptions("bfloat16")
    with pytest.raises(ValueError, match="optimizer: expected OptimizerOptions or a mapping of"):
        SFTModule(path, optimizer=1e-3)
    with pytest.raises(ValueError, match=r"optimizer\.grad_clip: expected a finite number > 0,"):
        SFTModule(path, optimizer={"grad_clip": -1})


def test_a_number_that_yaml_reads_as_text_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate: expected a finite number > 0, got '1e-5'"):
        OptimizerOptions(**yaml.safe_load("learning_rate: 1e-5"))


@pytest.mark.parametrize("module_class", [PPOModule, FrugalPPO])
def test_groups_are_built_again(root: Path, tmp_path: Path, module_class: type[PPOModule]) -> None:
    shaping = RewardShapingOptions(kl_coef=0.2, clip=None)
    module = module_class(**ppo_options(root) | {"reward_shaping": shaping, "seed": 3})
    checkpoint, logger = tmp_path / "run.ckpt", TensorBoardLogger(tmp_path, "", "")
    fit_module(module, prompts(root), tmp_path, logger=logger).save_checkpoint(checkpoint)

    saved = torch.load(checkpoint, weights_only=True)["hyper_parameters"]
    assert saved["reward_shaping"]["kl_coef"] == 0.2
    assert saved["sampling"] == asdict(SamplingOptions(max_new_tokens=6))
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


def test_wrong_field_of_a_mapping_names_the_right_one(root: Path) -> None:
    for group, field, right in (
        ("sampling", "temprature", "sampling.temperature"),
        ("reward_shaping", "gamma", "advantages.gamma"),
    ):
        message = rf"^{group}\.{field}: no such option; did you mean {right}\?"
        with pytest.raises(ValueError, match=message):
            PPOModule(**ppo_options(root) | {group: {field: 1}})


def test_unknown_names_in_a_checkpoint_are_refused(root: Path, tmp_path: Path) -> None:
    run = fit_module(SFTModule(str(root / "policy")), demonstrations(root), tmp_path)
    run.save_checkpoint(tmp_path / "new.ckpt")
    content = torch.load(tmp_path / "new.ckpt", weights_only=True)
    content["hyper_parameters"] = {"model_path": str(root / "policy"), "lora_rank": 0}
    torch.save(content, tmp_path / "other.ckpt")
    message = r"SFTModule: lora_rank: no such option; did you mean network\.lora_rank\?"
    with pytest.raises(ValueError, match=message):
        SFTModule.load_from_checkpoint(tmp_path / "other.ckpt", weights_only=True)
    module = SFTModule(str(root / "policy"))
    with pytest.raises(ValueError, match=message):
        fit_module(module, demonstrations(root), tmp_path, ckpt_path=tmp_path / "other.ckpt")


def test_names_of_a_subclass_are_its_own_and_its_bases() -> None:
    assert {"token_cost", "sampling.top_p", "network.dtype"} <= set(option_names(FrugalPPO))
    check_names(FrugalPPO, ["token_cost", "seed"])
    with pytest.raises(ValueError, match=r"SFTModule: zzz: no such option$"):
        check_names(SFTModule, ["zzz"])


def test_a_subclass_may_have_other_defaults(root: Path) -> None:
    @dataclass(frozen=True)
    class More(OptimizerOptions):
        beta: float = 0.9

    class Slow(SFTModule):
        def __init__(
            self, model_path: str, optimizer: OptimizerOptions = More(1e-7), **options: Any
        ) -> None:
            super().__init__(model_path, optimizer=optimizer, **options)

    assert option_groups(Slow)["optimizer"] == More(1e-7)
    assert Slow(str(root / "policy"), optimizer={"beta": 0.5}).optimizer == More(1e-7, beta=0.5)
