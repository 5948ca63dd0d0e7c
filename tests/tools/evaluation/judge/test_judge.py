"""Many questions to the judge: what is asked at once, what is kept, and how a run continues."""

import json
from pathlib import Path

import pytest

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation import Responses
from lit_rlhf.tools.evaluation.judge import JudgeOptions, judge_policies
from lit_rlhf.tools.evaluation.judge.client import JudgeError
from tests.support.judge_server import Asked, Failure, judge_server, longer_wins
from tests.tools.evaluation.judge.test_client import judge_pair


def test_a_failed_run_continues_where_it_stopped(tmp_path: Path) -> None:
    def second_fails(asked: Asked) -> str | Failure:
        return Failure(401) if asked.number == 2 else longer_wins(asked)

    with judge_server(second_fails) as server:
        with pytest.raises(JudgeError, match=r"1 answers are in .*answers.jsonl; the same command"):
            judge_pair(server.base_url, tmp_path)
        judged = judge_pair(server.base_url, tmp_path)
    assert len(server.asked) == 3
    assert (judged.usage["questions"], judged.usage["from_cache"]) == (2, 1)
    assert judged.policies[0].against_baseline.win == 1.0


# a wrong key is found by one request; of two at once, the fourth may still be on its way when the
# fifth fails
@pytest.mark.parametrize(
    ("good", "concurrency", "stored"),
    [(0, 2, "."), (4, 1, "4 answers are in"), (4, 2, r"[34] answers are in")],
)
def test_failure_on_way_ends_run(tmp_path: Path, good: int, concurrency: int, stored: str) -> None:
    prompts = [(Message("user", str(number)),) for number in range(100)]
    many = Responses(prompts, {"sft": ["four"] * 100, "ppo": ["longer"] * 100})

    def fails_later(asked: Asked) -> str | Failure:
        return longer_wins(asked) if asked.number <= good else Failure(401)

    with judge_server(fails_later) as server:
        more = {"folder": str(tmp_path), "concurrency": concurrency}
        options = JudgeOptions("tiny", server.base_url, **more)
        with pytest.raises(JudgeError, match=stored):
            judge_policies(many, options)
    # of 400; how many depends on the threads
    assert len(server.asked) == 1 if good == 0 else len(server.asked) < 200


def test_a_torn_last_line_is_asked_again(tmp_path: Path) -> None:
    with judge_server(longer_wins) as server:
        judge_pair(server.base_url, tmp_path)
        cache = tmp_path / "answers.jsonl"
        whole = cache.read_bytes()
        cache.write_bytes(whole[:-20])  # the second of two answers, as a crash may leave it
        judged = judge_pair(server.base_url, tmp_path)
    assert len(server.asked) == 3
    assert judged.usage["from_cache"] == 1
    assert len(cache.read_bytes().splitlines()) == 2
    assert all(json.loads(line)["key"] for line in cache.read_bytes().splitlines())


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"key": "a"}\n', "utf-8")
    with pytest.raises(ValueError, match=r"answers.jsonl:1: expected an answer .* delete the line"):
        judge_pair("http://127.0.0.1:9/v1", tmp_path)
