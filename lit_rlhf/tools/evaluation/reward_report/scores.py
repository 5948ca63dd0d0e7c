"""Scores of preference pairs by a reward model, and log-probs of the chosen responses.

Notation: `N` pairs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lit_rlhf.checks import check_count
from lit_rlhf.data import (
    DataCounts,
    DataSource,
    DialogueEncoder,
    OnBadRecord,
    PreferenceExample,
    PreferenceRecord,
    TokenBatch,
    collate_preferences,
    encode_each,
    load_records,
)
from lit_rlhf.forward import (
    LanguageModel,
    freeze,
    hidden_states,
    scores_from_hidden,
    sequence_scores,
    set_longest_sequence,
    target_logprobs_from_hidden,
    unwrap_model,
)
from lit_rlhf.models import (
    ModelOptions,
    load_lm_head,
    load_scalar_model,
    read_lm_head,
)
from lit_rlhf.tools.evaluation.loading import CPU, load_policy, load_shared_encoder
from lit_rlhf.tools.evaluation.output import progress_bar
from lit_rlhf.tools.evaluation.sampling import batch_by_length

_TRUNK = "reward model"
LANGUAGE_MODEL = "language model"


class LanguageHead(NamedTuple):
    """A language model as its two parts.

    Attributes:
        trunk: The layers below the output layer.
        lm_head: The output layer.
    """

    trunk: LanguageModel
    lm_head: nn.Module


class LoadedHeads(NamedTuple):
    """The language models that read the chosen responses.

    Attributes:
        by_name: Each of them by its name in the report.
        folder: Folder of the output layer on the reward model's trunk; empty without one.
    """

    by_name: dict[str, LanguageHead]
    folder: str


class EncodedPair(NamedTuple):
    """A preference pair as text and as token ids.

    Attributes:
        record: The pair as it was read.
        example: The same as token ids.
    """

    record: PreferenceRecord
    example: PreferenceExample


class PairScores(NamedTuple):
    """What the models say about `N` pairs.

    Attributes:
        chosen: Scores of the chosen responses, `[N]`.
        rejected: Scores of the rejected responses, `[N]`.
        logprobs: Sums of the log-probs of each chosen response in nats, `[N]`, by language model.
    """

    chosen: NDArray[np.float64]
    rejected: NDArray[np.float64]
    logprobs: dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class ScoredPairs:
    """Preference pairs with the scores of their responses.

    Attributes:
        records: The pairs, `N` of them.
        chosen: Scores of the chosen responses, `[N]`.
        rejected: Scores of the rejected responses, `[N]`.
        chosen_lengths: Lengths of the chosen responses in tokens, EOS included, `[N]`.
        rejected_lengths: Lengths of the rejected responses, `[N]`.
        logprobs: Sums of each chosen response's log-probs in nats, `[N]`, under the reward model's
            trunk and under the language model that it started from; empty without an output layer.
        lm_head: Folder of the output layer on the reward model's trunk; empty without one.
        skipped: Number of pairs that could not be read, by reason.
        left_out: Number of pairs that do not fit the longest sequence, by reason.
        shortened: Number of pairs whose prompt lost turns or its beginning.
    """

    records: Sequence[PreferenceRecord]
    chosen: NDArray[np.float64]
    rejected: NDArray[np.float64]
    chosen_lengths: NDArray[np.int64]
    rejected_lengths: NDArray[np.int64]
    logprobs: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    lm_head: str = ""
    skipped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    shortened: int = 0


def score_pairs(
    model: str,
    sources: Sequence[DataSource],
    *,
    language_model: str | None = None,
    options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    batch_size: int = 16,
    chat_template: str = "tokenizer",
    max_length: int | None = None,
    max_pairs: int | None = None,
    on_bad_record: OnBadRecord = "error",
) -> ScoredPairs:
    """Score preference pairs with a reward model.

    Args:
        model: Folder or hub id of the reward model.
        sources: Where the pairs are.
        language_model: Folder or hub id of the language model that the reward model started from,
            to compare their perplexities.
        options: How the models are loaded.
        device: Where they compute.
        batch_size: Pairs per batch.
        chat_template: Template of the dialogues; `tokenizer` for the reward model's own.
        max_length: Longest dialogue in tokens. `None`: as in the model's training, or 512.
        max_pairs: Number of pairs of each source, from the first; `None` for all.
        on_bad_record: Whether a bad pair is an `error` or left out (`skip`).
    """
    if max_pairs is not None:
        check_count("max_pairs", max_pairs)
    encoder = load_shared_encoder(
        [model] if language_model is None else [model, language_model],
        chat_template=chat_template,
        max_prompt_length=max_length,
        model_options=options,
    )
    counts = DataCounts()
    loaded = load_records("preference", sources, on_bad_record, counts=counts)
    counts.log_read()
    pairs = _encode(loaded, encoder, limit=max_pairs, counts=counts, on_bad_record=on_bad_record)
    if not pairs:
        raise ValueError(
            f"preferences: expected pairs of at most {encoder.max_length} tokens (max_length), got "
            f"none; left out: {dict(counts.dropped)}"
        )
    scorer = freeze(load_scalar_model(model, options))
    nn.Module.to(scorer, device)  # transformers 5 types its own `to` for a single model class
    heads = _load_heads(
        scorer, model=model, language_model=language_model, options=options, device=device
    )
    records = [pair.record for pair in pairs]
    examples = [pair.example for pair in pairs]
    scores = _score(
        scorer,
        heads.by_name,
        examples,
        pad_token_id=encoder.pad_token_id,
        batch_size=batch_size,
        device=device,
    )
    bad = np.flatnonzero(~(np.isfinite(scores.chosen) & np.isfinite(scores.rejected)))
    if len(bad):
        first = bad[0]
        raise ValueError(
            f"model {model!r}: expected finite scores, got "
            f"{[float(scores.chosen[first]), float(scores.rejected[first])]} for the pair of "
            f"{records[first].location}; {len(bad)} of {len(records)} pairs have one"
        )
    return ScoredPairs(
        records=records,
        chosen=scores.chosen,
        rejected=scores.rejected,
        chosen_lengths=np.array([int(e.chosen.completion_mask.sum()) for e in examples]),
        rejected_lengths=np.array([int(e.rejected.completion_mask.sum()) for e in examples]),
        logprobs=scores.logprobs,
        lm_head=heads.folder,
        skipped=counts.skipped,
        left_out=counts.dropped,
        shortened=counts.shortened + counts.cut_prompts,
    )


def _encode(
    records: Sequence[PreferenceRecord],
    encoder: DialogueEncoder,
    *,
    limit: int | None,
    counts: DataCounts,
    on_bad_record: OnBadRecord,
) -> list[EncodedPair]:
    """Encode the first `limit` pairs of each source, and leave out the pairs that do not fit."""
    seen: Counter[str] = Counter()
    first = []
    for record in records:
        seen[record.source] += 1
        if limit is None or seen[record.source] <= limit:
            first.append(record)

    def encode(record: PreferenceRecord) -> list[PreferenceExample]:
        return [encoder.encode_pair(record.prompt, chosen=record.chosen, rejected=record.rejected)]

    return [
        EncodedPair(record=encoded.record, example=encoded.examples[0])
        for encoded in encode_each(first, encode, counts, on_bad_record)
    ]


def _load_heads(
    scorer: LanguageModel,
    *,
    model: str,
    language_model: str | None,
    options: ModelOptions,
    device: torch.device,
) -> LoadedHeads:
    """Load the output layers of the scorer's trunk and of the language model."""
    heads: dict[str, LanguageHead] = {}
    lm_head = read_lm_head(model)
    if lm_head is not None:
        lm_head = lm_head.to(device=device, dtype=options.torch_dtype)
        heads[_TRUNK] = LanguageHead(trunk=scorer, lm_head=lm_head.requires_grad_(False))
    if language_model is None:
        return LoadedHeads(by_name=heads, folder=model if lm_head is not None else "")
    head = load_lm_head(language_model, options).to(device).requires_grad_(False)
    if lm_head is None:
        # Reward modelling keeps the trunk a language model (Eq. 2), which reads with any output
        # layer of the model that it started from.
        width = unwrap_model(scorer).config.hidden_size
        if head.in_features != width:
            raise ValueError(
                "language_model: expected the one that the reward model started from, with a "
                f"hidden size of {width}, got {head.in_features} in {language_model!r}"
            )
        heads[_TRUNK] = LanguageHead(trunk=scorer, lm_head=head)
    heads[LANGUAGE_MODEL] = LanguageHead(
        trunk=load_policy(language_model, options, device), lm_head=head
    )
    return LoadedHeads(by_name=heads, folder=model if lm_head is not None else language_model)


