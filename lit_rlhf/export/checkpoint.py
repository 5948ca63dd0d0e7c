"""Reads the model in a checkpoint, in the form in which a finished stage saves it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import TextContract, tokenizer_hash
from lit_rlhf.export.model import ExportableModel, NetworkName
from lit_rlhf.models import (
    VALUE_HEAD,
    DType,
    ModelCardInfo,
    ModelOptions,
    build_model,
    check_model_path,
    load_tokenizer,
)
from lit_rlhf.modules import (
    CONTRACT_KEY,
    SETTINGS_KEY,
    AdvantageOptions,
    critic_source,
    dotted_arguments,
    generation_settings,
)
from lit_rlhf.rewards import parse_rewards
from lit_rlhf.strategies import SavedCheckpoint, read_checkpoint

TRAINED_NETWORKS: dict[str, dict[NetworkName, tuple[str, str, bool]]] = {
    "ppo": {"policy": ("policy", "", False), "critic": ("critic", "", True)},
    "reward": {"reward": ("networks", "model.", True)},
    "sft": {"model": ("model", "", False)},
}
"""Trained networks by stage: attribute of the LightningModule, prefix in it, whether it is scalar.

The first of each stage is exported by default.
"""


def load_checkpoint_model(
    path: str | Path,
    network: NetworkName | None = None,
    dtype: DType | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    command: str | None = None,
) -> ExportableModel:
    """Load the model in a checkpoint of SFT, reward modelling or PPO.

    No code of the checkpoint is run, and its own setting of `trust_remote_code` is ignored.

    Args:
        path: Checkpoint file, or folder that the multi-engine strategy wrote.
        network: Network to load; `None` for PPO's policy, or the only network.
        dtype: Type to save the weights in; `None` for the run's.
        base: Folder or hub id of the model to take config and tokenizer from; `None` for the model
            that the run started the network from.
        trust_remote_code: Run code that comes with that model.
        command: Command line, for the card.
    """
    saved = read_checkpoint(path)
    hparams = saved.content.get("hyper_parameters", {})
    stage = find_stage(saved, hparams)
    choices = TRAINED_NETWORKS[stage]
    if not trains_critic(hparams):
        choices = {name: place for name, place in choices.items() if name != "critic"}
    if network is not None and network not in choices:
        raise ValueError(
            f"network: expected {' or '.join(choices)} of a checkpoint of stage {stage}, "
            f"got {network!r}"
        )
    chosen = next(iter(choices)) if network is None else network
    attribute, prefix, scalar = choices[chosen]
    source = base or hparams["model_path"]
    config_source = source
    if chosen == "critic" and base is None:
        # the critic may have started from a reward model of another shape than the policy
        models = [spec.key for spec in parse_rewards(hparams["rewards"]) if spec.is_model]
        config_source = critic_source(hparams["critic_init"], hparams["model_path"], models)
    for model in (source, config_source) if base is None else ():
        try:
            check_model_path(model)
        except ValueError as error:
            raise ValueError(
                f"checkpoint {path}: the run started from {model}; if that has moved, give its new "
                f"place as --base ({error})"
            ) from error
    run_options: Mapping[str, Any] = hparams["network"]
    options = ModelOptions(
        dtype=dtype or run_options["dtype"],
        trust_remote_code=trust_remote_code,
        load_in_4bit=run_options.get("load_in_4bit", False),  # no option of older checkpoints
        trained_layers=run_options.get("trained_layers") if run_options["lora_rank"] else None,
        **{key: value for key, value in run_options.items() if key.startswith("lora_")},
    )
    shared = scalar and attribute not in saved.networks
    weights = saved.state_dict("policy" if shared else attribute)
    if shared and options.lora_rank:
        raise ValueError(
            "network: expected policy of a run with LoRA and critic_init: shared, got critic, "
            "which the run's finished model has in critic/"
        )
    if shared:
        trunk_weights = {n: t for n, t in weights.items() if not n.startswith("lm_head.")}
        weights = {n.replace(f"{VALUE_HEAD}.", "score."): t for n, t in trunk_weights.items()}
    weights = {n: t for n, t in weights.items() if VALUE_HEAD not in n}
    lm_head = {
        n.removeprefix("lm_head."): t for n, t in weights.items() if n.startswith("lm_head.")
    }
    weights = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    if options.torch_dtype == torch.float32:
        # so that adapters of a run in bfloat16 are merged in float32 when that is asked for
        weights = {n: t.float() if t.is_floating_point() else t for n, t in weights.items()}
    progress = {key: saved.content[key] for key in ("epoch", "global_step") if key in saved.content}
    tokenizer = load_tokenizer(source, trust_remote_code)
    return ExportableModel(
        # 4-bit weights are made of those that the run read
        model=build_model(
            config_source,
            replace(options, dtype=run_options["dtype"]) if options.load_in_4bit else options,
            weights,
            scalar,
        ),
        tokenizer=tokenizer,
        name=f"{chosen} of {path} ({stage}, {progress.get('global_step', '?')} updates)",
        scalar=scalar,
        dtype=options.torch_dtype,
        contract=restore_contract(saved, tokenizer, source),
        card=ModelCardInfo(
            "critic" if chosen == "critic" else stage,
            config_source,
            dotted_arguments(hparams),
            progress,
            command,
            # without the options of the data
            inputs={n: v for n, v in saved.content.get(SETTINGS_KEY, {}).items() if "." not in n},
            updates=progress.get("global_step"),
        ),
        generation=(
            generation_settings(hparams["sampling"]["temperature"]) if chosen == "policy" else None
        ),
        lm_head=lm_head if stage == "reward" else {},
    )


def trains_critic(hparams: Mapping[str, Any]) -> bool:
    """Whether a run of PPO had a critic; the option is not in older checkpoints."""
    given = hparams.get("advantages", {}).get("estimator", AdvantageOptions.estimator)
    return AdvantageOptions(given).uses_critic


def find_stage(saved: SavedCheckpoint, hparams: Mapping[str, Any]) -> str:
    """Find the stage that wrote a checkpoint by its networks, as the class may be a subclass."""
    names = set(saved.networks)
    if hparams.get("critic_init") == "shared" or not trains_critic(hparams):
        names.add("critic")  # with the policy's weights, or there is none
    for stage, networks in TRAINED_NETWORKS.items():
        if {attribute for attribute, _, _ in networks.values()} <= names:
            if "model_path" not in hparams:
                break
            return stage
    name = hparams.get("_class_path", "another module")
    raise ValueError(
        f"checkpoint {saved.path}: expected one of SFTModule, RewardModule or PPOModule with its "
        f"hyper-parameters, got one of {name} with weights of {', '.join(saved.networks)}"
    )


def restore_contract(
    saved: SavedCheckpoint, tokenizer: PreTrainedTokenizerBase, source: str
) -> TextContract | None:
    """Give the tokenizer the run's chat template, and return the run's text contract."""
    if CONTRACT_KEY not in saved.content:
        return None
    contract = TextContract(**saved.content[CONTRACT_KEY])
    if tokenizer_hash(tokenizer) != contract.tokenizer_hash:
        raise ValueError(
            f"checkpoint {saved.path}: the run had another tokenizer than {source} has now; give a "
            "folder with config.json and the run's tokenizer as --base"
        )
    tokenizer.chat_template = contract.chat_template
    return contract
