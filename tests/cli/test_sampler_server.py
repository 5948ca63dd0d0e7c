"""PPO whose rollouts come from a server that dies or hangs: what it says, and what it leaves."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.cli.main import main
from tests.support.run_results import files_of
from tests.support.stages import short_run

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


class FaultyServer(ThreadingHTTPServer):
    """Samples as vLLM does, three tokens for each prompt, as long as it is well.

    Attributes:
        completions: Number of completions that it still gives; negative for any number.
        hangs: Whether it then keeps requests open, in place of closing their connections.
        ended: Ends the requests that hang.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.completions = -1
        self.hangs = False
        self.ended = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    server: FaultyServer

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/v1/completions":
            return self.answer({})
        if self.server.completions == 0:
            if self.server.hangs:
                self.server.ended.wait()
            self.close_connection = True
            return None
        self.server.completions -= 1
        request = json.loads(body)
        draw = request["seed"] + sum(request["prompt"])
        tokens = [10 + (draw + place) % 20 for place in range(3)]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-3.0] * 3}}
        return self.answer({"choices": [choice]})

    def answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def faulty_server() -> Iterator[FaultyServer]:
    with FaultyServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("hangs", [False, True])
def test_server_that_is_gone_ends_the_run_which_resumes_once_it_is_back(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hangs: bool,
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with faulty_server() as server:
        address = f"http://127.0.0.1:{server.server_port}"
        config = short_run(root)
        config["model"]["init_args"]["sampler"] = {
            "class_path": "lit_rlhf.rollout.VLLMServerSampler",
            "init_args": {"url": address, "weights_dir": str(tmp_path / "weights"), "timeout": 1.0},
        }
        (tmp_path / "ppo.yaml").write_text(json.dumps(config))

        def fit(folder: str) -> None:
            (tmp_path / folder).mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / folder)
            main(["fit", "--config", "../ppo.yaml", "--ckpt_path", "last"])

        fit("whole")
        server.completions = 5  # two of each iteration: in the middle of the third
        server.hangs = hangs
        with pytest.raises(SystemExit) as ended:
            fit("run")
        said = str(ended.value.code)  # Python writes it, and ends with status 1
        problem = "no answer within 1 seconds (timeout)" if hangs else "the connection failed"
        expected = "sampler: expected a vLLM server, started as in docs/sampler.md, at"
        assert said.startswith(f"lit_rlhf fit: error: {expected} {address}: {problem}")
        assert not Path("model").exists()
        checkpoints = sorted(path.name for path in Path("checkpoints").iterdir())
        assert checkpoints == ["batch=1.ckpt", "batch=2.ckpt"]
        server.completions = -1
        server.ended.set()
        fit("run")
    assert files_of(tmp_path / "run/model") == files_of(tmp_path / "whole/model")
