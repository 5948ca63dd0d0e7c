"""Checkpoint folders in the format of the multi-engine strategy, written without engines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_rlhf.files import partial_path
from lit_rlhf.strategies.checkpoint_files import LIGHTNING_FILE, finish_folder
from lit_rlhf.strategies.engine_shards import EngineLayout, ParameterSpec, shard_file

Weights = Mapping[str, Mapping[str, Tensor]]


def write_checkpoint_folder(
    path: Path, content: Any, trained: Weights | None = None, ranks: int = 1, aliases: Any = None
) -> Path:
    """Write a checkpoint folder with Lightning's part and shards of weights by network and name.

    A moment `exp_avg` is ten times the weights. `aliases` are other names, by network.
    """
    partial = partial_path(path)
    partial.mkdir(parents=True)
    layouts = {}
    for network, weights in (trained or {}).items():
        flat = torch.cat([tensor.flatten() for tensor in weights.values()])
        size = -(-len(flat) // ranks)
        flat = torch.cat([flat, torch.zeros(size * ranks - len(flat))])
        (partial / network).mkdir()
        for rank, part in enumerate(torch.split(flat, size)):
            tensors = {"0.weights": part.clone(), "0.exp_avg": part * 10}
            save_file(tensors, shard_file(partial / network, rank))
        group = tuple(ParameterSpec(name, tuple(t.shape)) for name, t in weights.items())
        layouts[network] = EngineLayout(ranks, (group,), dict((aliases or {}).get(network, {})))
    torch.save(content, partial / LIGHTNING_FILE)
    finish_folder(path, layouts, {})
    return path
