"""Runs on disk: their names, what an earlier run has left, and where a run resumes.

The name of a run is the last part of its `output_dir` and of its log folder. `--name` changes both.
`suffix` in an overlay is appended to them, so that runs with and without the overlay have folders
of their own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_callbacks.runs import RECORDS_FILE, SAMPLES_FILE
from lit_rlhf.files import delete, lock_path, read_manifest
from lit_rlhf.modules import RUN_KEY, StageModule, checkpoint_folders, run_id, training_folders
from lit_rlhf.parser import UsageError
from lit_rlhf.strategies import NAME_KEY, find_newest_checkpoint, read_lightning_state

_LOGGER_NAMES = ("name", "run_name")
"""Arguments of Lightning's loggers that name a run."""
_SEEDS = ("seed", "head_seed")
"""Options of modules and data that are seeds."""
_LATER_DEFAULTS = {
    "finished": "last",
    "kinds": None,
    "preset": "chat",
    "seed": None,
    "split_seed": None,
    "thresholds": None,
}
"""Defaults of options that came after the first hashes of commands, which must stay the same: a
run that was finished before is still finished. A new option of a command, a module, a data module
or a callback belongs here."""
_LOGGED_FILES = ("events.out.tfevents.*", RECORDS_FILE, SAMPLES_FILE)
"""Files that runs add to, in the folders of their logs."""
_SETTINGS_FILES = ("config.yaml", "hparams.yaml")
"""Files of a log that a run writes before it trains, and that need no protection."""


def name_run(config: Namespace) -> None:
    """Give a run's folders the name of `--name`, or append the suffixes of the overlays.

    Both are then reset: the configuration that is saved names the folders themselves.
    """
    name = config.name
    suffixes = config.suffix
    config.name = None
    config.suffix = []
    if name is None and not suffixes:
        return
    if name in ("", "..") or (name and Path(name).name != name):
        raise UsageError(f"--name: expected the name of a folder, got {name!r}")
    stage = config.model.init_args
    output_dir = stage.get("output_dir")
    logger_settings = config.trainer.logger
    loggers = [
        (logger.init_args, key)
        for logger in (logger_settings if isinstance(logger_settings, list) else [logger_settings])
        for key in _LOGGER_NAMES
        if key in (getattr(logger, "init_args", None) or ())
    ]
    if name is not None and output_dir is None and not loggers:
        raise UsageError(
            "--name: expected a configuration with model.output_dir or a logger that has a name, "
            "got neither"
        )
    if output_dir is not None:
        path = Path(output_dir)
        stage.output_dir = str(path.with_name(name or "-".join([path.name, *suffixes])))
    for arguments, key in loggers:
        arguments[key] = name or "-".join([part for part in (arguments[key], *suffixes) if part])


def seed_run(config: Namespace, words: Sequence[str]) -> None:
    """Give all that a run draws at random the seed of `--seed`, apart from what is held out.

    It is then reset: the configuration that is saved has the seeds themselves.

    Args:
        config: The settings of the run.
        words: Words of the command line. A seed that has a flag of its own there is left alone.
    """
    seed = config.seed
    config.seed = None
    if seed is None:
        return
    flags = {word.partition("=")[0].replace(".init_args", "") for word in words}
    data = config.data.init_args
    if data.get("split_seed", 0) is None:  # as without --seed
        data.split_seed = data.seed
    if "--seed_everything" not in flags:
        config.seed_everything = seed
    for section, arguments in (("model", config.model.init_args), ("data", data)):
        for name in _SEEDS:
            if name in arguments and f"--{section}.{name}" not in flags:
                arguments[name] = seed


def occupied_folders(trainer: Trainer, module: LightningModule) -> list[Path]:
    """Folders of a run's model, log and checkpoints that hold files, and not only settings.

    An empty folder is none, for instance an empty volume that is mounted at the checkpoints.
    """
    model = [module.finished_dir] if isinstance(module, StageModule) else []
    return [
        folder
        for folder in dict.fromkeys([*model, *training_folders(trainer)])
        if any(
            path.is_symlink() or not (path.is_dir() or path.name in _SETTINGS_FILES)
            for path in folder.rglob("*")
        )
    ]


