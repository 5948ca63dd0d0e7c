"""Configurations by name: `--config quickstart/sft`, and `lit_rlhf configs`."""

from functools import partial
from pathlib import Path

import pytest

from lit_rlhf.cli import configs
from lit_rlhf.command import run_group

main = partial(run_group, configs.COMMANDS, prog="lit_rlhf configs")


def test_each_configuration_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == configs.config_names()
    assert len(lines) == len(list(configs.CONFIGS.rglob("*.yaml")))
    descriptions = dict(line.split(maxsplit=1) for line in lines)
    assert descriptions["ablations/no_value_clip"] == "7. Value loss (Eq. 16) without clipping."


@pytest.mark.parametrize(
    "name", ["quickstart/sft", "quickstart/sft.yaml", "configs/quickstart/sft.yaml"]
)
def test_a_configuration_is_found_in_any_folder(name: str) -> None:
    path = str(configs.CONFIGS / "quickstart/sft.yaml")
    given = ["fit", "--config", name, f"--config={name}", "-c", name, "--config", "{a: 1}"]
    words = ["fit", "--config", path, f"--config={path}", "-c", path, "--config", "{a: 1}"]
    assert configs.resolve_configs(given) == words


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
