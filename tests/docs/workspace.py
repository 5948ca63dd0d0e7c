"""A workspace as readers of the documentation have it after a (tiny) quickstart."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import ROOT, all_blocks
from tests.models.foreign import write_weights
from tests.support.gguf_file import write_tiny_gguf


def make_workspace(folder: Path, quickstart: Path) -> Path:
    """Make `configs/`, `runs/quickstart/`, the files of titled blocks, and a foreign model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(quickstart, folder / "runs" / "quickstart")
    (folder / "runs" / "pairs").mkdir()
    for stage in ("sft", "reward", "ppo"):  # what `lit_rlhf start` writes comes from these
        shutil.copy(ROOT / f"configs/{stage}/hh_cpu.yaml", folder / f"runs/pairs/{stage}.yaml")
    for block in all_blocks():
        if "." in block.title and "/" not in block.title:
            (folder / block.title).write_text(block.text, "utf-8")
    downloads = folder / "downloads"
    write_foreign_reward(quickstart / "reward", downloads / "reward_en", downloads / "llama")
    write_tiny_gguf(downloads / "SmolLM2-135M-Instruct.Q4_1.gguf")
    return folder


@contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    """Make the folder current and importable; modules of the documentation are imported anew."""
    own = {block.title.removesuffix(".py") for block in all_blocks() if block.language == "python"}
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(folder)
        patches.syspath_prepend(str(folder))
        for name in own & sys.modules.keys():
            patches.delitem(sys.modules, name)
        yield
        for name in own & sys.modules.keys():
            del sys.modules[name]


def write_foreign_reward(reward: Path, folder: Path, llama: Path) -> None:
    """Save the reward model in the layout of the paper's authors.

    It is a language model with a `reward_head`, and its layers are differences from another model.
    """
    from safetensors.torch import load_file

    from lit_rlhf.models import load_causal_lm

    shutil.copytree(reward.parent / "sft", llama)
    base = load_causal_lm(llama).state_dict()
    weights = load_file(reward / "model.safetensors")
    weights = {n: t - base[n] if "layers" in n else t for n, t in weights.items()}
    weights["reward_head.weight"] = weights.pop("score.weight")
    weights["lm_head.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder.mkdir(parents=True)
    config = json.loads((reward / "config.json").read_text("utf-8"))
    for key in ("id2label", "label2id", "num_labels"):
        config.pop(key, None)
    config["architectures"] = ["LlamaRewardModel"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    write_weights(folder, weights, shards=2, pickled=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reward / name, folder / name)
