import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.drawing import STYLE
from experiments.known_truth.rule import common_phrase_share
from experiments.overoptimization import study
from experiments.overoptimization.criterion import (
    Course,
    Gate,
    Run,
    agreement,
    correlation_within,
    judge,
    keeps_variety,
)
from experiments.overoptimization.labels import Truth, as_matrix, draw_pairs, fit_truth, label_pairs
from experiments.overoptimization.page import draw, format_page, format_tables
from experiments.overoptimization.study import (
    BEST_OF,
    END_SAMPLES,
    SIZES,
    Overoptimization,
    Proxy,
    best_of_course,
    read_timeline,
    run,
)
from experiments.processes import Finished, Step
from experiments.results_file import read_run, write_run
from lit_rlhf.files import write_json_lines
from tests.support.experiment_steps import options_of

ITERATIONS = (0, 20, 40, 60, 80, 100)


def test_slope_on_length_is_fitted_within_prompts_and_taken_out() -> None:
    # 0.5 and 1.5 per token within the prompts, whatever the prompts' own levels: with the same
    # spread of lengths the slope is 1, and between prompts it would be negative
    gold = np.array([[10.0, 11.0], [0.0, 3.0]])
    lengths = np.array([[2.0, 4.0], [8.0, 10.0]])
    truth = fit_truth(gold, lengths)
    assert truth == Truth(slope=1.0, typical_length=6.0)
    assert truth.of(gold, lengths).tolist() == [[14.0, 13.0], [-2.0, -1.0]]


def test_labels_prefer_the_truth_and_leave_out_what_is_cut_off_empty_or_equal() -> None:
    def answer(text: str, ended: bool = True) -> dict[str, Any]:
        return {"prompt": "Q", "response": text, "ended": ended}

    rows = [answer(" a"), answer("b"), answer("c"), answer("d")]
    rows += [answer("e"), answer("f", ended=False), answer("g"), answer(" ")]
    truths = [1.0, 2.0, 5.0, 5.0, 1.0, 2.0, 1.0, 2.0]
    pairs = label_pairs(rows, truths)
    assert pairs == [{"prompt": "Q", "chosen": "b", "rejected": "a", "places": [1, 0]}]


def test_labels_of_a_length_lover_change_once_its_slope_is_taken_out() -> None:
    rows = [{"prompt": "Q", "response": text, "ended": True} for text in ("long", "short")]
    gold = np.array([[3.0, 2.0]])
    lengths = np.array([[9.0, 3.0]])
    truths = Truth(slope=0.5, typical_length=0.0).of(gold, lengths)
    assert label_pairs(rows, gold.ravel().tolist())[0]["chosen"] == "long"
    assert label_pairs(rows, truths.ravel().tolist())[0]["chosen"] == "short"


def test_pairs_are_drawn_anew_for_each_seed_and_size() -> None:
    pool = [{"n": n} for n in range(50)]
    first = draw_pairs(pool, 10, 0)
    assert first == draw_pairs(pool, 10, 0)
    assert len({row["n"] for row in first}) == 10
    assert first != draw_pairs(pool, 10, 1)
    assert first != draw_pairs(pool, 20, 0)[:10]


def test_gate_needs_agreement_and_correlation() -> None:
    assert agreement(np.array([2.0, 1.0, 3.0, 0.0]), np.array([1.0, 1.0, 0.0, 5.0])) == 0.625
    # deviations -1, 1 and -2, 2 against -1, 1 and 1, -1, whatever the prompts' means
    first = np.array([[0.0, 2.0], [50.0, 54.0]])
    second = np.array([[-1.0, 1.0], [8.0, 6.0]])
    assert correlation_within(first, second) == pytest.approx(-2 / math.sqrt(10 * 4))
    assert Gate(agreement=0.62, correlation=0.2).is_open
    assert not Gate(agreement=0.61, correlation=0.9).is_open
    assert not Gate(agreement=0.9, correlation=0.19).is_open


def test_best_of_n_has_the_analytic_kl_and_the_expectation() -> None:
    n_samples = BEST_OF[-1]
    # the proxy is the rank; the truth rises until rank 48 and falls from there
    ranks = np.arange(n_samples, dtype=float)
    proxies = np.stack([ranks, ranks[::-1]])
    course = best_of_course(proxies, -np.abs(proxies - 48.0))
    assert [point["n"] for point in course] == list(BEST_OF)
    assert course[2]["kl"] == pytest.approx(math.log(4) - 3 / 4)
    assert course[0]["proxy"][0] == pytest.approx(31.5)
    # the expected highest of two ranks of 0..63 is 2 (64 + 1) / 3 - 1
    assert course[1]["proxy"][0] == pytest.approx(2 * 65 / 3 - 1, abs=1e-4)
    assert course[-1]["proxy"][0] == 63.0
    assert course[-1]["truth"][0] == -15.0


