"""Nothing that comes with a model or checkpoint is executed, unless the user says so.

Each file here would leave a mark if it were.
"""

from __future__ import annotations

import json
import pickle
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.exceptions import SecurityError

from lit_rlhf.data import DialogueEncoder
from lit_rlhf.models import (
    build_random_scalar_model,
    load_causal_lm,
    load_lm_head,
    load_scalar_model,
    load_tokenizer,
    save_model_folder,
)
from lit_rlhf.modules import SFTModule
from lit_rlhf.strategies import read_state_dict
from tests.support.engine_checkpoints import write_checkpoint_folder
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

LOADERS: list[Callable[[Path], object]] = [
    load_causal_lm,
    load_scalar_model,
    build_random_scalar_model,
    load_lm_head,
]


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What a payload would leave; the test fails if one does."""
    return tmp_path / "mark"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model's folder."""
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def with_code(folder: Path, mark: Path, **config: Any) -> None:
    """Add Python files that leave the mark, and have the configs name them."""
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (folder / "custom_generate").mkdir()
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).write_text(code)
    names = {
        "config.json": ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"),
        "tokenizer_config.json": ("AutoTokenizer",),
    }
    for file, classes in names.items():
        settings = json.loads((folder / file).read_text())
        tokenizer = file != "config.json"
        settings["auto_map"] = {
            name: ["evil.Evil", None] if tokenizer else "evil.Evil" for name in classes
        }
        if not tokenizer:
            settings |= config
        (folder / file).write_text(json.dumps(settings))


def test_the_payloads_work(folder: Path, mark: Path) -> None:
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()
    mark.unlink()
    with_code(folder, mark, model_type="evil")
    runpy.run_path(str(folder / "evil.py"))
    assert mark.exists()


@pytest.mark.parametrize("load", LOADERS)
def test_a_model_that_needs_its_own_code_is_refused(
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
        load_tokenizer(folder)
    with pytest.raises(ValueError, match="custom code"):
        SFTModule(str(folder))
    assert not mark.exists()


def test_code_beside_a_model_that_does_not_need_it_is_not_run(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    for load in LOADERS:
        load(folder)
    load_tokenizer(folder)
    module = SFTModule(str(folder))
    module.model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)  # type: ignore[operator]
    assert not mark.exists()


@pytest.mark.parametrize("load", LOADERS)
def test_pickled_weights_are_refused_and_not_read(
    folder: Path, mark: Path, load: Callable[[Path], object]
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    if load is not build_random_scalar_model:  # which reads no weights
        with pytest.raises(ValueError, match="safetensors"):
            load(folder)
    assert not mark.exists()


def test_pickled_adapters_are_not_executed(folder: Path, mark: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    adapter["base_model_name_or_path"] = str(folder)
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    torch.save(Payload(mark), folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        load_causal_lm(folder)
    assert not mark.exists()


def test_a_chat_template_reaches_nothing_but_the_dialogue() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(SecurityError, match="access to attribute '__class__'"):
        DialogueEncoder(tokenizer, "tokenizer", 64)  # renders an example


def test_a_checkpoint_folder_is_read_without_executing_it(tmp_path: Path, mark: Path) -> None:
    content = {"state_dict": {}, "callbacks": Payload(mark)}
    path = write_checkpoint_folder(tmp_path / "evil.ckpt", content)
    with pytest.raises(ValueError, match="could run code when it is loaded: Weights only load"):
        read_state_dict(path)
    assert not mark.exists()


def test_a_checkpoint_file_is_read_without_executing_it(
    folder: Path, tmp_path: Path, mark: Path
) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": Payload(mark)}, tmp_path / "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        SFTModule.load_from_checkpoint(tmp_path / "evil.ckpt")
    assert not mark.exists()
