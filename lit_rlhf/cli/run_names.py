"""Names of runs, and the files of an earlier run that has the same name.

A run is called like the last part of its `output_dir` and of the folder of its log. `--name` gives
both another name, and `suffix` in an overlay lengthens it, so that a run with the overlay stands
beside one without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks import RECORDS_FILE
from lit_rlhf.modules import StageModule, folders_during

LOGGER_NAMES = ("name", "run_name")
"""Arguments of Lightning's loggers that name a run."""
WRITTEN = ("events.out.tfevents.*", RECORDS_FILE, "samples.jsonl", "*.ckpt")
"""Files that runs add to, in the folders of their logs and checkpoints."""
SETTINGS = ("config.yaml", "hparams.yaml")
"""Files of a log that a run writes before it trains. They alone are no run worth keeping."""


def name_run(config: Namespace) -> None:
    """Give a run's folders the name of `--name`, or append the suffixes of the overlays.

    Both are then reset: the configuration that is saved names the folders themselves.

    Args:
        config: The parsed configuration of a command.

    Raises:
        ValueError: If the name is not a folder's, or nothing in the configuration has a name.
    """
    name, suffixes = config.name, config.suffix
    config.name, config.suffix = None, []
    if name is None and not suffixes:
        return
    if name in ("", "..") or (name and Path(name).name != name):
        raise ValueError(f"--name: expected the name of a folder, got {name!r}")
    stage = config.model.init_args
    output_dir = stage.get("output_dir")
    loggers = list(named_loggers(config.trainer.logger))
    if name is not None and output_dir is None and not loggers:
        raise ValueError(
            "--name: expected a configuration with model.output_dir or a logger that has a name, "
            "got neither"
        )
    if output_dir is not None:
        path = Path(output_dir)
        stage.output_dir = str(path.with_name(name or "-".join([path.name, *suffixes])))
    for arguments, key in loggers:
        arguments[key] = name or "-".join([part for part in (arguments[key], *suffixes) if part])


def named_loggers(loggers: Any) -> Iterator[tuple[Namespace, str]]:  # noqa: ANN401  # many forms
    """Arguments of the configured loggers that name the run, with the argument's name."""
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        arguments = getattr(logger, "init_args", None)
        for key in LOGGER_NAMES:
            if arguments is not None and key in arguments:
                yield arguments, key


def occupied_folders(trainer: Trainer, module: LightningModule) -> list[Path]:
    """Folders of a run's model, log and checkpoints that are not empty."""
    model = [module.finished_dir] if isinstance(module, StageModule) else []
    folders = dict.fromkeys([*model, *folders_during(trainer)])
    return [folder for folder in folders if folder.is_dir() and any(earlier_files(folder))]


def earlier_files(folder: Path) -> Iterator[Path]:
    """What an earlier run has left in a folder."""
    return (path for path in folder.iterdir() if path.name not in SETTINGS)


class DeleteEarlierRun(Callback):
    """Deletes the logged values and checkpoints of an earlier run as soon as the new one trains.

    The values would be read as one run with the new ones, and `--ckpt_path last` would resume from
    the earlier checkpoints. Whatever else is in the folders stays.

    Args:
        folders: Folders of the log and the checkpoints.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        # Found now: at the start of training the loggers have opened files of their own.
        self._files = [
            path for folder in folders for pattern in WRITTEN for path in folder.glob(pattern)
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Delete the files, on rank 0."""
        if not trainer.is_global_zero:
            return
        for path in self._files:
            if path.is_dir():  # a checkpoint of engines
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
