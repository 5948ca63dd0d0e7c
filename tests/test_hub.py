"""A hub that cannot be reached is told at once."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import httpx2
import pytest

from lit_rlhf import hub
from lit_rlhf.data import DataSource, RecordError
from lit_rlhf.models import ModelOptions, load_tokenizer
from lit_rlhf.models.config import read_config

REASON = "the hub at https://hub.test cannot be reached: no such name"


@pytest.fixture(autouse=True)
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """The request of the hub, which fails; nothing is cached."""
    head = Mock(side_effect=httpx2.ConnectError("no such name"))
    monkeypatch.setattr(httpx2, "head", head)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.test")
    monkeypatch.setattr(hub, "try_to_load_from_cache", Mock(return_value=None))
    hub._try_connection.cache_clear()
    yield head
    hub._try_connection.cache_clear()


def test_model_of_a_hub_out_of_reach_is_refused_by_one_request(head: Mock) -> None:
    message = f"got owner/name: there is no such folder, and {REASON}"
    with pytest.raises(ValueError, match=message):
        read_config("owner/name", ModelOptions())
    with pytest.raises(ValueError, match=message):
        load_tokenizer("owner/name")
    assert head.call_count == 1


def test_dataset_of_a_hub_out_of_reach_is_refused() -> None:
    with pytest.raises(RecordError, match=f"^owner/rows: no such file or folder .{REASON}"):
        list(DataSource("owner/rows").read_rows())


def test_hub_is_not_asked_offline_nor_for_what_is_cached(
    head: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cached = Mock(return_value=str(tmp_path / "config.json"))
    monkeypatch.setattr(hub, "try_to_load_from_cache", cached)
    assert hub.find_hub_problem("owner/name", "config.json", "model") is None
    monkeypatch.setattr(hub, "try_to_load_from_cache", Mock(return_value=None))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.find_hub_problem("owner/name", "config.json", "model") is None
    assert head.call_count == 0


def test_hub_that_answers_is_left_to_its_libraries(head: Mock) -> None:
    head.side_effect = None
    assert hub.find_hub_problem("owner/name", "config.json", "model") is None
