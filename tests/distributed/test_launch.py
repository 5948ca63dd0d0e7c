"""Two nodes, as torchrun and SLURM start them: two launches on this machine, of a process each."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.strategies.runs import ROOT, outcome

pytestmark = pytest.mark.slow
NODES = 2
ARGUMENTS = ["multi_deepspeed_stage_2", "1", "32-true", "policy_and_critic"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def torchrun(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Command of a node, and what it adds to the environment."""
    options = {"nnodes": NODES, "nproc-per-node": 1, "rdzv-id": "test", "rdzv-backend": "c10d"}
    options |= {"rdzv-endpoint": f"127.0.0.1:{port}", "local-addr": "127.0.0.1"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return ["-m", "torch.distributed.run", *flags, "-m"], {}


def slurm(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What srun sets for a node's only task."""
    environment = {
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NAME": "ppo",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": str(NODES),
        "SLURM_NTASKS": str(NODES),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": str(node),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(port),
    }
    return ["-m"], environment


@pytest.mark.parametrize("launch", [torchrun, slurm])
def test_two_nodes_train_as_one_device(
    tmp_path: Path, launch: Callable[[int, int], tuple[list[str], dict[str, str]]]
) -> None:
    port = free_port()
    nodes = []
    for node in range(NODES):
        command, extra = launch(node, port)
        nodes.append(
            subprocess.Popen(
                [
                    sys.executable,
                    *command,
                    "tests.strategies.runs",
                    str(tmp_path / "nodes"),
                    *ARGUMENTS,
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    "DS_ACCELERATOR": "cpu",
                    "PYTHONPATH": str(ROOT),
                    "RUN_NODES": str(NODES),
                    **extra,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = "\n".join(node.communicate(timeout=300)[0] for node in nodes)
    finally:
        for process in nodes:
            process.kill()
    assert [process.returncode for process in nodes] == [0] * NODES, said[-4000:]
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in said
    expected = outcome(tmp_path / "one", "auto", 1, "policy_and_critic")["policy_and_critic"]
    actual = torch.load(tmp_path / "nodes" / "policy_and_critic.pt", weights_only=False)
    assert len(actual["records"]) == len(expected["records"])
    for name, tensor in expected["state"].items():
        torch.testing.assert_close(actual["state"][name], tensor, rtol=1e-5, atol=1e-6)
