"""Fixtures: folders of tiny models, which tests only read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lit_rlhf.models import load_scalar_model, save_model_folder
from tests.support.tiny_models import FAMILIES, tiny_causal_lm, tiny_tokenizer


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def causal_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny language model of a family; read only."""
    root = tmp_path_factory.mktemp("causal")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            save_model_folder(tiny_causal_lm(family), tiny_tokenizer(), root / family)
        return root / family

    return folder


@pytest.fixture(scope="session")
def folder(causal_folder: Callable[[str], Path]) -> Path:
    """Folder of a tiny Llama; read only."""
    return causal_folder("llama")


@pytest.fixture(scope="session")
def scalar_folder(
    tmp_path_factory: pytest.TempPathFactory, causal_folder: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Folder of a tiny scalar model of a family; read only."""
    root = tmp_path_factory.mktemp("scalar")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            model = load_scalar_model(causal_folder(family), head_seed=1)
            save_model_folder(model, tiny_tokenizer(), root / family)
        return root / family

    return folder
