"""A PPO run of two nodes that loses one and is started again ends with the bytes of a whole run.

A node is a launch of torchrun with two processes and a home of its own; both see the run's folder.
"""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lit_callbacks import read_logged_steps
from tests.support.nodes import NODES, free_port, run_nodes, torchrun
from tests.support.stages import short_run, write_data, write_models

pytestmark = pytest.mark.slow
ITERATIONS, SAVED = 6, 2  # a checkpoint after every second
PROMPTS = 1000  # what the cache of encoded examples takes


class LosesNode(Callback):
    """Ends the second node and its launcher in the fourth iteration, if the environment says so."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == SAVED + 1 and os.environ["GROUP_RANK"] == os.environ.get("LOST_NODE"):
            if os.environ["LOCAL_RANK"] == "0":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def write_run(root: Path, folder: Path) -> Path:
    """A configuration that keeps all files in `folder`."""
    config = short_run(root)
    model, data = (config[part]["init_args"] for part in ("model", "data"))
    model["output_dir"] = str(folder / "model")
    data |= {"batch_size": 1, "samples_per_epoch": NODES * 2 * ITERATIONS}
    trainer = config["trainer"]
    trainer |= {"devices": 2, "num_nodes": NODES, "strategy": "multi_deepspeed_stage_2"}
    trainer |= {"max_epochs": 1, "default_root_dir": str(folder)}
    log = {"save_dir": str(folder), "name": "logs", "version": ""}
    trainer["logger"] = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": log,
    }
    trainer["callbacks"][0]["init_args"]["every_n_batches"] = SAVED
    trainer["callbacks"].append({"class_path": f"{__name__}.LosesNode"})
    folder.mkdir()
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def launch(config: Path, homes: Path, **more: str) -> tuple[list[int], list[str]]:
    """Statuses and outputs of both nodes."""
    port, launches = free_port(), []
    for node in range(NODES):
        home = {"HOME": str(homes / str(node)), "HF_HOME": str(homes / str(node) / "hf")}
        launcher, _ = torchrun(node, port, ranks=2)
        launches.append((launcher, {**home, "OMP_NUM_THREADS": "1", **more}))
    words = ["lit_rlhf", "fit", "--config", str(config), "--ckpt_path", "last"]
    return run_nodes(words, launches)


def encodings(output: str) -> int:
    """How often a node encoded the prompts."""
    return len(re.findall(r"Encoding train[^:]*:   0%", output))


@pytest.mark.timeout(900)
def test_run_that_lost_a_node_ends_with_the_bytes_of_a_whole_one(tmp_path: Path) -> None:
    root = write_models(write_data(tmp_path))
    prompts = [{"prompt": [{"role": "user", "content": f"name {n}"}]} for n in range(PROMPTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    whole, lost = write_run(root, tmp_path / "whole"), write_run(root, tmp_path / "lost")

    statuses, outputs = launch(whole, tmp_path / "homes_of_whole")
    assert statuses == [0, 0], outputs
    assert [encodings(words) for words in outputs] == [1, 1]  # once on each node

    statuses, outputs = launch(lost, tmp_path / "homes", LOST_NODE="1")
    assert statuses == [1, -signal.SIGKILL], outputs
    assert not (tmp_path / "lost" / "model").exists()

    statuses, outputs = launch(lost, tmp_path / "homes")
    assert statuses == [0, 0], outputs
    assert [encodings(words) for words in outputs] == [0, 0]
    assert sum(words.count("saved the model") for words in outputs) == 1
    files = [tmp_path / run / "model" / "model.safetensors" for run in ("whole", "lost")]
    assert files[0].read_bytes() == files[1].read_bytes()
    logged = [read_logged_steps(tmp_path / run / "logs") for run in ("whole", "lost")]
    assert list(logged[0]) == list(logged[1])
    measured = ("time/", "memory/", "throughput/")
    for step, metrics in logged[0].items():
        same = {key for key in metrics if not key.startswith(measured)}
        assert {k: logged[1][step][k] for k in same} == {k: metrics[k] for k in same}
    assert len(list((tmp_path / "lost" / "logs").glob("events.*"))) == 2  # one of each launch
