"""Settings and fixtures of all tests."""

import atexit
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tiny tensors lose more to waiting threads than they gain from them, here and in processes that
# tests start. OpenMP reads the variable when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# A suite that a shell starts in the background ignores Ctrl-C, and one under nohup a closed
# terminal; some tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a plugin may have loaded torch before

# What `datasets` writes stays out of the user's cache, in processes that tests start too. It reads
# the variable when it is imported, which no fixture comes before.
_datasets_cache = tempfile.TemporaryDirectory(prefix="datasets_cache_")
atexit.register(_datasets_cache.cleanup)
os.environ["HF_DATASETS_CACHE"] = _datasets_cache.name

DATA_VARIABLE = "LIT_RLHF_TEST_DATA"
"""Names the folder of the real data sets, which are no part of the repository."""
OTHER_MATMUL_VARIABLE = "LIT_RLHF_TEST_OTHER_MATMUL"
"""If it is set, networks multiply with the library that they do not use on this processor."""


@pytest.fixture(scope="session", autouse=True)
def _outside_the_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hide what runs have left in the tree from tests, and from the fixtures that they share."""
    folder = tmp_path_factory.mktemp("current")
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(folder)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _without_waits_for_the_disk() -> Iterator[None]:
    """Write what tests write to memory only: no test survives a power cut."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _other_matmul() -> Iterator[None]:
    """Multiply with oneDNN on Intel processors and with MKL on AMD's, if the variable is set."""
    with pytest.MonkeyPatch.context() as patches:
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if OTHER_MATMUL_VARIABLE in os.environ and has_onednn:
            # late, because what it imports reads variables that are set above
            from lit_rlhf.forward.cpu import mkl_is_slow

            uses_mkl = not mkl_is_slow()
            patches.setattr("lit_rlhf.forward.optimize.mkl_is_slow", lambda: uses_mkl)
        yield


@pytest.fixture(autouse=True)
def _own_folder(_outside_the_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its `tmp_path`, unless a fixture of its module has chosen a folder."""
    if Path.cwd() == _outside_the_tree:
        monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands append the current folder


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _propagating() -> None:
    # Lightning's logger passes messages on to the root's handlers, one of which is `caplog`'s, only
    # if the root had some when Lightning was imported.
    logging.getLogger("lightning.pytorch").propagate = True


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data sets that the environment names."""
    if DATA_VARIABLE not in os.environ:
        pytest.skip(f"{DATA_VARIABLE} does not name a folder of real data sets")
    return Path(os.environ[DATA_VARIABLE]).resolve(strict=True)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tiny models and data files of the stages; read only."""
    from tests.support.stages import write_data, write_models

    return write_models(write_data(tmp_path_factory.mktemp("stages")))


@pytest.fixture(scope="session")
def pad_is_eos_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a tokenizer that pads with EOS; read only."""
    from tests.support.stages import write_data, write_models

    return write_models(write_data(tmp_path_factory.mktemp("pad_is_eos")), pad_is_eos=True)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab's world, an SFT model and a reward model; read only."""
    from tests.support.tiny_runs import world_root

    return world_root(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all models of a tiny quickstart; read only."""
    from tests.support.tiny_runs import full_root

    return full_root(tmp_path_factory.getbasetemp())
