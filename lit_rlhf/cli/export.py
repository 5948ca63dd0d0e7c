"""`lit_rlhf export`: write a checkpoint or model as a folder that other programs load."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_rlhf.choices import DType, HeadFormat, NetworkName
from lit_rlhf.command import Command
from lit_rlhf.paths import check_inputs, check_output_folder
from lit_rlhf.terminal import print_line, printable_line

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from lit_rlhf.export import ExportableModel

PROG = "lit_rlhf export"
_SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", re.IGNORECASE)


def export(
    checkpoint: str,
    output: str,
    *,
    average: list[str] | None = None,
    network: NetworkName | None = None,
    format: HeadFormat = "transformers",
    dtype: DType | None = None,
    max_shard_size: str = "5GB",
    merge_lora: bool = True,
    base: str | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    private: bool = True,
    trust_remote_code: bool = False,
) -> Path:
    """Write a checkpoint or model as a folder that transformers, TRL, OpenRLHF and vLLM load.

    Args:
        checkpoint: A checkpoint of SFT, reward modelling or PPO, written by any strategy; a model's
            folder, from a stage or from another program; a folder of LoRA adapters; or a GGUF
            file, whose weights are dequantized.
        output: Folder to write the model to.
        average: Further checkpoints or models, fine-tuned from the same start, whose weights are
            averaged with the checkpoint's.
        network: Network to export. Of a PPO checkpoint: policy or critic. Of a folder: reward or
            critic if it is a scalar model, policy or model if it is a language model. Default: the
            policy, or the only network.
        format: Names of the weights of a reward model or critic. transformers: a model for sequence
            classification, which TRL, vLLM and OpenRLHF load too; openrlhf: the same, and the
            config names the head; trl: a language model with a value head.
        dtype: Type of the weights. Default: as in the checkpoint or folder; float32 for GGUF.
        max_shard_size: Largest weight file, for example 5GB or 500MB.
        merge_lora: Merge LoRA adapters into the weights; false writes a folder of adapters only.
        base: Folder or hub id of the base model, if it is not where the run found it; of the model
            that adapters belong to; or of LLaMA, for the delta weights that the paper's authors
            publish.
        chat_template: Template that a model from another program was trained with, for its text
            contract: tokenizer, hh, paper-en, paper-zh.
        overwrite: Replace a model that is in the output folder.
        push_to_hub: Repository on the Hugging Face Hub to upload the folder to, as OWNER/NAME.
            Default: nothing is uploaded.
        private: Make the repository private if it is new.
        trust_remote_code: Run code that comes with a model. Leave it off unless you have read it.
    """
    folder = Path(output)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(
            f"output: expected a new or empty folder, got {output}, which has files; "
            "--overwrite replaces a model"
        )
    for source in (checkpoint, *(average or [])):
        if not Path(source).exists():
            raise FileNotFoundError(f"checkpoint {source}: does not exist")
    check_inputs({"base": base})
    check_output_folder("output", output, [checkpoint, *(average or []), base])
    if not _SIZE.fullmatch(max_shard_size):
        raise ValueError(f"max_shard_size: expected a size such as 5GB, got {max_shard_size!r}")
    from rich.console import Console
    from rich.text import Text  # rich would read markup in a path

    from lit_rlhf.export import with_text_contract
    from lit_rlhf.files import try_replacement, undo_interrupted_replacement
    from lit_rlhf.models import check_replaceable

    check_replaceable(folder)
    undo_interrupted_replacement(folder.resolve())
    try_replacement(folder.resolve(), "output")  # before a model is read
    if push_to_hub is not None:  # refused here, before a model is read and written
        _check_upload(push_to_hub)
    console = Console(stderr=True)
    loader = _Loader(network, dtype, base, trust_remote_code)
    with console.status(Text(printable_line(f"Reading {checkpoint}"))) as status:
        exported = loader.average([checkpoint, *average]) if average else loader.load(checkpoint)
        if chat_template is not None:
            exported = with_text_contract(exported, chat_template)
        status.update(Text(printable_line(f"Writing {output}")))
        if merge_lora:
            exported.save(output, max_shard_size, format)
        elif format != "transformers":
            raise ValueError(f"format: expected transformers for adapters, got {format!r}")
        else:
            exported.save_adapters(output)
    _tell_written(exported, folder)
    if push_to_hub is not None:
        with console.status(Text(f"Uploading to {push_to_hub}")):
            print_line(f"Uploaded: {_upload(output, push_to_hub, private)}")
    return folder


@dataclass(frozen=True)
class _Loader:
    """Reads checkpoints and models with the options of an export.

    Attributes:
        network: Network to take; `None` for the policy, or the only one.
        dtype: Type of the weights; `None` for the source's own.
        base: Folder or hub id of the base model, if it is not where the run found it.
        trust_remote_code: Run code that comes with a model.
    """

    network: NetworkName | None
    dtype: DType | None
    base: str | None
    trust_remote_code: bool

    def load(self, source: str) -> "ExportableModel":
        """Read a checkpoint, a model's folder or a GGUF file."""
        from lit_rlhf.export import (
            GGUF_SUFFIX,
            load_checkpoint_model,
            load_folder_model,
            load_gguf_model,
        )

        if source.endswith(GGUF_SUFFIX):
            return load_gguf_model(source, self.network, dtype=self.dtype)
        if _is_model_folder(Path(source)):
            return load_folder_model(
                source,
                self.network,
                dtype=self.dtype,
                base=self.base,
                trust_remote_code=self.trust_remote_code,
            )
        return load_checkpoint_model(
            source,
            network=self.network,
            dtype=self.dtype,
            base=self.base,
            trust_remote_code=self.trust_remote_code,
            command=shlex.join([*PROG.split(), "--checkpoint", source]),
        )

    def average(self, sources: list[str]) -> "ExportableModel":
        """Average the weights of checkpoints and models."""
        from lit_rlhf.export import average_models
        from lit_rlhf.files import hash_model

        names = [f"{Path(s).name} {hash_model(s) or 'of a checkpoint'}" for s in sources]
        return average_models(map(self.load, sources), names)


