import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from lit_rlhf.command import run_group
from lit_rlhf.data import DataSource, load_records
from lit_rlhf.tools.commands.lab import COMMANDS, sample_preferences
from lit_rlhf.tools.lab import WORLDS, World, read_world
from tests.support.evaluation_folders import Sampling, assert_continued, read_lines, write_policy
from tests.support.stages import content

main = partial(run_group, COMMANDS, prog="lit_rlhf lab")
SIZES = ("--n_demonstrations", "8", "--n_train_prompts", "6", "--n_heldout_prompts", "4")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small world with an untrained policy in `base`; read only."""
    folder = tmp_path_factory.mktemp("lab") / "world"
    main(["world", "--output_dir", str(folder), "--seed", "3", *SIZES, "--n_texts", "2"])
    return folder


def preferences(world: Path, output: Path) -> list[str]:
    """The command for seven pairs."""
    return [
        *("preferences", "--policy", str(world / "base"), "--world", str(world), "--pairs", "7"),
        *("--output", str(output), "--max_new_tokens", "4", "--device", "cpu"),
        *("--batch_size", "2"),
    ]


def sampled(world: Path, pairs: int, seed: int = 0) -> list[dict[str, str]]:
    few = {"max_new_tokens": 4, "batch_size": 3, "device": "cpu"}
    with TemporaryDirectory() as folder:
        output = f"{folder}/pairs.jsonl"
        return sample_preferences(
            str(world / "base"), str(world), output, pairs=pairs, seed=seed, **few
        )


def test_a_world_has_the_sizes_asked_for(world: Path) -> None:
    lengths = {path.stem: len(read_lines(path)) for path in world.glob("*.jsonl")}
    assert lengths == {"demonstrations": 8, "prompts_train": 6, "prompts_heldout": 4, "text": 2}
    assert (world / "base" / "model.safetensors").is_file()
    assert read_world(world) == World(language="en")
    assert json.loads((world / "world.json").read_text("utf-8"))["seed"] == 3


def test_another_world_is_not_replaced(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world, tmp_path / "w")
    before = content(tmp_path)
    words = ["world", "--output_dir", str(tmp_path / "w"), *SIZES, "--n_texts", "2"]
    for other in (["--seed", "4"], ["--seed", "3", "--world", "extrapolation"]):
        with pytest.raises(SystemExit, match="holds a world with another seed or other settings"):
            main([*words, *other])
    main([*words, "--seed", "3"])  # as after an interruption
    assert content(tmp_path) == before


def test_world_has_name_and_language(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--world", "extrapolation", "--language", "zh", *SIZES, "--n_texts", "1")
    main(["world", "--output_dir", str(tmp_path), *flags])
    assert read_world(tmp_path) == replace(WORLDS["extrapolation"], language="zh")
    assert "World 'extrapolation' in" in capsys.readouterr().out
    text = read_lines(tmp_path / "prompts_train.jsonl")[0]["prompt"][0]["content"]
    assert any("\u4e00" <= character <= "\u9fff" for character in text)


def test_pairs_share_a_prompt_of_the_training_side_each_used_before_one_comes_again(
    world: Path,
) -> None:
    prompts = load_records("prompt", [DataSource(str(world / "prompts_train.jsonl"))])
    asked = []
    for record in sampled(world, 12, seed=1):
        chosen, rejected = (record[key].rpartition("\n\nAssistant:") for key in sorted(record))
        assert chosen[0] == rejected[0]
        assert chosen[2] != rejected[2]
        asked.append(chosen[0].rpartition("\n\nHuman: ")[2])
    known = sorted(record.prompt[-1].content for record in prompts)  # type: ignore[union-attr]
    assert sorted(asked[:6]) == sorted(asked[6:]) == known
    assert asked[:6] != asked[6:]


def test_the_seed_repeats_the_preferences(world: Path) -> None:
    first = sampled(world, pairs=4, seed=1)
    assert sampled(world, pairs=4, seed=1) == first
    assert sampled(world, pairs=4, seed=2) != first


def test_interrupted_preferences_continue_where_they_were(world: Path, tmp_path: Path) -> None:
    def run(output: str, last: int | None = None) -> int:
        sampling = Sampling(last)
        with patch("lit_rlhf.tools.evaluation.sampling.generate_responses", sampling):
            main(preferences(world, folder / output))
        return sampling.n_batches

    folder = tmp_path / "new"
    n_batches = run("whole.jsonl")
    # a record that cannot be used would raise
    assert len(load_records("preference", [DataSource(str(folder / "whole.jsonl"))])) == 7
    with pytest.raises(KeyboardInterrupt):
        run("out.jsonl", last=n_batches - 1)
    assert not (folder / "out.jsonl").exists()
    assert run("out.jsonl") == 1
    assert_continued(folder)


def test_a_world_that_is_not_complete_or_of_another_version_is_none(tmp_path: Path) -> None:
    main(["world", "--output_dir", str(tmp_path), *SIZES, "--n_texts", "1"])
    stops = patch("lit_rlhf.tools.lab.world_folder.write_base_model", side_effect=KeyboardInterrupt)
    with stops, pytest.raises(KeyboardInterrupt):
        main(["world", "--output_dir", str(tmp_path), *SIZES, "--n_texts", "1"])
    with pytest.raises(ValueError, match="expected a folder that `lit_rlhf lab world` wrote"):
        read_world(tmp_path)
    (tmp_path / "world.json").write_text('{"world": {"color": "red"}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"world: expected a world of this version in .*color"):
        read_world(tmp_path)


def test_equal_responses_are_replaced_until_a_policy_is_given_up(world: Path) -> None:
    second, n_prompts = ["copper.", "iron.", "zinc."], []

    def sample(*arguments: Any, **_: object) -> list[dict[str, Any]]:
        places = range(len(arguments[2]))
        n_prompts.append(len(places))
        pairs = [("iron.", second[place % 3], True, True) for place in places]
        return [{"positions": list(places), "pairs": pairs}]

    with patch("lit_rlhf.tools.evaluation.sampling.sample_batches", sample):
        assert len(sampled(world, pairs=9)) == 9
        assert n_prompts == [9, 3, 1]
        second[:] = ["iron."] * 3
        with pytest.raises(ValueError, match="whose responses differ, got 0 usable pairs of 40"):
            sampled(world, pairs=2)


def test_a_policy_that_cuts_the_prompts_is_refused(world: Path, tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy", max_length=16)
    with pytest.raises(ValueError, match=r"takes the world's prompts whole, got .* 16 tokens"):
        sample_preferences(policy, str(world), str(tmp_path / "pairs.jsonl"), pairs=2)


@pytest.mark.parametrize("name", ["text.jsonl", "base"])
def test_world_replaces_no_file_of_the_user(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(SystemExit, match=rf"expected a new folder, .* whose {name} is not of a"):
        COMMANDS["world"].run(["--output_dir", str(tmp_path), *SIZES], "lit_rlhf lab world")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_world_that_was_interrupted_is_written_again(tmp_path: Path) -> None:
    words = ["world", "--output_dir", str(tmp_path), *SIZES, "--n_texts", "1"]
    stops = patch("lit_rlhf.tools.lab.world_folder.write_base_model", side_effect=KeyboardInterrupt)
    with stops, pytest.raises(KeyboardInterrupt):
        main(words)
    main(words)
    assert read_world(tmp_path) == WORLDS["biased"]
    assert not list(tmp_path.glob(".*"))


def test_base_model_is_not_written_where_a_link_leads(tmp_path: Path) -> None:
    world = tmp_path / "world"
    main(["world", "--output_dir", str(world), *SIZES])
    (tmp_path / "theirs").write_text("kept")
    (world / "base/config.json").unlink()
    (world / "base/config.json").symlink_to(tmp_path / "theirs")
    main(["world", "--output_dir", str(world), *SIZES])
    assert (tmp_path / "theirs").read_text() == "kept"


def test_number_of_records_that_is_none_is_refused(tmp_path: Path) -> None:
    for name in ("n_demonstrations", "n_train_prompts", "n_heldout_prompts", "n_texts"):
        with pytest.raises(ValueError, match=rf"{name}: expected an integer >= [01], got -1"):
            COMMANDS["world"].function(str(tmp_path / "w"), **{name: -1})
