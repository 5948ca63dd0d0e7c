import json
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lit_rlhf.data import DataSource, DialogueEncoder, Message
from lit_rlhf.files import write_json_lines
from lit_rlhf.functional import Interval
from lit_rlhf.models import ModelOptions, load_scalar_model
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.tools.evaluation import (
    Comparison,
    compare_policies,
    print_comparison,
    read_prompts,
    read_responses,
)
from lit_rlhf.tools.evaluation.compare import (
    METRICS,
    BestOf,
    PolicyReport,
    PolicySamples,
    measure_policy,
)
from lit_rlhf.tools.evaluation.outcomes import Outcomes, ScoreSummary, score_summary
from lit_rlhf.tools.evaluation.sampling import (
    EncodedPrompts,
    encode_prompt_records,
    sample_batches,
)
from tests.support.evaluation_folders import (
    CHARACTERS,
    QUESTION_MARKS,
    QUESTIONS,
    Folders,
    Sampling,
    assert_continued,
    read_lines,
    write_lines,
    write_policy,
    write_prompts,
    write_reward,
)
from tests.support.tiny_models import EOS_ID, tiny_causal_lm, tiny_tokenizer


def compared(folders: Folders, policies: list[str], **options: Any) -> Comparison:
    rewards = options.pop("rewards", {CHARACTERS: 1.0})
    sampling = SamplingOptions(max_new_tokens=5)
    prompts = DataSource(folders.prompts)
    return compare_policies(policies, prompts, rewards, sampling, batch_size=3, **options)


@pytest.fixture(scope="module")
def comparison(folders: Folders) -> Comparison:
    rewards = {CHARACTERS: 1.0, folders.reward: 1.0}
    return compared(folders, [folders.sft, folders.ppo], rewards=rewards)


def test_every_reward_of_every_policy_is_summarized(comparison: Comparison) -> None:
    assert list(comparison.policies) == ["sft", "ppo"]
    for name, report in comparison.policies.items():
        scores = comparison.samples[name].scores
        assert list(report.scores) == ["characters", "reward"]
        for reward, summary in report.scores.items():
            assert summary == score_summary(scores[reward], seed=0)


@pytest.mark.parametrize("reward", ["characters", "reward"])
def test_every_reward_decides_against_the_first_policy(comparison: Comparison, reward: str) -> None:
    ppo_scores, sft_scores = (comparison.samples[name].scores[reward] for name in ("ppo", "sft"))
    wins = sum(a > b for a, b in zip(ppo_scores.tolist(), sft_scores.tolist(), strict=True))
    losses = sum(a < b for a, b in zip(ppo_scores.tolist(), sft_scores.tolist(), strict=True))
    rates = comparison.policies["ppo"].outcomes[reward]
    assert comparison.policies["sft"].outcomes == {}
    assert (rates.win, rates.lose, rates.n) == (wins / 7, losses / 7, 7)
    decided = [(by, list(outcomes)) for by, outcomes in comparison.head_to_heads]
    assert decided == [("characters", ["ppo"]), ("reward", ["ppo"])]


def test_each_policy_gives_its_own_responses(comparison: Comparison, folders: Folders) -> None:
    alone = compared(folders, [folders.ppo], rewards={}).samples["ppo"]
    assert comparison.samples["ppo"].responses == alone.responses
    assert comparison.samples["sft"].responses != alone.responses


def test_a_file_of_responses_has_the_prompts_as_they_were_read(tmp_path: Path) -> None:
    # rendered by this template, a prompt cannot be parsed back into its turns
    policies = [write_policy(tmp_path / n, seed, "paper-en") for seed, n in enumerate("ab")]
    prompts = DataSource(write_prompts(tmp_path / "prompts.jsonl"))
    comparison = compare_policies(policies, prompts, {}, SamplingOptions(max_new_tokens=3))
    file = write_json_lines(tmp_path / "responses.jsonl", comparison.records())
    assert read_responses([str(file)]) == comparison.responses


