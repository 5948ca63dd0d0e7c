"""The three stages on HH-RLHF files, on a CPU, with a small Llama built from a config.

    python -m experiments hh_cpu run FOLDER --output_dir runs/hh

`FOLDER` holds `helpful_base_test.jsonl.gz` and `harmless_base_test.jsonl.gz`. 90 % of the prompts
are for training and 10 % are held out, by the seed. The script runs `lit_rlhf init`, `lit_rlhf fit`
for the three stages, and a report on the reward model with the held-out pairs, beside two baselines
by length only. The same command continues an interrupted run: parts that have ended are kept, and
the part that was interrupted starts anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from experiments.frame import Documents
from experiments.processes import CONFIGS
from lit_rlhf.cli.main import main as lit_rlhf
from lit_rlhf.data import DataSource, load_records, split_records
from lit_rlhf.files import write_json_lines, write_text

RESULT = Path(__file__).with_name("results.json")
FILES = {"helpful": "helpful_base_test.jsonl.gz", "harmless": "harmless_base_test.jsonl.gz"}


def run_once(result: Path, *arguments: str) -> None:
    """Run a command of `lit_rlhf`, unless the file or folder that it ends with exists."""
    if not result.exists():
        lit_rlhf(arguments)


def check_settings(root: Path, settings: Mapping[str, Any]) -> None:
    """Keep the settings of a run, or compare them with the run that is continued.

    Raises:
        ValueError: If they differ.
    """
    file = root / "settings.json"
    if not file.is_file():
        write_text(file, json.dumps(settings))
    elif (saved_settings := json.loads(file.read_text("utf-8"))) != settings:
        raise ValueError(
            f"output_dir: expected a free name, or a run with {settings}, got {root} of a run with "
            f"{saved_settings}"
        )


def length_baselines(held_out: list[Any]) -> dict[str, float]:
    """Accuracy by source of preferring the longer or the shorter response; ties count as half."""
    accuracy: dict[str, float] = {}
    for name in FILES:
        pairs = [r for r in held_out if r.source == name]
        longer = sum(
            1.0 if len(r.chosen) > len(r.rejected) else 0.5 * (len(r.chosen) == len(r.rejected))
            for r in pairs
        )
        accuracy[f"{name}, longer"] = longer / len(pairs)
        accuracy[f"{name}, shorter"] = 1.0 - longer / len(pairs)
    return accuracy


def write_held_out(folder: Path, held_out: list[Any]) -> list[str]:
    """Write the held-out pairs to a file for each source, and return the paths."""
    return [
        str(
            write_json_lines(
                folder / f"{name}.jsonl",
                (
                    {
                        "prompt": [{"role": m.role, "content": m.content} for m in record.prompt],
                        "chosen": record.chosen,
                        "rejected": record.rejected,
                    }
                    for record in held_out
                    if record.source == name
                ),
            )
        )
        for name in FILES
    ]


def read_first_and_last(folder: Path) -> dict[str, float]:
    """Read the first and the last value of every scalar in a run's TensorBoard log."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    values = {key: events.Scalars(key) for key in events.Tags()["scalars"] if "/" in key}
    return {
        f"{key} {when}": round(series[index].value, 4)
        for key, series in sorted(values.items())
        for when, index in (("first", 0), ("last", -1))
    }


def run(data: str, output_dir: str = "runs/hh", seed: int = 0) -> None:
    """Run the three stages on HH-RLHF files.

    Args:
        data: Folder with the HH-RLHF files.
        output_dir: Folder for all files that are written.
        seed: Seed of the split, the weights and the rollouts.
    """
    root = Path(output_dir)
    check_settings(root, {"data": data, "seed": seed})
    sources = [DataSource(f"{data}/{file}", name=name) for name, file in FILES.items()]
    sources_json = json.dumps([{"path": s.path, "name": s.name} for s in sources])
    records = load_records("preference", sources, on_bad_record="skip")
    base = root / "base"
    files = [source.path for source in sources]
    initialize = ["init", "--data", *files, "--output_dir", str(base), "--seed", str(seed)]
    run_once(base, *initialize)
    seeded = {
        "sft": ["--data.seed"],
        "reward": ["--data.seed", "--model.head_seed"],
        "ppo": ["--data.seed", "--model.seed"],
    }
    for stage, flags in seeded.items():
        config = (CONFIGS / stage / "hh_cpu.yaml").read_text("utf-8")
        copy = root / "configs" / f"{stage}.yaml"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(config.replace("runs/hh/", f"{root}/"), "utf-8")
        command = ["fit", "--config", str(copy), "--overwrite"]
        command += ["--data.init_args.train_sources", sources_json]
        command += [word for flag in flags for word in (flag, str(seed))]
        run_once(root / stage, *command, "--seed_everything", str(seed))
    report = {stage: read_first_and_last(root / "logs" / stage) for stage in seeded}
    held_out = split_records(records, val_fraction=0.1, test_fraction=0.0, seed=seed).val
    report["length baselines"] = length_baselines(held_out)
    (root / "report.json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    judge = ["report", "reward", "--model", f"{root}/reward", "--language_model", f"{root}/sft"]
    judge += ["--preferences", *write_held_out(root / "held_out", held_out)]
    run_once(root / "reward_report" / "report.json", *judge, "--output", f"{root}/reward_report")
    plot = ["plot", "--runs", f"PPO-max={root}/logs/ppo", "--output", f"{root}/ppo.png"]
    run_once(root / "ppo.png", *plot)
    print(json.dumps(report, indent=2))


def documents() -> Documents:
    """None: its page was written by hand."""
    return {}


COMMANDS = (run,)
