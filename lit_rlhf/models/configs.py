"""Whether there is a model at a path, and what its config says."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from lit_rlhf.models.options import ModelOptions

HUB_ID = re.compile(r"(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)


def check_path(path: str | Path) -> None:
    """Refuse a mistyped folder here: transformers would ask the network for it, several times."""
    if path != "" and Path(path).is_dir():
        return
    if Path(path).is_file():
        raise ValueError(
            f"path: expected a folder with a model, got the file {path}; from a checkpoint "
            "`lit_rlhf export` makes such a folder"
        )
    expected = (
        "path: expected a folder with a model or a hub id (name or owner/name), got "
        f"{str(path)!r}, which is no folder here and "
    )
    if isinstance(path, Path) or Path(path).exists() or HUB_ID.fullmatch(path) is None:
        raise ValueError(expected + "has no hub id's form")
    owner, _, name = path.partition("/")
    if name and Path(owner).is_dir():
        raise ValueError(expected + f"no hub id either, as {owner!r} is a folder without {name!r}")


def check_folder(folder: Path) -> None:
    """Refuse what people take for a model's folder; transformers' own errors name other causes."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"path: expected a folder with a whole model, got {folder} with a LoRA adapter alone; "
            "`lit_rlhf export` merges it into its base model"
        )
    if folder.suffix == ".ckpt" or any(folder.glob("*.ckpt")):  # engines save a folder each
        raise ValueError(
            f"path: expected a folder with a model, got {folder} with a checkpoint of a run; from "
            "a checkpoint `lit_rlhf export` makes such a folder"
        )


def read_config(path: str | Path, options: ModelOptions) -> PreTrainedConfig:
    """The config of the model at `path`.

    Raises:
        ValueError: If `path` is neither a folder nor a hub id, or no model's.
    """
    check_path(path)
    if path != "" and Path(path).is_dir():
        check_folder(Path(path))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path), trust_remote_code=options.trust_remote_code
        )
        return config
    except (OSError, ValueError) as error:
        raise ValueError(f"path: expected a model at {path}, got none: {error}") from error


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether it is a sequence classifier's, by the class that it names."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def has_pickled_weights(path: str | Path) -> bool:
    """Whether a folder holds `pytorch_model.bin`, whole or in shards."""
    return any(Path(path).glob("pytorch_model*.bin"))
