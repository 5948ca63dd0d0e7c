"""`lit_rlhf reward`: strengths by cross-fitted models, and labels corrected by them."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_rlhf.cli.main import main
from lit_rlhf.data import DataSource, PreferenceRecord, load_records
from lit_rlhf.tools.commands import quickstart, reward
from lit_rlhf.tools.commands.reward import COMMANDS, assign_folds, relabel
from lit_rlhf.tools.evaluation.reward_report.scores import ScoredPairs
from tests.support.evaluation_folders import assert_continued, read_lines, refusal, write_lines
from tests.support.tiny_runs import QUICKSTART, SMALL, overlay, run, world_root

strength = partial(COMMANDS["strength"].run, prog="lit_rlhf reward strength")
PAIRS = [
    {"prompt": "a", "chosen": "one", "rejected": "three"},
    {"prompt": "b", "chosen": "eleven", "rejected": "two"},
    {"prompt": "a", "chosen": "three", "rejected": "one"},
    {"prompt": "c", "chosen": "four", "rejected": "nine", "margin": 0.5},
    {"prompt": "d", "chosen": "seven", "rejected": "no"},
    {"prompt": "e", "chosen": "ten", "rejected": "fourteen"},
]
TOO_LONG = "x" * 100


class Models:
    """Reward models that are not trained: the n-th scores n points per character.

    They stand in for the fit and the scoring, and keep the pairs of both.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interrupted: int | None = None) -> None:
        self.trained: list[set[tuple[str, str]]] = []
        self.scored: list[list[PreferenceRecord]] = []
        self.interrupted = interrupted
        monkeypatch.setattr(reward, "fit_reward_model", self.fit)
        monkeypatch.setattr("lit_rlhf.tools.evaluation.reward_report.score_pairs", self.score)

    def fit(
        self, model: str, rows: Sequence[Any], configs: Sequence[str], folder: str, seed: int
    ) -> str:
        if len(self.trained) == self.interrupted:
            raise KeyboardInterrupt
        Path(folder, "weights").write_text("large", "utf-8")
        self.trained.append({(row["prompt"][0]["content"], row["chosen"]) for row in rows})
        return str(seed + 1)

    def score(self, model: str, sources: Sequence[DataSource], device: object) -> ScoredPairs:
        records = load_records("preference", sources)
        self.scored.append(records)
        records = [record for record in records if record.chosen != TOO_LONG]
        points, none = float(model), np.zeros(len(records), dtype=np.int64)
        chosen = np.array([points * len(record.chosen) for record in records])
        rejected = np.array([points * len(record.rejected) for record in records])
        return ScoredPairs(records[::-1], chosen[::-1], rejected[::-1], none, none)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Arguments that measure the pairs in three folds and write `out.jsonl`."""
    pairs = write_lines(tmp_path / "data" / "pairs.jsonl", PAIRS)
    words = ["--model", "sft", "--preferences", pairs, "--fit_config", "quickstart/reward"]
    return [*words, "--folds", "3", "--output", str(tmp_path / "made" / "out.jsonl")]


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()


def test_no_model_scores_what_it_was_trained_on(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(monkeypatch)
    strength([*arguments, "--repeats", "2"])
    assert len(models.trained) == len(models.scored) == 6
    for trained, scored in zip(models.trained, models.scored, strict=True):
        prompts = {record.prompt[0].content for record in scored}
        assert prompts
        assert prompts.isdisjoint(prompt for prompt, _ in trained)
        assert len(trained) + len(scored) == len(PAIRS)
    times = Counter((r.prompt[0].content, r.chosen) for part in models.scored for r in part)
    assert sorted(times.values()) == [2] * len(PAIRS)
    parts = [{record.prompt[0].content for record in part} for part in models.scored]
    assert parts[:3] != parts[3:]  # another division


def test_a_single_fold_is_the_papers_ensemble(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(monkeypatch)
    strength([*arguments, "--folds", "1", "--repeats", "2"])
    pairs = {(pair["prompt"], pair["chosen"]) for pair in PAIRS}
    assert models.trained == [pairs, pairs]
    assert [len(part) for part in models.scored] == [len(PAIRS)] * 2


def test_strength_is_mean_and_deviation_over_the_models(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    models = Models(monkeypatch)
    strength([*arguments, "--repeats", "2", "--seed", "4"])
    rows = read_lines(tmp_path / "made" / "out.jsonl")
    assert [(row["chosen"], row["rejected"]) for row in rows] == [
        (pair["chosen"], pair["rejected"]) for pair in PAIRS
    ]
    for row in rows:
        points = [  # one for each model that scored the pair: seeds 4, 5, ...
            5 + number
            for number, part in enumerate(models.scored)
            if any((r.chosen, r.rejected) == (row["chosen"], row["rejected"]) for r in part)
        ]
        differences = [n * (len(row["chosen"]) - len(row["rejected"])) for n in points]
        assert row["strength"] == pytest.approx(statistics.fmean(differences))
        assert row["strength_std"] == pytest.approx(statistics.pstdev(differences))
    assert rows[3] == {
        "prompt": [{"role": "user", "content": "c"}],
        **{"chosen": "four", "rejected": "nine", "margin": 0.5},
        **{"source": "pairs", "location": f"{tmp_path}/data/pairs.jsonl:4"},
        **{"strength": 0.0, "strength_std": 0.0},
    }
    printed = capsys.readouterr().out
    assert "33.3%" in printed  # the first and the last pair of six
    weakest = printed.partition("Weakest")[2]
    assert weakest.index("pairs.jsonl:6") < weakest.index("pairs.jsonl:2")


def test_one_model_has_no_deviation_and_long_pairs_no_strength(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    Models(monkeypatch)
    long = {"prompt": "f", "chosen": TOO_LONG, "rejected": "no"}
    write_lines(tmp_path / "data" / "pairs.jsonl", [PAIRS[1], long, *PAIRS[3:]])
    strength(arguments)
    rows = read_lines(tmp_path / "made" / "out.jsonl")
    assert [row["chosen"] for row in rows] == ["eleven", "four", "seven", "ten"]
    assert {row["strength_std"] for row in rows} == {None}
    assert "; 1 too long for the model" in capsys.readouterr().out


def test_interrupted_command_continues(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uninterrupted = tmp_path / "made"
    Models(monkeypatch)
    strength([*arguments, "--output", str(uninterrupted / "whole.jsonl")])
    models = Models(monkeypatch, interrupted=2)
    with pytest.raises(KeyboardInterrupt):
        strength(arguments)
    assert len(models.trained) == 2
    assert {path.name for path in uninterrupted.glob("*out*")} == {"out.jsonl.partial"}
    assert not list(uninterrupted.glob(".*.models"))  # no model of many gigabytes
    killed = uninterrupted / ".out.jsonl.models" / "reward"  # which a killed command has left
    killed.mkdir(parents=True)
    (killed / "model.safetensors").touch()
    assert "another value of folds" in refusal(strength, [*arguments, "--folds", "2"])
    models = Models(monkeypatch)
    strength(arguments)
    assert len(models.trained) == 1
    assert_continued(uninterrupted)


def test_pairs_with_one_prompt_are_in_one_fold() -> None:
    folds = assign_folds(list("abcdaeabb"), folds=3, seed=1)
    assert folds[0] == folds[4] == folds[6]
    assert folds[1] == folds[7] == folds[8]
    assert sorted(Counter([*folds[:4], folds[5]]).values()) == [1, 2, 2]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["--folds", "0"], "folds: expected an integer >= 1, got 0"),
        (["--folds", "6"], "folds: expected at most 5, one per prompt, got 6"),
        (["--repeats", "0"], "repeats: expected an integer >= 1, got 0"),
        (["--fit_config", "quickstart/rewards"], "'quickstart/rewards'"),
        (["--preferences", "missing.jsonl"], "missing.jsonl: no such file"),
        (["--output", "data/pairs.jsonl"], "output: expected a file of its own"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], changed: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Models(monkeypatch)
    message = refusal(strength, [*arguments, *changed])
    assert message.startswith("lit_rlhf reward strength: ")
    assert expected in message


def test_fit_starts_from_the_model_and_ends_in_the_folder_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(quickstart, "run", lambda *words: commands.append(words))
    configs = ["--config", "quickstart/reward"]
    trained = reward.fit_reward_model("sft", PAIRS[:1], configs, str(tmp_path), seed=5)
    assert trained == f"{tmp_path}/reward"
    (words,) = commands
    assert words[:-1] == ("fit", *configs, "--config")
    overlay = json.loads(Path(words[-1]).read_text("utf-8"))
    assert overlay["seed_everything"] == 5
    assert overlay["model"]["init_args"] == {
        "model_path": "sft",
        "output_dir": trained,
        "head_seed": 5,
    }
    data = overlay["data"]["init_args"]
    (source,) = data.pop("train_sources")
    assert read_lines(Path(source["path"])) == PAIRS[:1]
    assert data == {"val_fraction": 0, "test_fraction": 0, "seed": 5}


@pytest.mark.slow  # trains two models
def test_fits_are_those_of_the_reward_stage(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: Any
) -> None:
    root = world_root(tmp_path_factory.getbasetemp())
    pairs = root / "world" / "preferences.jsonl"
    small, output = overlay(tmp_path, "small", SMALL["reward"]), tmp_path / "out"
    capsys.readouterr()  # drop what the models it starts from printed
    run(
        *("reward", "strength", "--model", str(root / "sft"), "--preferences", f"lab={pairs}"),
        *("--fit_config", str(QUICKSTART / "reward.yaml"), str(small), "--folds", "2"),
        *("--output", str(output / "strengths.jsonl")),
    )
    rows = read_lines(output / "strengths.jsonl")
    assert len({row["strength"] for row in rows}) > len(rows) / 2
    assert {path.name for path in output.iterdir()} == {
        *("strengths.jsonl", ".strengths.jsonl.lit_rlhf.json")
    }
    printed, progress = capsys.readouterr()
    assert printed.count("$ lit_rlhf fit --config") == 2
    assert progress.count("fit took") == 2  # the end of each bar
    source = DataSource(str(pairs), name="lab")
    given, written = (
        load_records("preference", [source_of_pairs])
        for source_of_pairs in (source, DataSource(str(output / "strengths.jsonl"), name="lab"))
    )
    assert written == given


STRENGTHS = [-2.0, 1.0, -1.0, 3.0, 0.5]


@pytest.fixture
def strengths(tmp_path: Path) -> str:
    """Five pairs `c0`, `r0` and so on, the first and the second with a margin of their own."""
    rows = [
        {"prompt": "p", "chosen": f"c{n}", "rejected": f"r{n}", "strength": strength}
        for n, strength in enumerate(STRENGTHS)
    ]
    for row in rows[:2]:
        row["margin"] = 0.7
    return write_lines(tmp_path / "strengths.jsonl", rows)


@pytest.mark.parametrize(
    ("flip", "remove", "margin", "expected"),
    [
        (0.0, 0.0, False, ["c0 -2.0 0.7", "c1 1.0 0.7", "c2 -1.0 0", "c3 3.0 0", "c4 0.5 0"]),
        (0.4, 0.0, False, ["r0 2.0 0", "c1 1.0 0.7", "r2 1.0 0", "c3 3.0 0", "c4 0.5 0"]),
        (0.0, 0.4, False, ["c1 1.0 0.7", "c3 3.0 0", "c4 0.5 0"]),
        (0.2, 0.2, False, ["r0 2.0 0", "c1 1.0 0.7", "c3 3.0 0", "c4 0.5 0"]),
        (0.0, 0.0, True, ["c0 -2.0 0", "c1 1.0 1.0", "c2 -1.0 0", "c3 3.0 3.0", "c4 0.5 0.5"]),
        (0.2, 0.0, True, ["r0 2.0 2.0", "c1 1.0 1.0", "c2 -1.0 0", "c3 3.0 3.0", "c4 0.5 0.5"]),
    ],
)
def test_relabelled_pairs_by_hand(
    strengths: str,
    flip: float,
    remove: float,
    margin: bool,
    expected: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = str(tmp_path / "clean.jsonl")
    flags = ["--flip", str(flip), "--remove", str(remove), "--margin", str(margin).lower()]
    main(["reward", "relabel", "--strengths", strengths, "--output", output, *flags])
    rows = read_lines(Path(output))
    relabelled = [f"{r['chosen']} {r['strength']} {r.get('margin') or 0}" for r in rows]
    assert relabelled == expected
    counts = f"{round(flip * 5)} flipped, {round(remove * 5)} removed"
    assert f"{len(expected)} pairs in {output}: {counts}" in capsys.readouterr().out
    assert all(row["chosen"][1] == row["rejected"][1] for row in rows)  # one prompt each
    records = load_records("preference", [DataSource(output)])
    assert [record.margin for record in records] == [float(e.split()[2]) for e in expected]


def test_relabelling_needs_strengths_and_leaves_pairs(strengths: str, tmp_path: Path) -> None:
    output = str(tmp_path / "clean.jsonl")
    with pytest.raises(ValueError, match=r"^flip: expected a share in \[0, 1\), got 1.5"):
        relabel(strengths, output, flip=1.5)
    with pytest.raises(ValueError, match=r"^flip, remove: expected to leave pairs as they are"):
        relabel(strengths, output, flip=0.6, remove=0.4)
    with pytest.raises(ValueError, match="output: expected a file of its own"):
        relabel(strengths, strengths)
    rows: list[dict[str, Any]] = read_lines(Path(strengths))
    for broken, message in (
        ({**rows[1], "strength": None}, "field 'strength': not a number"),
        ({**rows[1], "rejected": 3}, "field 'rejected': not a string"),
    ):
        write_lines(Path(strengths), [rows[0], broken])
        with pytest.raises(ValueError, match=rf"strengths\.jsonl:2: {message}"):
            relabel(strengths, output)
    Path(strengths).write_text(json.dumps(rows[0]) + "\n{", "utf-8")
    with pytest.raises(ValueError, match=r"strengths\.jsonl:2: broken JSON"):
        relabel(strengths, output)
    assert not Path(output).exists()
