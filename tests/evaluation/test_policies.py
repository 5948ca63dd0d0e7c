from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlhf.data import DataSource, DialogueEncoder, PromptExample
from lit_rlhf.evaluation import PolicySamples, load_prompts, measure_policy, sample_batches
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import SamplingOptions
from tests.evaluation.conftest import Folders
from tests.evaluation.folders import CHARACTERS, QUESTION_MARKS, QUESTIONS
from tests.support.tiny_models import EOS_ID, tiny_causal_lm, tiny_tokenizer

TEMPERATURE = 0.7
OPTIONS = SamplingOptions(max_new_tokens=12, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def encoder() -> DialogueEncoder:
    return DialogueEncoder(tiny_tokenizer(), "hh", max_length=64)


@pytest.fixture(scope="module")
def examples(encoder: DialogueEncoder, folders: Folders) -> list[PromptExample]:
    return load_prompts(DataSource(folders.prompts), encoder).examples


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    model = tiny_causal_lm(seed=1)
    with torch.no_grad():  # so that some responses end by themselves
        model.get_parameter("lm_head.weight")[EOS_ID] *= 3.0
    return model


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return tiny_causal_lm(seed=0)


@pytest.fixture(scope="module")
def samples(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    encoder: DialogueEncoder,
    examples: list[PromptExample],
) -> PolicySamples:
    rewards = {
        name: WeightedReward({source: 1.0}, ModelOptions(), encoder.tokenizer)
        for name, source in (("characters", CHARACTERS), ("marks", QUESTION_MARKS))
    }
    return measure_policy(policy, reference, encoder, examples, rewards, OPTIONS, 2, seed=5)


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
    samples: PolicySamples,
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    encoder: DialogueEncoder,
    examples: list[PromptExample],
) -> None:
    responses: dict[int, list[int]] = {}
    for batch in sample_batches(policy, encoder, examples, OPTIONS, 2, seed=5):
        rows = batch.rollouts
        for row, position in enumerate(batch.positions):
            responses[position] = rows.response_ids[row][rows.response_mask[row]].tolist()
    ids = [example.input_ids.tolist() for example in examples]
    ours = [logprob(policy, ids[i], responses[i]) for i in range(len(ids))]
    theirs = [logprob(reference, ids[i], responses[i]) for i in range(len(ids))]
    lengths = [len(responses[i]) for i in range(len(ids))]
    ended = [responses[i][-1] == EOS_ID for i in range(len(ids))]

    assert 0 < sum(ended) < len(ended)
    assert len(set(lengths)) > 1
    assert samples.lengths.tolist() == lengths
    assert samples.terminated.tolist() == ended
    expected_kl = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert samples.kl.tolist() == pytest.approx(expected_kl, rel=1e-4, abs=1e-4)
    assert samples.metrics["kl"] == pytest.approx(sum(expected_kl) / 7, rel=1e-4)
    assert samples.metrics["perplexity"] == pytest.approx(math.exp(-sum(ours) / sum(lengths)), 1e-4)
    assert samples.metrics["ref_perplexity"] == pytest.approx(
        math.exp(-sum(theirs) / sum(lengths)), 1e-4
    )
    assert samples.metrics["response_length"] == pytest.approx(sum(lengths) / 7)
    assert samples.metrics["truncation_rate"] == pytest.approx(1 - sum(ended) / 7)


def test_everything_is_in_the_order_of_the_prompts(samples: PolicySamples) -> None:
    assert samples.prompts == [f"\n\nHuman: {text}\n\nAssistant:" for text in QUESTIONS]
    assert samples.scores["characters"].tolist() == [len(text) for text in samples.responses]
    marks = [
        text.count("?") - float(not ended)
        for text, ended in zip(QUESTIONS, samples.terminated.tolist(), strict=True)
    ]
    assert samples.scores["marks"].tolist() == marks


def test_a_policy_is_at_no_distance_from_itself(
    policy: PreTrainedModel, encoder: DialogueEncoder, examples: list[PromptExample]
) -> None:
    samples = measure_policy(policy, policy, encoder, examples, {}, OPTIONS, 3)

    assert samples.kl.tolist() == [0.0] * len(examples)
    assert samples.metrics["kl"] == 0.0
    assert samples.metrics["perplexity"] == samples.metrics["ref_perplexity"]


def test_equal_policies_answer_alike(
    reference: PreTrainedModel, encoder: DialogueEncoder, examples: list[PromptExample]
) -> None:
    copy = tiny_causal_lm(seed=0)

    first = measure_policy(reference, reference, encoder, examples, {}, OPTIONS, 2, seed=3)
    second = measure_policy(copy, reference, encoder, examples, {}, OPTIONS, 2, seed=3)
    other = measure_policy(copy, reference, encoder, examples, {}, OPTIONS, 2, seed=4)

    assert first.responses == second.responses
    assert first.responses != other.responses


def test_records_say_what_was_measured(samples: PolicySamples) -> None:
    record = samples.records("ppo")[5]

    assert record == {
        "policy": "ppo",
        "prompt": "\n\nHuman: why?\n\nAssistant:",
        "response": samples.responses[5],
        "scores": {
            "characters": float(len(samples.responses[5])),
            "marks": 1.0 - float(not samples.terminated[5]),
        },
        "kl": samples.kl[5].item(),
        "response_length": int(samples.lengths[5]),
        "terminated": bool(samples.terminated[5]),
    }


def test_no_prompts_are_refused(policy: PreTrainedModel, encoder: DialogueEncoder) -> None:
    with pytest.raises(ValueError, match="examples: expected at least one prompt"):
        measure_policy(policy, policy, encoder, [], {}, OPTIONS)
