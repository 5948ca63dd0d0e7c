"""A checkpoint folder of one engine, which three ranks wrote."""

from pathlib import Path

import torch

from tests.support.engine_checkpoints import write_checkpoint_folder


def write(path: Path, value: float = 0.0) -> Path:
    """A checkpoint of 7 elements from `value` on, 3 on each rank, so the last two are padding."""
    flat = torch.arange(7.0) + value
    content = {"state_dict": {"frozen.c": torch.ones(1), "scale": torch.ones(())}}
    trained, aliases = {"a": flat[:4].view(2, 2), "b": flat[4:]}, {"policy": {"tied": "a"}}
    return write_checkpoint_folder(path, content, {"policy": trained}, ranks=3, aliases=aliases)
