"""`lit_rlhf plot`: a figure of the course of PPO runs."""

from collections.abc import Sequence
from pathlib import Path

from lit_rlhf.command import Command

_RUNS_HELP = (
    "Runs as FOLDER or NAME=FOLDER, before all flags even without --runs; it is the folder of a "
    "TensorBoardLogger or CSVLogger. The name, by default the folder's, goes into the legend."
)


def plot(
    runs: list[str],
    output: str = "collapse.png",
    keys: list[str] | None = None,
    baseline: dict[str, float] | None = None,
) -> None:
    """Draw metrics of PPO runs over their iterations: score, KL, length, perplexity and so on.

    Args:
        runs: Runs as FOLDER or NAME=FOLDER.
        output: Path of the figure; its suffix is the format, for example .png or .svg.
        keys: Metrics to draw, for example [rollout/score, ppo/policy_loss]. Default: the six that
            show a collapse, as far as the runs have them.
        baseline: Value of the SFT policy by metric, drawn as a dashed line, for example
            {rollout/gold: 0.66}.
    """
    from lit_rlhf.tools.evaluation import run_figure, save_figure

    figure = run_figure(parse_runs(runs), keys, baseline)
    print(f"Figure: {save_figure(figure, output)}")


def parse_runs(runs: Sequence[str]) -> dict[str, str]:
    """Parse runs given as FOLDER or NAME=FOLDER into folders by name."""
    named: dict[str, str] = {}
    for run in runs:
        name, sign, folder = run.partition("=")
        if not sign or Path(run).exists():
            name, folder = Path(run).name, run
        named[name] = folder
    if not all(name and folder for name, folder in named.items()) or len(named) < len(runs):
        raise ValueError(
            f"runs: expected FOLDER or NAME=FOLDER with different names, got {' '.join(runs)}"
        )
    return named


COMMAND = Command(plot, lists={"runs": _RUNS_HELP}, first="runs")


def main(argv: Sequence[str]) -> None:
    """Run `lit_rlhf plot`."""
    COMMAND.run(argv, "lit_rlhf plot")
