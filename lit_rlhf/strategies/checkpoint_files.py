"""Checkpoints on disk: how they are written, verified and found, and read by any process.

A checkpoint is either a single file, which Lightning's own strategies write, or a folder, which
`MultiEngineDeepSpeedStrategy` writes. A file is a zip archive with a CRC-32 for each member. A
folder has a manifest, as models have, with the size and CRC-32 of each file.
"""

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_rlhf.files import (
    MANIFEST,
    REPLACED,
    delete,
    delete_partials,
    file_crc32,
    fsync,
    move_into_place,
    partial_path,
    read_manifest,
    save_durably,
    undo_interrupted_replacement,
)
from lit_rlhf.strategies.engine_shards import EngineLayout, ShardReader

FORMAT = "lit_rlhf.multi_engine/3"
PROVENANCE = ("run", "epoch", "global_step", "resume_settings", "versions")
"""Keys of a checkpoint that a folder's manifest repeats."""
LIGHTNING_FILE = "state.ckpt"
"""File of a checkpoint folder with Lightning's state and the weights that no engine trains."""
NAME_KEY = "written_as"
"""Key of a checkpoint for the name that it was written under, which tells copies apart."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint plugin that writes atomically and verifies before it loads.

    A write that is interrupted or runs out of disk space leaves the previous checkpoint of that
    name as it was, and at most a hidden file `.NAME.partial`, which the next save in the folder
    deletes. Works with any Trainer: `Trainer(plugins=[AtomicCheckpointIO()])`. Paths with a scheme
    (`s3://`) are handled by Lightning's `TorchCheckpointIO`.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Write `checkpoint` to `path`. It is on disk when the method returns."""
        if is_remote(path) or storage_options is not None:  # which Lightning refuses
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        partial = partial_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        delete_partials(path.parent)
        try:
            save_durably({**checkpoint, NAME_KEY: path.name}, partial)
            move_into_place(path)
        except OSError as error:
            raise OSError(
                error.errno,
                f"checkpoint {path} could not be written: {error.strerror}. Earlier checkpoints "
                "are unchanged",
            ) from error
        finally:
            delete(partial)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[[Any, str], Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the checkpoint at `path`, as plain data unless `weights_only` is False."""
        weights_only = weights_only is not False
        if is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only)
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"checkpoint {path}: does not exist")
        if path.is_dir():
            return read_whole_folder(path, weights_only)
        if problem := file_problem(path):
            raise damaged_checkpoint_error(path, problem)
        try:
            checkpoint: dict[str, Any] = torch.load(path, map_location, weights_only=weights_only)
        except RuntimeError as error:
            # The zip checksums do not cover the archive's own bookkeeping; torch's reader does.
            raise damaged_checkpoint_error(path, f"is damaged: {error}") from error
        checkpoint.pop(NAME_KEY, None)
        return checkpoint


def use_atomic_checkpoints(trainer: Trainer) -> None:
    """Replace Lightning's default checkpoint plugin by `AtomicCheckpointIO`.

    A plugin that the user chose, and a strategy that has its own way of writing, are kept.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def is_remote(path: str | Path) -> bool:
    """Whether `path` has a scheme such as `s3://`."""
    return "://" in str(path)


def is_checkpoint_folder(path: Path) -> bool:
    """Whether `path` is a folder that the multi-engine strategy wrote, intact or not."""
    return (path / LIGHTNING_FILE).is_file() or "engines" in read_manifest(path)


def checkpoint_problem(path: str | Path) -> str | None:
    """Read a whole checkpoint file or folder; say what is wrong with it, `None` if it is intact."""
    path = Path(path)
    if not path.exists():
        return "does not exist"
    if path.is_dir():
        return folder_problem(path) or content_problem(path)
    return file_problem(path)


def file_problem(path: Path) -> str | None:
    """Say what is wrong with a checkpoint file, by the CRC-32 of each member of its zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type for member in archive.infolist()):
                return "is compressed, as no checkpoint is"  # to unpack it may take hours
            damaged = archive.testzip()
    except Exception as error:  # damaged bytes can raise almost anything inside zipfile
        return f"is damaged or cut off: {error}"
    return None if damaged is None else f"is damaged: the checksum of {damaged} differs"


def folder_problem(path: Path) -> str | None:
    """Say what is wrong with a checkpoint folder, by the names and sizes of its files."""
    try:
        manifest = read_folder_manifest(path)
    except ValueError as error:
        return str(error)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} is damaged: expected {expected['bytes']} bytes, got {size}"
    return None


def content_problem(path: Path, share: int = 0, n_shares: int = 1) -> str | None:
    """Say what is wrong with a checkpoint folder, by the CRC-32 of its files.

    `folder_problem` comes first. Ranks divide the reading into `n_shares`; this one reads `share`,
    from 0.
    """
    files = read_folder_manifest(path)["files"]
    for name in sorted(files)[share::n_shares]:
        if file_crc32(path / name) != files[name]["crc32"]:
            return f"{name} is damaged: its checksum differs"
    return None


def finish_folder(
    path: Path,
    engines: Mapping[str, EngineLayout],
    checksums: Mapping[str, int],
    made: Mapping[str, Any] | None = None,
) -> None:
    """Write the manifest of a complete `partial_path(path)` and rename that folder to `path`.

    It says what the checkpoint was `made` of. Files without a checksum, CRC-32 by relative name,
    are forced to disk and read here.
    """
    partial = partial_path(path)
    files = {}
    for file in sorted(partial.rglob("*")):
        name = str(file.relative_to(partial))
        if name not in checksums:
            fsync(file)
        if file.is_file():
            crc32 = checksums[name] if name in checksums else file_crc32(file)
            files[name] = {"bytes": file.stat().st_size, "crc32": crc32}
    manifest = {
        "format": FORMAT,
        "made": made,
        "files": files,
        "engines": {name: asdict(layout) for name, layout in engines.items()},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1, default=str), encoding="utf-8")
    for name in files:  # safetensors lets nobody else read its files, whatever the umask
        (partial / name).chmod((partial / MANIFEST).stat().st_mode)
    fsync(partial / MANIFEST)
    fsync(partial)
    move_into_place(path)


def read_folder_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint folder; its ValueErrors are endings of a sentence."""
    manifest = read_manifest(path)
    if manifest.get("format") == FORMAT:
        return manifest
    if (path / MANIFEST).is_file():
        raise ValueError(f"{MANIFEST} is damaged, or not of format {FORMAT}")
    raise ValueError(f"has no {MANIFEST}: not a checkpoint of the multi-engine strategy")


def read_engine_layouts(path: Path) -> dict[str, EngineLayout]:
    """Read from a checkpoint folder what each engine's shards hold, by network.

    A checkpoint whose replacement was interrupted is restored first. The content of the files is
    not verified.
    """
    undo_interrupted_replacement(path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path}: does not exist")
    if problem := folder_problem(path) if path.is_dir() else "not a folder":
        raise damaged_checkpoint_error(path, problem)
    engines = read_folder_manifest(path)["engines"]
    return {name: EngineLayout.from_json(layout) for name, layout in engines.items()}


def read_whole_folder(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint folder as one of Lightning's own strategies would have written it."""
    layouts = read_engine_layouts(path)
    if problem := content_problem(path):
        raise damaged_checkpoint_error(path, problem)
    content: dict[str, Any] = torch.load(
        path / LIGHTNING_FILE, map_location="cpu", weights_only=weights_only
    )
    content.pop(NAME_KEY, None)
    states = content.get("optimizer_states", [])
    for index, (name, layout) in enumerate(layouts.items()):
        with ShardReader(path / name, layout) as reader:
            weights = reader.read_weights()
            content["state_dict"] |= {f"{name}.{key}": w for key, w in weights.items()}
            if states:
                states[index] = reader.read_optimizer(states[index])
    return content


def find_newest_checkpoint(*folders: str | Path) -> Path | None:
    """The checkpoint in `folders` that is furthest into its run; `None` without any.

    One that cannot be read comes before all others. Checkpoints whose replacement was interrupted
    are restored first. It warns if another checkpoint was written later, as copies may be and those
    of a run that went back.
    """
    found = list_checkpoints(*folders)
    if not found:
        return None
    latest = max(found, key=_recency)
    if batches_of(latest) < batches_of(found[0]):
        rank_zero_warn(
            f"{latest} was written after {found[0]}, which is further into the run and so counts "
            "as the newest checkpoint; name another one with --ckpt_path"
        )
    return found[0]


def list_checkpoints(*folders: str | Path) -> list[Path]:
    """Restore interrupted replacements in `folders`; return all checkpoints, furthest first."""
    found = []
    for folder in map(Path, folders):
        for replaced in folder.glob(f".*.ckpt.{REPLACED}"):
            undo_interrupted_replacement(replaced.with_name(replaced.name[1 : -len(REPLACED) - 1]))
        found += [path for path in folder.glob("*.ckpt") if _dated_file(path).is_file()]
    return sorted(found, key=lambda path: (batches_of(path), _recency(path)), reverse=True)


def batches_of(path: Path) -> float:
    """Batches that a checkpoint is into its run; infinity for one that cannot be read."""
    file = path / LIGHTNING_FILE if path.is_dir() else path
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        epochs = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        return float(epochs["total"]["completed"])
    except Exception:  # damaged bytes can raise almost anything
        return math.inf


def _dated_file(path: Path) -> Path:
    """The file whose modification time says when a checkpoint was written."""
    # the time of a folder itself also changes when something in it is deleted
    return path / MANIFEST if path.is_dir() else path


def _recency(path: Path) -> tuple[int, list[int]]:
    """Sort key: time of writing, then the numbers in the name, as file times may be coarse."""
    numbers = [int(number) for number in re.findall(r"\d+", path.name)]
    return _dated_file(path).stat().st_mtime_ns, numbers


def damaged_checkpoint_error(path: Path, problem: str) -> ValueError:
    """The error for a checkpoint with a problem, with the newest intact one as an alternative."""
    others = (other for other in list_checkpoints(path.parent) if other != path)
    intact = next((other for other in others if checkpoint_problem(other) is None), None)
    advice = (
        f"there is no other intact checkpoint in {path.parent}"
        if intact is None
        else f"resume from {intact} instead"
    )
    return ValueError(f"checkpoint {path}: {problem}; {advice}")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk: a file, or a folder of the multi-engine strategy.

    `content` is Lightning's as plain data, its tensors mapped from the file. In a folder its
    `state_dict` lacks what the engines train, by network.
    """

    path: Path
    content: Mapping[str, Any]
    engines: Mapping[str, EngineLayout]

    @property
    def networks(self) -> list[str]:
        """Attributes of the LightningModule that have weights."""
        return sorted(
            {*self.engines, *(key.partition(".")[0] for key in self.content["state_dict"])}
        )

    def state_dict(self, network: str | None = None) -> dict[str, Tensor]:
        """The weights of one network, or of all, as a state dict; engines' are float32 masters."""
        if network is not None and network not in self.networks:
            raise ValueError(f"network: expected one of {self.networks}, got {network!r}")
        state = dict(self.content["state_dict"])
        for name, layout in self.engines.items():
            if network in (None, name):
                with ShardReader(self.path / name, layout) as reader:
                    weights = reader.read_weights()
                state |= {f"{name}.{key}": tensor for key, tensor in weights.items()}
        if network is None:
            return state
        prefix = f"{network}."
        return {key[len(prefix) :]: t for key, t in state.items() if key.startswith(prefix)}


def read_checkpoint(path: str | Path) -> SavedCheckpoint:
    """Verify and open a checkpoint, a file or a folder of the multi-engine strategy."""
    path = Path(path)
    engines = {} if path.is_file() else read_engine_layouts(path)
    if problem := file_problem(path) if path.is_file() else content_problem(path):
        raise damaged_checkpoint_error(path, problem)
    return SavedCheckpoint(path, read_lightning_state(path), engines)


def read_state_dict(path: str | Path, network: str | None = None) -> dict[str, Tensor]:
    """The weights in a checkpoint as an ordinary state dict, see `SavedCheckpoint.state_dict`."""
    return read_checkpoint(path).state_dict(network)


def read_lightning_state(path: str | Path) -> dict[str, Any]:
    """Lightning's part of a checkpoint as plain data, with tensors mapped from the file.

    Fast, as nothing is verified: damaged tensors are not noticed. A file with more than tensors and
    plain data, which could run code when it is loaded, is refused.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path}: does not exist")
    file = path / LIGHTNING_FILE if path.is_dir() else path
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path}: holds more than tensors and plain data, which could run code when "
            f"it is loaded: {error}"
        ) from error
    except (OSError, RuntimeError) as error:  # cut off, or not an archive of torch's
        problem = checkpoint_problem(path) or f"cannot be read: {error}"
        raise damaged_checkpoint_error(path, problem) from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(
            f"checkpoint {path}: expected a checkpoint of Lightning's, got one without state_dict"
        )
    return content
