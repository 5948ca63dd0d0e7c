"""Sample one response and show it token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from lit_rlhf.data import DialogueEncoder
from lit_rlhf.forward import LanguageModel, eval_mode, unwrap_model
from lit_rlhf.models import stop_token_ids
from lit_rlhf.rollout import SamplingOptions, using_generation_config


class ChatReply(NamedTuple):
    """A model's reply to a message.

    Attributes:
        text: The reply, without special tokens and outer whitespace.
        ended: Whether the model ended it.
        interrupted: Whether Ctrl-C did. A reply that neither of them ended was cut off at
            `max_new_tokens`.
        dropped_turns: Oldest turns that were dropped from the dialogue to make room.
        cut_tokens: Tokens cut from the beginning of the message, which was too long by itself.
    """

    text: str
    ended: bool
    interrupted: bool
    dropped_turns: int = 0
    cut_tokens: int = 0


class _Streamer(TextStreamer):
    """Passes text on word by word, without the whitespace that a response may start with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(
            tokenizer,
            skip_prompt=True,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        self.show = show
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if not self.text:
            text = text.lstrip()
        if text:
            self.text += text
            self.show(text)


@torch.no_grad()
def stream_reply(
    model: LanguageModel,
    encoder: DialogueEncoder,
    prompt_ids: Sequence[int],
    sampling: SamplingOptions,
    seed: int,
    show: Callable[[str], None],
) -> ChatReply:
    """Sample a response and show it while it grows.

    The generation settings in the model's folder are ignored, as in `generate_responses`.
    KeyboardInterrupt (Ctrl-C) ends the response and is not raised again.

    Args:
        model: A causal language model.
        encoder: Its encoder.
        prompt_ids: The prompt.
        sampling: How to sample.
        seed: Equal seeds give equal tokens. The caller's random state is restored.
        show: Called with each new piece of text.
    """
    inner = unwrap_model(model)
    stop_ids = stop_token_ids(model, encoder.tokenizer)
    ids = torch.tensor([prompt_ids], dtype=torch.long, device=inner.device)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        **sampling.generation_kwargs(),
        eos_token_id=stop_ids,
        pad_token_id=encoder.pad_token_id,
        num_beams=1,
        use_cache=True,
    )
    streamer = _Streamer(encoder.tokenizer, show)
    try:
        # transformers fills what a configuration leaves out from the model's own, so the model's
        # is replaced by an empty one
        with (
            eval_mode(inner),
            using_generation_config(inner, GenerationConfig()),  # type: ignore[no-untyped-call]
            torch.random.fork_rng(devices=[inner.device] if inner.device.type == "cuda" else []),
        ):
            torch.manual_seed(seed)
            sequences = inner.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=streamer,
            )
    except KeyboardInterrupt:
        # the streamer holds the last word back until it is complete; `end` flushes it
        streamer.end()  # type: ignore[no-untyped-call]
        return ChatReply(streamer.text.strip(), ended=False, interrupted=True)
    response = sequences[0, len(prompt_ids) :].tolist()
    ended = not set(stop_ids).isdisjoint(response)
    return ChatReply(encoder.decode_response(response), ended, interrupted=False)