def test_interrupted_comparison_samples_what_is_missing(folders: Folders, tmp_path: Path) -> None:
    def run(output: str, last: int | None = None, **options: Any) -> Comparison:
        sampling = Sampling(last)
        with patch("lit_rlhf.tools.evaluation.sampling.generate_responses", sampling):
            policies = [folders.sft, folders.ppo]
            comparison = compared(folders, policies, responses=tmp_path / output, **options)
        n_batches.append(sampling.n_batches)
        return comparison

    n_batches: list[int] = []
    whole = run("whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run("out.jsonl", last=4)
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial: .* another value of reward_m"):
        run("out.jsonl", rewards={QUESTION_MARKS: 1.0})
    resumed = run("out.jsonl")
    assert n_batches == [6, 2]  # three batches for each policy, and the rest
    assert resumed.as_dict() == whole.as_dict()
    assert torch.equal(resumed.samples["ppo"].kl, whole.samples["ppo"].kl)
    assert_continued(tmp_path)


@pytest.mark.parametrize("edited", [None, "edited_reward.py", "its_helper.py"])
def test_an_edited_reward_function_is_not_mixed_with_its_earlier_scores(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str | None
) -> None:
    def run(last: int | None = None) -> Comparison:
        for name in ("edited_reward", "its_helper"):  # each command is a process of its own
            sys.modules.pop(name, None)
        with patch("lit_rlhf.tools.evaluation.sampling.generate_responses", Sampling(last)):
            output, rewards = tmp_path / "out.jsonl", {"edited_reward:score": 1.0}
            return compared(folders, [folders.sft], rewards=rewards, responses=output)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "its_helper.py").write_text("ONE = 1.0\n")
    score = "def score(prompts, responses): return [1.0 * its_helper.ONE] * len(responses)\n"
    (tmp_path / "edited_reward.py").write_text(f"import its_helper\n{score}")
    with pytest.raises(KeyboardInterrupt):
        run(last=2)
    if edited:
        source = tmp_path / edited
        source.write_text(source.read_text().replace("1.0", "100.0"))
        with pytest.raises(ValueError, match=r"another value of source of reward score; .*delete"):
            run()
    else:
        assert run().samples["sft"].scores["score"].tolist() == [1.0] * len(QUESTIONS)


@pytest.mark.parametrize(("policy", "options"), [("copy", {}), ("ppo", {"tie_margin": 1000.0})])
def test_copies_and_wide_margins_tie(folders: Folders, policy: str, options: Any) -> None:
    report = compared(folders, [folders.sft, getattr(folders, policy)], **options).policies[policy]
    assert report.outcomes["characters"][:3] == (0.0, 1.0, 0.0)
    assert report.metrics["kl"] == 0.0 if policy == "copy" else report.metrics["kl"] > 0.5


def test_a_rule_scores_too_times_its_weight_and_not_normalized(folders: Folders) -> None:
    rule = {"rule": "length", "unit": "characters", "longest": 0, "weight": 2.0, "normalize": True}
    policies, rewards = [folders.sft, folders.ppo], {CHARACTERS: 1.0, "short": rule}
    comparison = compared(folders, policies, rewards=rewards)
    for samples in comparison.samples.values():
        assert torch.equal(samples.scores["short"], -2.0 * samples.scores["characters"])
    longer, shorter = comparison.policies["ppo"].outcomes.values()
    assert (shorter.win, shorter.lose) == (longer.lose, longer.win)
    assert comparison.as_dict()["rewards"] == {"characters": CHARACTERS, "short": rule}


def test_python_objects_are_rewards(folders: Folders, tmp_path: Path) -> None:
    def vowels(prompts: list[str], responses: list[str]) -> list[float]:
        return [float(sum(map(response.count, "aeiou"))) for response in responses]

    class Constant:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
            return [1.0] * len(responses)

    model = load_scalar_model(folders.reward)
    path = tmp_path / "responses.jsonl"
    comparison = compared(folders, [folders.sft], rewards={vowels: 2.0, model: 1}, responses=path)
    by_path = compared(folders, [folders.sft], rewards={folders.reward: 1.0})
    samples = comparison.samples["sft"]
    counts = vowels([], [response.response for response in samples.responses])
    assert samples.scores["vowels"].tolist() == [2 * count for count in counts]
    assert samples.scores["reward"].tolist() == by_path.samples["sft"].scores["reward"].tolist()
    assert json.loads(json.dumps(comparison.as_dict()))["rewards"]["vowels"].endswith(".vowels")
    constant = compared(folders, [folders.sft], rewards=[Constant(), CHARACTERS])
    assert list(constant.samples["sft"].scores) == ["Constant", "characters"]


def test_rule_compares_with_field_of_prompts_records(folders: Folders, tmp_path: Path) -> None:
    rows = [{"question": q, "known": " "[: row % 2] + "e"} for row, q in enumerate(QUESTIONS)]
    source = DataSource(write_lines(tmp_path / "known.jsonl", rows))
    sampling = SamplingOptions(max_new_tokens=5)
    rule = {"rule": "contains", "field": "known"}
    comparison = compare_policies([folders.sft], source, {"e": rule}, sampling)
    samples = comparison.samples["sft"]
    assert samples.scores["e"].tolist() == [float("e" in r.response) for r in samples.responses]
    other = {"e": rule | {"field": "gold"}}
    with pytest.raises(ValueError, match=r"'e' .*with the field 'gold'.* records have known, que"):
        compare_policies([folders.sft], source, other, sampling)


