"""`transformers serve` in another process, and tiny models for it to serve."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tests.support.tiny_models import EOS_ID, tiny_config, tiny_tokenizer

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"
)


def write_chat_model(folder: Path, reply: str | None = None) -> str:
    """A Llama of a few thousand weights with a chat template and room for a judge's questions.

    It answers everything with `reply`, one token and EOS, or with nonsense without one.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    if reply is not None:
        tokenizer.add_tokens([reply])
    config = tiny_config("llama", len(tokenizer))
    config.num_hidden_layers, config.max_position_embeddings = 1, 16384
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if reply is not None:
        _always_says(model, len(tokenizer) - 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def _always_says(model: LlamaForCausalLM, token: int) -> None:
    """Set weights with which any token is followed by `token`, and `token` by EOS."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.zero_()
    head.zero_()
    embedding[:, 0] = 1.0
    embedding[token] = 0.0
    embedding[token, 1] = 1.0
    head[token, 0] = 1.0
    head[EOS_ID, 1] = 1.0


@contextmanager
def transformers_serve(log: Path) -> Iterator[str]:
    """Serve any model by its folder, at the base URL given; the server's output goes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", "--host", "127.0.0.1", "--port", port]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = Event()

    def copy_output(server: subprocess.Popen[str]) -> None:
        with log.open("w", encoding="utf-8") as file:
            for line in server.stdout:  # all of it: a full pipe would stop the server
                file.write(line)
                if "Uvicorn running" in line:
                    started.set()
        started.set()  # the server has started, or ended

    with subprocess.Popen([*command, "--device", "cpu"], env=environment, **output) as server:
        reader = Thread(target=copy_output, args=[server])
        reader.start()
        try:
            started.wait()
            if server.poll() is not None:
                raise RuntimeError(f"transformers serve did not start: {log.read_text('utf-8')}")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            reader.join()
