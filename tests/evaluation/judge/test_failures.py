"""An endpoint that fails: what is repeated, what the error says, and what is kept."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import Message
from lit_rlhf.evaluation import Responses
from lit_rlhf.evaluation.judge import JudgeError, Judgement, JudgeOptions, judge_policies
from tests.support.judge_server import Asked, Failure, judge_server, longer_wins

AT_ONCE = {"retry-after-ms": "1"}  # what the client waits, in place of its half a second and more
PAIR = Responses([(Message("user", "hi"),)], {"sft": ["four"], "ppo": ["longer"]})


def judge(base_url: str | None, folder: Path, **more: Any) -> Judgement:
    settings: dict[str, Any] = {"criteria": ["helpful"], "max_retries": 0, "concurrency": 1} | more
    return judge_policies(
        PAIR, JudgeOptions(model="tiny", base_url=base_url, folder=str(folder), **settings)
    )


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_a_passing_failure_is_repeated(tmp_path: Path, status: int) -> None:
    def recovers(asked: Asked) -> str | Failure:
        return Failure(status, headers=AT_ONCE) if asked.number < 3 else longer_wins(asked)

    with judge_server(recovers) as server:
        judged = judge(server.base_url, tmp_path, max_retries=2)

    assert len(server.asked) == 2 + 2
    assert judged.usage.now.requests == 2
    assert judged.policies[0].outcomes is not None
    assert judged.policies[0].outcomes.win == 1.0


@pytest.mark.parametrize(
    ("failure", "requests", "message"),
    [
        (Failure(401, "no such key"), 1, r"does not accept the key. Set .* OPENAI_API_KEY .*no su"),
        (Failure(403), 1, r"does not accept the key"),
        (Failure(404), 1, r"knows no model 'tiny', .*judge.base_url, which usually ends in /v1"),
        (Failure(400, "too long"), 1, r"refuses the request.*judge.max_characters.*too long"),
        (Failure(422), 1, r"refuses the request.*judge.temperature"),
        (
            Failure(429, "slow", AT_ONCE),
            2,
            r"still limits the rate after 1 retries.*judge.concurrency",
        ),
        (Failure(500, "bug", AT_ONCE), 2, r"fails after 1 retries .*its log tells why.*bug"),
    ],
)
def test_a_lasting_failure_says_what_to_do(
    tmp_path: Path, failure: Failure, requests: int, message: str
) -> None:
    with (
        judge_server(lambda asked: failure) as server,
        pytest.raises(JudgeError, match=f"the judge at {server.base_url} {message}"),
    ):
        judge(server.base_url, tmp_path, max_retries=1)

    assert len(server.asked) == requests


def test_a_server_that_is_down(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        base_url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"

        with pytest.raises(JudgeError, match=r"cannot be reached.*the server runs.*judge.base_url"):
            judge(base_url, tmp_path)


def test_a_server_that_is_no_judge(tmp_path: Path) -> None:
    with (
        judge_server(lambda asked: Failure(200, "welcome")) as server,
        pytest.raises(JudgeError, match=r"does not reply as an OpenAI-compatible endpoint"),
    ):
        judge(server.base_url, tmp_path)


def test_a_wrong_path(tmp_path: Path) -> None:
    with (
        judge_server(longer_wins) as server,
        pytest.raises(JudgeError, match=r"judge.base_url, which usually ends in /v1"),
    ):
        judge(server.base_url.removesuffix("/v1"), tmp_path)


def test_openai_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)

    with pytest.raises(ValueError, match=r"variable MY_KEY, which is not set.*judge.base_url"):
        judge(None, tmp_path, api_key_variable="MY_KEY")


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)

    with pytest.raises(JudgeError, match=r"pip install 'lit-rlhf\[judge\]'"):
        judge("http://127.0.0.1:9/v1", tmp_path)


def test_the_form_of_the_reply_is_asked_for_where_the_server_knows_how(tmp_path: Path) -> None:
    def picky(asked: Asked) -> str | Failure:
        if "response_format" in asked.body:
            return Failure(400, "response_format is not supported")
        return longer_wins(asked)

    with judge_server(picky) as server:
        judged = judge(server.base_url, tmp_path)

    assert judged.usage.questions == 2
    bodies = [asked.body for asked in server.asked]
    assert ["response_format" in body for body in bodies] == [True, False, False]
    sent = bodies[0]["response_format"]["json_schema"]["schema"]["properties"]["verdict"]["enum"]
    assert sent == ["A", "B", "tie"]
    assert (bodies[0]["temperature"], bodies[0]["max_completion_tokens"]) == (0.0, 1024)


def test_no_temperature_is_sent_where_none_is_wanted(tmp_path: Path) -> None:
    with judge_server(longer_wins) as server:
        judge(server.base_url, tmp_path, temperature=None)

    assert "temperature" not in server.asked[0].body


def test_a_run_that_failed_goes_on_where_it_was(tmp_path: Path) -> None:
    def second_fails(asked: Asked) -> str | Failure:
        return Failure(401) if asked.number == 2 else longer_wins(asked)

    with judge_server(second_fails) as server:
        with pytest.raises(JudgeError, match=r"1 answers are in .*answers.jsonl; the same command"):
            judge(server.base_url, tmp_path)
        judged = judge(server.base_url, tmp_path)

    assert len(server.asked) == 3
    assert (judged.usage.questions, judged.usage.from_cache) == (2, 1)
    assert judged.policies[0].outcomes is not None
    assert judged.policies[0].outcomes.win == 1.0


def test_a_key_that_is_wrong_is_found_by_one_request(tmp_path: Path) -> None:
    many = Responses(
        [(Message("user", str(i)),) for i in range(50)],
        {"sft": ["four"] * 50, "ppo": ["longer"] * 50},
    )
    with judge_server(lambda asked: Failure(401)) as server:
        options = JudgeOptions("tiny", server.base_url, folder=str(tmp_path), concurrency=2)
        with pytest.raises(JudgeError):
            judge_policies(many, options)

    assert len(server.asked) == 1


# of two at once, the fourth may still be on its way when the fifth fails
@pytest.mark.parametrize(
    ("concurrency", "stored"), [(1, "4 answers are in"), (2, r"[34] answers are in")]
)
def test_a_failure_on_the_way_ends_the_run(tmp_path: Path, concurrency: int, stored: str) -> None:
    prompts = [(Message("user", str(number)),) for number in range(100)]
    many = Responses(prompts, {"sft": ["four"] * 100, "ppo": ["longer"] * 100})

    def fails_later(asked: Asked) -> str | Failure:
        return longer_wins(asked) if asked.number < 5 else Failure(401)

    with judge_server(fails_later) as server:
        options = JudgeOptions(
            "tiny", server.base_url, folder=str(tmp_path), concurrency=concurrency
        )
        with pytest.raises(JudgeError, match=stored):
            judge_policies(many, options)

    assert len(server.asked) < 200  # of 400; how many depends on the threads


def test_a_torn_last_line_is_asked_again(tmp_path: Path) -> None:
    with judge_server(longer_wins) as server:
        judge(server.base_url, tmp_path)
        cache = tmp_path / "answers.jsonl"
        whole = cache.read_bytes()
        cache.write_bytes(whole[:-20])  # the second of two answers, as a crash may leave it
        judged = judge(server.base_url, tmp_path)

    assert len(server.asked) == 3
    assert judged.usage.from_cache == 1
    assert len(cache.read_bytes().splitlines()) == 2
    assert all(json.loads(line)["key"] for line in cache.read_bytes().splitlines())


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"key": "a"}\n', "utf-8")

    with pytest.raises(ValueError, match=r"answers.jsonl:1: expected an answer .* delete the line"):
        judge("http://127.0.0.1:9/v1", tmp_path)
