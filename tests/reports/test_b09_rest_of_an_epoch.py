"""B9: prompts that do not fill a batch are left out of an epoch, and the log says so once."""

import logging
from typing import Any

import pytest

from lit_rlhf.data import DataSource, PromptDataModule
from lit_rlhf.data.samplers import FixedBatchSampler
from tests.support.tiny_models import tiny_tokenizer

LOGGER = "lit_rlhf.data.datamodules.prompt"


def build_data(**options: Any) -> PromptDataModule:
    rows = [{"prompt": f"say {number}"} for number in range(10)]
    usual: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "chat_template": "hh", "batch_size": 4}
    data = PromptDataModule([DataSource(rows)], **usual | options)
    data.setup("fit")
    return data


def read_epoch(data: PromptDataModule, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of two epochs' loaders."""
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(2):
            data.train_dataloader()
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize(
    ("options", "n_prompts", "message"),
    [
        ({}, 8, "train: each epoch leaves out 2 of 10 prompts, which do not fill a batch of 4"),
        ({"batch_size": 3}, 9, "train: each epoch leaves out 1 of 10 prompts, which do not fill"),
        ({"samples_per_epoch": 15}, 12, "train: each epoch leaves out 3 of 15 prompts, which do"),
        ({"batch_size": 5}, 10, ""),
        ({"samples_per_epoch": 12}, 12, ""),
    ],
)
def test_rest_is_told_once_with_its_number(
    options: dict[str, Any], n_prompts: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = build_data(**options)
    messages = read_epoch(data, caplog)
    assert [text.startswith(message) for text in messages] == ([True] if message else [])
    assert sum(len(batch.texts) for batch in data.train_dataloader()) == n_prompts


def test_validation_leaves_nothing_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"answer {number}"} for number in range(10)]
    data = build_data(val_sources=[DataSource(rows)], batch_size=5)
    data.batch_size = 4
    with caplog.at_level(logging.INFO, LOGGER):
        loader = data.val_dataloader()
    assert sum(len(batch.texts) for batch in loader) == 10
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_ranks_leave_out_what_does_not_fill_a_batch_on_each() -> None:
    def left_out(size: int, ranks: int, *, drop_last: bool = True) -> int:
        return FixedBatchSampler(size, 4, drop_last=drop_last, num_replicas=ranks).n_left_out

    assert [left_out(10, 1), left_out(10, 2), left_out(16, 2), left_out(23, 2)] == [2, 2, 0, 7]
    assert left_out(10, 2, drop_last=False) == 0
