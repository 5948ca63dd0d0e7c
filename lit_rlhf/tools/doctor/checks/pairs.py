"""The check that reward models rank known pairs right."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from lit_rlhf.data import (
    DataCounts,
    DialogueEncoder,
    PreferenceExample,
    PreferenceRecord,
    RecordDataModule,
    RecordError,
    collate_preferences,
    encode_records,
    load_records,
    split_records,
)
from lit_rlhf.forward import on_device, sequence_scores
from lit_rlhf.functional import wilson_interval
from lit_rlhf.modules.held_out import describe_pairs
from lit_rlhf.rewards import ModelReward
from lit_rlhf.tools.doctor.case import FEW, Case
from lit_rlhf.tools.doctor.report import Finding, Status, ok, warning

_PAIRS = 128  # whose accuracy is known within 0.09


def check_known_pairs(case: Case) -> Finding:
    """Check whether the reward models prefer the chosen responses of the data's held-out pairs."""
    encoder = case.module.encoder
    models = [model for model in case.module.reward.models if model.own_text is None]
    if not models or encoder is None or not isinstance(case.data, RecordDataModule):
        return Finding(Status.NOT_CHECKED, "No reward model reads pairs as the policy writes them.")
    examples = _read_pairs(case.data, encoder)
    if not examples:
        return Finding(
            Status.NOT_CHECKED, "The data have prompts only: `lit_rlhf report reward` takes pairs."
        )
    texts = []
    is_doubtful = False
    for model in models:
        metrics = _measure(model, examples, encoder.pad_token_id, case.module.device)
        texts.append(f"{model.path!r} on held-out pairs: {describe_pairs(metrics)}")
        n_hits = metrics["reward/accuracy"] * len(examples)
        is_doubtful |= wilson_interval(n_hits, len(examples)).low <= 0.5
    summary = f"{'; '.join(texts)}."
    if not is_doubtful:
        return ok(summary)
    return warning(
        summary,
        "Train the reward model on more or cleaner pairs first: an accuracy near one half is "
        "chance, and PPO would learn from noise.",
    )


def _read_pairs(data: RecordDataModule, encoder: DialogueEncoder) -> list[PreferenceExample]:
    """The first held-out pairs of the run's data; all pairs where none are held out."""
    try:
        records: Sequence[PreferenceRecord] = load_records(
            "preference", data.sources["val"] or data.sources["train"], "skip", counts=DataCounts()
        )
    except RecordError:  # prompts or demonstrations
        return []
    if data.val_fraction:
        splits = split_records(
            records,
            val_fraction=data.val_fraction,
            test_fraction=data.test_fraction,
            seed=data.split_seed,
        )
        records = splits.val
    encode = partial(_encode, encoder)
    return encode_records(records[:_PAIRS], encode, DataCounts(), "skip")


def _encode(encoder: DialogueEncoder, record: PreferenceRecord) -> list[PreferenceExample]:
    return [encoder.encode_pair(record.prompt, chosen=record.chosen, rejected=record.rejected)]


@torch.no_grad()
def _measure(
    model: ModelReward,
    examples: Sequence[PreferenceExample],
    pad_token_id: int,
    device: torch.device,
) -> Mapping[str, float]:
    """The metrics of a reward model's validation that `describe_pairs` reads.

    Args:
        model: The reward model.
        examples: The pairs.
        pad_token_id: Token id of padding.
        device: Where the model computes.
    """
    differences = []
    longer = []
    with on_device(model.model, device) as network:
        for start in range(0, len(examples), FEW):
            batch = collate_preferences(examples[start : start + FEW], pad_token_id)
            chosen, rejected = (
                sequence_scores(
                    network, side.input_ids.to(device), side.attention_mask.to(device)
                ).view(len(side.input_ids), -1)
                for side in (batch.chosen, batch.rejected)
            )
            differences += (chosen - rejected).mean(1).tolist()
            tokens = batch.chosen.completion_mask.sum(1) - batch.rejected.completion_mask.sum(1)
            longer += (tokens.sign() / 2 + 0.5).tolist()
    n_pairs = len(examples)
    return {
        "reward/accuracy": sum(difference > 0 for difference in differences) / n_pairs,
        "reward/longer_accuracy": sum(longer) / n_pairs,
        "reward/pairs": float(n_pairs),
    }
