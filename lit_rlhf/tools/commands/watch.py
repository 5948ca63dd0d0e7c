"""`lit_rlhf watch`: judges the logs of any trainer for a collapse."""

from lit_rlhf.command import Command

TROUBLED = 1
"""Exit status if a run collapsed."""
ERROR = 2
"""Exit status after an error, for instance of a log that cannot be read."""


def watch(
    logs: list[str],
    map: dict[str, str] | None = None,
    follow: float = 0.0,
    votes: int = 2,
    responses: int = 0,
    *,
    preset: str = "chat",
    healthy: list[str] | None = None,
) -> None:
    """Judge the logs of training runs, and print each change of a verdict.

    The metrics of TRL, LLaMA-Factory, OpenRLHF, verl, NeMo-RL, slime and prime-rl are recognized by
    their names. The exit status is 0 if no run collapsed, 1 if one did, and 2 after an error.

    Args:
        logs: Folders of runs, folders of such folders, or files (.csv, .tsv, .jsonl, .json, .log,
            .wandb), before all flags even without --logs. A table may be the export of a panel of
            Weights & Biases, or of a curve of TensorBoard; a .json may be a trainer_state.json; and
            a .log may be what verl printed.
        map: Names of metrics in the log by the keys that are watched, for example
            {rollout/kl: my/kl}.
        follow: Seconds between two looks for new steps, until Ctrl-C; 0 reads the logs once.
        votes: Number of different signals that make a collapse.
        responses: Number of responses of a step, from which the noise of its metrics follows.
        preset: Task that the thresholds are meant for: chat, short answers or checkable reward.
        healthy: Logs of runs that you call healthy. Thresholds are loosened so that none of these
            runs is flagged, and what changed is printed.
    """
    from lit_callbacks.logs import watch_logs
    from lit_callbacks.monitors import Level

    levels = watch_logs(
        logs,
        names=map,
        votes=votes,
        responses=responses,
        follow=follow,
        preset=preset,
        healthy=healthy or (),
    )
    if Level.COLLAPSED in levels.values():
        raise SystemExit(TROUBLED)


COMMAND = Command(watch, lists=("logs", "healthy"), first="logs", error_status=ERROR)
