"""`lit_rlhf start`: configurations of the stages for one's own data, and a look at its records."""

from contextlib import nullcontext
from pathlib import Path

from lit_rlhf.command import Command
from lit_rlhf.paths import check_inputs


def start(
    data: str,
    model: str | None = None,
    output_dir: str | None = None,
    *,
    columns: dict[str, str] | None = None,
    map: str | None = None,
    max_length: int | None = None,
) -> None:
    """Write configurations of the stages for your own data, and show how its records are read.

    Without a model it makes one from your text that is small enough for a CPU, for a trial.

    Args:
        data: A file of preferences, demonstrations or plain text, in any format of docs/data.md, or
            a dataset.
        model: Folder or hub id of a causal language model; default: a small one from your text.
        output_dir: Folder for the configurations and all that they write: a free name. Default:
            runs/ and the name of the data.
        columns: The data's own names of columns, by the names that formats read, for example
            '{prompt: question, chosen: better, rejected: worse}'.
        map: package.module:function of a function that turns a row, a dict, into fields that
            formats read.
        max_length: Longest dialogue of all stages, in tokens. Default: what 99 % of the data need,
            at most the model's positions.
    """
    if output_dir is not None and Path(output_dir).exists():
        raise ValueError(f"output_dir: expected a free name, got {output_dir}, which exists")
    check_inputs({"model": model}, [data])
    # imports torch, for which --help does not wait
    from lit_rlhf.cli.own_data import write_configs_for
    from lit_rlhf.data import DataSource
    from lit_rlhf.files import lock_outputs

    source = DataSource(data, columns=columns, map=map)
    root = Path(output_dir or f"runs/{Path(source.label).name}")
    # a folder that is named has been locked by the command
    with nullcontext() if output_dir else lock_outputs([root]):
        write_configs_for(source, model, root, max_length=max_length)


COMMAND = Command(start, words=("data", "model"), writes=("output_dir",))
