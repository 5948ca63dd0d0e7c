"""Load what a probe needs: the reward, and prompts with honest answers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lit_rlhf.data import (
    DataCounts,
    DataSource,
    DemonstrationRecord,
    OnBadRecord,
    PromptExample,
    encode_each,
    load_records,
)
from lit_rlhf.models import ModelOptions, read_config
from lit_rlhf.rewards import Rewards, WeightedReward, parse_rewards
from lit_rlhf.tools.evaluation.loading import CPU, load_shared_encoder
from lit_rlhf.tools.evaluation.reward_probe.answers import AnswerEncoder, HonestAnswer
from lit_rlhf.tools.evaluation.reward_probe.cheats import Attempt


@dataclass(frozen=True, eq=False)
class LoadedProbe:
    """What a probe needs.

    Attributes:
        reward: The reward, in evaluation mode.
        answers: Prompts with honest answers, in the order of the data.
        encoder: Encodes responses.
        left_out: Number of records that cannot be used, by reason.
    """

    reward: WeightedReward
    answers: list[HonestAnswer]
    encoder: AnswerEncoder
    left_out: Counter[str]


def load_probe(
    rewards: Rewards,
    sources: Sequence[DataSource],
    *,
    policy: str | None = None,
    max_new_tokens: int | None = None,
    on_bad_record: OnBadRecord = "error",
    chat_template: str = "tokenizer",
    reward_timeout: float | None = None,
    model_options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
) -> LoadedProbe:
    """Load a reward as PPO does, and honest answers.

    Args:
        rewards: Rewards with their weights, see `lit_rlhf.rewards.parse_rewards`.
        sources: Preferences, whose chosen responses are taken, or demonstrations.
        policy: Folder or hub id of the policy, whose tokenizer and template write prompts and
            responses. `None`: the first reward model's.
        max_new_tokens: Longest response in tokens; `None`: what the policy's positions leave.
        on_bad_record: Whether a bad record is an `error` or left out (`skip`).
        chat_template: Template of the dialogues; `tokenizer` for the policy's own.
        reward_timeout: Seconds that a call of a reward function may take; `None`: no limit.
        model_options: How models are loaded.
        device: Where they compute.
    """
    specs = parse_rewards(rewards)
    folder = policy or next((spec.key for spec in specs if spec.is_model), None)
    if folder is None:
        raise ValueError(
            "policy: expected the folder or hub id of a policy, whose tokenizer and chat template "
            "write the responses, because no reward is a model; got none"
        )
    prompts = load_shared_encoder(
        [folder], chat_template=chat_template, model_options=model_options
    )
    config = read_config(folder, model_options).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 2 * prompts.max_length
    encoder = AnswerEncoder(prompts, positions=positions, max_new_tokens=max_new_tokens)
    left_out: Counter[str] = Counter()
    answers = load_honest_answers(sources, encoder, left_out, on_bad_record)
    if not answers:
        raise ValueError(f"data: expected honest answers that fit, got none: {dict(left_out)}")
    reward = WeightedReward(rewards, model_options, prompts.tokenizer, timeout=reward_timeout)
    for model in reward.models:
        model.check_contract(prompts.contract)
    fields = {name for answer in answers for name in answer.prompt.fields}
    reward.check_fields(fields, "the records of data")
    return LoadedProbe(
        reward=reward.eval().to(device),
        answers=answers,
        encoder=encoder,
        left_out=left_out,
    )


def load_honest_answers(
    sources: Sequence[DataSource],
    encoder: AnswerEncoder,
    left_out: Counter[str],
    on_bad_record: OnBadRecord = "error",
) -> list[HonestAnswer]:
    """Read prompts with honest answers: chosen responses of pairs, or answers of demonstrations.

    Args:
        sources: Where they are.
        encoder: Encodes them.
        left_out: Takes the number of records that cannot be used, by reason. An answer that is too
            long is one.
        on_bad_record: Whether any other bad record is an `error` or left out (`skip`).
    """
    counts = DataCounts()
    records: list[DemonstrationRecord] = load_records(
        "demonstration", sources, on_bad_record, counts=counts, keep_fields=True
    )

    def encode(record: DemonstrationRecord) -> list[PromptExample]:
        prompt = encoder.prompts.encode_prompt(record.messages[:-1])
        return [prompt._replace(fields=record.fields)]

    encoded = [*encode_each(records, encode, counts, on_bad_record)]
    left_out.update(counts.skipped)
    left_out.update(counts.dropped)
    answers = []
    for record, (prompt,) in encoded:
        text = record.messages[-1].content.strip()
        response = encoder.encode(prompt, Attempt(text))
        if response.ended:
            answers.append(HonestAnswer(prompt=prompt, text=text, response=response))
        else:
            left_out["the honest answer is too long"] += 1
    return answers
