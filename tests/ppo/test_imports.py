"""What the algorithm imports."""

import subprocess
import sys

import pytest

REFUSE_LIGHTNING = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning"):
            raise ImportError(f"{name} is refused")

sys.meta_path.insert(0, Refusal())
"""


def run_without_lightning(program: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", REFUSE_LIGHTNING + program]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow  # make lint has a contract that says the same
def test_ppo_imports_without_lightning() -> None:
    finished = run_without_lightning("import lit_rlhf.ppo")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_modules_import_lightning() -> None:
    finished = run_without_lightning("import lit_rlhf.modules")
    assert "is refused" in finished.stderr
