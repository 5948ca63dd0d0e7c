"""Reads the model in a checkpoint, in the form in which a finished stage saves it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import TextContract, tokenizer_hash
from lit_rlhf.export.model import ExportableModel, NetworkName
from lit_rlhf.models import (
    VALUE_HEAD,
    DType,
    ModelCardInfo,
    ModelOptions,
    build_for_saving,
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


class _TrainedNetwork(NamedTuple):
    """Where a checkpoint has the weights of a network that a stage trains.

    Attributes:
        attribute: Attribute of the LightningModule.
        prefix: What the names of the weights begin with in that attribute.
        is_scalar: Whether it is a scalar model, as opposed to a language model.
    """

    attribute: str
    prefix: str
    is_scalar: bool


TRAINED_NETWORKS: dict[str, dict[NetworkName, _TrainedNetwork]] = {
    "ppo": {
        "policy": _TrainedNetwork(attribute="policy", prefix="", is_scalar=False),
        "critic": _TrainedNetwork(attribute="critic", prefix="", is_scalar=True),
    },
    "reward": {
        "reward": _TrainedNetwork(attribute="networks", prefix="model.", is_scalar=True),
    },
    "sft": {
        "model": _TrainedNetwork(attribute="model", prefix="", is_scalar=False),
    },
}
"""Trained networks by stage. The first of each stage is exported by default."""


def load_checkpoint_model(
    path: str | Path,
    network: NetworkName | None = None,
    *,
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
    name = _choose_network(stage, hparams, network)
    is_scalar = TRAINED_NETWORKS[stage][name].is_scalar
    tokenizer_source = base or hparams["model_path"]
    config_source = base or _start_of_network(name, hparams)
    if base is None:
        _check_sources([tokenizer_source, config_source], path)
    options = _model_options(hparams["network"], dtype=dtype, trust_remote_code=trust_remote_code)
    weights = _read_weights(saved, stage, name, options)
    run_dtype: DType = hparams["network"]["dtype"]
    # 4-bit weights are made of the numbers that the run read, in the run's type
    build_options = replace(options, dtype=run_dtype) if options.load_in_4bit else options
    tokenizer = load_tokenizer(tokenizer_source, trust_remote_code)
    card = _describe_run(
        saved,
        hparams,
        stage="critic" if name == "critic" else stage,
        base_model=config_source,
        command=command,
    )
    model = build_for_saving(config_source, build_options, weights.network, scalar=is_scalar)
    generation = None
    if name == "policy":
        temperature: float = hparams["sampling"]["temperature"]
        generation = generation_settings(model, tokenizer, temperature)
    return ExportableModel(
        model=model,
        tokenizer=tokenizer,
        name=f"{name} of {path} ({stage}, {saved.content.get('global_step', '?')} updates)",
        scalar=is_scalar,
        dtype=options.torch_dtype,
        contract=restore_contract(saved, tokenizer, tokenizer_source),
        card=card,
        generation=generation,
        lm_head=weights.lm_head,
    )


def _choose_network(
    stage: str, hparams: Mapping[str, Any], network: NetworkName | None
) -> NetworkName:
    """The network to export, which the run has to have trained; by default the stage's first."""
    choices = list(TRAINED_NETWORKS[stage])
    if "critic" in choices and not trains_critic(hparams):
        choices.remove("critic")
    if network is not None and network not in choices:
        raise ValueError(
            f"network: expected {' or '.join(choices)} of a checkpoint of stage {stage}, "
            f"got {network!r}"
        )
    return choices[0] if network is None else network


def _start_of_network(name: NetworkName, hparams: Mapping[str, Any]) -> str:
    """Folder or hub id of the model that the run started a network from."""
    model_path: str = hparams["model_path"]
    if name != "critic":
        return model_path
    # the critic may have started from a reward model of another shape than the policy
    models = [spec.key for spec in parse_rewards(hparams["rewards"]) if spec.is_model]
    return critic_source(hparams["critic_init"], model_path, models)


def _check_sources(models: Sequence[str], path: str | Path) -> None:
    """Refuse a checkpoint whose run started from a model that is not there any more."""
    for model in models:
        try:
            check_model_path(model)
        except ValueError as error:
            raise ValueError(
                f"checkpoint {path}: the run started from {model}; if that has moved, give its new "
                f"place as --base ({error})"
            ) from error


