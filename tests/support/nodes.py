"""Nodes of a launch, on this machine."""

import os
import socket
import subprocess
import sys
from typing import Any

from tests.support.strategy_runs import ROOT


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


NODES = 2


def torchrun(node: int, port: int, ranks: int = 1) -> tuple[list[str], dict[str, str]]:
    """Command of a node, and what it adds to the environment."""
    options = {"nnodes": NODES, "nproc-per-node": ranks, "rdzv-id": "test", "rdzv-backend": "c10d"}
    options |= {"rdzv-endpoint": f"127.0.0.1:{port}", "local-addr": "127.0.0.1"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return ["-m", "torch.distributed.run", *flags, "-m"], {}


def run_nodes(
    words: list[str], launches: list[tuple[list[str], dict[str, str]]]
) -> tuple[list[int], list[str]]:
    """Statuses and outputs of nodes that run a module with arguments."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "callbacks")])
    shared = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": paths}
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [
        subprocess.Popen([sys.executable, *launcher, *words], cwd=ROOT, env=shared | own, **output)
        for launcher, own in launches
    ]
    try:
        said = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for process in nodes:
            process.kill()
    return [process.returncode for process in nodes], said
