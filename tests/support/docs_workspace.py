"""The workspace that readers of the documentation have after a quickstart, but tiny."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lit_rlhf.models import save_model_folder
from tests.support.docs_blocks import ROOT, all_blocks
from tests.support.foreign_models import FOREIGN, write_foreign
from tests.support.gguf_file import write_tiny_gguf
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer


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
    # the paper's reward models are differences from another model
    write_foreign(downloads / "reward_en", FOREIGN["paper"], shards=2, pickled=True)
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), downloads / "llama")
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