class DeleteEarlierRun(Callback):
    """Deletes the logged values and checkpoints of an earlier run as soon as the new one trains.

    The values would be read as one run with the new ones, and `--ckpt_path last` would resume from
    the earlier checkpoints. Whatever else is in the folders stays, checkpoints of other runs and
    copies under other names included.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        # Found now: at the start of training the loggers have opened their files.
        folders = training_folders(trainer)
        self._files = [
            path for folder in folders for pattern in _LOGGED_FILES for path in folder.glob(pattern)
        ]
        log = folders[0] if trainer.loggers else None
        run = run_id(module) if isinstance(module, StageModule) else None
        for folder in folders:
            is_own = log is not None and folder.resolve().is_relative_to(log.resolve())
            for path in folder.glob("*.ckpt"):
                try:
                    content = read_lightning_state(path)
                except (OSError, ValueError):  # no checkpoint, or a damaged one
                    continue
                same_run = is_own or content.get(RUN_KEY) == run
                if same_run and content.get(NAME_KEY, path.name) == path.name:
                    self._files.append(path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Delete the files, on rank 0."""
        for path in self._files if trainer.is_global_zero else ():
            delete(path)


def hash_command(settings: Namespace) -> str:
    """Hash of the settings of a command, apart from how its run starts."""
    options = settings.as_dict()
    for name in ("config", "ckpt_path", "allow_changes", "overwrite"):
        options.pop(name, None)
    text = json.dumps(_without_later_defaults(options), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_later_defaults(settings: Any) -> Any:  # noqa: ANN401  # whatever a configuration holds
    """Settings without the options of `_LATER_DEFAULTS` that have their defaults."""
    if isinstance(settings, list):
        return [_without_later_defaults(value) for value in settings]
    if not isinstance(settings, Mapping):
        return settings
    return {
        name: _without_later_defaults(value)
        for name, value in settings.items()
        if name not in _LATER_DEFAULTS or value != _LATER_DEFAULTS[name]
    }


def has_finished(folder: Path, command: str | None = None) -> bool:
    """Whether a folder has the finished model of a command, or of any, and no run writes to it."""
    same = command is None or read_manifest(folder).get("command") == command
    return same and any(folder.glob("*.safetensors")) and not lock_path(folder).exists()


def find_last_checkpoint(trainer: Trainer) -> str | None:
    """The newest checkpoint in the folders of the run's checkpoint callbacks; `None` without one.

    Lightning's own `last` finds only what a ModelCheckpoint with `save_last` has saved.
    """
    if not trainer.checkpoint_callbacks:
        raise UsageError(
            "--ckpt_path last: the run keeps no checkpoints. Add configs/overlays/resumable.yaml, "
            "or set trainer.enable_checkpointing to true"
        )
    folders = checkpoint_folders(trainer)
    newest = find_newest_checkpoint(*folders)
    if newest is None:
        rank_zero_info(
            f"--ckpt_path last: no checkpoint in {', '.join(map(str, folders))}; the run starts "
            "from the beginning"
        )
    return None if newest is None else str(newest)


def check_checkpoint_class(path: str, configured: str) -> None:
    """Raise UsageError if a checkpoint cannot be read, or is of another class than `configured`."""
    if not (Path(path).is_file() or Path(path).is_dir()):  # reading it may not end
        raise UsageError(f"--ckpt_path: expected a checkpoint, got the device or pipe {path}")
    try:
        checkpoint = read_lightning_state(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--ckpt_path: {error}") from error
    saved = checkpoint.get("hyper_parameters", {}).get("_class_path", configured)
    if saved.rpartition(".")[2] != configured.rpartition(".")[2]:
        raise UsageError(
            f"--ckpt_path {path} is a checkpoint of {saved}, but the configuration trains "
            f"{configured}. --ckpt_path resumes a run of the same class; to start a stage from an "
            "earlier one, point --model.model_path at the folder that the earlier stage left."
        )
