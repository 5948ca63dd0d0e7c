from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lit_rlhf.data import DataSource
from lit_rlhf.evaluation import (
    Comparison,
    PolicyReport,
    compare_policies,
    load_shared_encoder,
    score_summary,
    short_names,
)
from lit_rlhf.rollout import SamplingOptions
from tests.evaluation.conftest import Folders
from tests.evaluation.folders import (
    CHARACTERS,
    QUESTION_MARKS,
    QUESTIONS,
    write_policy,
    write_reward,
)
from tests.support.tiny_models import tiny_tokenizer


def compared(folders: Folders, policies: list[str], **options: Any) -> Comparison:
    rewards = options.pop("rewards", {CHARACTERS: 1.0})
    return compare_policies(
        policies,
        DataSource(folders.prompts),
        rewards,
        SamplingOptions(max_new_tokens=5),
        batch_size=3,
        **options,
    )


@pytest.fixture(scope="module")
def comparison(folders: Folders) -> Comparison:
    return compared(
        folders, [folders.sft, folders.ppo], rewards={CHARACTERS: 1.0, folders.reward: 1.0}
    )


def test_every_reward_of_every_policy_is_summarized(comparison: Comparison) -> None:
    assert list(comparison.policies) == ["sft", "ppo"]
    for name, report in comparison.policies.items():
        scores = comparison.samples[name].scores
        assert list(report.scores) == ["characters", "reward"]
        for reward, summary in report.scores.items():
            assert summary == score_summary(scores[reward], seed=0)


@pytest.mark.parametrize("reward", ["characters", "reward"])
def test_every_reward_decides_against_the_first_policy(comparison: Comparison, reward: str) -> None:
    ours, theirs = (comparison.samples[name].scores[reward] for name in ("ppo", "sft"))
    wins = sum(a > b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))
    losses = sum(a < b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))

    rates = comparison.policies["ppo"].outcomes[reward]

    assert comparison.policies["sft"].outcomes == {}
    assert (rates.win, rates.lose, rates.n) == (wins / 7, losses / 7, 7)
    assert [row[:2] for row in comparison.head_to_heads] == [
        ("ppo", "characters"),
        ("ppo", "reward"),
    ]


def test_without_a_reward_there_are_only_metrics(folders: Folders) -> None:
    result = compared(folders, [folders.sft, folders.ppo], rewards={}, max_prompts=2)

    assert result.head_to_heads == []
    assert result.policies["ppo"].metrics["response_length"] > 0


def test_responses_go_with_the_prompts_as_they_were_read(comparison: Comparison) -> None:
    answered = comparison.answered

    assert [prompt[0].content for prompt in answered.prompts] == QUESTIONS
    assert answered.by_policy["ppo"] == comparison.samples["ppo"].responses


def test_kl_is_against_the_first_policy(comparison: Comparison) -> None:
    assert comparison.policies["sft"].metrics["kl"] == 0.0
    assert comparison.policies["ppo"].metrics["kl"] > 0.5


def test_a_copy_of_the_baseline_ties_on_every_prompt(folders: Folders) -> None:
    report = compared(folders, [folders.sft, folders.copy]).policies["copy"]

    assert report.outcomes["characters"][:3] == (0.0, 1.0, 0.0)
    assert report.metrics["kl"] == 0.0


def test_a_weight_multiplies_its_reward(folders: Folders, comparison: Comparison) -> None:
    flipped = compared(folders, [folders.sft, folders.ppo], rewards={CHARACTERS: -2.0})

    for name, report in flipped.policies.items():
        plain = comparison.policies[name].scores["characters"]
        assert report.scores["characters"].mean == pytest.approx(-2.0 * plain.mean)
    ours, theirs = (run.policies["ppo"].outcomes["characters"] for run in (flipped, comparison))
    assert (ours.win, ours.lose) == (theirs.lose, theirs.win)


def test_a_wide_margin_makes_every_prompt_a_tie(folders: Folders) -> None:
    report = compared(folders, [folders.sft, folders.ppo], tie_margin=1000.0).policies["ppo"]

    assert report.outcomes["characters"][:3] == (0.0, 1.0, 0.0)


def test_a_function_is_told_which_responses_ended(folders: Folders) -> None:
    result = compared(folders, [folders.sft], rewards={QUESTION_MARKS: 1.0}, max_prompts=2)

    samples = result.samples["sft"]
    assert samples.scores["question_marks"].tolist() == [
        -float(not ended) for ended in samples.terminated.tolist()
    ]


