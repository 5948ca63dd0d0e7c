"""What the algorithm imports."""

import subprocess
import sys


def test_ppo_imports_without_lightning() -> None:
    # with None in its place, Lightning cannot be imported
    program = "import sys; sys.modules['lightning'] = None; import lit_rlhf.ppo"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