def test_the_report_is_strict_json(comparison: Comparison) -> None:
    report = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert (report["baseline"], report["n_prompts"]) == ("sft", 7)
    assert report["policies"]["sft"]["rewards"]["reward"]["against_baseline"] is None
    ppo = report["policies"]["ppo"]
    assert len(ppo["rewards"]["reward"]["against_baseline"]["win_interval"]) == 2
    assert ppo["response_length"] == comparison.policies["ppo"].metrics["response_length"]


def test_a_number_that_is_not_finite_is_null() -> None:
    report = PolicyReport("a", {}, {}, {"perplexity": math.inf, "kl": 1.0})
    values = Comparison({"a": report}, {}, {}, 1, 0).as_dict()["policies"]["a"]
    assert (values["perplexity"], values["kl"]) == (None, 1.0)


def test_a_score_that_is_not_finite_ends_the_comparison(folders: Folders) -> None:
    rewards = {"tests.support.reward_functions:infinite": 1.0}
    shown = pytest.warns(UserWarning, match="-inf")
    with shown, pytest.raises(ValueError, match="expected finite scores of infinite, got -inf"):
        compared(folders, [folders.sft, folders.ppo], rewards=rewards)


def test_shortened_prompts_are_counted(folders: Folders) -> None:
    assert compared(folders, [folders.sft], max_prompts=2, max_prompt_length=16).shortened == 1


def test_prompts_that_leave_no_room_are_counted_before_a_model_is_loaded(
    folders: Folders, prompts: EncodedPrompts
) -> None:
    lengths = [len(example.input_ids) for example in prompts.examples]
    n_long = sum(length > 128 - 120 for length in lengths)
    expected = (
        rf"prompts: {n_long} of {len(lengths)} are too long: 120 new tokens \(--max_new_tokens\) "
        rf"leave 8 of the model's 128 positions, and the longest prompt has {max(lengths)}; "
        r"--max_prompt_length 8 shortens them"
    )
    source = DataSource(folders.prompts)
    with pytest.raises(ValueError, match=expected):
        compare_policies([folders.sft], source, {}, SamplingOptions(max_new_tokens=120))
    with pytest.raises(ValueError, match=r"max_new_tokens: expected fewer than the model's 128"):
        compare_policies([folders.sft], source, {}, SamplingOptions(max_new_tokens=128))


