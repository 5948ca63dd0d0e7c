"""Returns and values by position: measures by hand, and a figure of made-up results."""

import pytest
import torch

from experiments.critic_positions import study as critic_positions
from experiments.critic_positions.study import (
    ARMS,
    PHASES,
    SEEDS,
    draw,
    format_tables,
    measure,
)


def test_measures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critic_positions, "LEAST", 3)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]])
    returns = torch.tensor([[1.0, 3, 9], [2, 6, 0], [3, 0, 0], [6, 7, 0]])
    values = torch.tensor([[2.0, 4, 9], [3, 7, 0], [4, 1, 0], [7, 0, 0]])
    values[3, 0] = 5
    first, second = measure(returns, values, mask)  # one response reaches the third
    assert (first["responses"], first["return"], first["value"]) == (4, 3.0, 3.5)
    # errors -1, -1, -1 and 1 have the variance 1, returns 14/3
    assert first["explained_variance"] == pytest.approx(1 - 3 / 14, abs=1e-4)
    # errors are -1 throughout: a constant offset explains all
    assert second == {"responses": 3, "return": 3.0, "value": 4.0, "explained_variance": 1.0}


def test_figure_and_tables_have_every_arm() -> None:
    row = {"responses": 60, "return": 1.0, "value": 0.5, "explained_variance": 0.3}
    results = {
        f"{arm}-seed_{seed}": {phase: [row] * (3 + place) for phase in PHASES}
        for place, seed in enumerate(SEEDS)
        for arm in ARMS
    }
    axes = draw(results).axes
    titles = [axis.get_title(loc="left") for axis in axes[1:]]
    assert titles == [f"{label}: variance explained" for label in ARMS.values()]
    assert axes[1].get_legend_handles_labels()[1][0] == "iterations 6 to 20"
    assert format_tables(results).count("| 3 | 1.00 | 0.50 | 0.30 |") == len(ARMS)
    assert "| 4 |" not in format_tables(results)  # one seed has three tokens
