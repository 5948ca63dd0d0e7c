"""Python functions as rewards, and the errors that they raise."""

import asyncio
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import CallableReward, RewardError, WeightedReward
from lit_rlhf.rollout import RolloutBatch
from tests.support import reward_functions
from tests.support.reward_inputs import PROMPTS, TEXTS
from tests.support.tiny_models import tiny_tokenizer

FUNCTIONS = "tests.support.reward_functions"


def scores(name: str, rollouts: RolloutBatch, records: Sequence[Any] = ()) -> list[float]:
    reward = CallableReward(f"{FUNCTIONS}:{name}", tiny_tokenizer())
    result = reward(rollouts, PROMPTS, None, records)
    assert result.dtype == torch.float32
    return result.tolist()  # type: ignore[no-any-return]


def test_function_gets_the_columns_of_its_parameters(rollouts: RolloutBatch) -> None:
    assert scores("length", rollouts) == [3.0, 6.0, 0.0]
    assert scores("prompt_length", rollouts) == [12.0, 6.0, 9.0]
    assert scores("ended", rollouts) == [1.0, -1.0, 1.0]
    answers = [{"answer": "yes", "level": 3}, {"answer": "never", "level": 4}, {"level": 5}]
    assert scores("equals_answer", rollouts, answers) == [1.0, 0.0, 0.0]
    assert scores("default_level", rollouts, answers) == [3.0, 4.0, 5.0]
    assert scores("default_level", rollouts, [{"answer": "yes"}] * 3) == [7.0, 7.0, 7.0]
    assert scores("default_level", rollouts) == [7.0, 7.0, 7.0]
    assert scores("length", rollouts, answers) == [3.0, 6.0, 0.0]
    # `**` takes all except those that are arguments already
    named = [{**answer, "prompts": 1, "lengths": 2} for answer in answers]
    assert scores("count_fields", rollouts, named) == [2.0, 2.0, 2.0]


def test_coroutine_is_awaited_whether_a_loop_runs_or_not(rollouts: RolloutBatch) -> None:
    async def in_a_notebook() -> list[float]:
        return scores("asynchronous", rollouts)

    assert scores("asynchronous", rollouts) == [3.0, 6.0, 0.0]
    assert asyncio.run(in_a_notebook()) == [3.0, 6.0, 0.0]


def test_function_that_changes_a_field_changes_a_copy(rollouts: RolloutBatch) -> None:
    records = [{"tags": ["a"]} for _ in PROMPTS]
    scores("empties_a_field", rollouts, records)
    assert records == [{"tags": ["a"]} for _ in PROMPTS]


def test_missing_field_is_named_with_the_function(rollouts: RolloutBatch) -> None:
    reward = CallableReward(f"{FUNCTIONS}:equals_answer", tiny_tokenizer())
    message = "equals_answer': expected records with the field 'answer'.* the train records have "
    with pytest.raises(ValueError, match=message + "label, prompt;"):
        reward.check_fields({"prompt", "label"}, "the train records")
    with pytest.raises(ValueError, match=r"with the field 'answer'.* the prompts have no fields"):
        reward(rollouts, PROMPTS, None)
    reward.check_fields({"answer"}, "the train records")


@pytest.mark.parametrize(
    ("name", "actual"),
    [
        (
            "one_too_few",
            r"shape \(2,\); called with 3 responses, the first: prompt 'first prompt' and",
        ),
        ("a_column", r"shape \(3, 1\)"),
        ("nothing", "None"),
        ("words", r"\['good', 'bad'"),
        ("beyond_any_float", r"\[1000"),
    ],
)
def test_invalid_result_of_a_function_is_named(
    rollouts: RolloutBatch, name: str, actual: str
) -> None:
    message = f"{name}': expected 3 scores, one for each response, got {actual}"
    with pytest.raises(ValueError, match=message):
        scores(name, rollouts)


def test_fork_of_a_function_may_end_by_exit(rollouts: RolloutBatch) -> None:
    assert scores("forks", rollouts) == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("name", "number", "row"), [("not_a_number", "nan", 1), ("infinite", "-inf", 0)]
)
def test_non_finite_scores_pass(rollouts: RolloutBatch, name: str, number: str, row: int) -> None:
    sample = f"prompt {PROMPTS[row]!r} and response {TEXTS[row]!r}"
    message = f"{name}': expected finite scores, got {number} for {sample}"
    with pytest.warns(UserWarning, match=message):
        result = scores(name, rollouts)
    assert str(result[row]) == number


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_error_is_shown_with_the_sample(rollouts: RolloutBatch, timeout: float | None) -> None:
    def fails_on(text: str, prompts: Sequence[str] = PROMPTS) -> str:
        reward = CallableReward(f"{FUNCTIONS}:fails_on_{text}", tiny_tokenizer(), timeout=timeout)
        with pytest.raises(RuntimeError) as error:
            reward(rollouts, prompts, None)
        assert isinstance(error.value.__cause__, KeyError)
        return str(error.value)

    message = "raised KeyError: 'way'. Called with prompt 'second' and response 'no way'"
    assert fails_on("no_way") == f"reward function '{FUNCTIONS}:fails_on_no_way' {message}"
    assert "prompt 'x" + "x" * 199 + "...' and" in fails_on("no_way", ["a", "x" * 1000, "z"])
    # no sample fails by itself
    assert "KeyError: 'several'. Called with 3 responses, the first" in fails_on("several")


