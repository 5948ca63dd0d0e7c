"""Runs on disk that tests of the reader and of the report share."""

from pathlib import Path

import pytest

from tests.support.report_pages import write_run

COLLAPSE = """**collapsed** at step 4

KL 41 nats is 12x its baseline: the policy is exploiting its reward

- raised kl_coef from 0 to 0.2

- multiplied the learning rates by 0.5"""


@pytest.fixture
def watched(tmp_path: Path) -> str:
    """A run of 5 steps that is suspicious at 3 and collapsed from 4 on."""
    series = {
        "rollout/kl": [0.0, 1.0, 2.0, 3.0, 4.0],
        "rollout/score": [1.0, 2.0, 3.0, 4.0, 5.0],
        "monitor/level": [0, 0, 1, 2, 2],
        "monitor/toy_spread": [0, 0, 0, 0, 0],
    }
    texts = {3: "**suspicious** at step 3\n\nKL is <b>rising</b>", 4: COLLAPSE}
    return write_run(tmp_path / "watched", series, texts)


@pytest.fixture
def calm(tmp_path: Path) -> str:
    """A run of 2 steps without a detector."""
    return write_run(tmp_path / "calm", {"rollout/kl": [0.0, 0.1], "rollout/gold": [1.0, 2.0]})
