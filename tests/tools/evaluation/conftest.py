import pytest

from lit_rlhf.data import DialogueEncoder
from tests.support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def encoder() -> DialogueEncoder:
    """What the tiny policies read and write."""
    return DialogueEncoder(tiny_tokenizer(), "hh", max_length=64)
