"""A number that is not finite on one rank of two skips the update on both."""

from typing import Any

import pytest
import torch

from tests.support.fault_runs import STRATEGIES, on_a_rank
from tests.support.ranks import run_on_ranks
from tests.support.stages import assert_equal_states, distance, write_data, write_models

pytestmark = pytest.mark.slow

STAGES = {
    "sft": "the model skipped at epoch 0, batch 1: non-finite: sft/loss",
    "reward": "the model skipped at epoch 0, batch 1: non-finite: reward/loss",
    "critic": "the critic skipped at iteration 2, minibatch 1: non-finite: ppo/value_loss",
    "log-probs": "policy and critic skipped at iteration 2: non-finite: log-probs of the policy",
}
COUNTERS = ("iteration", "ppo_step")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    root = write_models(write_data(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        return run_on_ranks(on_a_rank, 2, folder, root, folder)


def of_the_faulty(state: dict[str, Any], stage: str) -> dict[str, Any]:
    """What the fault must not touch: the critic, or everything but counters."""
    if stage == "critic":
        return {key: value for key, value in state.items() if key.startswith("critic.")}
    return {key: value for key, value in state.items() if key not in COUNTERS}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_ranks_skip_and_go_on(ranks: list[dict[str, Any]], strategy: str, stage: str) -> None:
    for rank in ranks:
        run = rank[f"{strategy} {stage}"]
        before, at, after = (of_the_faulty(state, stage) for state in run["states"][:3])
        assert_equal_states(at, before)
        assert distance(after, at) > 0
        network = 1 if stage == "critic" else 0
        moments = [step[network] for step in run["moments"]]
        torch.testing.assert_close(moments[1], moments[0], rtol=0, atol=0)
        assert len(moments[0]) > 0
        assert run["skipped"] == [0.0, 1.0] + [0.0] * (len(run["states"]) - 2)
    assert_equal_states(*(rank[f"{strategy} {stage}"]["states"][-1] for rank in ranks))
    # rank 0 tells how many
    (warning,) = ranks[0][f"{strategy} {stage}"]["warnings"]
    message = f"update of {STAGES[stage]} (on 1 of 2 ranks). Weights and moments are as"
    assert warning.startswith(message)
    assert ranks[1][f"{strategy} {stage}"]["warnings"] == []
