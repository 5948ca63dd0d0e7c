"""All stages on two CUDA devices: what one device cannot show, as no rank waits for another.

`python -m tests.gpu.test_two_gpus ROOT FOLDER STRATEGY ACCELERATOR` is a rank of such a run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.trajectories import EPOCHS, trajectory

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
pytestmark = [pytest.mark.gpu, needs_two]

STAGES = ("sft", "reward", "ppo")


def run_stages(root: Path, folder: Path, strategy: str, accelerator: str) -> None:
    arguments = {"devices": 2, "accelerator": accelerator, "strategy": strategy}
    arguments |= {"precision": "bf16-mixed", "use_distributed_sampler": False}
    for stage in STAGES:
        options = {"memory": {"shard_frozen": True}} if stage == "ppo" else {}
        run = trajectory(stage, root, folder / stage, 4, trainer=arguments, **options)
        assert len(run.metrics) == EPOCHS
        assert all(torch.isfinite(tensor).all() for tensor in run.state.values())
        print(stage, run.metrics[-1], flush=True)


@pytest.mark.parametrize("strategy", ["ddp", "multi_deepspeed_stage_2"])
def test_all_stages_train_on_two_devices(root: Path, tmp_path: Path, strategy: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launch, "tests.gpu.test_two_gpus", str(root), str(tmp_path), strategy, "gpu"]
    options = {"env": {**os.environ, "DS_ACCELERATOR": "cuda"}, "timeout": 80}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    print(done.stdout)


if __name__ == "__main__":
    run_stages(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
