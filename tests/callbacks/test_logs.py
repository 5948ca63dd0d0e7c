"""Logs of other trainers, read and judged."""

import csv
import json
import math
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lit_callbacks import (
    CollapseDetector,
    KLMonitor,
    LengthMonitor,
    Level,
    Monitor,
    NonFiniteMonitor,
    RewardDistributionMonitor,
    replay_run,
    replay_steps,
)
from lit_callbacks.logs import read_logged_steps, watch_logs
from lit_callbacks.names import NAMES, find_names
from lit_callbacks.report.table import runs_table
from lit_callbacks.runs import read_run
from tests.support.report_pages import write_run
from tests.support.scripted import Scripted, Watch, batches, trainer
from tests.support.trainer_logs import CALM, FAR

RECORDS: list[dict[str, Any]] = [
    *({**CALM, "step": 10 * i, "note": "x"} for i in range(1, 11)),
    *({**FAR, "step": 10 * i, "note": "x"} for i in range(11, 14)),
]


def write(kind: str, folder: Path) -> Path:
    """The records as a log of a kind."""
    file = folder / f"log.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + '{"kl": 9')
    elif kind == "csv":
        with file.open("w", newline="") as table:
            rows = csv.DictWriter(table, RECORDS[0])
            rows.writeheader()
            rows.writerows(RECORDS)
    elif kind == "json":
        file = folder / "trainer_state.json"
        summary = {"train_runtime": 3.0, "step": 140}
        file.write_text(json.dumps({"log_history": [*RECORDS, summary]}))
    else:
        script = {key: [record[key] for record in RECORDS] for key in CALM}
        return Path(write_run(folder / "events", {f"train/{key}": v for key, v in script.items()}))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_log_is_read_with_its_steps_without_unfinished_rows(kind: str, tmp_path: Path) -> None:
    steps = read_logged_steps(str(write(kind, tmp_path)))
    assert list(steps)[:13] == [record["step"] for record in RECORDS]
    first, *_, thirteenth = list(steps.values())[:13]
    assert {key: thirteenth[key] for key in FAR} == FAR
    assert "note" not in first


