"""An endpoint that fails: which requests are repeated, and what the error says."""

import socket
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation import Responses
from lit_rlhf.tools.evaluation.judge import JudgeOptions, judge_policies
from lit_rlhf.tools.evaluation.judge.client import JudgeError
from lit_rlhf.tools.evaluation.judge.judge import Judgement
from tests.rewards.test_remote import drip, raw_service
from tests.support.judge_server import Asked, Failure, judge_server, longer_wins, verdict

AT_ONCE = {"retry-after-ms": "1"}  # what the client waits, in place of its half a second and more
PAIR = Responses([(Message("user", "hi"),)], {"sft": ["four"], "ppo": ["longer"]})


def judge_pair(base_url: str | None, folder: Path, **more: Any) -> Judgement:
    """Judge a longer answer against `four`; one request at a time, without retries."""
    settings: dict[str, Any] = {"criteria": ["helpful"], "max_retries": 0, "concurrency": 1} | more
    settings |= {"model": "tiny", "base_url": base_url, "folder": str(folder)}
    return judge_policies(PAIR, JudgeOptions(**settings))


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_passing_failure_is_repeated(tmp_path: Path, status: int) -> None:
    def recovers(asked: Asked) -> str | Failure:
        return Failure(status, headers=AT_ONCE) if asked.number < 3 else longer_wins(asked)

    with judge_server(recovers) as server:
        judged = judge_pair(server.base_url, tmp_path, max_retries=2)
    assert len(server.asked) == 2 + 2
    assert judged.policies[0].against_baseline.win == 1.0


@pytest.mark.parametrize(
    ("failure", "requests", "message"),
    [
        (Failure(401, "no such key"), 1, r"does not accept the key. Set .* OPENAI_API_KEY .*no su"),
        (Failure(404), 1, r"knows no model 'tiny', .*judge.base_url, which usually ends in /v1"),
        (Failure(400, "too long"), 1, r"refuses the request.*judge.max_characters.*too long"),
        (Failure(422), 1, r"refuses the request.*judge.temperature"),
        (Failure(307, "", {"location": "/v2"}), 1, r"redirects .*not followed.*judge.base_url"),
        (
            *(Failure(429, "slow", AT_ONCE), 2),
            r"still limits the rate after 1 retries.*judge.concurrency",
        ),
        (Failure(500, "bug", AT_ONCE), 2, r"fails after 1 retries .*its log tells why.*bug"),
    ],
)
def test_lasting_failure(tmp_path: Path, failure: Failure, requests: int, message: str) -> None:
    with (
        judge_server(lambda asked: failure) as server,
        pytest.raises(JudgeError, match=f"the judge at {server.base_url} {message}"),
    ):
        judge_pair(server.base_url, tmp_path, max_retries=1)
    assert len(server.asked) == requests


def test_a_server_that_is_down(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        base_url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match=r"cannot be reached.*the server runs.*judge.base_url"):
            judge_pair(base_url, tmp_path)


@pytest.mark.parametrize("status", [200, 401, 404, 400])
def test_a_password_in_the_address_is_not_shown(tmp_path: Path, status: int) -> None:
    with judge_server(lambda asked: Failure(status, "welcome")) as server:
        address = server.base_url.replace("//", "//me:secret@")
        with pytest.raises(JudgeError) as error:
            judge_pair(address, tmp_path)
    assert server.base_url.replace("//", "//***@") in str(error.value)
    assert "secret" not in str(error.value)
    with judge_server(longer_wins) as server:
        judged = judge_pair(server.base_url.replace("//", "//me:secret@"), tmp_path)
    assert judged.as_dict()["base_url"] == server.base_url.replace("//", "//***@")


@pytest.mark.parametrize(
    ("reply", "path", "message"),
    [
        (Failure(200, "welcome"), "/v1", "does not reply as an OpenAI-compatible endpoint"),
        ({"choices": []}, "/v1", "does not reply as an OpenAI-compatible endpoint"),
        ({"choices": {"a": 1}}, "/v1", "does not reply as an OpenAI-compatible endpoint"),
        ({}, "", r"judge.base_url, which usually ends in /v1"),
    ],
)
def test_a_server_that_is_no_judge(tmp_path: Path, reply: Any, path: str, message: str) -> None:
    with judge_server(lambda asked: reply) as server, pytest.raises(JudgeError, match=message):
        judge_pair(server.base_url.removesuffix("/v1") + path, tmp_path)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000])
