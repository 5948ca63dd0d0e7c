"""Active labelling: how much reward models disagree on a comparison."""

from dataclasses import replace

import pytest
import torch

from lit_rlhf.tools.evaluation.people import PairScorer
from lit_rlhf.tools.labelling import order_comparisons
from lit_rlhf.tools.labelling.spread import difference_spreads
from tests.support.evaluation_folders import Folders, write_reward
from tests.support.labelling import make_comparisons

COMPARISONS = make_comparisons(5)


@pytest.fixture(scope="module")
def rewards(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A reward model, the same one again, and one on another trunk."""
    folder = tmp_path_factory.mktemp("rewards")
    return {
        "first": folders.reward,
        "same": write_reward(folder / "same", folders.copy),
        "other": write_reward(folder / "other", folders.ppo),
    }


def test_models_that_agree_have_no_spread(rewards: dict[str, str]) -> None:
    spreads = difference_spreads(COMPARISONS, [rewards["first"], rewards["same"]])
    assert spreads == pytest.approx([0.0] * 5, abs=1e-9)


def test_spread_is_the_deviation_of_scaled_differences(rewards: dict[str, str]) -> None:
    models = [rewards["first"], rewards["other"]]
    differences = []
    for model in models:
        scores = PairScorer({model: 1.0}).score(COMPARISONS, "scores").total.double()
        difference = scores[5:] - scores[:5]
        differences.append(difference / difference.square().mean().sqrt())
    # the deviation of two numbers is half of their distance
    expected = (differences[0] - differences[1]).abs() / 2
    spreads = difference_spreads(COMPARISONS, models)
    torch.testing.assert_close(torch.tensor(spreads, dtype=torch.float64), expected)
    swapped = [
        replace(one, response_a=one.response_b, response_b=one.response_a) for one in COMPARISONS
    ]
    assert difference_spreads(swapped, models) == pytest.approx(spreads, rel=1e-4)
    order = order_comparisons(COMPARISONS, seed=0, spreads=spreads, random_share=0.0)
    assert order[0].spread == max(spreads)


def test_one_head_cannot_disagree(rewards: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected two or more reward models"):
        difference_spreads(COMPARISONS, [rewards["first"]])
