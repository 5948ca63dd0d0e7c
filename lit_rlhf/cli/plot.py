"""`lit_rlhf plot`: how PPO runs went, as one figure."""

from __future__ import annotations

from collections.abc import Sequence

from lit_rlhf.cli.command import run_command

RUNS_HELP = (
    "Runs as NAME=FOLDER; the folder holds TensorBoard event files. The name goes into the legend."
)


def plot(
    runs: list[str],
    output: str = "collapse.png",
    keys: list[str] | None = None,
    baseline: dict[str, float] | None = None,
) -> None:
    """Draw score, KL, length, perplexity and so on of PPO runs over their iterations.

    Args:
        runs: Runs as NAME=FOLDER.
        output: Where the figure goes; its suffix is its format, for instance .png or .svg.
        keys: Metrics to draw, for instance [rollout/score, ppo/policy_loss]. Default: the six that
            tell a collapse, as far as the runs have them.
        baseline: Level of the SFT policy by metric, drawn as a dashed line, for instance
            {rollout/gold: 0.66}.
    """
    from lit_rlhf.evaluation import run_figure, save_figure

    figure = run_figure(parse_runs(runs), keys, baseline)
    print(f"Figure: {save_figure(figure, output)}")


def parse_runs(runs: Sequence[str]) -> dict[str, str]:
    """Parse runs given as NAME=FOLDER.

    Returns:
        Folder by name.

    Raises:
        ValueError: If a run is not NAME=FOLDER, or two have one name.
    """
    pairs = [run.partition("=") for run in runs]
    named = {name: folder for name, _, folder in pairs}
    if not all(name and folder for name, folder in named.items()) or len(named) < len(runs):
        raise ValueError(f"runs: expected NAME=FOLDER with different names, got {' '.join(runs)}")
    return named


def main(argv: Sequence[str]) -> None:
    """Entry point of `lit_rlhf plot`."""
    run_command(plot, argv, "lit_rlhf plot", lists={"runs": RUNS_HELP})