def test_a_rule_scores_too_times_its_weight_and_not_normalized(folders: Folders) -> None:
    rule = {"rule": "length", "unit": "characters", "longest": 0, "weight": 2.0, "normalize": True}
    result = compared(folders, [folders.sft], rewards={CHARACTERS: 1.0, "short": rule})
    (samples,) = result.samples.values()
    assert torch.equal(samples.scores["short"], -2.0 * samples.scores["characters"])
    assert result.as_dict()["rewards"] == {"characters": CHARACTERS, "short": rule}


def test_the_report_is_strict_json(comparison: Comparison) -> None:
    report = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))

    assert report["baseline"] == "sft"
    assert report["n_prompts"] == 7
    assert report["rewards"]["characters"] == CHARACTERS
    assert report["policies"]["sft"]["rewards"]["reward"]["against_baseline"] is None
    ppo = report["policies"]["ppo"]
    assert set(ppo["rewards"]["reward"]) == {"mean", "low", "high", "std", "against_baseline"}
    against = ppo["rewards"]["reward"]["against_baseline"]
    assert against["win"] + against["tie"] + against["lose"] == pytest.approx(1.0)
    assert len(against["win_interval"]) == 2
    assert ppo["response_length"] == comparison.policies["ppo"].metrics["response_length"]


def test_a_number_that_is_not_finite_is_null() -> None:
    report = PolicyReport("a", {}, {}, {"perplexity": math.inf, "kl": 1.0})

    values = Comparison({"a": report}, {}, {}, 1, 0).as_dict()["policies"]["a"]

    assert (values["perplexity"], values["kl"]) == (None, 1.0)


def test_responses_of_all_policies_are_recorded(comparison: Comparison) -> None:
    records = comparison.records()

    assert [record["policy"] for record in records] == ["sft"] * 7 + ["ppo"] * 7


def test_shortened_prompts_are_counted(folders: Folders) -> None:
    assert compared(folders, [folders.sft], max_prompts=2, max_prompt_length=16).shortened == 1


def test_prompts_are_as_long_as_the_baseline_was_trained_on(folders: Folders) -> None:
    assert load_shared_encoder([folders.sft]).max_prompt_length == 64
    assert load_shared_encoder([folders.sft], max_prompt_length=20).max_prompt_length == 20


def test_policies_with_different_tokenizers_are_refused(folders: Folders, tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer(special_pad=False, pad_token="</s>")
    other = write_policy(tmp_path / "other", tokenizer=tokenizer)

    with pytest.raises(ValueError, match=r"other' \(here\).* as the first one, .*tokenizer_hash"):
        compared(folders, [folders.sft, other])


def test_policies_with_different_templates_are_refused(folders: Folders, tmp_path: Path) -> None:
    other = write_policy(tmp_path / "other", template="paper-en")

    with pytest.raises(ValueError, match=r"(?s)the chat templates differ.*Human:first question"):
        compared(folders, [folders.sft, other])


def test_a_template_the_policy_was_not_trained_on_is_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match=r"(?s)sft': expected to show it text as in its training"):
        compared(folders, [folders.sft], chat_template="paper-en")


def test_a_reward_model_of_another_template_is_refused(folders: Folders, tmp_path: Path) -> None:
    other = write_reward(tmp_path / "other", folders.sft, template="paper-en")

    with pytest.raises(ValueError, match=r"(?s)reward model .*the chat templates differ"):
        compared(folders, [folders.sft], rewards={other: 1.0})


@pytest.mark.parametrize(
    ("policies", "options", "message"),
    [
        (["sft", "sft"], {}, "policies: expected one or more, each once"),
        ([], {}, "policies: expected one or more, each once"),
        (["sft"], {"tie_margin": -1.0}, "tie_margin: expected a number >= 0"),
        (["sft"], {"max_prompts": 0}, "max_prompts: expected an integer >= 1"),
        (["sft"], {"rewards": {"no.such:function": 1.0}}, "reward function 'no.such:function'"),
    ],
)
def test_refused(
    folders: Folders, policies: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compared(folders, [getattr(folders, name) for name in policies], **options)


def test_names_are_short_where_they_differ() -> None:
    sources = ["runs/a/model", "runs/b/model", "runs/sft/", "package.module:gold", "owner/name"]

    assert short_names(sources, "sources") == [
        "runs/a/model",
        "runs/b/model",
        "sft",
        "gold",
        "name",
    ]