@torch.no_grad()
def _score(
    scorer: LanguageModel,
    heads: Mapping[str, LanguageHead],
    examples: Sequence[PreferenceExample],
    *,
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
) -> PairScores:
    """Compute the scores of the responses, and the log-probs of the chosen ones."""
    chosen_scores = np.zeros(len(examples))
    rejected_scores = np.zeros(len(examples))
    logprobs = {name: np.zeros(len(examples)) for name in heads}
    longest = max(len(dialogue.input_ids) for e in examples for dialogue in (e.chosen, e.rejected))
    for network in (scorer, *(head.trunk for head in heads.values())):
        set_longest_sequence(network, longest)
    lengths = [len(e.chosen.input_ids) + len(e.rejected.input_ids) for e in examples]
    with progress_bar("pairs scored", len(examples)) as progress:
        for rows in batch_by_length(lengths, batch_size):
            batch = collate_preferences([examples[row] for row in rows], pad_token_id)
            chosen = TokenBatch(*(part.to(device) for part in batch.chosen))
            rejected = TokenBatch(*(part.to(device) for part in batch.rejected))
            hidden = hidden_states(scorer, chosen.input_ids, chosen.attention_mask)
            chosen_scores[rows] = scores_from_hidden(scorer, hidden, chosen.attention_mask).tolist()
            rejected_scores[rows] = sequence_scores(
                scorer, rejected.input_ids, rejected.attention_mask
            ).tolist()
            for name, (trunk, lm_head) in heads.items():
                # The forward for the scores serves the log-probs of the same trunk.
                states = (
                    hidden
                    if trunk is scorer
                    else hidden_states(trunk, chosen.input_ids, chosen.attention_mask)
                )
                token_logprobs = target_logprobs_from_hidden(
                    trunk, lm_head, states, chosen.input_ids, chosen.completion_mask
                )
                logprobs[name][rows] = token_logprobs.double().sum(dim=1).tolist()
            progress(len(rows))
    return PairScores(chosen=chosen_scores, rejected=rejected_scores, logprobs=logprobs)
