"""The judge over a real server: `transformers serve` with models of a few thousand weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation import Responses
from lit_rlhf.tools.evaluation.judge import JudgeOptions, judge_policies
from lit_rlhf.tools.evaluation.judge.client import JudgeError
from tests.support.judge_server import verdict
from tests.support.serving import transformers_serve, write_chat_model
from tests.tools.evaluation.judge.attacks import ATTACKS

pytestmark = pytest.mark.slow  # starts a server process that imports transformers

RESPONSES = Responses(
    [(Message("user", "name three metals"),), (Message("user", "说出三种金属"),)],
    {"sft": ["iron", "铁"], "ppo": ["iron, copper and zinc", ATTACKS["template"]]},
)


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with transformers_serve(tmp_path_factory.mktemp("serve") / "log.txt") as url:
        yield url


def options(base_url: str, model: str, folder: Path, **more: Any) -> JudgeOptions:
    few = {"concurrency": 2, "max_tokens": 8, "max_retries": 0}
    return JudgeOptions(model, base_url, folder=str(folder), **few, **more)


def test_a_model_that_always_says_a(base_url: str, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model", reply=verdict("A", "always the first"))
    settings = options(base_url, model, tmp_path / "judge")
    judged, again = judge_policies(RESPONSES, settings), judge_policies(RESPONSES, settings)
    rates = {row.criterion: row.against_baseline for row in judged.policies}
    ties = (0.0, 1.0, 0.0)
    assert {c: r and r[:3] for c, r in rates.items()} == {"helpful": ties, "harmless": ties}
    assert [row.position_bias for row in judged.policies] == [{"first": 1.0, "second": 0.0}] * 2
    # two prompts, two criteria, two orders
    assert judged.usage == {"questions": 8, "from_cache": 0, "invalid": 0, "shortened": 0}
    assert again.usage["from_cache"] == 8
    assert again.policies == judged.policies


def test_a_model_that_talks_nonsense(base_url: str, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    judged = judge_policies(RESPONSES, options(base_url, model, tmp_path / "judge"))
    assert [(row.against_baseline, row.invalid) for row in judged.policies] == [(None, 2)] * 2
    assert (judged.usage["questions"], judged.usage["invalid"]) == (8, 8)


def test_a_model_that_is_not_there(base_url: str, tmp_path: Path) -> None:
    settings = options(base_url, str(tmp_path / "none"), tmp_path / "judge")
    with pytest.raises(JudgeError, match=rf"the judge at {base_url} fails .*its log tells why"):
        judge_policies(RESPONSES, settings)
