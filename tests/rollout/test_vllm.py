"""vLLM as the sampler: what it is asked for and given, and vLLM itself where it is installed."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lit_rlhf.errors import UserError
from lit_rlhf.forward import LanguageModel
from lit_rlhf.models import ModelOptions, load_causal_lm, merged_state_dict, save_model_folder
from lit_rlhf.rollout import SamplingOptions, VLLMSampler, VLLMServerSampler
from lit_rlhf.time_limit import call_with_timeout
from tests.support.nucleus import nucleus_logprobs
from tests.support.raw_service import drip, raw_service
from tests.support.tiny_models import (
    EOS_ID,
    PAD_ID,
    move_adapters,
    tiny_causal_lm,
    tiny_config,
    tiny_tokenizer,
)

IDS = torch.tensor([[PAD_ID, 5, 6], [7, 8, 9]])
MASK = torch.tensor([[False, True, True], [True, True, True]])
OPTIONS = SamplingOptions(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01)
ANSWERS = [[11, 10, EOS_ID], [12, 13, 14, 15]]  # the first ends, the second is cut off
LOGPROBS = [[-0.5, -1.5, -2.5], [-0.1, -0.2, -0.3, -0.4]]
ASKED = {
    **{"max_tokens": 4, "min_tokens": 0, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
    **{
        "min_p": 0.01,
        "repetition_penalty": 1.0,
        "stop_token_ids": [EOS_ID],
        "ignore_eos": True,
        "logprobs": 0,
    },
}


def sample(sampler: Any, model: LanguageModel, seed: int = 3) -> Any:
    return sampler(model, IDS, MASK, OPTIONS, eos_token_ids=[EOS_ID], pad_token_id=9, seed=seed)


def policy(folder: Path, **options: Any) -> LanguageModel:
    """A policy with tied embeddings, as loaded from a folder."""
    save_model_folder(tiny_causal_lm("qwen3"), tiny_tokenizer(), folder)
    return load_causal_lm(str(folder), ModelOptions(**options))


class StandIn:
    """What `VLLMSampler` uses of `vllm.LLM`; it notes its calls."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, **settings: Any) -> None:
        self.calls.append(("build", settings))
        sleeps = settings["enable_sleep_mode"]
        model_config = SimpleNamespace(enable_sleep_mode=sleeps)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache",))

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        weights = {name: weight.clone() for name, weight in kwargs["weights_iterator"]}
        self.calls.append((method, weights))

    def generate(self, inputs: Any, settings: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append(("generate", inputs, settings))
        answers = zip(ANSWERS, LOGPROBS, strict=True)
        return [SimpleNamespace(outputs=[completion(*answer)]) for answer in answers]


def completion(ids: list[int], logprobs: Sequence[float]) -> Any:
    logprobs_by_token = [
        {token: SimpleNamespace(logprob=x)} for token, x in zip(ids, logprobs, strict=True)
    ]
    return SimpleNamespace(token_ids=ids, logprobs=logprobs_by_token)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = StandIn, lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(StandIn, "calls", [])
    return StandIn.calls


def test_vllm_is_given_the_policy_and_its_samples_become_rollouts(
    calls: list[Any], tmp_path: Path
) -> None:
    model, sampler = policy(tmp_path / "policy"), VLLMSampler({"max_model_len": 64})
    rollouts = sample(sampler, model)
    assert rollouts.response_ids.tolist() == [[11, 10, EOS_ID, 9], [12, 13, 14, 15]]
    assert rollouts.response_mask.sum(1).tolist() == [3, 4]
    assert rollouts.prompt_ids is IDS
    assert rollouts.prompt_mask is MASK
    assert rollouts.terminated.tolist() == [True, False]
    expected = torch.tensor([[*LOGPROBS[0], 0.0], LOGPROBS[1]])
    torch.testing.assert_close(rollouts.sampler_logprobs, expected)
    assert rollouts.statistics is None
    (build, settings), (reload, weights), reset, (generate, inputs, sampling) = calls
    assert (build, reload, reset, generate) == (
        *("build", "reload_weights"),
        *(("reset_prefix_cache",), "generate"),
    )
    assert settings == {
        **{"model": str(tmp_path / "policy"), "load_format": "dummy", "dtype": "float32"},
        **{"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs", "seed": 0},
        **{"enable_sleep_mode": False, "max_model_len": 64},
    }
    assert inputs == [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7, 8, 9]}]
    seeds = [params.pop("seed") for params in sampling]
    assert sampling == [ASKED | {"detokenize": False}] * 2
    assert len(set(seeds)) == 2
    # tied weights are given by both names: vLLM computes with a copy
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").add_(1.0)
    sample(sampler, model, seed=4)
    again = calls[4:7]
    assert [call[0] for call in again] == ["reload_weights", "reset_prefix_cache", "generate"]
    torch.testing.assert_close(again[0][1]["lm_head.weight"], weights["lm_head.weight"] + 1.0)
    assert [params["seed"] for params in again[2][2]] != seeds
    sample(sampler, model)
    assert [params["seed"] for params in calls[-1][2]] == seeds
    options = replace(OPTIONS, do_sample=False)  # the likeliest tokens, without log-probs
    rollouts = sampler(
        model, IDS, MASK, options, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, seed=0
    )
    assert calls[-1][2][0]["temperature"] == 0.0
    assert rollouts.sampler_logprobs is None