def course_of(means: Sequence[float]) -> Course:
    """A course whose prompts differ by as much as the mean is moved."""
    spread = np.linspace(-0.1, 0.1, 8)
    return Course(ITERATIONS, np.array([mean + spread for mean in means]))


def run_of(course: Course, *, vanilla: float, ppo_max: float) -> Run:
    """A run whose SFT ends at 0."""
    ends = {"sft": 0.0, "ppo_vanilla": vanilla, "ppo_max": ppo_max}
    return Run(course, {name: np.full((8, 2), value) for name, value in ends.items()})


PEAK_AT_20 = course_of([0, 1, 0.5, 0, -1, -2])
HIGHER_AT_60 = course_of([0, 1, 1.5, 2, 1, 0])


def test_criterion_holds_where_gold_peaks_falls_and_peaks_later_with_more_pairs() -> None:
    few = {0: run_of(PEAK_AT_20, vanilla=-2, ppo_max=1)}
    many = {0: run_of(HIGHER_AT_60, vanilla=-0.5, ppo_max=1)}
    assert (PEAK_AT_20.peak_iteration, PEAK_AT_20.fall.mean) == (20, pytest.approx(-3))
    assert judge(few, many) == {
        "1 falls": True,
        "2 higher and later": True,
        "3 PPO-max improves": True,
    }


@pytest.mark.parametrize(
    ("few", "many", "missing"),
    [
        # gold falls from the start: there is no peak
        (run_of(course_of([0, -1, -2, -3, -4, -5]), vanilla=-5, ppo_max=1), None, ["1 falls"]),
        # gold is highest at the end
        (
            run_of(course_of([0, 0, 0, 0, 0, 0.5]), vanilla=-5, ppo_max=1),
            None,
            ["1 falls", "2 higher and later"],
        ),
        # it falls below its peak and not below SFT
        (run_of(PEAK_AT_20, vanilla=0.5, ppo_max=1), None, ["1 falls"]),
        # with more pairs the peak is higher and not later
        (
            None,
            run_of(course_of([0, 2, 1, 0, 0, 0]), vanilla=-1, ppo_max=1),
            ["2 higher and later"],
        ),
        # it is later and not higher
        (
            None,
            run_of(course_of([0, 0, 0, 0.5, 0, 0]), vanilla=-1, ppo_max=1),
            ["2 higher and later"],
        ),
        (run_of(PEAK_AT_20, vanilla=-2, ppo_max=-1), None, ["3 PPO-max improves"]),
        (None, run_of(HIGHER_AT_60, vanilla=2, ppo_max=1), ["3 PPO-max improves"]),
    ],
)
def test_criterion_fails_where_a_part_is_missing_in_one_seed(
    few: Run | None, many: Run | None, missing: list[str]
) -> None:
    good_few = run_of(PEAK_AT_20, vanilla=-2, ppo_max=1)
    good_many = run_of(HIGHER_AT_60, vanilla=-0.5, ppo_max=1)
    verdict = judge({0: good_few, 1: few or good_few}, {0: good_many, 1: many or good_many})
    assert [part for part, held in verdict.items() if not held] == missing


def test_variety_is_kept_to_a_fifth() -> None:
    assert keeps_variety(0.8, 1.0)
    assert not keeps_variety(0.79, 1.0)


def test_common_phrases_are_counted_over_other_prompts() -> None:
    canned = ["i", "hope", "this", "helps"]
    texts = [["well", *canned], ["yes", *canned], ["no", "i", "hope", "this", "is"]]
    assert common_phrase_share(["a", "b", "c"], texts) == pytest.approx(2 / 3)
    # twice in responses to one prompt is not common
    assert common_phrase_share(["a", "a", "c"], texts) == 0.0


def test_arms_learn_from_their_proxy_alone_and_are_sampled_every_20_iterations(
    tmp_path: Path,
) -> None:
    runs = Overoptimization(tmp_path, "base", "hh", SIZES, gold_base="gemma")
    proxy = Proxy(pairs=300, seed=2)
    steps = [*runs.proxy_steps(proxy), *runs.ppo_steps(proxy)]
    reward, *arms = options_of(steps, "proxy_300_2", "ppo_vanilla_300_2", "ppo_max_300_2")
    assert (reward["head_seed"], reward["seed"]) == (2, 2)
    assert [Path(source["path"]).name for source in reward["train_sources"]] == [
        "proxy_300_2.jsonl"
    ]
    for arm in arms:
        assert {Path(path).name: w for path, w in arm["rewards"].items()} == {"proxy_300_2": 1.0}
        assert (arm["seed"], arm["sampling"]["max_new_tokens"]) == (2, 64)
        rates = [arm[f"{network}_optimizer"]["learning_rate"] for network in ("policy", "critic")]
        assert rates == pytest.approx([5e-5, 1.5e-4])
    assert [arm["reward_shaping"]["kl_coef"] > 0 for arm in arms] == [False, True]
    overlay = (tmp_path / "configs" / "ppo_max_300_2.yaml").read_text()
    assert "lit_callbacks.SampleTimeline" in overlay
    assert "every_n_batches: 20" in overlay
    end = steps[-1].command
    assert end[end.index("--samples_per_prompt") + 1] == str(END_SAMPLES)
    # PPO's prompts are cut alike
    assert reward["max_prompt_length"] == arms[0]["max_prompt_length"]
    assert end[end.index("--max_prompt_length") + 1] == str(arms[0]["max_prompt_length"])


