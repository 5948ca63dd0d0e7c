"""Scores of preference pairs by a reward model, and log-probs of the chosen responses.

Notation: `N` pairs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

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
    encode_records,
    load_records,
)
from lit_rlhf.forward import (
    LanguageModel,
    freeze,
    hidden_states,
    scores_from_hidden,
    sequence_scores,
    target_logprobs_from_hidden,
    unwrap_model,
)
from lit_rlhf.models import (
    ModelOptions,
    load_lm_head,
    load_scalar_model,
    read_lm_head,
)
from lit_rlhf.tools.evaluation.loading import load_policy, load_shared_encoder
from lit_rlhf.tools.evaluation.output import progress_bar
from lit_rlhf.tools.evaluation.sampling import batch_by_length

_TRUNK = "reward model"
LANGUAGE_MODEL = "language model"
_LanguageHead: TypeAlias = tuple[LanguageModel, nn.Module]  # a trunk and its output layer


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs with the scores of their responses, whose lengths are in tokens with EOS; `[N]` each.

    `logprobs` are the sums of each chosen response's log-probs in nats under the reward model's
    trunk and under the language model that it started from; empty without an output layer, whose
    folder is `lm_head`. Pairs were `skipped` that could not be read and `left_out` that do not fit
    the longest sequence (by reason), and `shortened` if their prompt lost turns or its beginning.
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
    language_model: str | None = None,
    options: ModelOptions | None = None,
    device: torch.device | None = None,
    batch_size: int = 16,
    chat_template: str = "tokenizer",
    max_length: int | None = None,
    max_pairs: int | None = None,
    on_bad_record: OnBadRecord = "error",
) -> ScoredPairs:
    """Score preference pairs with a reward model.

    The arguments are the options of `lit_rlhf report reward`, where each is described.
    """
    if max_pairs is not None:
        check_count("max_pairs", max_pairs)
    options, device = options or ModelOptions(), device or torch.device("cpu")
    folders = [model] if language_model is None else [model, language_model]
    encoder = load_shared_encoder(folders, chat_template, max_length, options)
    counts = DataCounts()
    loaded = load_records("preference", sources, on_bad_record, counts=counts)
    counts.log_read()
    pairs = _encode(loaded, max_pairs, encoder, counts, on_bad_record)
    if not pairs:
        raise ValueError(
            f"preferences: expected pairs of at most {encoder.max_length} tokens (max_length), got "
            f"none; left out: {dict(counts.dropped)}"
        )
    scorer = freeze(load_scalar_model(model, options))
    nn.Module.to(scorer, device)  # transformers 5 types its own `to` for a single model class
    heads, lm_head = _load_heads(scorer, model, language_model, options, device)
    scores, logprobs = _score(
        scorer, heads, [example for _, example in pairs], encoder, batch_size, device
    )
    records = [record for record, _ in pairs]
    bad = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    if len(bad):
        raise ValueError(
            f"model {model!r}: expected finite scores, got {scores[bad[0]].tolist()} for the pair "
            f"of {records[bad[0]].location}; {len(bad)} of {len(scores)} pairs have one"
        )
    return ScoredPairs(
        records=records,
        chosen=scores[:, 0],
        rejected=scores[:, 1],
        chosen_lengths=np.array([int(e.chosen.completion_mask.sum()) for _, e in pairs]),
        rejected_lengths=np.array([int(e.rejected.completion_mask.sum()) for _, e in pairs]),
        logprobs=logprobs,
        lm_head=lm_head,
        skipped=counts.skipped,
        left_out=counts.dropped,
        shortened=counts.shortened + counts.cut_prompts,
    )


def _encode(
    records: Sequence[PreferenceRecord],
    limit: int | None,
    encoder: DialogueEncoder,
    counts: DataCounts,
    on_bad_record: OnBadRecord,
) -> list[tuple[PreferenceRecord, PreferenceExample]]:
    """Encode the first `limit` pairs of each source; keep those that fit, with their records."""
    seen: Counter[str] = Counter()
    first = []
    for record in records:
        seen[record.source] += 1
        if limit is None or seen[record.source] <= limit:
            first.append(record)
    kept = []

    def encode(record: PreferenceRecord) -> list[PreferenceExample]:
        example = encoder.encode_pair(record.prompt, chosen=record.chosen, rejected=record.rejected)
        kept.append(record)
        return [example]

    examples = encode_records(first, encode, counts, on_bad_record)
    return list(zip(kept, examples, strict=True))


def _load_heads(
    scorer: LanguageModel,
    model: str,
    language_model: str | None,
    options: ModelOptions,
    device: torch.device,
) -> tuple[dict[str, _LanguageHead], str]:
    """Load the output layers by name; also returns the folder of the one on the scorer's trunk."""
    heads: dict[str, _LanguageHead] = {}
    own = read_lm_head(model)
    if own is not None:
        own = own.to(device=device, dtype=options.torch_dtype)
        heads[_TRUNK] = (scorer, own.requires_grad_(False))
    if language_model is None:
        return heads, model if own is not None else ""
    head = load_lm_head(language_model, options).to(device).requires_grad_(False)
    if own is None:
        # Reward modelling keeps the trunk a language model (Eq. 2), which reads with any output
        # layer of the model that it started from.
        width = unwrap_model(scorer).config.hidden_size
        if head.in_features != width:
            raise ValueError(
                "language_model: expected the one that the reward model started from, with a "
                f"hidden size of {width}, got {head.in_features} in {language_model!r}"
            )
        heads[_TRUNK] = (scorer, head)
    heads[LANGUAGE_MODEL] = (load_policy(language_model, options, device), head)
    return heads, model if own is not None else language_model


@torch.no_grad()
def _score(
    scorer: LanguageModel,
    heads: Mapping[str, _LanguageHead],
    examples: Sequence[PreferenceExample],
    encoder: DialogueEncoder,
    batch_size: int,
    device: torch.device,
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Compute the scores `[N, 2]`, and the log-probs `[N]` of the chosen responses by head."""
    scores = np.zeros((len(examples), 2))
    logprobs = {name: np.zeros(len(examples)) for name in heads}
    lengths = [len(e.chosen.input_ids) + len(e.rejected.input_ids) for e in examples]
    with progress_bar("pairs scored", len(examples)) as progress:
        for rows in batch_by_length(lengths, batch_size):
            batch = collate_preferences([examples[row] for row in rows], encoder.pad_token_id)
            chosen, rejected = (
                TokenBatch(*(part.to(device) for part in side))
                for side in (batch.chosen, batch.rejected)
            )
            hidden = hidden_states(scorer, chosen.input_ids, chosen.attention_mask)
            of_chosen = scores_from_hidden(scorer, hidden, chosen.attention_mask)
            of_rejected = sequence_scores(scorer, rejected.input_ids, rejected.attention_mask)
            scores[rows] = torch.stack([of_chosen, of_rejected], dim=1).tolist()
            for name, (trunk, lm_head) in heads.items():
                # The forward for the scores serves the log-probs of the same trunk.
                states = (
                    hidden
                    if trunk is scorer
                    else hidden_states(trunk, chosen.input_ids, chosen.attention_mask)
                )
                targets = (states, chosen.input_ids, chosen.completion_mask)
                found = target_logprobs_from_hidden(trunk, lm_head, *targets)
                logprobs[name][rows] = found.double().sum(dim=1).tolist()
            progress(len(rows))
    return scores, logprobs
