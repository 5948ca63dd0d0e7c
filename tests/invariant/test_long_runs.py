"""Twenty iterations of PPO on two ranks equal those on one process with the same global batch.

DDP, one DeepSpeed engine for each network under ZeRO-2, and FSDP2, over real gloo processes in
float32: critic pre-training, ptx, four micro-batches, schedules, and clips that act on both.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from tests.support.long_runs import CLIPS, PASSES, PRETRAINING, Run, on_a_rank, ppo_run
from tests.support.rank_runs import RANKS, STRATEGIES
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow

ITERATIONS = 20
TOLERANCE = 1e-4  # the weights move by 2e-6 when the first ones move by a unit in the last place


class Runs(NamedTuple):
    """The same run alone and, by rank and strategy, on two ranks."""

    alone: Run
    ranks: list[dict[str, Run]]


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        arguments = [root, folder, ITERATIONS]
        ranks = run_on_ranks(on_a_rank, RANKS, folder, *arguments)
    return Runs(ppo_run(root, folder / "alone", ITERATIONS), ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_on_two_ranks_follow_those_of_one(runs: Runs, strategy: str) -> None:
    assert len(runs.alone.metrics) == ITERATIONS
    for rank in runs.ranks:
        for one, other in zip(rank[strategy].metrics, runs.alone.metrics, strict=True):
            # the absolute part: whitened advantages, of size 1, cancel to a policy loss near zero,
            # and the KL sums up to six differences of log-probs, each rounded by up to 5e-7
            unlike = {
                key: (one[key], value)
                for key, value in other.items()
                if one[key] != pytest.approx(value, rel=TOLERANCE, abs=3e-6)
            }
            assert unlike == {}
    losses = {key for key in runs.alone.metrics[-1] if key.endswith("_loss")}
    assert losses == {f"ppo/{name}_loss" for name in ("policy", "value", "entropy", "ptx")}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_on_two_ranks_follow_those_of_one(runs: Runs, strategy: str) -> None:
    for rank in runs.ranks:
        assert_weights_follow(rank[strategy].state, runs.alone.state)


def assert_weights_follow(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (state[name].double() - tensor.double()).abs().max()
        assert error <= TOLERANCE * tensor.double().abs().max(), name


def test_sharded_weights_follow_on_four_ranks(runs: Runs, root: Path, tmp_path: Path) -> None:
    arguments = [root, tmp_path, ITERATIONS, 4, ("fsdp2",)]
    for rank in run_on_ranks(on_a_rank, 4, tmp_path, *arguments):
        assert_weights_follow(rank["fsdp2"].state, runs.alone.state)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("network", CLIPS)
def test_clip_of_each_network_acts_on_two_ranks_as_on_one(
    runs: Runs, strategy: str, network: str
) -> None:
    parts = [rank[strategy].squares[network] for rank in runs.ranks]
    # under DDP each rank has the whole gradient, under the others its own part of it
    parts = parts[:1] if strategy == "ddp" else parts
    norms = [sum(step) ** 0.5 for step in zip(*parts, strict=True)]
    assert norms == pytest.approx([s**0.5 for s in runs.alone.squares[network]], rel=TOLERANCE)
    clipped = [norm == pytest.approx(CLIPS[network], rel=TOLERANCE) for norm in norms]
    assert sum(clipped) >= 0.9 * len(norms)
    assert max(norms) <= CLIPS[network] * (1 + TOLERANCE)
    before = [m[f"ppo/{network}_grad_norm"] for m in runs.alone.metrics[PRETRAINING:]]
    assert before[0] > 2 * CLIPS[network]


def test_critic_pretraining_leaves_the_policy_exactly_as_it_was(runs: Runs) -> None:
    for run in (runs.alone, *(rank[name] for rank in runs.ranks for name in STRATEGIES)):
        assert run.untouched == [True] * PRETRAINING + [False]
        trained = ITERATIONS - PRETRAINING
        assert run.steps == {"policy": PASSES * trained, "critic": PASSES * ITERATIONS}