def test_what_vllm_cannot_sample_for_is_refused(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy(tmp_path / "policy")
    with pytest.raises(ValueError, match="padded on the left"):
        VLLMSampler()(
            model, IDS, MASK.flip(1), OPTIONS, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, seed=0
        )
    monkeypatch.setattr("lit_rlhf.rollout.vllm.is_sharded", lambda network: True)
    with pytest.raises(ValueError, match=r"expected a strategy .* got a sharded policy"):
        sample(VLLMSampler(), model)
    assert calls == []


def test_vllm_sleeps_between_rollouts_where_it_can(calls: list[Any], tmp_path: Path) -> None:
    sample(VLLMSampler({"enable_sleep_mode": True}), policy(tmp_path / "policy"))
    assert [call for call in calls if call[0] in ("wake_up", "sleep")] == [
        *(("wake_up", "weights"), ("wake_up", "kv_cache"), ("sleep", 2)),
    ]
    # no room for the cache before the weights are there, and none of either after the rollout
    names = [call[0] for call in calls]
    assert names[1:4] == ["wake_up", "reload_weights", "wake_up"]
    assert names[-1] == "sleep"


def test_vllm_is_given_merged_adapters(calls: list[Any], tmp_path: Path) -> None:
    model = policy(tmp_path / "policy", lora_rank=2)
    move_adapters(model)
    sample(VLLMSampler(), model)
    weights = calls[1][1]
    plain = tiny_causal_lm("qwen3").state_dict()
    assert weights.keys() == plain.keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights[name], merged_state_dict(model)[name])
    assert not torch.equal(weights[name], plain[name])


