"""The launch commands of docs/scale.md parse, and its memory table equals the estimate."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_rlhf.forward import gathered
from lit_rlhf.strategies.sharded import shard
from lit_rlhf.tools.doctor import NetworkShape, PPOSizes, ppo_memory
from lit_rlhf.tools.doctor.memory import PPOMemory, network_shape
from tests.support.config_parsing import cli_parser, parse_configs
from tests.support.docs_blocks import ROOT, blocks
from tests.support.tiny_runs import CONFIGS

PAGE = ROOT / "docs" / "scale.md"
LAYOUTS = {  # hidden and intermediate size, layers, heads, heads of keys
    "1B": (2048, 5632, 22, 32, 4),
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "34B": (8192, 22016, 48, 64, 8),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "all on the GPU": {},
    "`shard_frozen`": {"shard_frozen": True},
    "`offload_frozen`": {"offload_frozen": True},
    "and `_offload`": {"offload_frozen": True, "offload_optimizer": True},
}


def shape(size: str) -> NetworkShape:
    """Shape of a Llama, whose parameters are counted on the meta device."""
    with torch.device("meta"):
        return network_shape(causal_lm(size))


def causal_lm(size: str) -> Any:
    hidden, intermediate, layers, heads, kv_heads = LAYOUTS[size]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = LlamaConfig(vocab_size=32000, tie_word_embeddings=False, **sizes)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def cells(memory: PPOMemory) -> list[str]:
    """Numbers of the GPU in GiB, as the tables have them."""
    update = memory.update + memory.gradients
    numbers = (memory.trained, memory.frozen, memory.rollout, memory.scoring, update, memory.peak)
    return [f"{number / 2**30:.1f}" for number in numbers]


def rows() -> Iterator[str]:
    """Rows of the table, from the estimate."""
    for size in [*LAYOUTS][:3]:
        network = shape(size)
        for name, setting in SETTINGS.items():
            sizes = PPOSizes(
                gpus=8,
                prompt_tokens=1536,
                response_tokens=512,
                rollouts=16,
                rows=4,
                **setting,
            )
            memory = ppo_memory(network, sizes)
            shown = [*cells(memory), f"{memory.cpu / 2**30:.0f}"]
            yield f"| {size} | {name} | {' | '.join(shown)} |"


def test_memory_table_agrees_with_the_estimate() -> None:
    text = PAGE.read_text("utf-8")
    shown = [line for line in text.splitlines() if re.match(r"\| \d+B \| \D", line)]
    assert shown == list(rows())


def test_memory_table_of_fsdp2_agrees_with_the_estimate() -> None:
    text = PAGE.read_text("utf-8")
    for line in re.findall(r"^\| \d+B \| \d+ \|.*", text, re.MULTILINE):
        size, gpus, rows, *shown = line.strip("| ").split(" | ")
        rollouts, tokens = map(int, rows.split(", "))
        sizes = PPOSizes(
            gpus=int(gpus),
            prompt_tokens=1536,
            response_tokens=512,
            rollouts=rollouts,
            rows=4,
            micro_batch_tokens=tokens,
            sharded=True,
        )
        assert shown == cells(ppo_memory(shape(size), sizes))


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int], DeviceMesh]]:
    """Makes a mesh of so many ranks, of which only this one exists."""

    def start(n: int) -> DeviceMesh:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
        return init_device_mesh("cpu", (n,))

    yield start
    distributed.destroy_process_group()


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"), reason="torch 2.8 gathers no fake tensors"
)
@pytest.mark.parametrize(
    ("size", "n_ranks"), [("13B", 8), pytest.param("34B", 16, marks=pytest.mark.slow)]
)
def test_fsdp2_keeps_the_estimated_bytes(size: str, n_ranks: int, fake_ranks: Any) -> None:
    mesh, network = fake_ranks(n_ranks), shape(size)
    sizes = PPOSizes(
        gpus=n_ranks,
        prompt_tokens=1536,
        response_tokens=512,
        rollouts=4,
        rows=4,
        micro_batch_tokens=4096,
        sharded=True,
    )
    expected = ppo_memory(network, sizes)

    def count_sharded_bytes(tensors: Iterable[Any]) -> int:
        return sum(t.to_local().nbytes for t in tensors if isinstance(t, DTensor))

    with FakeTensorMode(allow_non_fake_inputs=True):
        policy, reference = causal_lm(size), causal_lm(size).requires_grad_(False)
        for model in (policy, reference):
            shard(model, mesh, torch.bfloat16)
        optimizer = torch.optim.AdamW(policy.parameters(), foreach=False)
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = count_sharded_bytes(parameter.grad for parameter in policy.parameters())
        optimizer.step()
        states = count_sharded_bytes(
            x for state in optimizer.state.values() for x in state.values()
        )
        assert 2 * (count_sharded_bytes(policy.parameters()) + states) == pytest.approx(
            expected.trained, rel=1e-3
        )
        assert 2 * count_sharded_bytes(reference.parameters()) == pytest.approx(
            expected.frozen, rel=1e-3
        )
        with gathered(policy):
            whole = sum(parameter.nbytes for parameter in policy.parameters())
        keys_and_values = 2 * 2 * network.layers * network.kv_width * 2048 * 4
        assert whole + keys_and_values == pytest.approx(expected.rollout, rel=1e-3)
        layers = 2 * (whole - 4 * 32000 * network.hidden) // network.layers
        assert gradients + 2 * layers == pytest.approx(expected.gradients, rel=1e-3)


def test_seven_billion_fit_an_a100_with_the_overlay_only() -> None:
    overlay = parse_configs(
        CONFIGS / "ppo" / "paper_7b_en.yaml", CONFIGS / "overlays/zero2_8xa100.yaml"
    )
    prefix = "model.init_args."
    options = {k.removeprefix(prefix): v for k, v in overlay.items() if k.startswith(prefix)}
    sizes: dict[str, Any] = {
        "gpus": overlay["trainer.devices"],
        "prompt_tokens": overlay["data.init_args.max_prompt_length"],
        "response_tokens": options["sampling.max_new_tokens"],
        "rollouts": options["memory.rollout_batch_size"],
        "rows": options["minibatches.minibatch_size"],
    }
    shards = (options["memory.shard_frozen"], False)
    sizes_of = [PPOSizes(**sizes, shard_frozen=shard) for shard in shards]
    peaks = [ppo_memory(shape("7B"), run_sizes).peak / 2**30 for run_sizes in sizes_of]
    assert peaks[0] < 72 < 80 < peaks[1]
    gpus = overlay["trainer.devices"] * overlay["trainer.num_nodes"]
    assert gpus * overlay["data.init_args.batch_size"] == 128  # the paper's
    assert gpus * options["minibatches.minibatch_size"] == 32


def launches() -> list[list[str]]:
    """The commands that start `lit_rlhf` through `torchrun` or `srun`."""
    text = "\n".join(block.text for block in blocks(PAGE)).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith(("torchrun", "srun"))]
    return [shlex.split(line) for line in lines]


def test_launch_lines_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = launches()
    assert [line[0] for line in lines] == ["torchrun", "srun"]
    for line in lines:
        settings = cli_parser().parse_args(line[line.index("lit_rlhf") + 1 :]).fit
        gpus = int(settings.trainer.devices) * settings.trainer.num_nodes
        assert gpus == 16
        assert gpus * settings.data.init_args.batch_size == 128
        assert gpus * settings.model.init_args.minibatches.minibatch_size == 32


def test_timeout_of_the_page_reaches_the_strategy(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(PAGE) if block.language == "yaml")
    overlay = tmp_path / "timeout.yaml"
    overlay.write_text(block.text, "utf-8")
    settings = parse_configs(CONFIGS / "ppo" / "paper_7b_en.yaml", overlay)
    (timeout,) = (v for key, v in settings.items() if key.endswith("strategy.init_args.timeout"))
    assert timeout.total_seconds() == 600
