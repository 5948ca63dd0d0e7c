"""The processes of experiments: jobs that keep their own result, and measured steps."""

from pathlib import Path
from subprocess import CalledProcessError

import pytest
import yaml

from experiments.frame import read_commands
from experiments.processes import (
    Job,
    Step,
    command_job,
    fit_step,
    read_watched_run,
    run_jobs,
    run_missing_jobs,
    run_missing_steps,
    run_step,
)
from experiments.results_file import write_run
from lit_callbacks import KLMonitor


def test_jobs_keep_their_output_and_a_failure_is_raised(tmp_path: Path) -> None:
    jobs = [Job(["platform"], tmp_path / "a" / "log.txt"), Job(["no_such_module"], tmp_path / "b")]
    with pytest.raises(CalledProcessError):
        run_jobs(jobs, parallel=2)
    assert (tmp_path / "a" / "log.txt").read_text("utf-8").strip()
    assert "no_such_module" in (tmp_path / "b").read_text("utf-8")


def test_job_is_a_command_that_its_experiment_understands(tmp_path: Path) -> None:
    options = {"output_dir": "runs", "seed": 30, "arithmetic": "intel"}
    job = command_job("quickstart_seeds", "run_one", options, log=tmp_path / "log.txt", threads=2)
    words = ["experiments", "quickstart_seeds", "run_one", "runs", "intel", "--seed", "30"]
    assert job == Job(words, tmp_path / "log.txt", 2)
    parser = read_commands("quickstart_seeds")["run_one"].build_parser("run_one")
    assert vars(parser.parse_args(words[3:])).items() >= options.items()


def test_job_with_a_result_is_not_repeated(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    write_run(results, "done", {"gold": 1.0})
    jobs = {name: Job(["platform"], tmp_path / name) for name in ("done", "missing")}
    run_missing_jobs(jobs, results, parallel=1)
    assert [(tmp_path / name).is_file() for name in jobs] == [False, True]


@pytest.mark.parametrize("logged", [99.0, 0.0])
def test_peak_of_a_step_covers_all_phases(logged: float, tmp_path: Path) -> None:
    figures = {"peak_gib": logged, "perplexity": 2.0}
    step = Step("name", 1, ["-c", "print('done')"], lambda: figures)
    row = run_step(step, tmp_path, threads=1)
    assert logged <= row["peak_gib"] <= 99.0
    assert row["peak_gib"] > 0
    assert row["result"] == {"perplexity": 2.0}
    assert (tmp_path / "output" / "name.txt").read_text("utf-8") == "done\n"


def test_step_is_kept_before_the_next_one_fails(tmp_path: Path) -> None:
    commands = {"old": "1 / 0", "new": "print(1)", "failing": "1 / 0"}
    steps = [Step(name, 1, ["-c", code], dict) for name, code in commands.items()]
    done = {"old": {}}
    missing = run_missing_steps(steps, done, folder=tmp_path, threads=1)
    done["new"] = next(missing).row
    with pytest.raises(RuntimeError, match=r"failing failed; .* ends with\n(.*\n)*ZeroDivision"):
        next(missing)
    assert list(done) == ["old", "new"]


def test_fit_puts_its_changes_on_top_of_the_configurations(tmp_path: Path) -> None:
    step = fit_step(
        name="ppo",
        folder=tmp_path,
        config=Path("a.yaml"),
        model={"seed": 3},
        data={"batch_size": 2},
        trainer={"max_epochs": 1},
        collect=dict,
    )
    files = [Path(word) for word in step.command if word.endswith(".yaml")]
    assert [file.name for file in files][:3] == ["a.yaml", "ppo.yaml", "resumable.yaml"]
    logger = {"init_args": {"save_dir": str(tmp_path / "logs"), "name": "ppo"}}
    assert yaml.safe_load(files[1].read_text("utf-8")) == {
        "trainer": {"logger": logger, "max_epochs": 1},
        "model": {"init_args": {"seed": 3, "output_dir": str(tmp_path / "ppo")}},
        "data": {"init_args": {"batch_size": 2}},
    }
    assert step.command[-2:] == ["--ckpt_path", "last"]


def test_collapse_in_a_log_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def monitors() -> list[KLMonitor]:
        return [KLMonitor(high=1.0, baseline_steps=3, horizon=0)]

    monkeypatch.setattr("experiments.processes.default_monitors", monitors)
    kls = [0.1, 0.1, 0.1, 0.1, 0.9, 2.0, 3.0, 9.0]
    rows = [f"{step},{kl},8.0" for step, kl in enumerate(kls, 1)]
    text = "\n".join(["step,rollout/kl,rollout/response_length", *rows]) + "\n"
    (tmp_path / "metrics.csv").write_text(text, "utf-8")
    watched = read_watched_run(tmp_path, ["rollout/kl"])
    assert watched["curves"] == {"rollout/kl": kls}
    assert watched["flagged_at"] == 7  # the second reading beyond 1
    assert "KL" in watched["reasons"]