def _model_options(
    run_options: Mapping[str, Any], *, dtype: DType | None, trust_remote_code: bool
) -> ModelOptions:
    """The run's options that decide on names and types of weights, with the caller's own."""
    return ModelOptions(
        dtype=dtype or run_options["dtype"],
        trust_remote_code=trust_remote_code,
        load_in_4bit=run_options.get("load_in_4bit", False),  # no option of older checkpoints
        trained_layers=run_options.get("trained_layers") if run_options["lora_rank"] else None,
        **{key: value for key, value in run_options.items() if key.startswith("lora_")},
    )


class _Weights(NamedTuple):
    """The weights that belong to an exported network.

    Attributes:
        network: State dict of the network, with its adapters.
        lm_head: State dict of the output layer that was trained beside a reward model; else empty.
    """

    network: dict[str, Tensor]
    lm_head: dict[str, Tensor]


def _read_weights(
    saved: SavedCheckpoint, stage: str, name: NetworkName, options: ModelOptions
) -> _Weights:
    place = TRAINED_NETWORKS[stage][name]
    if name == "critic" and place.attribute not in saved.networks:
        weights = _read_shared_critic(saved, options)
    else:
        weights = saved.state_dict(place.attribute)
        # the critic's, where policy and critic share a trunk
        weights = {key: tensor for key, tensor in weights.items() if VALUE_HEAD not in key}
    if options.torch_dtype == torch.float32:
        # so that adapters of a run in bfloat16 are merged in float32 when that is asked for
        weights = {
            key: tensor.float() if tensor.is_floating_point() else tensor
            for key, tensor in weights.items()
        }
    return _Weights(
        network=_take_prefix(weights, place.prefix),
        lm_head=_take_prefix(weights, "lm_head.") if stage == "reward" else {},
    )


def _read_shared_critic(saved: SavedCheckpoint, options: ModelOptions) -> dict[str, Tensor]:
    """The weights of a critic on the policy's trunk, by a scalar model's names."""
    if options.lora_rank:
        raise ValueError(
            "network: expected policy of a run with LoRA and critic_init: shared, got critic, "
            "which the run's finished model has in critic/"
        )
    return {
        key.replace(f"{VALUE_HEAD}.", "score."): tensor
        for key, tensor in saved.state_dict("policy").items()
        if not key.startswith("lm_head.")
    }


def _take_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with a prefix, without it."""
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in weights.items()
        if key.startswith(prefix)
    }


def _describe_run(
    saved: SavedCheckpoint,
    hparams: Mapping[str, Any],
    *,
    stage: str,
    base_model: str,
    command: str | None,
) -> ModelCardInfo:
    """What the card says of the run that wrote a checkpoint."""
    content = saved.content
    # names with a dot are options of the data
    inputs = {key: value for key, value in content.get(SETTINGS_KEY, {}).items() if "." not in key}
    return ModelCardInfo(
        stage=stage,
        base_model=base_model,
        config=dotted_arguments(hparams),
        metrics={key: content[key] for key in ("epoch", "global_step") if key in content},
        command=command,
        inputs=inputs,
        updates=content.get("global_step"),
    )


def trains_critic(hparams: Mapping[str, Any]) -> bool:
    """Whether a run of PPO had a critic; the option is not in older checkpoints."""
    estimator = hparams.get("advantages", {}).get("estimator", AdvantageOptions.estimator)
    return AdvantageOptions(estimator).uses_critic


def find_stage(saved: SavedCheckpoint, hparams: Mapping[str, Any]) -> str:
    """Find the stage that wrote a checkpoint by its networks: the class may be a subclass."""
    attributes = set(saved.networks)
    if hparams.get("critic_init") == "shared" or not trains_critic(hparams):
        attributes.add("critic")  # with the policy's weights, or there is none
    for stage, networks in TRAINED_NETWORKS.items():
        if {network.attribute for network in networks.values()} <= attributes:
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
    """Give a tokenizer the chat template of a run.

    Args:
        saved: The run's checkpoint.
        tokenizer: The tokenizer, which is changed in place.
        source: Folder or hub id that it was loaded from, for the error.

    Returns:
        The run's text contract; `None` if the checkpoint has none.
    """
    if CONTRACT_KEY not in saved.content:
        return None
    contract = TextContract.parse(saved.content[CONTRACT_KEY], f"checkpoint {saved.path}")
    if tokenizer_hash(tokenizer) != contract.tokenizer_hash:
        raise ValueError(
            f"checkpoint {saved.path}: the run had another tokenizer than {source} has now; give a "
            "folder with config.json and the run's tokenizer as --base"
        )
    tokenizer.chat_template = contract.chat_template
    return contract
