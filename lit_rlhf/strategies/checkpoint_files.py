"""Checkpoints on disk: how they are written, verified and found, and read by any process.

A checkpoint is either a single file, which Lightning's own strategies write, or a folder, which
`MultiEngineDeepSpeedStrategy` writes. A file is a zip archive with a CRC-32 for each member. A
folder has a manifest, like models, with the size and CRC-32 of each file.
"""

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    write_text,
)
from lit_rlhf.strategies.engine_shards import EngineLayout, ShardReader
from lit_rlhf.tensor_checks import check_stored

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
        """Write a checkpoint. It is on disk when the method returns.

        Args:
            checkpoint: The content.
            path: Path of the file, or a URL.
            storage_options: Options of Lightning's `TorchCheckpointIO`.
        """
        if is_remote(path) or storage_options is not None:  # Lightning refuses options
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
        """Read a checkpoint: a file, or a folder of a strategy that partitions weights.

        Args:
            path: Path of the checkpoint, or a URL.
            map_location: Where to put tensors, see `torch.load`; only for files.
            weights_only: Whether to read plain data only; `None` means True.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
            ValueError: If it is damaged.
        """
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

    It keeps a plugin that the user chose, and a strategy that has its own way of writing.
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
                # no checkpoint is compressed, and unpacking a forged one may take hours
                return "is compressed, unlike any checkpoint"
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


def content_problem(path: Path, *, share: int = 0, n_shares: int = 1) -> str | None:
    """Say what is wrong with a checkpoint folder, by the CRC-32 of its files.

    Call `folder_problem` first. Ranks can divide the reading among them.

    Args:
        path: Path of the folder.
        share: Which share of the files to read, from 0.
        n_shares: Number of shares.

    Returns:
        The problem in words; `None` if these files are intact.
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
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write the manifest of a complete `partial_path(path)` and rename that folder to `path`.

    Args:
        path: Path of the checkpoint.
        engines: Layouts of the engines' shards by network.
        checksums: CRC-32 of files by relative name. Other files are forced to disk and read here.
        provenance: What the checkpoint was made of, see `PROVENANCE`.
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
        "made": provenance,
        "files": files,
        "engines": {name: asdict(layout) for name, layout in engines.items()},
    }
    write_text(partial / MANIFEST, json.dumps(manifest, indent=1, default=str))
    for name in files:  # safetensors ignores the umask and lets nobody else read its files
        (partial / name).chmod((partial / MANIFEST).stat().st_mode)
    fsync(partial / MANIFEST)
    fsync(partial)
    move_into_place(path)


def read_folder_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint folder.

    Raises:
        ValueError: With the problem in words that can end a sentence, if there is no manifest or
            it is damaged.
    """
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
    """Read a checkpoint folder into the form that Lightning's own strategies write.

    Args:
        path: Path of the folder.
        weights_only: Whether Lightning's part may hold only tensors and plain data.
    """
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
    """Find the checkpoint that is furthest into its run; `None` without any.

    One that cannot be read comes before all others. Checkpoints whose replacement was interrupted
    are restored first. It warns if another checkpoint was written later: it may be a copy, or from
    a run that went back.

    Args:
        *folders: Folders to look in.
    """
    checkpoints = _order_checkpoints(folders)
    if not checkpoints:
        return None
    furthest = checkpoints[0]
    latest = max(checkpoints, key=lambda checkpoint: checkpoint.recency)
    if latest.batches < furthest.batches:
        rank_zero_warn(
            f"{latest.path} was written after {furthest.path}, which is further into the run and "
            "so counts as the newest checkpoint; name another one with --ckpt_path"
        )
    return furthest.path


def list_checkpoints(*folders: str | Path) -> list[Path]:
    """Restore interrupted replacements in `folders`; return all checkpoints, furthest first."""
    return [checkpoint.path for checkpoint in _order_checkpoints(folders)]


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


class _Recency(NamedTuple):
    """Sort key of checkpoints by the time of writing.

    Attributes:
        time: Time of writing in nanoseconds, which may be coarse.
        numbers: Numbers in the name, which tell checkpoints of the same time apart.
    """

    time: int
    numbers: list[int]


def _recency(path: Path) -> _Recency:
    numbers = [int(number) for number in re.findall(r"\d+", path.name)]
    return _Recency(_dated_file(path).stat().st_mtime_ns, numbers)


class _Position(NamedTuple):
    """Sort key of checkpoints by their position in a run.

    Attributes:
        batches: Batches that it is into its run.
        recency: When it was written.
        path: The checkpoint.
    """

    batches: float
    recency: _Recency
    path: Path


def _order_checkpoints(folders: Iterable[str | Path]) -> list[_Position]:
    """Restore interrupted replacements in `folders`; order all checkpoints, furthest first."""
    checkpoints: list[_Position] = []
    for folder in map(Path, folders):
        for replaced in folder.glob(f".*.ckpt.{REPLACED}"):
            undo_interrupted_replacement(replaced.with_name(replaced.name[1 : -len(REPLACED) - 1]))
        for path in folder.glob("*.ckpt"):
            if not _dated_file(path).is_file():  # a folder that is not complete
                continue
            with suppress(FileNotFoundError):  # another run in the folder has just deleted it
                checkpoints.append(_Position(batches_of(path), _recency(path), path))
    return sorted(checkpoints, reverse=True)


def damaged_checkpoint_error(path: Path, problem: str) -> ValueError:
    """The error for a checkpoint with a problem, with the newest intact one as an alternative."""
    candidates = (candidate for candidate in list_checkpoints(path.parent) if candidate != path)
    intact = next(
        (candidate for candidate in candidates if checkpoint_problem(candidate) is None), None
    )
    advice = (
        f"there is no other intact checkpoint in {path.parent}"
        if intact is None
        else f"resume from {intact} instead"
    )
    return ValueError(f"checkpoint {path}: {problem}; {advice}")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk: a file, or a folder of the multi-engine strategy.

    Attributes:
        path: Path of the checkpoint.
        content: Lightning's state as plain data, with tensors mapped from the file. In a folder its
            `state_dict` lacks the weights that the engines train.
        engines: Layouts of the engines' shards by network; empty for a file.
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
        """Weights as a state dict. Weights that an engine trains are its float32 masters.

        Args:
            network: Name of a network, for its weights by their names in it; `None` for all
                weights, by their names in the module.
        """
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

    It is fast because nothing is verified: damaged tensors are not noticed.

    Args:
        path: Path of a checkpoint, a file or a folder.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If it cannot be read, is no checkpoint of Lightning's, or holds more than
            tensors and plain data: these could run code when they are loaded.
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
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(
            f"checkpoint {path}: expected a checkpoint of Lightning's, got one without state_dict"
        )
    for name in ("hyper_parameters", "callbacks", "loops"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(
                f"checkpoint {path}: expected a mapping as {name}, got "
                f"{type(content[name]).__name__}"
            )
    for name, value in content["state_dict"].items():
        if isinstance(value, Tensor):  # a module may keep other state of its own there
            check_stored(f"checkpoint {path}: {name}", value)
    return content