def test_timeline_becomes_rows_that_are_scored(tmp_path: Path) -> None:
    line = {"step": 20.0, "prompt_index": 3, "prompt": "Q", "response": "A", "score": 1.5}
    write_json_lines(tmp_path / "samples.jsonl", [{**line, "kl": 2, "length": 4, "truncated": 1}])
    (row,) = read_timeline(tmp_path / "samples.jsonl")
    assert (row["iteration"], row["prompt_index"], row["ended"]) == (20, 3, False)
    assert (row["score"], row["kl"], row["length"]) == (1.5, 2, 4)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that ran; each only says whether the gate is open."""
    names: list[str] = []

    def run_missing(
        steps: list[Step], done: dict[str, Any], *, folder: Path, threads: int
    ) -> list[Finished]:
        missing = [step for step in steps if step.name not in done]
        (folder / "sft").mkdir(parents=True, exist_ok=True)
        names.extend(step.name for step in missing)
        return [
            Finished(step, {"result": {"open": step.name != "gate_300_1"}, "minutes": 1.0})
            for step in missing
        ]

    monkeypatch.setattr(study, "run_missing_steps", run_missing)
    monkeypatch.setattr(Overoptimization, "write_data", lambda self: None)
    return names


def test_command_skips_what_is_done_and_ppo_behind_a_shut_gate(
    tmp_path: Path, executed: list[str]
) -> None:
    results = tmp_path / "results.jsonl"
    options: dict[str, Any] = {"output_dir": str(tmp_path / "runs"), "results": str(results)}
    run("base", "gemma", "hh", seeds=(0,), **options)
    assert executed[:5] == ["sft", "gold", "labelled_test", "labelled_train", "best_of"]
    # all proxies come before the first PPO
    assert executed.index("best_of_1000_0") < executed.index("ppo_vanilla_300_0")
    assert executed[-1] == "end_1000_0"
    executed.clear()
    kept = read_run(results, "300_0")
    assert kept is not None
    del kept["course_ppo_max_300_0"]
    write_run(results, "300_0", kept)
    run("base", "gemma", "hh", seeds=(0, 1), **options)
    assert executed.index("best_of_1000_1") < executed.index("course_ppo_max_300_0")
    assert "ppo_vanilla_300_0" not in executed
    assert "gate_300_1" in executed
    assert "ppo_vanilla_300_1" not in executed
    assert "ppo_vanilla_1000_1" in executed
    executed.clear()
    run("base", "gemma", "hh", seeds=(0, 1), **options)
    assert executed == []


def test_settings_of_the_results_stay(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    write_run(results, "settings", {"criterion": "0"})
    with pytest.raises(ValueError, match=r"settings: expected {'criterion': '0'}, as in .*, got "):
        run("base", "gemma", "hh", output_dir=str(tmp_path), results=str(results))


def test_results_go_on_only_beside_their_models(tmp_path: Path, executed: list[str]) -> None:
    results = tmp_path / "results.jsonl"
    options: dict[str, Any] = {"results": str(results), "seeds": (0,)}
    run("base", "gemma", "hh", output_dir=str(tmp_path / "runs"), **options)
    kept = results.read_bytes()
    executed.clear()
    with pytest.raises(ValueError, match=r"output_dir: .*elsewhere does not have the models of "):
        run("base", "gemma", "hh", output_dir=str(tmp_path / "elsewhere"), **options)
    assert executed == []
    assert results.read_bytes() == kept


def made_up_results(*, with_ppo: bool) -> dict[str, Any]:
    """Results whose criterion holds, of two prompts and of six seeds and sizes."""
    mean = [0.5, 0.4, 0.6]
    truth = {"slope": 0.01, "typical_length": 30.0}
    labels: dict[str, Any] = {"truth": truth, "gold with length": 0.4, "truth with gold": 0.9}
    labels |= {"spread within prompts": 0.7, "pairs": {"train": {"used": 2000}}}
    labels["pairs"]["test"] = {"used": 400}
    sft = {"samples": [["Hi?", "A\nb"]], "spread within prompts": 0.5}
    common = {"sft": {}, "gold": {}, "labelled_train": labels, "best_of": sft}
    results: dict[str, Any] = {"settings": {}, "common": with_times(common)}
    for size, means in ((300, (0, 1, 0.5, 0, -1, -2)), (1000, (0, 1, 1.5, 2, 1, -1))):
        for seed in (0, 1, 2):
            tag = f"{size}_{seed}"
            points = [{"n": n, "kl": 0.1 * n, "proxy": mean, "truth": mean} for n in BEST_OF]
            steps: dict[str, Any] = {
                f"proxy_{tag}": {},
                f"gate_{tag}": {"agreement": 0.65, "correlation": 0.3, "open": True},
                f"best_of_{tag}": {"spread within prompts": 2.0, "course": points},
            }
            if with_ppo:
                course = [
                    {"iteration": n, "kl": 1.0 * n, "proxy": [1.0 * n] * 2, "truth": [value] * 2}
                    for n, value in zip(ITERATIONS, means, strict=True)
                ]
                # the detector's level changes, which is no point of the course
                course.insert(3, {**course[3], "iteration": 41, "truth": [9.0] * 2})
                ends = {"sft": 0.0, "ppo_vanilla": float(means[-1]), "ppo_max": 1.0}
                steps |= {f"course_{arm}_{tag}": {"points": course} for arm in study.ARMS}
                steps[f"end_{tag}"] = {
                    arm: {
                        "truth": [value] * 2 * END_SAMPLES,
                        "kl": 3.0,
                        "canned": 0.25,
                        "distinct_2": 0.5 if arm == "ppo_vanilla" else 0.9,
                        "samples": sft["samples"],
                    }
                    for arm, value in ends.items()
                }
            results[tag] = with_times(steps)
    return results


def with_times(steps: dict[str, Any]) -> dict[str, Any]:
    """Results of steps with what they took."""
    times = {"cpu_minutes": 1.0, "minutes": 2.0, "peak_gib": 3.0}
    return {name: {"result": result, **times} for name, result in steps.items()}


def test_page_of_finished_runs_has_the_verdict() -> None:
    results = made_up_results(with_ppo=True)
    page = format_page(results)
    assert "The criterion is met: 1 falls: yes, 2 higher and later: yes" in page
    assert "| 300 | 0 | 20 | -3.00 [-3.00, -3.00] | -2.00 [-2.00, -2.00] |" in page
    assert "0.90, 0.50 (low), 0.90" in page
    course = "| 0.00 | 1.00 | 0.50 | 0.00 | -1.00 | -2.00 | 100.0 |"
    assert f"| 300 | 0 | vanilla PPO {course}" in page
    assert "comparisons at the end (6 of 6 done)" in page
    assert "| SFT | Hi? | A b |" in format_tables(results)


def test_page_of_an_incomplete_run_claims_what_is_done() -> None:
    results = made_up_results(with_ppo=False)
    page = format_page(results)
    assert "Not known yet for PPO. 6 of 6 proxies pass the gate." in page
    assert "Done: SFT, the gold model, the labels, SFT's 64 samples, proxies (6 of 6 done)" in page
    assert "Not done: runs of vanilla PPO (0 of 6 done), runs of PPO-max (0 of 6 done)" in page
    assert "PPO has not run yet." in page
    empty = format_page({"settings": {}})
    assert "Not known: no proxy is trained yet." in empty
    assert "- Done: nothing." in empty
    format_tables({"settings": {}})


def test_figure_has_best_of_n_as_lines_and_ppo_as_points() -> None:
    left, right = draw(made_up_results(with_ppo=True)).axes
    titles = [axis.get_title(loc=STYLE["axes.titlelocation"]) for axis in (left, right)]
    assert titles == ["300 pairs", "1,000 pairs"]
    assert len(left.lines) == 6
    assert left.lines[0].get_xdata()[0] == pytest.approx(math.sqrt(0.1))
    # proxy and gold of two arms and three seeds
    assert len(left.collections) == 12
    # the proxy over its spread of 2, and gold over 0.5
    proxy, _, gold = (np.asarray(points.get_offsets()) for points in left.collections[:3])
    assert proxy[1].tolist() == pytest.approx([math.sqrt(20), 10.0])
    assert gold[1].tolist() == pytest.approx([math.sqrt(20), 2.0])
    assert len(draw({"settings": {}}).axes[0].lines) == 0


def test_matrix_keeps_the_responses_to_a_prompt_together() -> None:
    assert as_matrix([1, 2, 3, 4], 2).tolist() == [[1.0, 2.0], [3.0, 4.0]]