def test_a_body_without_json_is_shown(tmp_path: Path, body: bytes) -> None:
    with (
        raw_service([HEAD, b"content-length: %d\r\n\r\n" % len(body), body]) as (url, _),
        pytest.raises(JudgeError, match=r"does not reply as an OpenAI.* It sent '.+'"),
    ):
        judge_pair(url, tmp_path)


def test_openai_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ValueError, match=r"variable MY_KEY, which is not set.*judge.base_url"):
        judge_pair(None, tmp_path, api_key_variable="MY_KEY")


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(JudgeError, match=r"pip install openai"):
        judge_pair("http://127.0.0.1:9/v1", tmp_path)


def test_the_form_of_the_reply_is_asked_for_where_the_server_knows_how(tmp_path: Path) -> None:
    def picky(asked: Asked) -> str | Failure:
        if "response_format" in asked.body:
            return Failure(400, "response_format is not supported")
        return longer_wins(asked)

    with judge_server(picky) as server:
        judged = judge_pair(server.base_url, tmp_path)
        judge_pair(server.base_url, tmp_path / "own", temperature=None)
    assert judged.usage["questions"] == 2
    bodies = [asked.body for asked in server.asked]
    assert ["response_format" in body for body in bodies[:3]] == [True, False, False]
    sent = bodies[0]["response_format"]["json_schema"]["schema"]["properties"]["verdict"]["enum"]
    assert sent == ["A", "B", "tie"]
    assert (bodies[0]["temperature"], bodies[0]["max_completion_tokens"]) == (0.0, 1024)
    assert "temperature" not in bodies[-1]


MALFORMED: list[dict[str, Any]] = [
    {"choices": [None]},
    {"choices": [{"message": None}]},
    {"choices": [{"message": {"content": [{"type": "text", "text": verdict("A")}]}}]},
    {"choices": [{"message": {"content": {"reason": "", "verdict": "A"}}}]},
    {"choices": [{"message": {"content": 1}}], "usage": {"prompt_tokens": "one"}},
]


@pytest.mark.parametrize("fields", MALFORMED)
def test_reply_of_another_form_is_invalid_verdict(tmp_path: Path, fields: dict[str, Any]) -> None:
    with judge_server(lambda asked: fields) as server:
        judged = judge_pair(server.base_url, tmp_path, max_attempts=2)
    assert len(server.asked) == 2 * 2
    assert (judged.policies[0].against_baseline, judged.policies[0].invalid) == (None, 1)


@pytest.mark.parametrize("begun", [HEAD + b"\r\n", HEAD + b"slow: "])
def test_server_that_sends_blanks_ends_by_the_deadline(tmp_path: Path, begun: bytes) -> None:
    started = monotonic()
    with (
        raw_service(lambda: drip(begun)) as (url, _),
        pytest.raises(JudgeError, match=r"did not reply within 0.3 seconds after 1 retries"),
    ):
        judge_pair(url, tmp_path, timeout=0.3, max_retries=1)
    assert monotonic() - started < 10


def test_response_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rlhf.rewards.remote.MAX_BODY", 10_000)
    with (
        judge_server(lambda asked: verdict("A", "x" * 10_000)) as server,
        pytest.raises(JudgeError, match=r"a response of more than 10000 bytes"),
    ):
        judge_pair(server.base_url, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("concurrency", 0), ("max_retries", -1), ("timeout", 0.0), ("temperature", -1.0)),
        *(("criteria", ["nice"]), ("criteria", ["helpful", "helpful"])),
    ],
)
def test_settings_out_of_range(name: str, value: Any) -> None:
    wrong: Any = {name: value}
    with pytest.raises(ValueError, match=rf"judge\.{name}: expected .*, got "):
        JudgeOptions(model="tiny", **wrong)