def test_policies_with_different_tokenizers_are_refused(folders: Folders, tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer(special_pad=False, pad_token="</s>")
    other = write_policy(tmp_path / "other", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"other' \(here\).* like the first one, .*tokenizer_hash"):
        compared(folders, [folders.sft, other])


def test_a_reward_model_of_another_template_is_refused(folders: Folders, tmp_path: Path) -> None:
    other = write_reward(tmp_path / "other", folders.sft, template="paper-en")
    with pytest.raises(ValueError, match=r"(?s)reward model .*the chat templates differ"):
        compared(folders, [folders.sft], rewards={other: 1.0})


@pytest.mark.parametrize(
    ("policies", "options", "message"),
    [
        (["sft", "sft"], {}, "policies: expected one or more, each once"),
        ([], {}, "policies: expected one or more, each once"),
        (["sft"], {"tie_margin": -1.0}, "tie_margin: expected a finite number >= 0"),
        (["sft"], {"max_prompts": 0}, "max_prompts: expected an integer >= 1"),
        (["sft"], {"rewards": {"no.such:function": 1.0}}, "reward function 'no.such:function'"),
    ],
)
def test_comparison_of_what_does_not_fit_is_refused(
    folders: Folders, policies: list[str], options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compared(folders, [getattr(folders, name) for name in policies], **options)


TEMPERATURE = 0.7
OPTIONS = SamplingOptions(max_new_tokens=12, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def prompts(encoder: DialogueEncoder, folders: Folders) -> EncodedPrompts:
    return encode_prompt_records(read_prompts(DataSource(folders.prompts)), encoder)


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    model = tiny_causal_lm(seed=1)
    with torch.no_grad():  # so that some responses end by themselves
        model.get_parameter("lm_head.weight")[EOS_ID] *= 3.0
    return model


@pytest.fixture(scope="module")
def samples(policy: Any, encoder: Any, prompts: EncodedPrompts) -> PolicySamples:
    rewards = {
        name: WeightedReward({source: 1.0}, ModelOptions(), encoder.tokenizer)
        for name, source in (("characters", CHARACTERS), ("marks", QUESTION_MARKS))
    }
    reference = tiny_causal_lm(seed=0)
    return measure_policy(
        policy=policy,
        reference=reference,
        encoder=encoder,
        prompts=prompts,
        rewards=rewards,
        sampling=OPTIONS,
        batch_size=2,
        seed=5,
    )


def logprob(model: PreTrainedModel, prompt: list[int], response: list[int]) -> float:
    """Log-probability of a response, by one unpadded forward and a loop."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
    total = 0.0
    for place, token in enumerate(response, start=len(prompt) - 1):
        scaled = logits[place] / TEMPERATURE
        total += float(scaled[token]) - math.log(float(scaled.exp().sum()))
    return total


def test_metrics_are_those_of_an_unpadded_loop(
    samples: PolicySamples, policy: Any, encoder: Any, prompts: EncodedPrompts
) -> None:
    responses: dict[int, list[int]] = {}
    examples = prompts.examples
    for record in sample_batches(
        lambda: policy,
        encoder,
        examples,
        sampling=OPTIONS,
        batch_size=2,
        seed=5,
        describe=lambda _, rollouts: {"rows": rollouts},
    ):
        rows = record["rows"]
        for row, position in enumerate(record["positions"]):
            responses[position] = rows.response_ids[row][rows.response_mask[row]].tolist()
    ids = [example.input_ids.tolist() for example in examples]
    logprobs = [logprob(policy, ids[i], responses[i]) for i in range(len(ids))]
    reference = tiny_causal_lm(seed=0)
    ref_logprobs = [logprob(reference, ids[i], responses[i]) for i in range(len(ids))]
    lengths = [len(responses[i]) for i in range(len(ids))]
    ended = [responses[i][-1] == EOS_ID for i in range(len(ids))]
    assert 0 < sum(ended) < len(ended)
    assert len(set(lengths)) > 1
    assert [response.length for response in samples.responses] == lengths
    assert [response.ended for response in samples.responses] == ended
    expected_kl = [a - b for a, b in zip(logprobs, ref_logprobs, strict=True)]
    assert samples.kl.tolist() == pytest.approx(expected_kl, rel=1e-4, abs=1e-4)
    assert samples.metrics["kl"] == pytest.approx(sum(expected_kl) / 7, rel=1e-4)
    assert samples.metrics["perplexity"] == pytest.approx(
        math.exp(-sum(logprobs) / sum(lengths)), 1e-4
    )
    perplexity = math.exp(-sum(ref_logprobs) / sum(lengths))
    assert samples.metrics["ref_perplexity"] == pytest.approx(perplexity, 1e-4)
    assert samples.metrics["response_length"] == pytest.approx(sum(lengths) / 7)
    assert samples.metrics["truncation_rate"] == pytest.approx(1 - sum(ended) / 7)


def test_everything_is_in_the_order_of_the_prompts(samples: PolicySamples) -> None:
    responses = samples.responses
    assert [r.prompt for r in responses] == [(Message("user", text),) for text in QUESTIONS]
    texts = [response.prompt_text for response in responses]
    assert texts == [f"\n\nHuman: {text}\n\nAssistant:" for text in QUESTIONS]
    assert samples.scores["characters"].tolist() == [len(r.response) for r in responses]
    marks = [t.count("?") - float(not r.ended) for t, r in zip(QUESTIONS, responses, strict=True)]
    assert samples.scores["marks"].tolist() == marks


def test_records_say_what_was_measured(samples: PolicySamples) -> None:
    record, response = samples.records("ppo")[5], samples.responses[5]
    text, ended = response.response, response.ended
    assert record == {
        "policy": "ppo",
        "prompt": ({"role": "user", "content": "why?"},),
        "prompt_text": "\n\nHuman: why?\n\nAssistant:",
        **{"sample": 0, "response": text, "ended": ended, "length": response.length},
        "scores": {"characters": float(len(text)), "marks": 1.0 - float(not ended)},
        "kl": samples.kl[5].item(),
    }


def test_no_prompts_are_refused(policy: PreTrainedModel, encoder: DialogueEncoder) -> None:
    with pytest.raises(ValueError, match="prompts: expected at least one prompt"):
        measure_policy(
            policy=policy,
            reference=policy,
            encoder=encoder,
            prompts=EncodedPrompts(records=[], examples=[]),
            rewards={},
            sampling=OPTIONS,
        )


def test_the_table_shows_scores_metrics_and_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = dict.fromkeys(METRICS, 0.0)
    metrics |= {"response_length": 12.345, "truncation_rate": 0.125, "distinct_2": 0.4567}
    metrics |= {"commonest_opening": 0.25, "repetition": 0.75, "kl": 1.5, "perplexity": 2.5}
    sft = PolicyReport(
        path="runs/sft",
        scores={"gold": ScoreSummary(mean=0.5, low=0.4, high=0.6, std=1.0)},
        outcomes={},
        metrics=metrics,
    )
    outcomes = Outcomes(
        win=0.5,
        tie=0.2,
        lose=0.3,
        win_interval=Interval(0.44, 0.56),
        tie_interval=Interval(0.15, 0.26),
        lose_interval=Interval(0.25, 0.35),
        n=256,
    )
    ppo = PolicyReport(
        path="runs/ppo",
        scores={"gold": ScoreSummary(mean=1.25, low=1.0, high=1.5, std=1.0)},
        outcomes={"gold": outcomes},
        metrics=metrics,
    )
    print_comparison(
        Comparison(
            policies={"sft": sft, "ppo": ppo},
            samples={},
            rewards={"gold": "a:gold"},
            n_prompts=256,
            shortened=0,
            best_of=[
                BestOf(
                    n=4,
                    kl=0.64,
                    scores={"gold": ScoreSummary(mean=2.0, low=1.5, high=2.25, std=1.0)},
                    differences={},
                )
            ],
        )
    )
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["sft", "ppo"] in lines
    assert ["gold", "0.50 [0.40, 0.60]", "1.25 [1.00, 1.50]"] in lines
    assert ["length, tokens", "12.3", "12.3"] in lines
    assert ["truncated", "12.5%", "12.5%"] in lines
    assert ["commonest opening", "25.0%", "25.0%"] in lines
    assert ["repetition", "75.0%", "75.0%"] in lines
    assert ["KL, nats", "1.50", "1.50"] in lines
    assert ["perplexity", "2.50", "2.50"] in lines
    assert ["distinct-2", "0.457", "0.457"] in lines
    assert ["4", "0.64", "2.00 [1.50, 2.25]"] in lines
    assert ["gold", "ppo", "50 [44, 56]", "20 [15, 26]", "30 [25, 35]", "256"] in lines


def test_best_of_n_takes_the_best_of_several_samples_of_each_prompt(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {CHARACTERS: 1.0, QUESTION_MARKS: 2.0}
    options: Any = {"samples_per_prompt": 3, "best_of": [1, 2], "responses": tmp_path / "r.jsonl"}
    comparison = compared(folders, [folders.sft, folders.ppo], rewards=rewards, **options)
    sft, ppo = comparison.samples.values()
    lines = read_lines(tmp_path / "r.jsonl")
    assert [line["sample"] for line in lines] == [0, 1, 2] * (2 * len(QUESTIONS))
    questions = [line["prompt"][-1]["content"] for line in lines[: 3 * len(QUESTIONS)]]
    assert questions == [question for question in QUESTIONS for _ in range(3)]
    for samples in (sft, ppo):
        proxy = [len(response.response) for response in samples.responses]
        assert samples.scores["characters"].tolist() == proxy
        assert len(set(proxy)) > 1
    assert comparison.responses.by_policy["sft"] == [r.response for r in sft.responses[::3]]
    # the mean over prompts of the mean over samples, and of differences of the same prompt
    report, means = (
        comparison.policies["ppo"],
        [p.by_prompt("characters").mean(1) for p in (sft, ppo)],
    )
    assert report.scores["characters"].mean == pytest.approx(float(means[1].mean()))
    paired = score_summary((means[1] - means[0]).double())
    assert report.differences["characters"] == pytest.approx(paired, abs=1e-6)
    one, two = comparison.best_of
    assert one.kl == 0.0
    assert one.scores["characters"].mean == pytest.approx(float(means[0].mean()))
    assert two.scores["characters"].mean > one.scores["characters"].mean
    gap = report.scores["characters"].mean - two.scores["characters"].mean
    assert two.differences["ppo"]["characters"].mean == pytest.approx(gap)
    ended = [len(r.response) for r in ppo.responses if r.ended]
    assert report.complete["characters"] == pytest.approx(sum(ended) / max(len(ended), 1))
    print_comparison(comparison)
    printed = capsys.readouterr().out
    assert "best of n of sft by characters" in printed
    with pytest.raises(ValueError, match="best_of: expected sizes from 1 to the 1 samples"):
        compared(folders, [folders.sft], best_of=[2])
