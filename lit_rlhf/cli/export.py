"""`lit_rlhf export`: a checkpoint or model folder as a folder that others load."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # in its docs
from peft import PeftModel
from rich.console import Console

from lit_rlhf.cli.command import run_command
from lit_rlhf.export.checkpoint import Export, NetworkName, export_checkpoint
from lit_rlhf.export.folder import export_folder, with_template
from lit_rlhf.models import save_model_folder
from lit_rlhf.models.assembly import ADAPTER_CONFIG, plain_model
from lit_rlhf.models.exchange import HeadFormat
from lit_rlhf.models.saving import save_adapter_folder
from lit_rlhf.strategies import is_checkpoint_folder

PROG = "lit_rlhf export"


def export(
    checkpoint: str,
    output: str,
    network: NetworkName | None = None,
    format: HeadFormat = "transformers",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: str = "5GB",
    merge_lora: bool = True,
    base: str | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    private: bool = True,
    trust_remote_code: bool = False,
) -> Path:
    """Turn a checkpoint or model into a folder that transformers, TRL, OpenRLHF and vLLM load.

    Args:
        checkpoint: A checkpoint of SFT, reward modelling or PPO, whatever strategy wrote it; or a
            model's folder, from a stage or from elsewhere; or a folder of adapters.
        output: Folder for the model.
        network: policy or critic of a PPO checkpoint. Of a folder: reward or critic for its scalar
            model, policy or model for its language model. Default: the policy, or what there is.
        format: Names for a reward model or critic. transformers: those of sequence classification,
            which TRL, vLLM and OpenRLHF load too; openrlhf: the same, and the config names the
            head; trl: a language model with a value head.
        dtype: Type of the weights. Default: the checkpoint's or folder's own.
        max_shard_size: Largest weight file, for instance 5GB or 500MB.
        merge_lora: Merge LoRA adapters into the weights. false: leave a folder of adapters alone.
        base: Folder or hub id of the model that the run started from, if it is not where it was; of
            the model below adapters; or of LLaMA, for the differences that the paper's authors
            publish.
        chat_template: How a model from elsewhere was shown text, for its text contract: tokenizer,
            hh, paper-en, paper-zh.
        overwrite: Replace a model that is in the folder.
        push_to_hub: Repository on the Hugging Face Hub to upload the folder to, as OWNER/NAME.
            Default: nothing leaves this machine.
        private: Whether a repository that is made for this is private.
        trust_remote_code: Run code that comes with a model. Leave off unless you have read it.
    """
    _check_free(Path(output), overwrite)
    if push_to_hub is not None:
        _check_can_push(push_to_hub)
    console = Console(stderr=True)
    with console.status(f"Reading {checkpoint}") as status:
        if _is_model(Path(checkpoint)):
            exported = export_folder(checkpoint, network, dtype, base, trust_remote_code)
        else:
            command = shlex.join([*PROG.split(), "--checkpoint", checkpoint])
            exported = export_checkpoint(
                checkpoint, network, dtype, base, trust_remote_code, command
            )
        if chat_template is not None:
            exported = with_template(exported, chat_template)
        status.update(f"Writing {output}")
        if merge_lora:
            _write_model(exported, output, max_shard_size, format)
        else:
            _write_adapters(exported, output, format)
    print(f"Exported the {exported.name} to {output}: {_summary(Path(output))}")
    if exported.contract is None:
        print(
            "It does not say how the model was shown text, so there is no text_contract.json; "
            "--chat_template makes one."
        )
    if push_to_hub is not None:
        with console.status(f"Uploading to {push_to_hub}"):
            print(f"Uploaded: {_pushed(output, push_to_hub, private)}")
    return Path(output)


def _is_model(source: Path) -> bool:
    """Whether it is a model's folder rather than a checkpoint."""
    if any((source / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return True
    if source.is_dir() and not is_checkpoint_folder(source):
        raise ValueError(
            "checkpoint: expected a checkpoint file, a checkpoint folder with manifest.json, or a "
            f"model's folder with config.json or {ADAPTER_CONFIG}, got the folder {source} with "
            "none of them"
        )
    return False


def _write_model(exported: Export, output: str, max_shard_size: str, form: HeadFormat) -> None:
    if not exported.scalar and form != "transformers":
        raise ValueError(
            f"format: expected transformers for a language model, which {form} users load as it "
            f"is, got {form!r}; a scalar model is named by --network critic or reward"
        )
    save_model_folder(
        plain_model(exported.model, exported.dtype),
        exported.tokenizer,
        output,
        contract=exported.contract,
        card=exported.card,
        generation=exported.generation,
        max_shard_size=max_shard_size,
        head_format=form,
        lm_head={name: tensor.to(exported.dtype) for name, tensor in exported.lm_head.items()},
    )


def _write_adapters(exported: Export, output: str, form: HeadFormat) -> None:
    if not isinstance(exported.model, PeftModel):
        raise ValueError(f"merge_lora: expected true, as the {exported.name} has no adapters")
    if form != "transformers":
        raise ValueError(f"format: expected transformers for adapters, got {form!r}")
    save_adapter_folder(
        exported.model,
        exported.tokenizer,
        output,
        contract=exported.contract,
        card=exported.card,
    )


def _check_free(output: Path, overwrite: bool) -> None:
    taken = output.is_dir() and any(output.iterdir())
    if taken and not overwrite:
        raise ValueError(
            f"output: expected a free name or an empty folder, got {output}, which has files; "
            "--overwrite true replaces a model"
        )


def _summary(folder: Path) -> str:
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    size = sum(path.stat().st_size for path in files) / 1e6
    return f"{size:,.1f} MB of weights in {len(files)} file{'s' if len(files) != 1 else ''}"


def _check_can_push(repository: str) -> None:
    """Find what would stop the upload before anything is done."""
    validate_repo_id(repository)
    if huggingface_hub.get_token() is None:
        raise ValueError(
            f"push_to_hub: expected a token of the Hugging Face Hub to upload to {repository}, got "
            "none; log in with `hf auth login`, or set HF_TOKEN"
        )


def _pushed(folder: str, repository: str, private: bool) -> str:
    """Upload the folder; returns the repository's address."""
    api = huggingface_hub.HfApi()
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message=f"Upload with {PROG}"
        )
    except Exception as error:  # of many types: refused, not reached, cut off
        raise ValueError(
            f"push_to_hub: the hub did not take {repository}: {error}. The model is in {folder}; "
            f"`hf upload {repository} {folder}` tries again"
        ) from error
    return str(made)


def main(argv: Sequence[str]) -> Path:
    """Entry point of `lit_rlhf export`."""
    return run_command(export, argv, PROG)
