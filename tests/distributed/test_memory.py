"""The memory estimate next to what a small PPO run takes, on two ranks in bfloat16."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from lit_rlhf.modules import PhaseTimer
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy
from lit_rlhf.tools.doctor import NetworkShape, PPOSizes, ppo_memory
from tests.support.live_memory import LiveTensors
from tests.support.ranks import run_on_ranks
from tests.support.stages import fit_module, write_data, write_models
from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE
from tests.support.trajectories import stage_run

RANKS = 2
ROWS = 4
PROMPT, RESPONSE = 38, 6  # tokens, about

HIDDEN, LAYERS = 128, 4
INTERMEDIATE = 344
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
SIZES |= {
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
TOKENS = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
CONFIG = LlamaConfig(**SIZES, **TOKENS, tie_word_embeddings=False)


def on_a_rank(rank: int, root: Path, folder: Path) -> tuple[int, dict[str, int]]:
    """The policy's parameters, and the most bytes that tensors took in each phase."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    peaks: dict[str, int] = {}
    timed = PhaseTimer.__call__
    with LiveTensors() as live, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def watched_phase(timer: PhaseTimer, name: str, *args: Any) -> Iterator[None]:
            live.peak = live.live
            with timed(timer, name, *args):
                yield
            peaks[name] = live.peak  # the last iteration's, when all moments exist

        patch.setattr(PhaseTimer, "__call__", watched_phase)
        options = {"network.gradient_checkpointing": True, "loss.ptx_coef": 0.0}
        module, data = stage_run("ppo", root, ROWS, **options)
        arguments: Any = {"strategy": MultiEngineDeepSpeedStrategy(stage=2), "devices": RANKS}
        arguments |= {"precision": "bf16-mixed", "use_distributed_sampler": False}
        # the policy is not trained in the first iteration
        fit_module(module, data, folder, max_epochs=3, **arguments)
    return sum(p.numel() for p in module.policy.parameters()), peaks


@pytest.mark.slow
def test_each_phase_takes_its_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    root = write_models(write_data(tmp_path), CONFIG)
    for parameters, peaks in run_on_ranks(on_a_rank, RANKS, tmp_path, root, tmp_path / "run"):
        shape = NetworkShape(
            parameters=parameters,
            layers=LAYERS,
            hidden=HIDDEN,
            kv_width=HIDDEN,
            vocabulary=VOCAB_SIZE,
            matmul_width=11 * HIDDEN + 3 * INTERMEDIATE,
        )
        sizes = PPOSizes(
            gpus=RANKS,
            prompt_tokens=PROMPT,
            response_tokens=RESPONSE,
            rollouts=ROWS,
            rows=ROWS,
            scored_tokens=ROWS * (PROMPT + RESPONSE),
        )
        estimate = ppo_memory(shape, sizes)
        states = estimate.trained + estimate.frozen
        bucket = 2 * parameters  # one, as reduction on a CPU does not overlap
        assert peaks["rollout"] == pytest.approx(states + estimate.rollout, rel=0.05)
        assert peaks["score"] == pytest.approx(states + estimate.scoring, rel=0.05)
        assert peaks["estimate"] == pytest.approx(states + estimate.scoring, rel=0.05)
        assert peaks["update"] == pytest.approx(estimate.peak - bucket, rel=0.05)
        assert estimate.peak == states + estimate.update + estimate.gradients