def _check_upload(repository: str) -> None:
    """Refuse a name that the hub does not take, and an upload without a token."""
    import huggingface_hub
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # in its docs

    validate_repo_id(repository)
    if huggingface_hub.get_token() is None:
        raise ValueError(
            "push_to_hub: expected a token of the Hugging Face Hub to upload to "
            f"{repository}, got none; log in with `hf auth login`, or set HF_TOKEN"
        )


def _tell_written(exported: "ExportableModel", folder: Path) -> None:
    """Print what was written, and what it lacks."""
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    weights = f"{sum(sizes) / 1e6:,.1f} MB of weights in {len(sizes)} file{'s' * (len(sizes) != 1)}"
    print_line(f"Exported the {exported.name} to {folder}: {weights}")
    if exported.contract is None:
        print(
            "No text_contract.json was written: the source does not say which chat template the "
            "model was trained with. Name it with --chat_template."
        )


def _is_model_folder(source: Path) -> bool:
    """Tell a model's folder (True) from a checkpoint."""
    from lit_rlhf.models import ADAPTER_CONFIG
    from lit_rlhf.strategies import is_checkpoint_folder

    if any((source / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return True
    if source.is_dir() and not is_checkpoint_folder(source):
        raise ValueError(
            "checkpoint: expected a checkpoint file, a checkpoint folder with state.ckpt, or a "
            f"model's folder with config.json or {ADAPTER_CONFIG}, got the folder {source} with "
            "none of them"
        )
    return False


def _upload(folder: str, repository: str, private: bool) -> str:
    """Upload a folder and return the address of the repository.

    Args:
        folder: The folder.
        repository: Its name on the hub, as OWNER/NAME.
        private: Whether a new repository is private.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message=f"Upload with {PROG}"
        )
    # The hub's client raises its own errors, and errors of httpx and the system. Whatever stopped
    # the upload, the model on disk must not be lost behind a traceback.
    except Exception as error:
        raise ValueError(
            f"push_to_hub: uploading to {repository} failed: {error}. The model is in {folder}; "
            f"`hf upload {repository} {folder}` tries again"
        ) from error
    return str(url)


COMMAND = Command(export, writes=("output",))
