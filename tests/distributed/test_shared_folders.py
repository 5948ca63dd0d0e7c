"""Two ranks on two nodes: folders that they do not share, and a finished model that one fails."""

import os
import shutil
from pathlib import Path

import pytest

from lit_rlhf.modules import SFTModule
from tests.support.rank_runs import strategy
from tests.support.ranks import run_on_ranks
from tests.support.stages import demonstrations, fit_module, write_data, write_models


class FullDisk(SFTModule):
    """No finished model can be written, which only the first rank writes."""

    def write_finished(self, folder: Path) -> None:
        if self.global_rank == 0:
            raise OSError("no space left")


def on_a_rank(rank: int, homes: list[Path], folder: Path) -> dict[str, str]:
    """The errors of runs in a home for each rank, with other models, and on a full disk."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    cases = {
        "two homes": (SFTModule, folder / "policy", Path("run"), "deepspeed"),
        "two models": (SFTModule, Path("policy"), folder / "shared", "ddp"),
        "full disk": (FullDisk, folder / "policy", folder / "full", "ddp"),
    }
    os.chdir(homes[rank])
    errors = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: f"node{rank}")
        for name, (kind, model, run, strategy_name) in cases.items():
            module = kind(str(model), optimizer={"learning_rate": 1e-3})
            data = demonstrations(folder, batch_size=2)
            arguments = {"devices": 2, "strategy": strategy(strategy_name), "max_steps": 1}
            with pytest.raises((ValueError, OSError, RuntimeError)) as raised:
                fit_module(module, data, run, enable_checkpointing=True, **arguments)
            errors[name] = f"{type(raised.value).__name__}: {raised.value}"
    return errors


@pytest.mark.slow
def test_a_rank_that_cannot_go_on_ends_all_of_them(tmp_path: Path) -> None:
    root = write_models(write_data(tmp_path))
    homes = [tmp_path / f"home{rank}" for rank in range(2)]
    for home in homes:
        shutil.copytree(root / "policy", home / "policy")
        (home / "policy" / "lit_rlhf.json").unlink()  # which lists the config
    with (homes[1] / "policy" / "config.json").open("a") as config:
        config.write("\n")
    first, second = run_on_ranks(on_a_rank, 2, tmp_path, homes, root)
    for name, path in (("two homes", "run/model"), ("two models", "policy")):
        assert first[name] == second[name]
        assert first[name].startswith("ValueError: model_path, output_dir, trainer: expected")
        assert "of rank 0 at host node1: " in first[name]
        assert path in first[name]
    assert not (homes[1] / "run").exists()
    assert first["full disk"] == "OSError: no space left"
    assert second["full disk"].startswith("UserError: another rank could not save the model to")
