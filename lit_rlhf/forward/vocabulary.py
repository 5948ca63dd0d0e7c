"""Ids of a language model that its tokenizer has no token for.

The embedding of a model often has more rows than its tokenizer has tokens, because it was padded to
a round number. A response with such an id has no text there: what is scored is another response
than the one that was sampled. So a network that is given its tokenizer rules these ids out, and
everything that reads its logits sees one distribution, over the tokens that there are.

Notation: `V` vocabulary of the model.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlhf.forward.networks import LanguageModel, Offloaded, unwrap_model
from lit_rlhf.rank_zero import rank_zero_info

IDS_ATTRIBUTE = "lit_rlhf_ids_without_token"
"""The buffer of a network with the ids that it rules out. No state dict has it."""


def rule_out_ids_without_token(
    networks: Iterable[LanguageModel | Offloaded], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Give the ids of language models that a tokenizer has no token for the logit -inf.

    It holds for the forward of the networks themselves and for all functions of `lit_rlhf.forward`,
    and so for sampling, log-probs, entropies and KL. A network whose ids all have tokens is left as
    it is. The log says once how many ids are ruled out.

    Args:
        networks: The language models, in place.
        tokenizer: Their tokenizer.
    """
    logged = False
    for network in networks:
        inner = unwrap_model(network.network if isinstance(network, Offloaded) else network)
        ids = find_ids_without_token(inner, tokenizer)
        if not ids:
            continue
        if ids_without_token(inner) is None:
            inner.register_forward_hook(_rule_out_in_output)
        inner.register_buffer(
            IDS_ATTRIBUTE, torch.tensor(ids, device=inner.device), persistent=False
        )
        if not logged:
            rank_zero_info(
                f"{type(inner).__name__}: {len(ids)} of its {_vocab_size(inner)} ids have no token "
                "in its tokenizer; they are neither sampled nor part of log-probs, entropy and KL"
            )
            logged = True


def find_ids_without_token(model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the ids of a language model's vocabulary that its tokenizer has no token for."""
    tokens = {*tokenizer.get_vocab().values(), *tokenizer.all_special_ids}
    return [token_id for token_id in range(_vocab_size(model)) if token_id not in tokens]


def count_tokens(model: LanguageModel) -> int:
    """Count the ids that a language model gives a probability, which it does not rule out."""
    ids = ids_without_token(model)
    return _vocab_size(model) - (0 if ids is None else len(ids))


def _vocab_size(model: LanguageModel) -> int:
    size: int = unwrap_model(model).config.get_text_config().vocab_size
    return size


def ids_without_token(model: LanguageModel) -> Tensor | None:
    """The ids that a network rules out, `[n]` long; `None` if it rules out none."""
    ids = getattr(unwrap_model(model), IDS_ATTRIBUTE, None)
    return ids if isinstance(ids, Tensor) else None


def rule_out_in_logits(model: LanguageModel, logits: Tensor) -> Tensor:
    """Logits with -inf for the ids that their network rules out.

    Args:
        model: The network.
        logits: Its logits, `[..., V]`, which are changed in place: a copy of them would be the
            largest tensor of an update.
    """
    ids = ids_without_token(model)
    return logits if ids is None else logits.index_fill_(-1, ids, -torch.inf)


def _rule_out_in_output(model: PreTrainedModel, _: object, output: Any) -> Any:  # noqa: ANN401
    """Change the output of a forward of transformers, a different class for each architecture."""
    output.logits = rule_out_in_logits(model, output.logits)
    return output
