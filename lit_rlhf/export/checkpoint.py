"""What a checkpoint of a stage holds, as what the finished stage would leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import TextContract, tokenizer_hash
from lit_rlhf.forward import LanguageModel
from lit_rlhf.models import (
    DType,
    ModelCardInfo,
    ModelOptions,
    build_model,
    check_model_path,
    load_tokenizer,
)
from lit_rlhf.modules import (
    CONTRACT_KEY,
    PPOModule,
    RewardModule,
    SFTModule,
    StageModule,
    check_names,
    critic_source,
    dotted_arguments,
    generation_settings,
)
from lit_rlhf.rewards import parse_rewards
from lit_rlhf.strategies import SavedCheckpoint, read_checkpoint

NetworkName = Literal["policy", "critic", "reward", "model"]


class Network(NamedTuple):
    """A network that a stage trains.

    Attributes:
        attribute: Of the LightningModule.
        prefix: Of the model's weights in there.
        scalar: Whether it has a scalar head.
    """

    attribute: str
    prefix: str
    scalar: bool


# by stage, the one to export by default first
NETWORKS: dict[str, dict[NetworkName, Network]] = {
    "ppo": {"policy": Network("policy", "", False), "critic": Network("critic", "", True)},
    "reward": {"reward": Network("networks", "model.", True)},
    "sft": {"model": Network("model", "", False)},
}
MODULES: dict[str, type[StageModule]] = {
    module.stage: module for module in (SFTModule, RewardModule, PPOModule)
}


@dataclass(frozen=True)
class Export:
    """A model and what is saved beside it.

    Attributes:
        model: For saving alone; with its adapters, if it has any.
        tokenizer: With the chat template of the run.
        name: What it is, in words.
        scalar: Whether it has a scalar head.
        dtype: Type that its weights are to be saved in.
        contract: How it was shown text, if that is known.
        card: How it was made, or the text of its card.
        generation: Settings of a language model's generation config.
        lm_head: Weights of the output layer that was trained beside a scalar model, if any.
    """

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    scalar: bool
    dtype: torch.dtype
    contract: TextContract | None = None
    card: ModelCardInfo | str | None = None
    generation: Mapping[str, Any] | None = None
    lm_head: Mapping[str, Tensor] = field(default_factory=dict)


def export_checkpoint(
    path: str | Path,
    network: NetworkName | None = None,
    dtype: DType | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    command: str | None = None,
) -> Export:
    """The model in a checkpoint of SFT, reward modelling or PPO.

    Nothing in the checkpoint is run, and what it says of `trust_remote_code` is passed over.

    Args:
        path: A checkpoint file, or a folder of the multi-engine strategy of any number of ranks.
        network: Which network; `None` takes PPO's policy, or the only one.
        dtype: Type to save the weights in; `None` takes the run's.
        base: Folder or hub id to take config and tokenizer from; `None` takes the model that the
            run started the network from.
        trust_remote_code: Run code that comes with that model.
        command: Command line, for the card.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If it is damaged or of another module, has no such network, or its weights do
            not fit the model to take the config from.
    """
    saved = read_checkpoint(path)
    hparams = saved.content.get("hyper_parameters", {})
    stage = _stage(saved, hparams)
    check_names(MODULES[stage], hparams, others_allowed=True)
    choices = NETWORKS[stage]
    if network is not None and network not in choices:
        raise ValueError(
            f"network: expected {' or '.join(choices)} of a checkpoint of stage {stage}, "
            f"got {network!r}"
        )
    chosen = next(iter(choices)) if network is None else network
    place = choices[chosen]
    source = base or hparams["model_path"]
    shape = source
    if chosen == "critic" and base is None:
        models = [spec.path for spec in parse_rewards(hparams["rewards"]) if spec.is_model]
        shape = critic_source(hparams["critic_init"], hparams["model_path"], models)
    for model in (source, shape) if base is None else ():
        try:
            check_model_path(model)
        except ValueError as error:
            raise ValueError(
                f"checkpoint {path}: the run started from {model}; where that is another place "
                f"now, give it as --base ({error})"
            ) from error
    loaded: Mapping[str, Any] = hparams["network"]
    options = ModelOptions(
        dtype=dtype or loaded["dtype"],
        trust_remote_code=trust_remote_code,
        **{key: value for key, value in loaded.items() if key.startswith("lora_")},
    )
    weights = saved.state_dict(place.attribute)
    lm_head = {
        n.removeprefix("lm_head."): t for n, t in weights.items() if n.startswith("lm_head.")
    }
    weights = {
        n.removeprefix(place.prefix): t for n, t in weights.items() if n.startswith(place.prefix)
    }
    if options.torch_dtype == torch.float32:  # adapters are then merged in full precision
        weights = {n: t.float() if t.is_floating_point() else t for n, t in weights.items()}
    progress = {key: saved.content[key] for key in ("epoch", "global_step") if key in saved.content}
    tokenizer = load_tokenizer(source, trust_remote_code)
    return Export(
        model=build_model(shape, options, weights, place.scalar),
        tokenizer=tokenizer,
        name=f"{chosen} of {path} ({stage}, step {progress.get('global_step', '?')})",
        scalar=place.scalar,
        dtype=options.torch_dtype,
        contract=_contract(saved, tokenizer, source),
        card=ModelCardInfo(
            stage, hparams["model_path"], dotted_arguments(hparams), progress, command
        ),
        generation=(
            generation_settings(hparams["sampling"]["temperature"]) if chosen == "policy" else None
        ),
        lm_head=lm_head if stage == "reward" else {},
    )


def _stage(saved: SavedCheckpoint, hparams: Mapping[str, Any]) -> str:
    """The stage that wrote a checkpoint, also where it is a user's subclass."""
    for stage, networks in NETWORKS.items():
        if {network.attribute for network in networks.values()} <= set(saved.networks):
            if "model_path" not in hparams:
                break
            return stage
    name = hparams.get("_class_path", "another module")
    raise ValueError(
        f"checkpoint {saved.path}: expected one of SFTModule, RewardModule or PPOModule, with its "
        f"hyper-parameters, got one of {name} with weights of {', '.join(saved.networks)}"
    )


def _contract(
    saved: SavedCheckpoint, tokenizer: PreTrainedTokenizerBase, source: str
) -> TextContract | None:
    """The run's text contract; gives the tokenizer its template."""
    if CONTRACT_KEY not in saved.content:
        return None
    contract = TextContract(**saved.content[CONTRACT_KEY])
    if tokenizer_hash(tokenizer) != contract.tokenizer_hash:
        raise ValueError(
            f"checkpoint {saved.path}: the run had another tokenizer than {source} has now; give "
            "a folder with config.json and the run's tokenizer as base"
        )
    tokenizer.chat_template = contract.chat_template
    return contract
