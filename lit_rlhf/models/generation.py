"""Generation settings that are exactly the ones asked for, whatever the model's folder says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "typical_p")


@contextmanager
def using_generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """`config` as the model's generation config inside the context.

    transformers fills whatever a caller of `generate` leaves open from the model's own generation
    config, which came with its folder (`top_k`, `suppress_tokens`, ...): it must be out of the way.
    """
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


def saved_generation_config(
    tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any] | None
) -> GenerationConfig:
    """The generation config to save with a model.

    Args:
        tokenizer: Gives BOS, EOS and padding ids, unless `settings` does.
        settings: transformers' generation settings, for instance those of the rollouts. `None`
            saves the token ids only. What only sampling uses is left out when `do_sample` is off.

    Raises:
        ValueError: If a setting is unknown to transformers, or one contradicts another.
    """
    settings = {key: value for key, value in (settings or {}).items() if value is not None}
    known = GenerationConfig().to_dict()  # type: ignore[no-untyped-call]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            "generation: expected settings of transformers' GenerationConfig, "
            f"got {', '.join(unknown)}"
        )
    if not settings.get("do_sample", False):
        settings = {key: value for key, value in settings.items() if key not in SAMPLING_ONLY}
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = GenerationConfig(**{**ids, **settings})  # type: ignore[no-untyped-call]
    config.validate(strict=True)
    return config
