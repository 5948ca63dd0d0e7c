"""B12: `watch` and `report` read what people have, and the exit status tells what happened."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_callbacks import Level, read_logged_steps
from lit_callbacks.formats import READERS, LogFile
from lit_callbacks.gain import main as explain_gain
from lit_callbacks.logs import watch_logs
from lit_callbacks.names import find_names
from lit_callbacks.report import write_report
from lit_callbacks.runs import EmptyLogError
from lit_rlhf.tools.commands.watch import COMMAND
from tests.support.trainer_logs import CALM, FAR

RECORDS: list[dict[str, Any]] = [
    *({"step": 10 * i, **CALM} for i in range(1, 11)),
    *({"step": 10 * i, **FAR} for i in range(11, 14)),
]
STEPS = {int(record["step"]): {key: record[key] for key in CALM} for record in RECORDS}
KEYS = list(CALM)


def table(delimiter: str = ",", point: str = ".") -> str:
    head = delimiter.join(["step", *KEYS])
    rows = [delimiter.join(str(record[key]) for key in ("step", *KEYS)) for record in RECORDS]
    return "\n".join([head, *(row.replace(".", point) for row in rows)])


def panel() -> str:
    """Of Weights & Biases: each curve with its least and largest value, all quoted."""
    curves = [f"my run - {key}{end}" for key in KEYS for end in ("", "__MIN", "__MAX")]
    head = ["Step", "my run - _step", *curves]
    rows = [
        [record["step"], record["step"], *(record[key] for key in KEYS for _ in range(3))]
        for record in RECORDS
    ]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in [head, *rows])


def verl() -> str:
    lines = [
        f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{record['step']} - "
        + " - ".join(f"{key}:np.float64({record[key]})" for key in KEYS)
        for record in RECORDS
    ]
    return "\n".join(["Training Progress: 3%", *lines, "done"])


def printed() -> str:
    """Dictionaries of Python behind the number of the step."""
    lines = [
        f"[2026-01-01] data.py:1 - rollout {record['step']}: { {k: record[k] for k in KEYS} }"
        for record in RECORDS
    ]
    return "\n".join(["{not a dictionary}", *lines, "{'broken': }"])


LINES = [json.dumps(record) for record in RECORDS]
FILES: dict[str, Callable[[], str]] = {
    "commas.csv": table,
    "semicolons.csv": lambda: table(";"),
    "decimal_commas.csv": lambda: table(";", ","),
    "tabs.tsv": lambda: table("\t"),
    "tabs.csv": lambda: table("\t"),
    "panel.csv": panel,
    "blank.jsonl": lambda: "\n\n".join([*LINES, "", ""]),
    "no_line_break.jsonl": lambda: "\n".join(LINES),
    "windows.jsonl": lambda: "\r\n".join(LINES),
    "array.json": lambda: json.dumps(RECORDS),
    "trainer_state.json": lambda: json.dumps({"log_history": RECORDS}, indent=2),
    "lines.json": lambda: "\n".join(LINES),
    "verl.log": verl,
    "printed.out": printed,
    "printed.txt": lambda: "\n".join(LINES),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", FILES)
def test_file_has_all_its_steps(name: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name]().encode(encoding))
    assert read_logged_steps(str(tmp_path / name)) == STEPS


@pytest.mark.parametrize("name", ["panel.csv", "verl.log", "tabs.tsv", "no_line_break.jsonl"])
def test_file_has_its_verdict_and_its_page(name: str, tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / name
    log.write_text(FILES[name]())
    assert watch_logs([str(log)]) == {str(log): Level.COLLAPSED}
    assert f"{log} step 120: collapsed: KL per token 0.4 nats" in capsys.readouterr().out
    page = Path(write_report([str(log)], tmp_path / "page.html"))
    assert "the policy is exploiting its reward" in page.read_text("utf-8")


def test_downloads_of_tensorboard_are_curves_of_one_run(tmp_path: Path) -> None:
    for key in KEYS:
        rows = [f"17{r['step']}.5,{r['step']},{r[key]}" for r in RECORDS]
        name = f"run-.-tag-train_{key.replace('/', '_')}.csv"
        (tmp_path / name).write_text("\n".join(["Wall time,Step,Value", *rows]))
    steps = read_logged_steps(str(tmp_path))
    assert set(steps[10]) == {f"train_{key.replace('/', '_')}" for key in KEYS}
    assert find_names(steps[10]) == {
        "rollout/kl_per_token": "train_kl",
        "rollout/response_length": "train_completions_mean_length",
        "rollout/entropy": "train_entropy",
    }
    assert watch_logs([str(tmp_path)]) == {str(tmp_path): Level.COLLAPSED}
    # A second download of the same curve, which browsers number.
    other = tmp_path / "run-other-tag-train_kl (1).csv"
    other.write_text("Wall time,Step,Value\n1.0,10,0.5\n")
    with pytest.raises(ValueError, match=r"expected the curves of one run, got .* train_kl twice"):
        read_logged_steps(str(tmp_path))


def test_downloads_of_lit_rlhf_have_its_keys() -> None:
    assert find_names(["rollout_kl_per_token", "ppo_ratio_first", "other"]) == {
        "rollout/kl_per_token": "rollout_kl_per_token",
        "ppo/ratio_first": "ppo_ratio_first",
    }


def test_panels_of_one_run_are_read_together(tmp_path: Path) -> None:
    for key in KEYS:
        rows = [f'"{r["step"]}","{r[key]}","{r[key]}"' for r in RECORDS]
        head = f'"Step","my run - {key}","my run - {key}__MAX"'
        (tmp_path / f"wandb_export_{key.replace('/', '_')}.csv").write_text(
            "\n".join([head, *rows])
        )
    assert read_logged_steps(str(tmp_path)) == STEPS


def test_table_with_an_index_and_ragged_rows_is_read(tmp_path: Path) -> None:
    (tmp_path / "history.csv").write_text(",_step,kl\n0,5,0.5,9\n\n1,6,\n")
    assert read_logged_steps(str(tmp_path / "history.csv")) == {5: {"kl": 0.5}}


def test_panel_of_several_runs_is_refused_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "panel.csv").write_text('"Step","b - x - kl","a - kl"\n"1","0.1","0.2"\n')
    with pytest.raises(ValueError, match=r"expected a panel of one run, got .*csv with a, b - x;"):
        read_logged_steps(str(tmp_path / "panel.csv"))


def test_newest_state_of_a_trainer_has_all_steps(tmp_path: Path) -> None:
    for count in (13, 5):  # checkpoint-130 comes before checkpoint-50 in the order of letters
        folder = tmp_path / f"checkpoint-{count}0"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": RECORDS[:count]}))
    assert read_logged_steps(str(tmp_path)) == STEPS


def test_bad_last_line_counts(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, **CALM}) for i in range(10)]
    bad = [json.dumps({"step": i, **CALM, "kl": math.nan}) for i in (10, 11)]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([*lines, *bad]))
    assert watch_logs([str(log)]) == {str(log): Level.COLLAPSED}
    log.write_text("\n".join([*lines, bad[0], bad[1][:-3]]))  # the last one is still being written
    assert watch_logs([str(log)]) == {str(log): Level.HEALTHY}


def test_numbers_that_are_not_finite_are_read_from_printed_dictionaries() -> None:
    line = "{'loss': nan, 'kl': -inf, 'name': 'nan', 'k/nan': tensor(0.5, device='cuda:0')}"
    (record,) = READERS[".log"](LogFile(Path("x.log"), line))
    assert record.values == {"loss": "nan", "kl": "-inf", "name": "nan", "k/nan": 0.5}
    (record,) = READERS[".log"](LogFile(Path("x.log"), '{"kl": NaN, "done": true}'))
    assert math.isnan(record.values["kl"])


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("x.jsonl", '{"step": 1, "kl": 1}\n{"step": Infinity, "kl": 1}\n', 2),
        ("x.jsonl", '{"step": 1, "kl": 1}\n{"step": 1e300, "kl": 1}\n', 2),
        ("x.jsonl", '{"step": 1, "kl": 1}\n[' + "[" * 100_000 + "\n", 2),
        ("x.jsonl", '{"step": 1, "metrics": 3}\n', 1),
        ("x.json", '[{"step": 1, "kl": 1}, null]', 2),
        ("trainer_state.json", '{"log_history": null}', 1),
        ("x.csv", "step,kl\n1,1\nnan,1\n", 3),
        ("x.csv", "step,kl\n" + "9" * 400 + ",1\n", 2),
        ("x.csv", "step,kl\n1,1\nx,1\n", 3),
        ("x.csv", "step,kl\n1,1\n,1\n", 3),
        ("x.jsonl", '{"step": 1, "kl": 1}\n{"step": null, "kl": 1}\n', 2),
        ("x.log", "step:" + "9" * 400 + " - kl:1\n", 1),
    ],
)
def test_strange_log_is_refused_with_its_line(
    tmp_path: Path, name: str, content: str, place: int
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}:{place}: expected "):
        watch_logs([str(tmp_path / name)])


def test_one_of_several_columns_of_steps_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("step,global_step,kl\n1,10,0.5\n,20,0.25\n")
    steps = read_logged_steps(str(tmp_path / "x.csv"))
    assert {step: values["kl"] for step, values in steps.items()} == {1: 0.5, 20: 0.25}


def test_strange_values_of_a_log_are_read(tmp_path: Path) -> None:
    long = "x" * 200_000  # longer than a cell of Python's reader by default
    (tmp_path / "x.csv").write_text(f"step,kl,text\n1,{'9' * 400},{long}\n2,-1e308,\n3,0.5,\n")
    steps = read_logged_steps(str(tmp_path / "x.csv"))
    assert steps == {1: {"kl": math.inf}, 2: {"kl": -math.inf}, 3: {"kl": 0.5}}
    deep = "(" * 5000 + ")" * 5000
    (tmp_path / "y.log").write_text(f"{{'kl': {deep}}}\n{{'step': 1, 'kl': {'9' * 400}}}\n")
    assert read_logged_steps(str(tmp_path / "y.log")) == {1: {"kl": math.inf}}
    (tmp_path / "z.jsonl").write_text('{"step": 1, "kl": 0.5, "metrics": null}\n')
    assert read_logged_steps(str(tmp_path / "z.jsonl")) == {1: {"kl": 0.5}}
    zero = {"objective/kl": 1.0, "rollout/kl": 1.0, "rollout/response_length": 0.0}
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(zero) + "\n" for _ in range(30)))
    watch_logs([str(tmp_path / "w.jsonl")])


def test_separators_within_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    record = {"step": 1, "kl": 0.5, "text": "a\u2028b\x0cc"}
    (tmp_path / "log.jsonl").write_text(json.dumps(record, ensure_ascii=False), "utf-8")
    assert read_logged_steps(str(tmp_path / "log.jsonl")) == {1: {"kl": 0.5}}


def test_samples_are_read_like_logs(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "metrics.csv").write_text(table())
    samples = [
        {"step": step, "prompt": "p", "response": f"a\u2028b {n}", "score": n + step, "length": n}
        for step in (0, 1)
        for n in range(8)
    ]
    lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
    file = tmp_path / "samples.jsonl"
    file.write_text("\n\n".join(lines), "utf-8-sig")
    page = Path(write_report([str(tmp_path)], tmp_path / "page.html"))
    assert "a\u2028b 7" in page.read_text("utf-8")
    explain_gain([str(file)])
    assert f"{file}: of the gain of 1" in capsys.readouterr().out


def test_log_without_metrics_is_empty_and_not_healthy(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("Loading weights: 100%\n")
    with pytest.raises(EmptyLogError):
        read_logged_steps(str(log))
    with pytest.raises(ValueError, match="got no numbers"):
        watch_logs([str(log)])


TRAINERS: dict[str, tuple[dict[str, str], list[str]]] = {
    "TRL before 0.12": (
        {
            "rollout/score": "env/reward_mean",
            "rollout/kl": "objective/kl",
            "rollout/response_length": "tokens/responses_len_mean",
            "ppo/explained_variance": "ppo/val/var_explained",
        },
        ["objective/entropy"],
    ),
    "LLaMA-Factory": (
        {
            "rollout/score": "reward",
            "rollout/kl": "kl",
            "rollout/response_length": "response_len",
            "rollout/prompt_length": "query_len",
        },
        ["loss", "entropy"],  # a sum over the response
    ),
    "NeMo-RL": (
        {
            "rollout/kl_per_token": "train/kl_penalty",
            "rollout/response_length": "train/mean_gen_tokens_per_sample",
            "rollout/entropy": "train/approx_entropy",
        },
        ["train/reward", "train/loss", "validation/accuracy"],
    ),
    "slime": (
        {
            "rollout/kl_per_token": "train/kl_loss",
            "rollout/response_length": "rollout/response_len/mean",
            "rollout/truncation_rate": "rollout/truncated_ratio",
        },
        ["rollout/raw_reward", "train/ppo_kl"],
    ),
    "prime-rl": (
        {
            "rollout/response_length": "completion_len/mean",
            "rollout/sampler_kl": "mismatch_kl/mean",
            "rollout/informative_share": "batch/effective_batch_size",
        },
        ["reward/mean", "seq_len/mean"],
    ),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_names_of_a_trainer_are_recognized(trainer: str) -> None:
    names, others = TRAINERS[trainer]
    assert find_names([*others, *names.values()]) == names


def status_of(*arguments: str) -> object:
    try:
        COMMAND.run(arguments, "lit_rlhf watch")
    except SystemExit as end:
        return end.code
    return 0


def test_exit_status_tells_health_trouble_and_errors_apart(tmp_path: Path, capsys: Any) -> None:
    healthy, collapsed, broken = (tmp_path / f"{name}.jsonl" for name in ("good", "bad", "broken"))
    healthy.write_text("\n".join(LINES[:10]))
    collapsed.write_text("\n".join(LINES))
    broken.write_text("[1]\n")
    assert status_of(str(healthy)) == 0
    assert status_of(str(collapsed)) == 1
    assert status_of(str(healthy), str(collapsed)) == 1
    capsys.readouterr()
    for arguments, message in (
        ([str(tmp_path / "missing")], "lit_rlhf watch: log: expected a folder with"),
        ([str(broken)], "broken.jsonl:1: expected a JSON object of metrics, got"),
        ([str(collapsed), str(broken)], "broken.jsonl:1: expected a JSON object"),
        ([str(healthy), "--votes", "0"], "lit_rlhf watch: votes: expected at least 1, got 0"),
        ([str(healthy), "--vote", "1"], "vote"),
    ):
        assert status_of(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_unexpected_error_is_no_collapse(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("lit_callbacks.logs.watch_logs", fail)
    assert status_of(str(tmp_path)) == 2
    assert "ZeroDivisionError: a defect" in capsys.readouterr().err