def test_function_that_takes_too_long_is_named(rollouts: RolloutBatch) -> None:
    waiting = {f"{FUNCTIONS}:waits": 1.0}
    weighted = WeightedReward(waiting, ModelOptions(), tiny_tokenizer(), timeout=0.01)
    message = (
        "waits': no scores after 0.01 seconds .reward_timeout. for 3 responses, the first: prompt "
        "'first prompt' and response 'yes'"
    )
    try:
        reward_functions.released.clear()
        with pytest.raises(TimeoutError, match=message):
            weighted(rollouts, PROMPTS, None)
    finally:
        reward_functions.released.set()


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exits", "raised SystemExit: 0. Called with prompt 'second' and response 'no way'"),
        ("ends_the_process", "expected a function that returns, got one that calls os._exit.0."),
        ("turns_gradients_off", "expected a function that leaves torch's"),
        ("turns_gradients_on", "expected a function that leaves torch's"),
        ("changes_the_folder", "expected a function that leaves the current folder as it is"),
        ("changes_the_dtype", "expected a function that leaves torch's default dtype as it is"),
        ("sorts_the_responses", ".* leaves its argument 'responses' as it"),
        ("empties_the_prompts", ".* leaves its argument 'prompts' as it is"),
        ("changes_the_lengths", ".* leaves its argument 'lengths' as it is"),
    ],
)
def test_function_with_side_effects_is_refused(
    rollouts: RolloutBatch, name: str, message: str, timeout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(".")  # and back at the end
    reward = CallableReward(f"{FUNCTIONS}:{name}", tiny_tokenizer(), timeout=timeout)
    with torch.set_grad_enabled(name != "turns_gradients_on"):
        before = torch.is_grad_enabled()
        if name == "turns_gradients_on" and timeout is not None:
            reward(rollouts, PROMPTS, None)  # gradients are on at the start of a thread
        else:
            with pytest.raises(RuntimeError, match=f"{name}'.* {message}|{name}': {message}"):
                reward(rollouts, PROMPTS, None)
        assert torch.is_grad_enabled() == before
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("changes_the_device", "torch's default device"),
        ("leaves_autocast_on", "torch's autocast on cpu"),
        ("changes_autocast_on_gpus", "torch's autocast dtype on cuda"),
        ("becomes_deterministic", "torch's deterministic mode"),
        ("changes_the_precision", "torch's matmul precision"),
        ("changes_the_threads", "torch's number of threads"),
        ("changes_cudnn", "cuDNN's benchmark mode"),
        ("turns_flash_attention_off", "torch's flash attention"),
        ("turns_denormals_to_zero", "torch's treatment of denormals"),
        ("looks_for_anomalies", "torch's anomaly mode"),
        ("raises_numpys_errors", "NumPy's treatment of errors"),
        ("ignores_sigterm", "the handler of SIGTERM"),
        ("replaces_the_output", "sys.stdout"),
        ("closes_the_output", "sys.stdout"),
    ],
)
def test_setting_of_the_process_is_put_back_and_named(
    rollouts: RolloutBatch, name: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    before = process_settings()
    reward = CallableReward(f"{FUNCTIONS}:{name}", tiny_tokenizer())
    with pytest.raises(RewardError, match=f"that leaves {setting} as it is, got one that changes"):
        reward(rollouts, PROMPTS, None)
    assert process_settings() == before


def process_settings() -> tuple[Any, ...]:
    return (
        torch.empty(0).device.type,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.is_anomaly_enabled(),
        np.geterr(),
        signal.getsignal(signal.SIGTERM),
        (torch.tensor([5e-324], dtype=torch.float64) * 1).item(),
        sys.stdout,
    )


def test_setting_that_an_import_changes_is_put_back_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changes_at_import.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.manual_seed(7)\n"
        "def score(prompts, responses): return [0.0] * len(responses)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    random_state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="changes_at_import:score' changes torch's default dtype"):
        CallableReward("changes_at_import:score", tiny_tokenizer())
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("name", ["draws", "seeds"])
def test_random_numbers_of_training_do_not_depend_on_a_function(
    rollouts: RolloutBatch, name: str, timeout: float | None
) -> None:
    reward = CallableReward(f"{FUNCTIONS}:{name}", tiny_tokenizer(), timeout=timeout)
    state = torch.get_rng_state()
    first = reward(rollouts, PROMPTS, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(reward(rollouts, PROMPTS, None), first)  # as after a resume
    others = reward(rollouts, [*PROMPTS[1:], "another"], None)
    assert torch.equal(others, first) == (name == "seeds")


def test_search_for_the_sample_of_an_error_ends(
    rollouts: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_rlhf.rewards.functions._SEARCH_SECONDS", 0.0)
    reward = CallableReward(f"{FUNCTIONS}:fails_on_no_way", tiny_tokenizer())
    with pytest.raises(RewardError, match=r"'way'. Called with 3 responses, the first: "):
        reward(rollouts, PROMPTS, None)


def test_a_score_beyond_float32_is_shown_as_it_was_returned(rollouts: RolloutBatch) -> None:
    reward = CallableReward(lambda prompts, responses: [0.0, 1e308, 0.0], tiny_tokenizer())
    with pytest.warns(UserWarning, match=r"got 1e\+308 for .* 1 of 3 are not finite in float32"):
        assert reward(rollouts, PROMPTS, None).tolist() == [0.0, float("inf"), 0.0]
