"""The commands that an error names for what a configuration reads and is not there."""

import os
import re
from pathlib import Path

import pytest

from lit_rlhf.cli import configs
from lit_rlhf.cli.preparations import find_preparation


def test_preparation_writes_what_is_read() -> None:
    """In an empty folder: each command finds what the ones before it have written."""
    for name in configs.config_names():
        text = configs.find_config(name).read_text("utf-8")
        if name.startswith(("ablations/", "overlays/")) or name == "quickstart/ppo_vanilla":
            continue
        there: list[str] = []
        advice = find_preparation([str(configs.find_config(name))], text)
        for command in [*filter(None, advice.split(" && ")), f"lit_rlhf fit --config {name}"]:
            read, written = command, re.findall(r"(?:-o|--dest|--output\w*|into) (\S+)", command)
            if command.startswith("lit_rlhf fit"):
                read = configs.find_config(command.split()[-1]).read_text("utf-8")
                written = re.findall(r"output_dir: (\S+)", read)
                read = re.sub(r"(output_dir|save_dir): \S+", "", read)
            elif command.startswith("python -m zipfile"):
                written = [command.split()[-1]]
            named = [p.rstrip(".,:}'") for p in re.findall(r"\b(?:runs|data)/[^\s,}:]+", read)]
            missing = [p for p in named if not any(f"{p}/".startswith(f"{t}/") for t in there)]
            comments = "\n".join(line for line in read.splitlines() if line.startswith("#"))
            commented = re.findall(r"\b(?:runs|data)/\w+", comments)
            assert set(missing) <= {*written, *commented}, (name, command)
            there += written


def test_an_error_about_another_path_has_no_preparation() -> None:
    config = str(configs.find_config("quickstart/sft"))
    assert find_preparation([config], "something else") == ""


@pytest.mark.parametrize("beside", ["latin-1", "dangling", "a folder", "a pipe", "large", "closed"])
def test_advice_reads_nothing_that_it_cannot_use(tmp_path: Path, beside: str) -> None:
    """The error that the advice is for stands, whatever lies beside the configuration."""
    mine = tmp_path / "ppo.yaml"
    mine.write_text("model: {init_args: {model_path: runs/own/sft}}")
    neighbour = tmp_path / "sft.yaml"
    match beside:
        case "latin-1":
            neighbour.write_bytes(b"# M\xfcller\n  output_dir: runs/own/sft\n")
        case "dangling":
            neighbour.symlink_to(tmp_path / "nowhere")
        case "a folder":
            neighbour.mkdir()
        case "a pipe":
            os.mkfifo(neighbour)
        case "large":
            with neighbour.open("wb") as file:
                file.truncate(2**40)
        case "closed":
            neighbour.touch(mode=0)
    os.mkfifo(tmp_path / "others.yaml")
    advice = find_preparation([str(mine)], "got 'runs/own/sft', which is not a folder")
    command = f"lit_rlhf fit --config {neighbour}"
    assert advice == (command if beside == "latin-1" else "")


def test_advice_survives_names_that_no_file_can_have(tmp_path: Path) -> None:
    long = "x" * 300
    mine = tmp_path / "ppo.yaml"
    mine.write_text(f"model:\n  output_dir: {long}\n")
    assert find_preparation([f"{long}.yaml", str(mine)], f"got '{long}'") == ""
    assert configs.resolve_config(f"{long}: 3") == f"{long}: 3"