@pytest.mark.parametrize("answer", [([11, 12], [-1.0, -1.0]), ([], []), ([11, EOS_ID], [-1.0])])
def test_a_response_that_is_not_whole_is_refused(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    ids, logprobs = answer

    def generate(self: StandIn, *_: Any, **__: Any) -> list[Any]:
        reply = completion(ids[: len(logprobs)], logprobs)
        reply.token_ids = ids
        return [SimpleNamespace(outputs=[reply])] * 2

    monkeypatch.setattr(StandIn, "generate", generate)
    with pytest.raises((RuntimeError, ValueError), match=r"responses that end by .* 4 tokens|zip"):
        sample(VLLMSampler(), policy(tmp_path / "policy"))


@contextmanager
def server(
    weights_dir: Path, status: int = 200, answers: Mapping[str, Any] = {}
) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """A server with the endpoints that are used; it notes requests, and the weights when told.

    `answers` are sent in place of the right ones, by path.
    """
    requests: list[Any] = []
    weights: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            report = json.loads(body) if body else None
            requests.append((self.path, report))
            if self.path == "/collective_rpc":
                weights.append(load_file(weights_dir / "model.safetensors"))
                return self.answer({"results": [None]}, status)
            if self.path != "/v1/completions":
                return self.answer(None)
            row = 0 if report["prompt"] == [5, 6] else 1
            choice = {"token_ids": ANSWERS[row], "logprobs": {"token_logprobs": LOGPROBS[row]}}
            return self.answer({"choices": [choice]})

        def answer(self, content: Any, status: int = 200) -> None:
            content = answers.get(self.path, content)
            body = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/", requests, weights
        finally:
            running.shutdown()
            thread.join()


def test_a_server_reads_the_weights_and_is_asked_for_each_response(tmp_path: Path) -> None:
    folder, model = tmp_path / "weights", policy(tmp_path / "policy")
    with server(folder) as (url, requests, weights):
        sampler = VLLMServerSampler(url, str(folder))
        rollouts = sample(sampler, model)
        with torch.no_grad():
            model.get_parameter("model.embed_tokens.weight").add_(1.0)
        sample(sampler, model)
    assert rollouts.response_ids.tolist() == [[11, 10, EOS_ID, 9], [12, 13, 14, 15]]
    assert rollouts.sampler_logprobs[1].tolist() == pytest.approx(LOGPROBS[1])
    (rpc, update), (reset, _), *completions = requests[:4]
    assert (rpc, reset) == ("/collective_rpc", "/reset_prefix_cache")
    assert update["method"] == "reload_weights"
    assert update["kwargs"] == {"weights_path": str(folder)}
    bodies = sorted((body for _, body in completions), key=lambda body: len(body["prompt"]))
    assert [body.pop("prompt") for body in bodies] == [[5, 6], [7, 8, 9]]
    assert len({body.pop("seed") for body in bodies}) == 2
    assert bodies == [ASKED | {"model": "tiny", "return_token_ids": True}] * 2
    first, second = weights
    assert torch.equal(first["lm_head.weight"], first["model.embed_tokens.weight"])
    torch.testing.assert_close(second["lm_head.weight"], first["lm_head.weight"] + 1.0)


def test_a_link_in_the_folder_of_weights_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("somebody's file")
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(other)
    with server(folder) as (url, _, _):
        sample(VLLMServerSampler(url, str(folder)), policy(tmp_path / "policy"))
    assert other.read_text() == "somebody's file"
    assert not (folder / "model.safetensors").is_symlink()


def test_one_rank_hands_the_weights_over_to_a_server(tmp_path: Path, monkeypatch: Any) -> None:
    model, ranks = policy(tmp_path / "policy"), iter([0, 1])
    monkeypatch.setattr("lit_rlhf.rollout.vllm.fail_together", lambda action: nullcontext())
    group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: next(ranks))
    monkeypatch.setattr("lit_rlhf.rollout.vllm.distributed", group)
    with server(tmp_path) as (url, requests, weights):
        for _ in range(2):
            sample(VLLMServerSampler(url, str(tmp_path)), model)
    assert len(weights) == 1
    assert [path for path, _ in requests].count("/v1/completions") == 4


def test_a_server_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeout: expected a finite number > 0, got 0"):
        VLLMServerSampler("http://127.0.0.1:9", str(tmp_path), timeout=0)
    model = policy(tmp_path / "policy")
    error = pytest.raises(RuntimeError, match=r"a vLLM server.* at http://127\.0.* got status 404")
    with server(tmp_path, status=404) as (url, _, _), error:
        sample(VLLMServerSampler(url, str(tmp_path)), model)
    with pytest.raises(RuntimeError, match=r"docs/sampler\.md, at http://127\.0\.0\.1:9: the conn"):
        sample(VLLMServerSampler("http://127.0.0.1:9", str(tmp_path)), model)


