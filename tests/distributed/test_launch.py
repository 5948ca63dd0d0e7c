"""Two nodes, as torchrun and SLURM start them: two launches on this machine, of a process each."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.nodes import NODES, free_port, run_nodes, torchrun
from tests.support.strategy_runs import outcome

pytestmark = pytest.mark.slow
ARGUMENTS = ["multi_deepspeed_stage_2", "1", "32-true", "policy_and_critic"]


def slurm(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What srun sets for a node's only task."""
    job = {"SLURM_JOB_ID": "4321", "SLURM_JOB_NAME": "ppo", "SLURM_NODELIST": "127.0.0.1"}
    job |= dict.fromkeys(("SLURM_NNODES", "SLURM_NTASKS"), str(NODES))
    job |= dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID"), str(node))
    job |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "MASTER_PORT": str(port)}
    return ["-m"], job


@pytest.mark.parametrize("launch", [torchrun, slurm])
def test_two_nodes_train_as_one_device(tmp_path: Path, launch: Any) -> None:
    port, nodes = free_port(), {"RUN_NODES": str(NODES)}
    starts = [launch(node, port) for node in range(NODES)]
    words = ["tests.support.strategy_runs", str(tmp_path / "nodes"), *ARGUMENTS]
    statuses, outputs = run_nodes(words, [(start, own | nodes) for start, own in starts])
    said = "\n".join(outputs)
    assert statuses == [0] * NODES, said[-4000:]
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in said
    expected = outcome(tmp_path / "one", "auto", 1, "policy_and_critic")["policy_and_critic"]
    actual = torch.load(tmp_path / "nodes" / "policy_and_critic.pt", weights_only=False)
    assert len(actual["records"]) == len(expected["records"])
    for name, tensor in expected["state"].items():
        torch.testing.assert_close(actual["state"][name], tensor, rtol=1e-5, atol=1e-6)
