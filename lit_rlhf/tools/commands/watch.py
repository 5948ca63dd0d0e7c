"""`lit_rlhf watch`: judges the logs of any trainer for a collapse."""

from lit_rlhf.command import Command


def watch(
    logs: list[str],
    map: dict[str, str] | None = None,
    follow: float = 0.0,
    votes: int = 2,
    responses: int = 0,
) -> None:
    """Judge the logs of training runs, and print each change of a verdict.

    The names of TRL, OpenRLHF and verl are recognized. The exit status is 1 if a run collapsed.

    Args:
        logs: Folders of runs, or files (.csv, .jsonl, trainer_state.json, .wandb), before all flags
            even without --logs.
        map: Names of metrics in the log by the keys that are watched, for example
            {rollout/kl: my/kl}.
        follow: Seconds between two looks for new steps, until Ctrl-C; 0 reads the logs once.
        votes: Number of different signals that make a collapse.
        responses: Number of responses of a step, from which the noise of its metrics follows.
    """
    from lit_callbacks.logs import watch_logs
    from lit_callbacks.monitors import Level

    if Level.COLLAPSED in watch_logs(logs, map, votes, responses, follow).values():
        raise SystemExit(1)


COMMAND = Command(watch, lists=("logs",), first="logs")
