"""Nothing that comes with a model or checkpoint is executed, unless the user says so.

Each file here would leave a mark if it were.
"""

import json
import os
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors.torch import load_file, save_file

from lit_rlhf import models
from lit_rlhf.export import load_folder_model
from lit_rlhf.modules import PPOModule, SFTModule
from lit_rlhf.strategies import read_state_dict
from tests.support.engine_checkpoints import write_checkpoint_folder
from tests.support.unpickling import Payload

LOADERS: Any = [
    models.load_causal_lm,
    partial(models.load_scalar_model, head_seed=0),
    models.build_random_scalar_model,
    models.load_lm_head,
]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What a payload would leave; the test fails if one does."""
    return tmp_path / "mark"


@pytest.fixture
def folder(tmp_path: Path, causal_folder: Callable[[str], Path]) -> Path:
    """A tiny model's folder, to be written to."""
    return shutil.copytree(causal_folder("llama"), tmp_path / "model")


def with_code(folder: Path, mark: Path, **config: Any) -> None:
    """Add Python files that leave the mark, and have the configs name them."""
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (folder / "custom_generate").mkdir()
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).write_text(code)
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    for file, changes in (
        ("config", {"auto_map": dict.fromkeys(classes, "evil.Evil"), **config}),
        ("tokenizer_config", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
    ):
        path = folder / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (folder / "lit_rlhf.json").unlink(missing_ok=True)  # which lists the configs


def test_payloads_of_these_tests_run_where_nothing_stops_them(folder: Path, mark: Path) -> None:
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()
    mark.unlink()
    with_code(folder, mark, model_type="evil")
    runpy.run_path(str(folder / "evil.py"))
    assert mark.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "README.md", "spiece.model"])
@pytest.mark.parametrize("load", [*LOADERS, models.load_tokenizer, load_folder_model])
def test_text_that_is_too_large_is_refused_before_it_is_read(
    folder: Path, name: str, load: Callable[[Path], object]
) -> None:
    (folder / name).touch()
    os.truncate(folder / name, 2**40)  # of which nothing is on disk
    with pytest.raises(ValueError, match=rf"{name}: expected at most 100,000,000 bytes, got 1,0"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8},
        {"vocab_size": 2**21},
    ],
)
def test_network_that_its_weights_do_not_fill_is_refused_before_it_is_allocated(
    folder: Path, changes: dict[str, int]
) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    for load in LOADERS:
        with pytest.raises(ValueError, match="and that its weights fill, got a config"):
            load(folder)


def test_weights_of_very_many_tensors_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    empty_tensors = {f"empty.{number}": torch.empty(0) for number in range(60_000)}
    save_file({**tensors, **empty_tensors}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="and that its weights fill, got a config"):
        models.load_causal_lm(folder)


@pytest.mark.parametrize("load", LOADERS)
def test_code_of_models_is_refused(
    folder: Path, mark: Path, load: Callable[[Path], object]
) -> None:
    with_code(folder, mark, model_type="evil")
    with pytest.raises(ValueError, match=r"path: expected a model [\s\S]*custom code"):
        load(folder)
    assert not mark.exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(folder: Path, mark: Path) -> None:
    with_code(folder, mark, model_type="evil")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "Evil"}))
    with pytest.raises(ValueError, match=r"path: expected a tokenizer [\s\S]*custom code"):
        models.load_tokenizer(folder)
    with pytest.raises(ValueError, match="custom code"):
        SFTModule(str(folder))
    assert not mark.exists()


def test_code_beside_a_model_that_does_not_need_it_is_not_run(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    for load in LOADERS:
        load(folder)
    models.load_tokenizer(folder)
    module = SFTModule(str(folder))
    module.model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)  # type: ignore[operator]
    assert not mark.exists()


