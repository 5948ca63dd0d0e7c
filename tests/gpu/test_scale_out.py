"""PPO under ZeRO-2 on one CUDA device: as on one device without it, and 1B within its estimate.

Each run has a process of its own, which it leaves with its process group.
"""

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from lit_rlhf.modules import PPOModule
from lit_rlhf.tools.doctor import NetworkShape, PPOSizes, ppo_memory
from tests.support.long_runs import CLIPS, PRETRAINING, Run, ppo_run
from tests.support.stages import fit_module, ppo_options, prompts, write_data, write_models
from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID
from tests.support.trajectories import Logged

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_cuda]

ITERATIONS = 5
STRATEGIES = ("multi_deepspeed_stage_2", "multi_deepspeed_stage_2_offload")
LOSSES = [f"ppo/{name}_loss" for name in ("value", "policy", "entropy", "ptx")]
ROWS, RESPONSE, LONGEST = 8, 64, 64  # rollouts, and tokens of a response and of a prompt


@pytest.fixture(autouse=True)
def _cuda_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")


def in_a_process(fn: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(fn, *arguments).result()


def run_on_gpu(root: Path, folder: Path, strategy: str, precision: str) -> Run:
    torch.set_float32_matmul_precision("highest")
    arguments = {"accelerator": "gpu", "strategy": strategy, "precision": precision}
    run = ppo_run(root, folder, ITERATIONS, micro_batch_size=2, trainer=arguments)
    return run._replace(state={name: tensor.cpu() for name, tensor in run.state.items()})


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-3), ("bf16-mixed", 0.05)])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp2"])
def test_ppo_follows_the_same_device_without_engines(
    root: Path, tmp_path: Path, strategy: str, precision: str, tolerance: float
) -> None:
    alone, engines = (
        in_a_process(run_on_gpu, root, tmp_path / name, name, precision)
        for name in ("auto", strategy)
    )
    for one, other in zip(engines.metrics, alone.metrics, strict=True):
        for key in LOSSES:
            assert (key in one) == (key in other)
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=tolerance, abs=tolerance), key
    for name, tensor in alone.state.items():
        error = (engines.state[name].double() - tensor.double()).abs().max()
        assert error <= tolerance * tensor.double().abs().max() + 1e-8, name
    for network, norm in CLIPS.items():
        assert max(engines.squares[network]) ** 0.5 == pytest.approx(norm, rel=1e-2)
    assert engines.untouched == [True] * PRETRAINING + [False]


def billion(root: Path, folder: Path, strategy: str, offload_frozen: bool) -> dict[str, Any]:
    """Ten iterations with samples of the policy; what they logged and the peak in bytes."""
    own = ppo_options(
        root,
        minibatches={"minibatch_size": ROWS, "micro_batch_size": ROWS // 2},
        sampling={"max_new_tokens": RESPONSE},
        policy_optimizer={"learning_rate": 1e-6},
        critic_optimizer={"learning_rate": 1e-6},
        network={"gradient_checkpointing": True},
        memory={"frozen_dtype": "bfloat16", "offload_frozen": offload_frozen},
    )
    module = PPOModule(**own)
    logged = Logged()
    options = {"accelerator": "gpu", "strategy": strategy, "precision": "bf16-mixed"}
    data = prompts(root, batch_size=ROWS)
    fit_module(module, data, folder, max_epochs=10, callbacks=[logged], **options)
    parameters = sum(p.numel() for p in module.policy.parameters())
    peak = torch.cuda.max_memory_allocated()
    return {"parameters": parameters, "metrics": logged.steps, "peak": peak}


@pytest.fixture(scope="module")
def billion_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of TinyLlama's shape with random weights, and the small data files."""
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632}
    sizes |= {"num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    config = LlamaConfig(max_position_embeddings=256, tie_word_embeddings=False, **sizes, **ids)
    return write_models(write_data(tmp_path_factory.mktemp("billion")), config)


@pytest.mark.parametrize(
    ("strategy", "offload"), [(STRATEGIES[0], False), (STRATEGIES[0], True), (STRATEGIES[1], True)]
)
def test_ten_iterations_of_a_billion_weights_and_their_peak_next_to_the_estimate(
    billion_root: Path,
    tmp_path: Path,
    strategy: str,
    offload: bool,
    record_property: Callable[[str, object], None],
) -> None:
    measured = in_a_process(billion, billion_root, tmp_path, strategy, offload)
    assert measured["parameters"] > 1e9
    assert len(measured["metrics"]) == 10
    assert all(math.isfinite(v) for metrics in measured["metrics"] for v in metrics.values())
    offloads = {"offload_frozen": offload, "offload_optimizer": strategy == STRATEGIES[1]}
    scored = ROWS * (LONGEST + RESPONSE)
    sizes = PPOSizes(
        gpus=1,
        prompt_tokens=LONGEST,
        response_tokens=RESPONSE,
        rollouts=ROWS,
        rows=ROWS // 2,
        scored_tokens=scored,
        **offloads,
    )
    shape = NetworkShape(
        parameters=measured["parameters"],
        layers=22,
        hidden=2048,
        kv_width=256,
        vocabulary=32000,
        matmul_width=6 * 2048 + 2 * 256 + 3 * (2048 + 5632),
    )
    estimate = ppo_memory(shape, sizes).peak
    record_property("peak_bytes", measured["peak"])
    record_property("estimated_bytes", estimate)
    print(
        f"{strategy}, {offload=}: {measured['peak'] / 1e9:.1f} GB, estimate {estimate / 1e9:.1f} GB"
    )
    assert 0.6 < measured["peak"] / estimate < 1.15