@pytest.mark.parametrize("line", ["{kl: 1}", "[1]", '{"metrics": 3}'])
def test_a_line_without_metrics_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(f'{{"kl": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: expected a JSON object of metrics, got"):
        read_logged_steps(str(tmp_path / "log.jsonl"))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json", "events"])
def test_log_of_each_kind_has_its_verdict(kind: str, tmp_path: Path, capsys: Any) -> None:
    log = str(write(kind, tmp_path))
    assert watch_logs([log]) == {log: Level.COLLAPSED}
    preset, thresholds, verdict, last = capsys.readouterr().out.splitlines()
    each = 1 if kind == "events" else 10  # the steps of event files are counted anew
    assert preset.endswith(f"step {each}: preset: chat (others: short answers, checkable reward)")
    assert f"step {8 * each}: thresholds: KL per token at most 0.07 nats, length" in thresholds
    assert (
        f"step {12 * each}: collapsed: KL per token 0.4 nats is 5.7x its limit of 0.07" in verdict
    )
    assert "collapsed after 13 steps" in last


def test_folder_is_searched_for_a_log(tmp_path: Path) -> None:
    write("json", tmp_path)
    assert len(read_logged_steps(str(tmp_path))) == 14


def test_folder_of_runs_is_watched_run_by_run(tmp_path: Path, capsys: Any) -> None:
    calm = {key: [value] * 12 for key, value in CALM.items()}
    write_run(tmp_path / "logs/ppo", calm)
    write_run(tmp_path / "logs/sft", {"sft/loss": [1.0] * 3})
    ppo_log, sft_log = (str(tmp_path / "logs" / name) for name in ("ppo", "sft"))
    assert watch_logs([str(tmp_path / "logs")]) == {ppo_log: Level.HEALTHY}
    assert f"{sft_log}: left out, it logs nothing that is watched\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="sft: expected one of"):
        watch_logs([sft_log])


def test_line_feed_in_a_name_breaks_no_line(tmp_path: Path, capsys: Any) -> None:
    calm = {key: [value] * 12 for key, value in CALM.items()}
    names = ("a\nforged step 1: healthy", "b\tb")
    for name in names:
        write_run(tmp_path / "logs" / name, calm | {"ppo/ratio\nforged": [1.0] * 12})
    watch_logs([str(tmp_path / "logs")])
    lines = capsys.readouterr().out.splitlines()
    shown = [str(tmp_path / "logs" / name) for name in (r"a\nforged step 1: healthy", r"b\tb")]
    assert {next(name for name in shown if line.startswith(name)) for line in lines} == {*shown}
    runs = [read_run(name, tmp_path / "logs" / name) for name in names]
    table = runs_table(runs).splitlines()
    assert r"a\nforged" in table[0]
    assert any(line.startswith(r"ppo/ratio\nforged ") for line in table)


def write_json(file: Path, records: list[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.mark.parametrize("names", [("a.jsonl", "b.jsonl"), ("a/log.jsonl", "b/log.jsonl")])
def test_each_file_of_a_folder_is_a_run(names: tuple[str, str], tmp_path: Path) -> None:
    calm = write_json(tmp_path / names[0], RECORDS[:10])
    far = write_json(tmp_path / names[1], RECORDS)
    write_json(tmp_path / "samples.jsonl", [{"step": 1, "prompt": "a", "response": "b"}])
    assert watch_logs([str(tmp_path)]) == {calm: Level.HEALTHY, far: Level.COLLAPSED}
    with pytest.raises(ValueError, match=r"expected the log of one run, got .* with .*b"):
        read_logged_steps(tmp_path)


def test_last_state_of_each_trainer_is_a_run(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for last in (5, 13):
            folder = tmp_path / run / f"checkpoint-{last}"
            folder.mkdir(parents=True)
            history = json.dumps({"log_history": RECORDS[:last]})
            (folder / "trainer_state.json").write_text(history)
    states = [str(tmp_path / run / "checkpoint-13/trainer_state.json") for run in ("a", "b")]
    assert watch_logs([str(tmp_path)]) == dict.fromkeys(states, Level.COLLAPSED)


def last_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `watch_logs` printed last, without the name of the log."""
    lines = capsys.readouterr().out.splitlines()
    return [line.partition(": ")[2] for line in lines if " step " not in line.partition(": ")[0]]


@pytest.mark.parametrize("value", [None, "-", True, [0.4]])
def test_metric_that_is_no_longer_a_number_is_named(
    value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict at the end does not rest on it."""
    records = RECORDS[:8] + [RECORDS[8] | {"kl": value, "step": 10 * i} for i in range(9, 15)]
    log = write_json(tmp_path / "log.jsonl", records)
    assert watch_logs([log]) == {log: Level.HEALTHY}
    *notes, end = last_lines(capsys)
    unread = [] if value is None else [f"kl is no number, but {value!r}, at {log}:9"]
    assert notes == [*unread, "KL per token, KL: last logged at step 80, 6 steps ago"]
    assert end.startswith("healthy after 14 steps")


def test_metric_of_some_steps_is_not_called_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [dict(record) for record in RECORDS[:10]]
    for number, record in enumerate(records):
        if number % 5:
            del record["kl"]
    watch_logs([write_json(tmp_path / "log.jsonl", records)])
    assert len(last_lines(capsys)) == 1


def test_values_that_later_ones_replace_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run in a log would hide the first."""
    log = write_json(tmp_path / "log.jsonl", RECORDS + RECORDS[:10])
    watch_logs([log])
    note, _ = last_lines(capsys)
    assert note.startswith("13 of 23 values of ")
    assert "or the log has several runs" in note


def test_names_without_effect_are_refused(tmp_path: Path) -> None:
    log = write_json(tmp_path / "log.jsonl", RECORDS)
    with pytest.raises(
        ValueError, match=r"--map: expected keys among rollout/kl, .*got rollout/k$"
    ):
        watch_logs([log], {"rollout/k": "kl"})
    with pytest.raises(ValueError, match=r"--map: .* metric for rollout/kl, got 'my/kl'; logged "):
        watch_logs([log], {"rollout/kl": "my/kl"})


def test_judged_log_is_not_taken_as_healthy(tmp_path: Path) -> None:
    log = write_json(tmp_path / "log.jsonl", RECORDS)
    (tmp_path / "link.jsonl").symlink_to(log)
    with pytest.raises(ValueError, match=r"--healthy: expected other logs .*link\.jsonl"):
        watch_logs([log], healthy=[str(tmp_path / "link.jsonl")])


@pytest.mark.parametrize("option", ["follow", "responses"])
def test_negative_options_are_refused(option: str, tmp_path: Path) -> None:
    log = write_json(tmp_path / "log.jsonl", RECORDS)
    with pytest.raises(ValueError, match=f"^{option}: expected (at least )?0.*, got -1"):
        watch_logs([log], **{option: -1})  # type: ignore[arg-type]


def test_log_that_begins_anew_gets_new_baselines(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log.jsonl"
    longer = [record | {"completions/mean_length": 900.0} for record in RECORDS[:10]]
    contents = iter([RECORDS[:2], longer])
    write_json(file, RECORDS[:10])

    def sleep(seconds: float) -> None:
        if (records := next(contents, None)) is None:
            raise KeyboardInterrupt
        write_json(file, records)

    monkeypatch.setattr("lit_callbacks.logs.time.sleep", sleep)
    assert watch_logs([str(file)], follow=2.0) == {str(file): Level.HEALTHY}
    assert f"{file}: the log was begun anew" in capsys.readouterr().out


def test_unknown_names_are_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.jsonl"
    lines = [{"divergence": r["kl"], "tokens": r["completions/mean_length"]} for r in RECORDS]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"expected one of rollout/kl, .* got divergence, tokens"):
        watch_logs([str(file)])
    names = {"rollout/kl_per_token": "divergence", "rollout/response_length": "tokens"}
    assert watch_logs([str(file)], names) == {str(file): Level.COLLAPSED}
    assert "step 11: collapsed" in capsys.readouterr().out


def test_growing_log_is_read(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("")
    unwritten_lines = [json.dumps(record) + "\n" for record in RECORDS]

    def sleep(seconds: float) -> None:
        assert seconds == 2.0
        if not unwritten_lines:
            raise KeyboardInterrupt
        with file.open("a") as log:
            log.writelines(unwritten_lines[:4])
        del unwritten_lines[:4]

    monkeypatch.setattr("lit_callbacks.logs.time.sleep", sleep)
    assert watch_logs([str(file)], follow=2.0) == {str(file): Level.COLLAPSED}
    # the newest step may be incomplete, and is left
    assert "collapsed after 12 steps" in capsys.readouterr().out.splitlines()[-1]


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "none.pdf"
    with pytest.raises(
        ValueError, match=r"log: expected a folder .*none\.pdf, which does not exist"
    ):
        read_logged_steps(str(file))
    file.touch()
    with pytest.raises(ValueError, match=r"log: expected a folder .*, or a file \.csv.*none\.pdf$"):
        read_logged_steps(str(file))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="expected an object with log_history"):
        read_logged_steps(str(tmp_path / "a.json"))


class Record:
    """A record of wandb, here as JSON instead of a protobuf message."""

    def ParseFromString(self, data: bytes) -> None:  # protobuf's name
        self.content = json.loads(data)
        items = [
            types.SimpleNamespace(key=key, nested_key=[], value_json=json.dumps(value))
            for key, value in self.content.items()
        ]
        self.history = types.SimpleNamespace(item=items)

    def WhichOneof(self, name: str) -> str:  # protobuf's name
        return "history"


def blocks(records: list[bytes]) -> bytes:
    """Records in blocks of 32 KiB, as LevelDB's log writer splits them."""
    data = b":W&B\xee\xe1\x00"
    for record in records:
        begun = False
        while True:
            room = 32768 - len(data) % 32768
            if room < 7:
                data += bytes(room)
                continue
            part, record = record[: room - 7], record[room - 7 :]
            kind = {(False, False): 1, (False, True): 2, (True, True): 3, (True, False): 4}[
                (begun, bool(record))
            ]
            data += bytes(4) + len(part).to_bytes(2, "little") + bytes([kind]) + part
            begun = True
            if not record:
                break
    return data


@pytest.mark.parametrize("padding", [0, 8000, 90_000])
def test_wandbs_offline_file_is_read_as_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    messages = types.SimpleNamespace(Record=Record)
    monkeypatch.setattr("lit_callbacks.formats.import_module", lambda name: messages)
    lines = [json.dumps({**r, "_step": r["step"], "note": "x" * padding}).encode() for r in RECORDS]
    (tmp_path / "run-x.wandb").write_bytes(blocks(lines) + b"\x00" * 3)
    steps = read_logged_steps(str(tmp_path))
    assert list(steps) == [record["step"] for record in RECORDS]
    assert steps[max(steps)]["kl"] == 0.4


def test_absent_wandb_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=ModuleNotFoundError("wandb"))
    monkeypatch.setattr("lit_callbacks.formats.import_module", missing)
    (tmp_path / "run.wandb").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        read_logged_steps(str(tmp_path / "run.wandb"))


@pytest.mark.parametrize("trainer", NAMES)
@pytest.mark.parametrize("prefix", ["", "train/"])
def test_names_of_a_trainer_are_found(trainer: str, prefix: str) -> None:
    logged = [prefix + name for name in NAMES[trainer].values()]
    assert find_names([*logged, "loss"]) == {
        key: prefix + name for key, name in NAMES[trainer].items()
    }


def test_own_keys_go_before_names_of_others() -> None:
    assert find_names(["rollout/kl_per_token", "kl", "loss"]) == {}


# --- a replayed run gets the same verdicts as the detector gave during the run

STEPS = 30
BAD = [max(0.0, min(5.0, (i - 15) / 2)) for i in range(STEPS)]
"""Healthy for fifteen batches, and collapsed within ten."""
SCRIPT = {
    "toy/kl": [0.1 + 5.0 * bad for bad in BAD],
    "toy/length": [10.0 + i % 3 + 3.0 * bad for i, bad in enumerate(BAD)],
    "toy/loss": [math.nan if i >= 28 else 1.0 for i in range(STEPS)],
}
SCORES = [[k / 20 + 4 * bad * (k >= 18) for k in range(21)] for bad in BAD]


def monitors() -> list[Monitor]:
    kl, length = KLMonitor("toy/kl", high=10.0), LengthMonitor("toy/length", high_ratio=1.6)
    return [kl, length, RewardDistributionMonitor(), NonFiniteMonitor()]


@pytest.fixture(scope="module")
def detected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch]:
    folder, watch = tmp_path_factory.mktemp("run"), Watch()
    detector = CollapseDetector(monitors(), [watch])
    logger = TensorBoardLogger(folder, name="", version="")
    module = Scripted(SCRIPT, {"scores": SCORES})
    trainer(folder, detector, logger=logger).fit(module, batches(STEPS))
    return folder, watch


def test_replay_repeats_the_detector(detected: tuple[Path, Watch]) -> None:
    folder, watch = detected
    replayed = replay_run(str(folder), monitors())
    assert [judged.step for judged in replayed] == [*range(1, STEPS + 1)]
    assert {judged.verdict.level for judged in replayed} == {0, 1, 2}
    # TensorBoard keeps 32 bits of a number; sentences show three digits
    assert [judged.verdict for judged in replayed] == watch.verdicts


def test_other_votes_give_another_verdict(detected: tuple[Path, Watch]) -> None:
    folder, _ = detected

    def collapse_step(votes: int) -> int:
        replayed = replay_run(str(folder), monitors(), votes)
        return next(j.step for j in replayed if j.verdict.level is Level.COLLAPSED)

    # by hand: rewards are beyond their threshold from 17 on, KL from 20 on, length from 21 on, and
    # each votes at the second step beyond it; KL is needed in any case
    assert [collapse_step(1), collapse_step(2), collapse_step(3)] == [21, 21, 22]


def test_a_metric_that_was_not_logged_is_named(detected: tuple[Path, Watch]) -> None:
    with pytest.raises(ValueError, match=r"expected rollout/kl among the .*, got .*toy/kl"):
        replay_run(str(detected[0]), [KLMonitor()])
    with pytest.raises(ValueError, match=r"expected .*rollout/kl.* got loss"):
        replay_steps({1: {"loss": 1.0}})


def test_default_monitors_take_what_a_log_has() -> None:
    step = {"rollout/kl": 1.0, "rollout/response_length": 50.0}
    replayed = replay_steps(dict.fromkeys(range(3), step))
    assert [judged.verdict.level for judged in replayed] == [Level.HEALTHY] * 3