@pytest.mark.parametrize("load", LOADERS)
def test_pickled_weights_are_not_executed(
    folder: Path, mark: Path, load: Callable[[Path], object]
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    if load is not models.build_random_scalar_model:  # which reads no weights
        with pytest.raises(ValueError, match="safetensors"):
            load(folder)
    assert not mark.exists()


def test_pickled_adapters_are_not_executed(folder: Path, mark: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    adapter["base_model_name_or_path"] = str(folder)
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    torch.save(Payload(mark), folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        models.load_causal_lm(folder)
    assert not mark.exists()


def test_checkpoints_are_read_without_executing(tmp_path: Path, mark: Path) -> None:
    content = {"state_dict": {}, "hyper_parameters": Payload(mark)}
    path = write_checkpoint_folder(tmp_path / "folder.ckpt", content)
    with pytest.raises(ValueError, match="could run code when it is loaded: Weights only load"):
        read_state_dict(path)
    torch.save(content, tmp_path / "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        SFTModule.load_from_checkpoint(tmp_path / "evil.ckpt")
    assert not mark.exists()


def received(folder: Path, module: SFTModule | PPOModule, **arguments: Any) -> Path:
    """A checkpoint of a module that holds other arguments than the module had."""
    hparams = {**module.hparams, **arguments}
    content = {"state_dict": module.state_dict(), "hyper_parameters": hparams}
    if isinstance(module, PPOModule):
        frozen = ("reference.", "reward.functions.")
        state = {k: v for k, v in content["state_dict"].items() if not k.startswith(frozen)}
        content["state_dict"] = state
    torch.save(content, folder / "received.ckpt")
    return folder / "received.ckpt"


@pytest.fixture
def _evil_package(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that leaves the mark when it is imported."""
    (tmp_path / "evil_package.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "def reward(prompts, responses):\n    return [0.0 for _ in responses]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil_package", raising=False)


@pytest.mark.usefixtures("_evil_package")
def test_a_checkpoint_names_no_class_to_import(folder: Path, tmp_path: Path, mark: Path) -> None:
    evil = {"class_path": "evil_package.reward", "init_args": {}}
    of_cli = {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "_class_path": "lit_rlhf.modules.SFTModule",
    }
    path = received(tmp_path, SFTModule(str(folder)), **of_cli, network=evil)
    with pytest.raises(ValueError, match=r"network\.(class_path|init_args): no such option"):
        SFTModule.load_from_checkpoint(path)
    assert not mark.exists()
    path = received(tmp_path, SFTModule(str(folder)), _class_path="evil_package.reward")
    assert type(SFTModule.load_from_checkpoint(path)) is SFTModule
    assert not mark.exists()


def test_checkpoint_does_not_decide_to_trust_code(folder: Path, tmp_path: Path, mark: Path) -> None:
    network = {"trust_remote_code": True, "lora_rank": 0}
    path = received(tmp_path, SFTModule(str(folder)), network=network)
    with_code(folder, mark, model_type="evil")
    with pytest.raises(ValueError, match="custom code"):
        SFTModule.load_from_checkpoint(path)
    assert not mark.exists()
    with pytest.raises(AttributeError, match="Evil"):  # that class is not there, but the code is
        SFTModule.load_from_checkpoint(path, network=models.ModelOptions(trust_remote_code=True))
    assert mark.exists()


@pytest.mark.usefixtures("_evil_package")
def test_checkpoint_names_no_reward_or_server(folder: Path, tmp_path: Path, mark: Path) -> None:
    mine = {"short": {"rule": "length", "longest": 10}}
    module = PPOModule(str(folder), mine, critic_init="policy")
    for option, value, named in (
        ("rewards", {**mine, "evil_package:reward": 1.0}, "evil_package:reward"),
        ("rewards", {"os:system": 1.0}, "os:system"),
        ("rewards", {"lit_rlhf.cli.main:main": 1.0}, "lit_rlhf.cli.main:main"),
        ("rewards", {"theirs": {"rule": "http", "url": "https://example.org"}}, "theirs"),
        ("gold_reward", "evil_package:reward", "evil_package:reward"),
    ):
        path = received(tmp_path, module, **{option: value})
        with pytest.raises(ValueError, match=rf"^{option}: the checkpoint names {named},"):
            PPOModule.load_from_checkpoint(path)
        assert not mark.exists()
    path = received(tmp_path, module, rewards={"evil_package:reward": 1.0})
    reloaded = PPOModule.load_from_checkpoint(path, rewards=mine)
    assert [spec.name for spec in reloaded.reward.specs] == ["short"]
    assert not mark.exists()
    PPOModule.load_from_checkpoint(path, rewards={"evil_package:reward": 1.0})
    assert mark.exists()


def test_a_checkpoint_behind_a_url_is_read_as_plain_data() -> None:
    weights_only_flags: list[bool | None] = []

    def load(self: object, path: object, location: object, weights_only: bool | None) -> Any:
        weights_only_flags.append(weights_only)
        return {"state_dict": {}, "hyper_parameters": {"zzz": 0}}

    loads = patch.object(TorchCheckpointIO, "load_checkpoint", load)
    with loads, pytest.raises(ValueError, match="SFTModule: zzz"):
        SFTModule.load_from_checkpoint("https://example.org/received.ckpt")
    assert weights_only_flags == [True]
