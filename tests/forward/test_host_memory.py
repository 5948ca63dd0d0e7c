"""Memory that is freed and used again: counted in pages that the system had to hand out."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lit_rlhf.forward import host_memory
from lit_rlhf.forward.host_memory import give_back_freed_memory, keep_freed_memory
from lit_rlhf.modules import SFTModule, stage
from tests.modules.stages import demonstrations, fitted

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has mallopt")
PAGES = """
import resource, sys, torch
from lit_rlhf.forward.host_memory import give_back_freed_memory, keep_freed_memory
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def fetched():
    before = pages()
    for _ in range(4):
        for size in (2**24, 2**22):
            torch.ones(size)
    return (pages() - before) * resource.getpagesize()
kept = keep_freed_memory()
torch.ones(2**24), torch.ones(2**24)
once = fetched()
give_back_freed_memory()
print(kept, once, fetched())
"""
BYTES = 4 * 4 * (2**24 + 2**22)


def run(**environment: str) -> tuple[str, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", PAGES],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", **environment},
    )
    kept, once, after = done.stdout.split()
    return kept, int(once), int(after)


@glibc
def test_what_was_freed_is_used_again_until_it_is_given_back() -> None:
    kept, once, after = run()
    assert kept == "True"
    assert once < 0.05 * BYTES
    assert after > 0.5 * BYTES


@glibc
@pytest.mark.parametrize("name", host_memory.VARIABLES)
def test_the_users_own_settings_stay(name: str) -> None:
    kept, once, _ = run(**{name: "4096"})
    assert kept == "False"
    assert once > 0.5 * BYTES


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(host_memory.ctypes, "CDLL", None)
    assert not keep_freed_memory()
    give_back_freed_memory()


@pytest.mark.parametrize("keeps", [True, False])
def test_training_on_a_cpu_keeps_memory_and_gives_it_back(
    keeps: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def keep() -> bool:
        calls.append("keep")
        return keeps

    monkeypatch.setattr(stage, "keep_freed_memory", keep)
    monkeypatch.setattr(stage, "give_back_freed_memory", lambda: calls.append("give back"))
    module = SFTModule(str(root / "policy"), output_dir=str(tmp_path / "model"))
    fitted(module, demonstrations(root), tmp_path, max_steps=1)
    assert calls == (["keep", "give back"] if keeps else ["keep"])
