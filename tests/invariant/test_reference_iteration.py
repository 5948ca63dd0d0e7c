"""An iteration of PPO is what loops over tokens in float64 make of the same responses."""

from pathlib import Path

import pytest

from tests.support import reference_iteration
from tests.support.reference_estimators import RECIPES, assert_follows, recompute_step, run_step


@pytest.mark.parametrize(
    ("truncation", "folder"),
    [*((way, "root") for way in reference_iteration.TRUNCATIONS), ("terminal", "pad_is_eos_root")],
)
def test_an_iteration_follows_the_reference(
    request: pytest.FixtureRequest, tmp_path: Path, truncation: str, folder: str
) -> None:
    root = request.getfixturevalue(folder)
    actual = reference_iteration.run_iteration(root, tmp_path, truncation)
    expected = reference_iteration.recompute(root, truncation, [actual])
    # every trick acts in this iteration
    assert 0 < expected.logged["ppo/clip_fraction"] < 1
    assert 0 < expected.logged["ppo/value_clip_fraction"] < 1
    assert abs(expected.logged["rollout/kl"]) > 0.01
    assert expected.logged["ppo/policy_grad_norm"] > reference_iteration.POLICY["grad_clip"]
    assert expected.logged["ppo/critic_grad_norm"] > reference_iteration.CRITIC["grad_clip"]
    assert {sample.ended for sample in actual.samples} == {True, False}
    reference_iteration.assert_follows_reference(actual, expected)


@pytest.mark.parametrize("truncation", ["terminal", "mask"])
@pytest.mark.parametrize("estimator", RECIPES)
def test_update_follows_the_equations(
    root: Path, tmp_path: Path, estimator: str, truncation: str
) -> None:
    step = run_step(root, tmp_path, estimator, truncation)
    # groups are ragged where responses that were cut off are left out
    ended = [sample.ended for sample in step.samples]
    assert {sum(ended[i : i + 3]) for i in range(0, len(ended), 3)} == {1, 2}
    assert_follows(step, recompute_step(root, estimator, truncation, [step]))
    assert not [key for key in step.logged if "critic" in key or "value" in key]
    assert "ppo/explained_variance" not in step.logged
    assert not (tmp_path / "model" / "critic").exists()
