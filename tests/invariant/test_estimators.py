"""An update without a critic is what loops over responses in float64 make of the same ones."""

from pathlib import Path

import pytest

from tests.invariant.estimators import RECIPES, assert_follows, recompute_step, run_step


@pytest.mark.parametrize("truncation", ["terminal", "mask"])
@pytest.mark.parametrize("estimator", RECIPES)
def test_update_by_equations(root: Path, tmp_path: Path, estimator: str, truncation: str) -> None:
    step = run_step(root, tmp_path, estimator, truncation)
    # groups are ragged where responses that were cut off are left out
    ended = [sample.ended for sample in step.samples]
    assert {sum(ended[i : i + 3]) for i in range(0, len(ended), 3)} == {1, 2}
    assert_follows(step, recompute_step(root, estimator, truncation, [step]))
    assert not [key for key in step.logged if "critic" in key or "value" in key]
    assert "ppo/explained_variance" not in step.logged
    assert not (tmp_path / "model" / "critic").exists()
