"""A remote scorer against a real server on this machine; no test waits."""

import base64
import json
import re
import socket
from collections.abc import Sequence
from itertools import chain, repeat
from threading import Event
from time import monotonic
from traceback import format_exception
from typing import Any

import pytest

from lit_rlhf import remote
from lit_rlhf.errors import UserError
from lit_rlhf.rewards import CallableReward, RemoteScorer, RewardError, redact_url
from lit_rlhf.urls import ServiceUrl
from tests.support.raw_service import drip, raw_service
from tests.support.reward_inputs import Answer, make_rollouts, service
from tests.support.tiny_models import tiny_tokenizer

PROMPTS = ["first", "second", "third"]
TEXTS = ["yes", "no way", "对"]
HIDDEN = r"variable in place of the .*'http://\*\*\*@host'"
BASIC = b"Authorization: Basic " + base64.b64encode(b"me:secret")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is waited between attempts, without waiting; and no proxy of the environment."""
    waited: list[float] = []
    monkeypatch.setattr(remote, "sleep", waited.append)
    monkeypatch.setenv("no_proxy", "*")
    return waited


def lengths(request: dict[str, Any]) -> tuple[int, bytes]:
    pairs = zip(request["prompts"], request["responses"], strict=True)
    scores = [len(prompt) + len(response) / 10 for prompt, response in pairs]
    return 200, json.dumps({"scores": scores}).encode()


def first(answers: Sequence[tuple[int, bytes]], then: Answer = lengths) -> Answer:
    """These answers in turn, then others."""
    waiting = list(answers)
    return lambda request: waiting.pop(0) if waiting else then(request)


def always(status: int, body: str) -> Answer:
    return lambda request: (status, body.encode())


@pytest.mark.parametrize("fields", [[], ["gold"]])
def test_service_scores_requests_of_the_batch_size(fields: list[str]) -> None:
    records = [{"gold": "yes", "id": 1}, {"gold": "no", "id": 2}, {"gold": "对", "id": 3}]
    with service(lengths) as (url, requests):
        scorer = RemoteScorer(url, batch_size=2, fields=fields)
        reward = CallableReward(scorer, tiny_tokenizer(), label="remote")
        scores = reward(make_rollouts(TEXTS), PROMPTS, None, records)
    assert scores.tolist() == pytest.approx([5.3, 6.6, 5.1])
    sent = [request.pop("fields", {}) for request in requests]
    assert sent == ([{"gold": ["yes", "no"]}, {"gold": ["对"]}] if fields else [{}, {}])
    first, last = (PROMPTS[:2], TEXTS[:2]), (PROMPTS[2:], TEXTS[2:])
    assert requests == [{"prompts": p, "responses": t} for p, t in (first, last)]


def refuses(url: str, message: str, **options: Any) -> None:
    with pytest.raises(RewardError, match=message):
        RemoteScorer(url, **options)(PROMPTS, TEXTS)


@pytest.mark.parametrize("status", [429, 500, 0])
def test_transient_failures_are_retried_after_pauses(status: int, pauses: list[float]) -> None:
    with (
        service(first([(status, b"busy")] * 3)) as (url, requests),
        pytest.warns(UserWarning, match="in attempt . of 4; the next one is in") as warned,
    ):
        scores = RemoteScorer(url, retries=3, backoff=0.5)(PROMPTS, TEXTS)
    assert (scores, len(requests), pauses) == (pytest.approx([5.3, 6.6, 5.1]), 4, [0.5, 1.0, 2.0])
    message = "the connection failed" if status == 0 else f"status {status} and the body"
    assert all(f"{url}: {message}" in str(warning.message) for warning in warned)


@pytest.mark.filterwarnings("ignore:http.*in attempt")
def test_last_attempt_reports_the_answer(pauses: list[float]) -> None:
    with service(always(503, "the model is loading")) as (url, requests):
        refuses(url, "the body 'the model is loading' in the last of 3 attempts", retries=2)
    assert (len(requests), pauses) == (3, [1.0, 2.0])


def test_refused_connection_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        refuses(url, f"{url}: the connection failed .*refused.* last of 1 attempt", retries=0)


def test_missing_answer_is_reported() -> None:
    end = Event()

    def waits(request: dict[str, Any]) -> tuple[int, bytes]:
        end.wait()
        return 0, b""

    with service(waits) as (url, _):
        try:
            refuses(url, r"no answer within 0\.05 seconds .timeout. in", timeout=0.05, retries=0)
        finally:
            end.set()


@pytest.mark.parametrize("status", [400, 404])
def test_permanent_failures_are_not_retried(status: int) -> None:
    with service(always(status, "no field 'prompts'")) as (url, requests):
        refuses(url, f'{url}: expected status 200, got status {status} and the body "no field')
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<html>welcome</html>", "got status 200 and the body '<html>welcome</html>'"),
        ("[1, 2, 3]", "got status 200 and the body '[1, 2, 3]'"),
        ('{"scores": 1.0}', "got status 200 and"),
        ('{"scores": [9, 9, 9], "scores": [1, 2, 3]}', "got status 200 and"),
        ('{"scores": [1, 2, "3"]}', "got status 200 and"),
        ('{"scores": [1, 2, true]}', "got status 200 and"),
        ('{"scores": [1, 2, [null]]}', "got status 200 and"),
        ('{"scores": [1, 2]}', "got 2 scores with status 200 and"),
        ('{"scores": [1, 2, NaN]}', "not all are finite in status 200 and"),
        ('{"scores": [1, 2, 1e999]}', "not all are finite in status 200 and"),
        ('{"scores": [1, 2, -1e39]}', "not all are in the range of float32 in status 200 and"),
        (f'{{"scores": [1, 2, 1{"0" * 400}]}}', "not all are in the range of float32 in status"),
        (f'{{"scores": [1, 2, 1{"0" * 5000}]}}', "got status 200 and"),
        ("", "got status 200 and no body"),
        (f'{{"scores": "{"x" * 1000}"}}', 'got status 200 and the body \'{"scores": "xxxx'),
    ],
)
def test_malformed_answer_is_shown(body: str, problem: str) -> None:
    expected = 'expected {"scores": [...]} with 3 finite numbers, one for each response, '
    with (
        service(always(200, body)) as (url, requests),
        pytest.raises(RewardError, match=re.escape(f"{url}: {expected}{problem}")) as error,
    ):
        RemoteScorer(url)(PROMPTS, TEXTS)
    assert str(error.value).endswith("asked about 3 responses, the first: 'yes'")
    assert len(str(error.value)) < 500
    assert len(requests) == 1


def test_service_failure_is_not_searched_for_a_sample() -> None:
    with service(always(404, "")) as (url, requests):
        label = "reward 'safe' (rule: http)"
        reward = CallableReward(RemoteScorer(url), tiny_tokenizer(), label=label)
        with pytest.raises(RewardError, match=r"^reward 'safe' .rule: http.: http.* got status 40"):
            reward(make_rollouts(TEXTS), PROMPTS, None)
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "localhost:8000"}, "url: expected http://host... or https.* got 'localhost:8000'"),
        ({"url": "file:///etc/passwd"}, "url: expected http"),
        ({"url": "http://"}, "url: expected http"),
        ({"url": "ftp://me:secret@host"}, r"url: expected http.* got 'ftp://\*\*\*@host'"),
        ({"url": "http://me:secret@host"}, HIDDEN),
        ({"url": "http://me:$a$b@host"}, HIDDEN),
        ({"url": "http://secret@host"}, HIDDEN),
        ({"url": "http://me:secret\u2100@host"}, HIDDEN),
        ({"url": "http://host/s?token=secret"}, r"as value of 'token'.*\?token=\*\*\*'"),
        ({"url": "http://host/s?a=1&API_Key=secret"}, r"value of 'API_Key'.*a=\*\*\*&API_Key=\*"),
        ({"url": "http://host?t=secret0123456789abcdef"}, r"as value of 't'.*\?t=\*\*\*'"),
        ({"url": "http://host?token=$A-secret"}, r"as value of 'token'.*\?token=\*\*\*'"),
        ({"url": "http://host/b/secret0123456789/s"}, r"of what looks .*'/b/\*\*\*/s'"),
        ({"url": "http://host/token/secret"}, r"of what looks .*'/token/\*\*\*'"),
        ({"url": "http://host/score;token=secret"}, r"of what looks .*'/score;token=\*\*\*'"),
        ({"url": "http://host/score#secret"}, r"expected no fragment, .*/score#\*\*\*'"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        ({"timeout": 0.0}, r"timeout: expected a finite number > 0, got 0\.0"),
        ({"retries": -1}, "retries: expected an integer >= 0, got -1"),
        ({"backoff": -1.0}, r"backoff: expected a finite number >= 0, got -1\.0"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        RemoteScorer(**{"url": "http://localhost/", **arguments})
    assert "secret" not in "".join(format_exception(error.value))


@pytest.mark.parametrize("in_body", [False, True])
def test_dripping_answer_does_not_stretch_the_time_limit(in_body: bool) -> None:
    answer = drip(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if in_body else b"X:"))
    begun, client_left = monotonic(), Event()
    with raw_service(answer, client_left) as (url, _):
        refuses(url, r"no answer within 0\.1 seconds .timeout. in", timeout=0.1, retries=0)
        if in_body:  # the thread that was given up stops reading
            assert client_left.wait(5)
    assert monotonic() - begun < 5


@pytest.mark.parametrize("status", [301, 303, 308])
def test_redirect_is_not_followed(status: int) -> None:
    head = f"HTTP/1.1 {status} Moved\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n"
    with raw_service([head.encode()]) as (url, requests):
        refuses(url, f"got status {status}, a redirect, which is not followed")
    assert len(requests) == 1


@pytest.mark.parametrize("status", [200, 404])
def test_long_answer_is_not_read_to_its_end(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"scores": [1, 2, 3]}'
    monkeypatch.setattr(remote, "MAX_BODY", len(body))
    head = f"HTTP/1.1 {status} OK\r\n\r\n".encode()
    with raw_service(chain([head], repeat(bytes(100)))) as (url, _):
        refuses(url, f"of at most 21 bytes, got .* with status {status}")
    with service(always(200, body.decode())) as (url, _):  # the largest size
        assert RemoteScorer(url)(PROMPTS, TEXTS) == [1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:http.*in attempt")
def test_incomplete_answer_is_retried() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
    with raw_service([head, b'{"scores"']) as (url, requests):
        refuses(url, r"connection failed .*9 bytes.* last of 2 attempts", retries=1)
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("variable", "place", "secret", "shown", "sent"),
    [
        ("PASSWORD", "", "secret", r"http://\*\*\*@127.* got status 403", BASIC),
        (
            "TOKEN",
            "?lang=en&token=$TOKEN",
            "secret/ &+",
            r"lang=\*\*\*&token=\$TOKEN: .* 403",
            b"POST /score?lang=en&token=secret%2F%20%26%2B HTTP/1.1\r\n",
        ),
        (
            "PART",
            "/%20/$PART?lang=en",
            "secret/?",
            r"/%20/\$PART\?lang=\*\*\*: .* 403",
            b"POST /score/%20/secret%2F%3F?lang=en HTTP/1.1\r\n",
        ),
    ],
)
def test_credential_of_the_environment_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, variable: str, place: str, secret: str, shown: str, sent: bytes
) -> None:
    with raw_service([b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"]) as (url, requests):
        scorer = RemoteScorer(url + place if place else url.replace("//", "//me:$PASSWORD@"))
        with pytest.raises(RewardError, match=f"environment variable {variable}, which is not"):
            scorer(PROMPTS, TEXTS)
        monkeypatch.setenv(variable, secret)
        with pytest.raises(RewardError, match=shown) as error:
            scorer(PROMPTS, TEXTS)
    assert sent in requests[0]
    assert b"@" not in requests[0]
    assert "secret" not in "".join(format_exception(error.value))
    assert "secret" not in repr(scorer)


def test_secret_that_a_service_repeats_is_hidden_in_all_spellings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = 'a1/"b 2'
    monkeypatch.setenv("PASSWORD", secret)
    basic = base64.b64encode(f"me:{secret}".encode()).decode()
    escaped = ["a1%2F%22b%202", "A1%2f%22B%202", "a1%2F%22b+2", 'a1/\\"b 2', 'a1\\/\\"b 2']
    spellings = [secret, *escaped, basic]
    body = "|".join(spellings).encode()
    head = f"HTTP/1.1 403 No\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with raw_service([head + body]) as (url, _):
        scorer = RemoteScorer(url.replace("//", "//me:$PASSWORD@"))
        with pytest.raises(RewardError) as error:
            scorer(PROMPTS, TEXTS)
    assert "the body '" + "|".join(["***"] * 7) + "'" in str(error.value)


def test_redact_url_hides_what_may_be_secret() -> None:
    uuid, host = "01234567-89ab-cdef-0123-456789abcdef", "https://host0123456789abcdef.org"
    model = "http://h/v2/Meta-Llama-3.1-8B-Instruct/key/$A"
    shown = {
        "https://host?a=$TOKEN&b=x$TOKEN&c=&d#e": "https://host?a=$TOKEN&b=***&c=&d#***",
        "https://host:1/a?b#c": "https://host:1/a?b#***",
        f"{host}/{uuid}/v1?b=/c": f"{host}/***/v1?b=***",
        model: model,
        "https://me:p/w@x@host/a": "https://***@host/a",
        "me:secret@host": "***@host",
    }
    assert {url: redact_url(url) for url in shown} == shown


def test_proxy_that_is_none_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "foo://me:s3cret@127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(UserError, match=r"http://a: expected a proxy's URL") as raised:
        remote.RemoteClient(ServiceUrl("http://a"), timeout=1.0)
    assert "s3cret" not in "".join(format_exception(raised.value))
