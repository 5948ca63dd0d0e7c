"""What every test may use or relies on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Tiny tensors lose more to waiting threads than they gain from them.
torch.set_num_threads(1)

SHARED_DATA = Path(__file__).resolve().parents[1] / "../shared/data"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data sets, beside the project's root."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the real data sets are not beside this checkout")
    return SHARED_DATA.resolve()
