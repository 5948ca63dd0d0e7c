"""The report's page, read back from its HTML, and its command."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lit_callbacks.panels import KNOWN
from lit_callbacks.report import main, write_report
from lit_callbacks.report.table import runs_table
from lit_callbacks.runs import read_run
from lit_callbacks.verdict import advise
from tests.support.hostile_yaml import BOMB
from tests.support.report_pages import Page, report, write_run

ROOT = Path(__file__).resolve().parents[3]


def test_page_says_what_curves_mean_and_what_to_do_next(tmp_path: Path, watched: str) -> None:
    page = report(tmp_path, watched)
    advice = page.root.one(css="advice").text
    assert advice.startswith("What to do next: take the best checkpoint on held-out prompts")
    assert "begins at 0" in page.panel("rollout/kl").one(css="meaning").text
    assert all(panel.meaning for panel in KNOWN)


@pytest.mark.parametrize("name", ["log.jsonl", "metrics"])
def test_page_and_table_have_the_line_on_held_out_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    line = "accuracy 0.58 [0.49, 0.67] on 117 pairs"
    if name == "metrics":
        rows = [{"step": 1, "toy/a": 1.0}, {"step": 2, "held_out": line}]
        run = tmp_path / "run.jsonl"
        run.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        run = Path(write_run(tmp_path / "run", {"toy/a": [1.0]}))
        record = {"time": 1.0, "step": 1, "key": "held_out", "text": line}
        (run / name).write_text(json.dumps(record) + "\n")
    page = tmp_path / "page.html"
    main([f"reward={run}", "--output", str(page)])
    assert f"reward, held out: {line}\nReport: {page}" in capsys.readouterr().out
    assert f'<p class="held-out">On held-out data: {line}</p>' in page.read_text("utf-8")


def test_page_needs_nothing_else(tmp_path: Path, watched: str) -> None:
    page = report(tmp_path, watched)
    assert page.source.startswith("<!doctype html>")
    assert not page.root.all("link") + page.root.all("img") + page.root.all("script")
    assert all("src" not in element.attributes for element in page.root.all())
    assert not re.findall(r"https?:|@import|url\((?!#)", page.source)
    links = {element.attributes["xlink:href"] for element in page.root.all("a")}
    assert links == {"#verdict-1", "#verdict-2"}
    assert {link[1:] for link in links} <= {e.attributes.get("id") for e in page.root.all()}


def test_page_shows_last_verdict_levels_actions_and_values(tmp_path: Path, watched: str) -> None:
    page = report(tmp_path, watched)
    card = page.root.one(css="run")
    assert "collapsed at step 5" in card.one("h2").text
    assert card.one(css="sentence").text == "the policy is exploiting its reward (step 4)"
    assert [sign.text for sign in card.all("li")] == ["KL 41 nats is 12x its baseline"]
    assert [(s.text, s.attributes["style"]) for s in card.all(css="segment")] == [
        ("healthy", "left:0.00%;width:50.00%"),
        ("suspicious", "left:50.00%;width:25.00%"),
        ("collapsed", "left:75.00%;width:25.00%"),
    ]
    first, second = ([c.text for c in r.children] for r in page.root.one("tbody").all("tr"))
    assert first[1:] == ["step 3", "▲ suspicious", "KL is <b>rising</b>", ""]
    trouble = "the policy is exploiting its reward KL 41 nats is 12x its baseline"
    assert second[1:4] == ["step 4", "■ collapsed", trouble]
    assert "raised kl_coef from 0 to 0.2" in second[4]
    headings = [section.one("h2").text for section in page.root.all("section")[1:]]
    assert headings == ["Reward", "Policy", "Verdicts"]
    assert page.panel("rollout/kl").one(css="values").one("b").text == "4"


def test_number_above_a_chart_is_the_one_of_the_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"toy/a": [*[0.0] * 18, 1.0, 2.0]})
    value = report(tmp_path, run).panel("toy/a").one(css="values").one("b").text
    assert value == "1.5"  # the mean of the last two of twenty
    assert "1.5" in runs_table([read_run("run", run)]).splitlines()[1]


@pytest.mark.parametrize(
    ("levels", "texts", "head"),
    [
        ([], {}, "run"),  # no detector
        ([0, 0, 0], {}, "run ● healthy at step 3"),
        ([0, 2, 0], {2: "**collapsed** at 2\n\nbad"}, "run ● healthy at step 3, collapsed before"),
    ],
)
def test_healthy_run_has_no_sentence(tmp_path: Path, levels: Any, texts: Any, head: str) -> None:
    series = {"toy/a": [1.0, 1.0, 1.0]} | ({"monitor/level": levels} if levels else {})
    page = report(tmp_path, write_run(tmp_path / "run", series, texts))
    card = page.root.one(css="run")
    assert card.one("h2").text == head
    assert [line.text for line in card.all(css="sentence")] == ["no detector ran"] * (not levels)
    assert ("The level never changed." in page.root.text) == (sum(levels) == 0 < len(levels))


def test_run_without_known_metrics_shows_all_of_its_own(tmp_path: Path) -> None:
    series = {key: [1.0] for key in ("b/loss", "plain", "a/x", "hp_metric", "epoch")}
    run = write_run(tmp_path / "run", series | {"monitor/level": [0], "monitor/x": [0]})
    page = report(tmp_path, run)
    assert [code.text for code in page.root.all("code")] == ["plain", "a/x", "b/loss"]
    assert [s.one("h2").text for s in page.root.all("section")[1:4]] == ["Metrics", "a", "b"]


def test_every_known_metric_is_documented() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert [panel.key for panel in KNOWN if f"| `{panel.key}` |" not in documented] == []


def test_texts_are_escaped(tmp_path: Path) -> None:
    nasty = "<script>\"&'</script>"
    texts = {1: f"**collapsed** at step 1\n\n{nasty}\n\n- {nasty}"}
    run = write_run(tmp_path / "run", {f"toy/{nasty}": [1.0], "monitor/level": [2]}, texts)
    page = Page(write_report({nasty: run}, tmp_path / "report.html"))
    assert page.root.all("script") == []
    assert page.title == nasty
    assert page.root.one(css="panel").one("code").text == f"toy/{nasty}"
    assert page.root.one(css="why").text == nasty
    assert page.root.one("tbody").one("li").text == nasty  # the action


def test_halves_of_surrogate_pairs_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"toy/a": [1.0]})
    write_samples(run, [{"step": 1, "prompt": "a\ud800", "response": "b\udfff"}])
    page = Page(write_report({"run\udcff": run}, tmp_path / "report.html"))
    assert page.title == "run\\udcff"
    assert "b\\udfff" in page.root.one(css="responses").text


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
def test_pause_that_is_no_time_is_refused(calm: str, seconds: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([calm, f"--watch={seconds}"])
    assert "watch: expected 0 to 604800 seconds" in capsys.readouterr().err


def test_table_of_verdicts_without_actions_has_no_column_for_them(tmp_path: Path) -> None:
    texts = {1: "**suspicious** at step 1\n\nKL 3 is above 2, length 9 is above 8"}
    run = write_run(tmp_path / "run", {"toy/a": [1.0], "monitor/level": [1]}, texts)
    page = report(tmp_path, run)
    heads = [head.text for head in page.root.one(css="verdicts").one("thead").all("th")]
    assert heads == ["", "Step", "Level", "Trouble and its signs"]
    assert [sign.text for sign in page.root.one(css="why").all("li")] == [
        "KL 3 is above 2",
        "length 9 is above 8",
    ]
    assert page.root.one(css="sentence").text == "several signs (step 1)"


def test_page_replaces_no_other_file(tmp_path: Path) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text("step,toy/a\n1,2\n")
    with pytest.raises(ValueError, match=r"output: expected a new file or an earlier page, got .*"):
        write_report([str(log)], log)
    assert log.read_text() == "step,toy/a\n1,2\n"
    (tmp_path / "empty").touch()  # as mktemp makes it
    write_report([str(log)], tmp_path / "empty")


def test_new_page_replaces_old(tmp_path: Path, calm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "new" / "report.html"
    write_report([calm], output)
    output.write_text("<!doctype html>old")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            write_report([calm], output)
    old = ("<!doctype html>old", [output])
    assert (output.read_text(), list(output.parent.iterdir())) == old
    assert write_report([calm], output).read_text().startswith("<!doctype html>")
    assert list(output.parent.iterdir()) == [output]


def test_verdicts_of_several_runs_are_in_order_of_steps(tmp_path: Path, watched: str) -> None:
    texts = {1: "**suspicious** at step 1\n\nfirst", 4: "**suspicious** at step 4\n\nlast"}
    series = {"rollout/kl": [1.0] * 4, "monitor/level": [1, 1, 1, 1]}
    page = report(tmp_path, watched, write_run(tmp_path / "other", series, texts))
    rows = page.root.one("tbody").all("tr")
    verdict_rows = [
        f"{row.one('td', css='name').text} {row.one('td', css='step').text}" for row in rows
    ]
    assert verdict_rows == ["other step 1", "watched step 3", "watched step 4", "other step 4"]
    values = page.panel("rollout/kl").one(css="values")
    assert [value.text for value in values.all("b")] == ["4", "1"]


def test_runs_are_named_by_folder_after_parents_where_two_are_alike(tmp_path: Path) -> None:
    names = ["a/ppo", "b/ppo", "sft"]
    page = report(tmp_path, *(write_run(tmp_path / name, {"toy/a": [1.0]}) for name in names))
    assert [item.text for item in page.root.one(css="legend").all("li")] == names


def test_table_shows_settings_only_if_every_run_has_them(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, {"toy/a": [1.0]}) for name in ("one", "two")]
    (tmp_path / "one" / "config.yaml").write_text("lr: 0.1\nseed: 1\nckpt_path: last\n")
    runs = [read_run(Path(folder).name, folder) for folder in folders]
    assert "settings that differ" not in runs_table(runs)
    (tmp_path / "two" / "config.yaml").write_text("lr: 0.2\nseed: 1\nckpt_path: null\n")
    last = [line.split() for line in runs_table(runs).splitlines()[-2:]]
    assert last == [["settings", "that", "differ"], ["lr", "0.1", "0.2"]]


def test_table_of_different_stages_leaves_out_settings_of_one_stage(tmp_path: Path) -> None:
    stages = {"sft": "class_path: SFT\n  pack: true", "ppo": "class_path: PPO\n  kl_coef: 0.1"}
    runs = []
    for name, model in stages.items():
        folder = write_run(tmp_path / name, {"toy/a": [1.0]})
        Path(folder, "config.yaml").write_text(f"steps: {len(runs)}\nmodel:\n  {model}\n")
        runs.append(read_run(name, folder))
    last = [line.split() for line in runs_table(runs).splitlines()[-2:]]
    assert last == [["steps", "0", "1"], ["model.class_path", "SFT", "PPO"]]


@pytest.mark.parametrize(
    "settings", [b"lr: \x7f", b"lr: [", b"lr: \xff", b"lr: 1:30", b"a: &a {b: *a}", BOMB.encode()]
)
def test_table_names_the_file_whose_settings_cannot_be_read(
    tmp_path: Path, settings: bytes
) -> None:
    folders = [write_run(tmp_path / name, {"toy/a": [1.0]}) for name in ("one", "two")]
    for folder in folders:
        Path(folder, "config.yaml").write_bytes(settings)
    runs = [read_run(Path(folder).name, folder) for folder in folders]
    with pytest.raises(ValueError, match=r"config\.yaml: expected YAML in UTF-8, got "):
        runs_table(runs)


@pytest.mark.parametrize("part", ["~", "$HOME", "${HOME}", "${oc.env:HOME}"])
def test_output_with_what_only_a_shell_replaces_is_refused(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_run(tmp_path / "run", {"toy/a": [1.0]})
    with pytest.raises(SystemExit) as ended:
        main([log, f"--output={part}/page.html"])
    assert ended.value.code == 2
    expected = f"error: output: expected a path without {part}, which only a shell replaces"
    error = capsys.readouterr().err
    assert expected in error
    assert ("; write /" in error) == (part != "${oc.env:HOME}")  # no shell knows this one
    with pytest.raises(SystemExit):
        main([log, "--output", "s3://bucket/page.html"])
    assert "on this machine, got the address s3://bucket" in capsys.readouterr().err


def test_runs_of_several_seeds_are_one_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {"base_0": 1.0, "base_1": 2.0, "base_2": 6.0, "other": 5.0}
    for seed, (name, end) in enumerate(ends.items()):
        write_run(tmp_path / name, {"toy/a": [0.0, end]})
        rate = 0.2 if name == "other" else 0.1
        (tmp_path / name / "config.yaml").write_text(f"lr: {rate}\nseed: {seed}\n")
    base = ",".join(str(tmp_path / f"base_{seed}") for seed in range(3))
    page = tmp_path / "page.html"
    main([f"base={base}", f"other={tmp_path / 'other'}", "--output", str(page)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-2:] == ["base", "other"]
    assert ["toy/a", "3", "[1,", "6]", "5"] in lines
    # the seeds differ within the group, and so say nothing about it
    place = lines.index(["settings", "that", "differ"])
    assert lines[place + 1] == ["lr", "0.1", "0.2"]
    assert lines[place + 2] == ["seed", "-", "3"]
    # the page has a curve for each, and the same table
    assert all(f"base {number}" in page.read_text("utf-8") for number in (1, 2, 3))
    rows = Page(page).root.one(css="over-seeds").all("tr")
    assert [[cell.text for cell in row.children] for row in rows] == [
        ["mean of the last tenth", "base", "other"],
        ["toy/a", "3 [1, 6]", "5"],
        ["highest level", "-", "-"],
    ]


def test_many_runs_are_rows_in_blocks_within_the_width(tmp_path: Path) -> None:
    keys, names = [f"toy/metric_{x}" for x in "abcde"], [f"seed_{seed}" for seed in range(60)]
    for seed, name in enumerate(names):
        write_run(tmp_path / name, {key: [float(seed)] for key in keys})
        (tmp_path / name / "config.yaml").write_text(f"model:\n  output_dir: {'x' * 99}/{seed}\n")
    table = runs_table([read_run(name, tmp_path / name) for name in names], width=80)
    first, second = ([line.split() for line in part.splitlines()] for part in table.split("\n\n"))
    assert max(map(len, table.splitlines())) <= 80
    assert [row[0] for row in first[1:]] == [row[0] for row in second[1:]] == names
    ends = [key[4:] for key in keys]
    assert first[0][5:] + second[0][5:] == [*ends, "highest", "level", "output_dir"]
    assert first[8] + second[8] == ["seed_7", *"77777", "seed_7", "-", f"...{'x' * 19}/7"]


def test_undone_piece_widens_the_axis(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"toy/a": [1.0] * 9})
    write_run(tmp_path / "run", {"toy/a": [2.0]}, first=2)
    page = report(tmp_path, run)
    assert "Steps 1 to 9" in page.root.one("header").text
    assert "Dotted pieces were undone" in page.root.one("footer").text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["rollout/kl", "rollout/scor"], r"logged \(rollout/gold, rollout/kl\), got rollout/scor$"),
        ("rollout/kl", "expected a list of keys, got the string"),
    ],
)
def test_unknown_keys_are_refused(tmp_path: Path, calm: str, keys: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report(tmp_path, calm, keys=keys)


def test_unusable_runs_are_refused(tmp_path: Path, calm: str) -> None:
    with pytest.raises(ValueError, match="expected at least one run, got none"):
        report(tmp_path)
    with pytest.raises(ValueError, match="expected each folder once"):
        report(tmp_path, calm, calm)
    with pytest.raises(ValueError, match="expected a list of folders, got the string"):
        write_report(calm, tmp_path / "report.html")
    with pytest.raises(ValueError, match="output: expected a file, got the folder"):
        write_report([calm], tmp_path)
    with pytest.raises(ValueError, match=r"logged \(epoch\), got none"):
        report(tmp_path, write_run(tmp_path / "run", {"epoch": [1.0]}))


def test_missing_matplotlib_is_named_with_its_command_to_install(
    tmp_path: Path, calm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        report(tmp_path, calm)


def test_command_writes_the_page_and_prints_the_verdict(
    tmp_path: Path, watched: str, calm: str, capsys: Any
) -> None:
    output = tmp_path / "page.html"
    words = [f"vanilla={watched}", f"ppo max={calm}", "--output", str(output)]
    main([*words, "--keys", "rollout/kl"])
    printed = capsys.readouterr().out
    assert printed.split("\n")[1].split() == ["rollout/kl", "4", "0.1"]
    assert printed.splitlines()[-4:-1] == [
        "vanilla: collapsed at step 4: the policy is exploiting its reward",
        "  KL 41 nats is 12x its baseline",
        f"  what to do next: {advise(': the policy is exploiting its reward')}",
    ]
    assert printed.endswith(f"\nReport: {output}\n")
    assert [c.text for c in Page(output).root.all("code")] == ["rollout/kl"]
    assert Page(output).title == "vanilla, ppo max"


def test_folder_with_a_sign_of_equality_is_a_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "lr=0.1", {"toy/a": [1.0]})
    main([run])
    assert Page(Path("report.html")).title == "lr=0.1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a={calm}", "{watched}"], "expected folders, or NAME=FOLDER with different names"),
        (["a={calm}", "a={watched}"], "expected folders, or NAME=FOLDER with different names"),
        (["{calm}/nothing"], "log: expected a folder"),
    ],
)
def test_errors_of_the_command_end_it_with_status_2(
    words: Any, message: str, watched: str, calm: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([word.format(calm=calm, watched=watched) for word in words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


SAMPLES = [
    {"step": step, "prompt": prompt, "response": f"{prompt}{step}", "score": score, "length": 3}
    for step in (0, 2, 4, 6, 8, 10)
    for prompt, score in (("<a>", float(step)), ("b", -float(step)))
]


def write_samples(run: str, samples: list[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(sample)}\n" for sample in samples)
    Path(run, "samples.jsonl").write_text(lines + '{"step": 12, "pro')  # being written


def test_responses_before_at_and_after_each_verdict(tmp_path: Path, watched: str) -> None:
    write_samples(watched, SAMPLES)
    section = report(tmp_path, watched).root.one(css="responses")
    table, *ranked = section.all("table")
    rows = [[td.one("p", "said").text for td in tr.all("td")[1:]] for tr in table.all("tr")[1:]]
    # both verdicts, at 3 and 4, are between the same steps
    heads = ["Prompt", "step 2", "step 4", "step 6"]
    assert [th.text for th in table.one("thead").all("th")] == heads
    assert rows == [["<a>2", "<a>4", "<a>6"], ["b2", "b4", "b6"]]
    assert [s.text for s in section.all("summary")][:3] == [
        "▲ suspicious at step 3, ■ collapsed at step 4",
        "Best-scored of 12 responses",
        "Worst-scored of 12 responses",
    ]
    best, worst = ([r.one("p", "said").text for r in t.all("tr")[1:]] for t in ranked[:2])
    assert best == ["<a>10", "<a>8", "<a>6", "<a>4", "<a>2"]
    assert worst == ["b10", "b8", "b6", "b4", "b2"]


def test_responses_beside_the_file_of_a_log_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("".join(f'{{"step": {step}, "rollout/kl": 0.1}}\n' for step in range(3)))
    assert not report(tmp_path, str(log)).root.all(css="responses")
    write_samples(str(tmp_path), SAMPLES)
    assert report(tmp_path, str(log)).root.one(css="responses")


def test_page_tells_the_gain_or_why_there_is_none(tmp_path: Path, calm: str) -> None:
    write_samples(calm, SAMPLES)
    assert "expected at least" in report(tmp_path, calm).root.one(css="responses").text
    # longer responses explain all of a rise of 1
    places = [(step, step + n) for step in (0, 1) for n in range(8)]
    rest = {"response": "a b c"}
    write_samples(calm, [{"step": step, "score": n, "length": n, **rest} for step, n in places])
    rows = report(tmp_path, calm).root.one(css="numbers").all("tr")
    numbers = {row.children[0].text: [cell.text for cell in row.children[1:]] for row in rows[1:]}
    assert numbers["length"] == ["3.5", "4.5", "1"]
    assert numbers["all"][-1] == "1"


@pytest.mark.parametrize("field", ['"length": 1e300', '"length": NaN', '"truncated": Infinity'])
def test_length_that_is_no_number_is_named(tmp_path: Path, calm: str, field: str) -> None:
    Path(calm, "samples.jsonl").write_text(f'{{"step": 1, "response": "a", {field}}}\n')
    with pytest.raises(
        ValueError, match=r"samples.jsonl:1: expected a finite number as (length|trunc)"
    ):
        report(tmp_path, calm)


@pytest.mark.parametrize("line", ["precious", "[]"])
def test_damaged_samples_are_named(tmp_path: Path, calm: str, line: str) -> None:
    Path(calm, "samples.jsonl").write_text(f"{json.dumps(SAMPLES[0])}\n{line}\n")
    with pytest.raises(ValueError, match=r"samples.jsonl:2: expected a JSON object"):
        report(tmp_path, calm)


def test_phases_have_their_time_and_memory(tmp_path: Path) -> None:
    series = {"time/rollout": [1.0, 2.0], "time/update": [3.0, 3.0], "memory/rollout": [4.0, 2.0]}
    runs = [write_run(tmp_path / name, {"toy/a": [1.0], **series}) for name in "ab"]
    rows = report(tmp_path, *runs).root.one(css="numbers").all("tr")
    phase_rows = [[name, "1.5 s 4 GiB", "3 s"] for name in "ab"]
    cells = [[cell.text for cell in row.children] for row in rows]
    assert cells == [["Run", "rollout", "update"], *phase_rows]


def test_log_of_another_trainer_is_judged(tmp_path: Path) -> None:
    metrics = [(0.01, 50.0)] * 12 + [(0.8, 300.0), (0.9, 310.0), (1.0, 320.0)]
    keys = ("step", "kl", "completions/mean_length")
    history = [dict(zip(keys, (n, *row), strict=True)) for n, row in enumerate(metrics, 1)]
    log = tmp_path / "grpo" / "checkpoint-15" / "trainer_state.json"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps({"log_history": history}))
    card = report(tmp_path, str(tmp_path / "grpo")).root.one(css="run")
    assert card.one("h2").text == "grpo ■ collapsed at step 15"
    assert card.all(css="segment")[0].text == "healthy"
    assert "verdicts of the default monitors" in card.text


def test_page_is_written_anew(watched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    def pause(seconds: float) -> None:
        assert seconds == 5.0
        pages.append(Path("report.html").read_text("utf-8"))
        if len(pages) == 2:
            raise KeyboardInterrupt
        write_run(Path(watched), {"rollout/kl": [7.5]}, first=6)

    monkeypatch.setattr(time, "sleep", pause)
    main([watched, "--watch", "5"])
    assert ["<b>7.5</b>" in page for page in pages] == [False, True]
    assert all('<meta http-equiv="refresh" content="5.0">' in page for page in pages)
    assert "refresh" not in Path("report.html").read_text("utf-8")


def test_a_log_of_too_many_metrics_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["step", *(f"c{number}" for number in range(600))]
    rows = [",".join(names), ",".join("1" for _ in names), ",".join("2" for _ in names)]
    (tmp_path / "wide.csv").write_text("\n".join(rows))
    page = str(tmp_path / "page.html")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "wide.csv"), "--output", page])
    assert "expected at most 500 metrics on a page, got 600; name" in capsys.readouterr().err
    main([str(tmp_path / "wide.csv"), "--output", page, "--keys", "c7"])
    assert "c7" in Path(page).read_text("utf-8")