def choice(ids: Any, logprobs: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/models", "welcome"),
        ("/v1/models", {"data": []}),
        ("/v1/models", {"data": [{"id": 3}]}),
        ("/v1/completions", [1]),
        ("/v1/completions", {"choices": []}),
        ("/v1/completions", {"choices": [{"text": "hi"}]}),
        ("/v1/completions", choice(None, [])),
        ("/v1/completions", choice([10**9] * 4, [-1.0] * 4)),
        ("/v1/completions", choice([-1] * 4, [-1.0] * 4)),
        ("/v1/completions", choice([True] * 4, [-1.0] * 4)),
        ("/v1/completions", choice([11] * 4, [float("nan")] * 4)),
        ("/v1/completions", choice([11] * 4, [-(10**400)] * 4)),
        ("/v1/completions", choice([11] * 4, ["-1"] * 4)),
        ("/v1/completions", choice([11] * 3, [-1.0] * 3)),
        ("/v1/completions", choice([11] * 4, [-1.0] * 3)),
    ],
)
def test_a_server_that_answers_something_else_is_named(
    tmp_path: Path, path: str, answer: Any
) -> None:
    model = policy(tmp_path / "policy")
    refused = pytest.raises(UserError, match=r"^sampler: expected .* got ")
    with server(tmp_path, answers={path: answer}) as (url, _, _), refused:
        sample(VLLMServerSampler(url, str(tmp_path)), model)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (lambda: drip(HEAD + b"X: "), r"no answer within 0\.2 seconds .timeout."),
        (lambda: drip(HEAD + b"\r\n"), r"no answer within 0\.2 seconds .timeout."),
        (lambda: chain([HEAD, b"\r\n"], repeat(bytes(1000))), "of at most 10000 bytes, got"),
        (
            lambda: [HEAD, b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\n "],
            "that is not compressed, got gzip",
        ),
        (
            lambda: [b"HTTP/1.1 302 Found\r\nLocation: /a\r\nContent-Length: 0\r\n\r\n"],
            "got status 302, a redirect, which is not followed",
        ),
        (lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"], "the connection failed"),
    ],
)
def test_a_server_that_does_not_end_its_answer_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: Any, message: str
) -> None:
    monkeypatch.setattr("lit_rlhf.remote.MAX_BODY", 10_000)
    monkeypatch.setenv("no_proxy", "*")
    model = policy(tmp_path / "policy")
    with raw_service(pieces) as (url, _), pytest.raises(UserError, match=message):
        sample(VLLMServerSampler(url.removesuffix("/score"), str(tmp_path), timeout=0.2), model)


@pytest.mark.parametrize("timeout", [0.1, 0.3])
def test_the_deadline_of_a_server_is_the_option_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    limits = []

    def limited(call: Any, seconds: float | None) -> Any:
        limits.append(seconds)
        return call_with_timeout(call, seconds)

    monkeypatch.setattr("lit_rlhf.remote.call_with_timeout", limited)
    model = policy(tmp_path / "policy")
    with (
        raw_service(lambda: drip(HEAD + b"X: ")) as (url, _),
        pytest.raises(UserError, match=f"no answer within {timeout} seconds"),
    ):
        sample(VLLMServerSampler(url, str(tmp_path), timeout=timeout), model)
    assert limits == [timeout]


def test_a_token_in_the_address_of_a_server_is_refused_and_not_shown(tmp_path: Path) -> None:
    for url in ("http://me:secret@host", "http://host?token=secret", "http://host/key/secret"):
        with pytest.raises(ValueError, match=r"^url: expected .* variable") as error:
            VLLMServerSampler(url, str(tmp_path))
        assert "secret" not in str(error.value)


@pytest.mark.filterwarnings("default")  # vLLM's imports warn
def test_vllm_itself_follows_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM has an environment of its own, see docs/sampler.md")
    for name, value in (("KVCACHE_SPACE", "1"), ("OMP_THREADS_BIND", "nobind")):
        monkeypatch.setenv(f"VLLM_CPU_{name}", value)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    config = tiny_config("qwen3")
    config.head_dim = 32  # the smallest that vLLM's kernels take
    folder = tmp_path / "policy"
    save_model_folder(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), folder)
    model = load_causal_lm(str(folder), ModelOptions())
    engine = {"max_model_len": 64, "max_num_seqs": 4, "enforce_eager": True}
    sampler = VLLMSampler(engine)
    options = SamplingOptions(max_new_tokens=8, temperature=0.7, top_p=0.9)
    for seed in range(2):
        rollouts = sampler(
            model, IDS, MASK, options, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, seed=seed
        )
        sampler_logprobs = rollouts.sampler_logprobs[rollouts.response_mask].double()
        torch.testing.assert_close(
            sampler_logprobs, nucleus_logprobs(model, rollouts, options), atol=1e-4, rtol=0
        )
        with torch.no_grad():
            model.get_parameter("model.embed_tokens.weight").mul_(0.9)
