"""Configurations by name: `--config quickstart/sft`, and `lit_rlhf configs`."""

import re
from functools import partial
from pathlib import Path

import pytest

from lit_rlhf.cli import configs
from lit_rlhf.cli.errors import end_with_message
from lit_rlhf.command import run_group

main = partial(run_group, configs.COMMANDS, prog="lit_rlhf configs")


def test_each_configuration_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == configs.config_names()
    assert len(lines) == len(list(configs.CONFIGS.rglob("*.yaml")))
    told = dict(line.split(maxsplit=1) for line in lines)
    assert told["ablations/no_value_clip"] == "7. Value loss (Eq. 16) without clipping."


@pytest.mark.parametrize(
    "name", ["quickstart/sft", "quickstart/sft.yaml", "configs/quickstart/sft.yaml"]
)
def test_a_configuration_is_found_in_any_folder(name: str) -> None:
    path = str(configs.CONFIGS / "quickstart/sft.yaml")
    given = ["fit", "--config", name, f"--config={name}", "-c", name, "--config", "{a: 1}"]
    found = ["fit", "--config", path, f"--config={path}", "-c", path, "--config", "{a: 1}"]
    assert configs.resolve_configs(given) == found


def test_a_file_of_ones_own_wins() -> None:
    mine = Path("configs/quickstart/sft.yaml")
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert configs.resolve_configs(["--config", str(mine)]) == ["--config", str(mine)]


def test_the_nearest_name_is_proposed() -> None:
    with pytest.raises(ValueError, match="'quickstart/ppo_mx'; did you mean quickstart/ppo_max\\?"):
        configs.find_config("quickstart/ppo_mx")


def test_copies_are_not_overwritten(tmp_path: Path) -> None:
    main(["copy", "quickstart/sft", "overlays/bf16"])
    copy = tmp_path / "configs/quickstart/sft.yaml"
    assert copy.read_bytes() == (configs.CONFIGS / "quickstart/sft.yaml").read_bytes()
    assert (tmp_path / "configs/overlays/bf16.yaml").is_file()
    copy.write_text("mine: 1\n")
    with pytest.raises(SystemExit, match=r"sft\.yaml exists already; --overwrite"):
        main(["copy", "quickstart/sft"])
    assert copy.read_text() == "mine: 1\n"
    main(["copy", "quickstart/sft", "--overwrite", "true"])
    assert copy.read_text() != "mine: 1\n"


def test_preparation_writes_what_is_read() -> None:
    """In an empty folder: each command finds what the ones before it have written."""
    for name in configs.config_names():
        text = configs.find_config(name).read_text("utf-8")
        if name.startswith(("ablations/", "overlays/")) or name == "quickstart/ppo_vanilla":
            continue
        there: list[str] = []
        advice = configs.find_preparation([str(configs.find_config(name))], text)
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


def test_error_names_key_and_preparation() -> None:
    found = str(configs.find_config("quickstart/sft"))
    error = ValueError("path: expected a model, got 'runs/quickstart/world/base'")
    with pytest.raises(SystemExit) as ended:
        end_with_message(error, "lit_rlhf fit: error", ["fit", "--config", found])
    assert str(ended.value) == (
        "lit_rlhf fit: error: model.model_path: expected a model, got 'runs/quickstart/world/base'"
        "; this prepares it: lit_rlhf lab world --output_dir runs/quickstart/world"
    )
    assert configs.find_preparation([found], "something else") == ""
