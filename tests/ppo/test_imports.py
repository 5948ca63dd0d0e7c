"""What the algorithm imports."""

import subprocess
import sys

import pytest


@pytest.mark.slow  # make lint has a contract that says the same
def test_ppo_imports_without_lightning() -> None:
    # with None in its place, Lightning cannot be imported
    program = "import sys; sys.modules['lightning'] = None; import lit_rlhf.ppo"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
