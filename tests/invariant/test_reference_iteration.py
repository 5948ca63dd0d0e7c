"""An iteration of PPO is what loops over tokens in float64 make of the same responses."""

from pathlib import Path

import pytest

from tests.invariant import reference


@pytest.mark.parametrize("truncation", reference.TRUNCATIONS)
def test_an_iteration_follows_the_reference(root: Path, tmp_path: Path, truncation: str) -> None:
    actual = reference.run_iteration(root, tmp_path, truncation)
    expected = reference.recompute(root, truncation, [actual])
    # every trick acts in this iteration
    assert 0 < expected.logged["ppo/clip_fraction"] < 1
    assert 0 < expected.logged["ppo/value_clip_fraction"] < 1
    assert abs(expected.logged["rollout/kl"]) > 0.01
    assert {sample.ended for sample in actual.samples} == {True, False}
    reference.assert_follows_reference(actual, expected)
