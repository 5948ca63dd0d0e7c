"""A response that is shown while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from lit_rlhf.data import DialogueEncoder
from lit_rlhf.forward import LanguageModel, eval_mode, unwrap_model
from lit_rlhf.models import using_generation_config
from lit_rlhf.rollout import SamplingOptions


class StreamedResponse(NamedTuple):
    """A response.

    Attributes:
        text: Without special tokens and outer whitespace.
        ended: Whether the model ended it.
        stopped: Whether Ctrl-C did; if neither, it was cut off at `max_new_tokens`.
    """

    text: str
    ended: bool
    stopped: bool


class _Streamer(TextStreamer):
    """Hands text on word by word, without the whitespace that a response may begin with."""

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
def stream_response(
    model: LanguageModel,
    encoder: DialogueEncoder,
    prompt_ids: Sequence[int],
    options: SamplingOptions,
    seed: int,
    show: Callable[[str], None],
) -> StreamedResponse:
    """Sample a response and show it while it grows.

    As for `generate_responses`, the settings in the model's folder have no say. KeyboardInterrupt
    (Ctrl-C) ends the response and nothing else.

    Args:
        model: A causal language model.
        encoder: Its encoder.
        prompt_ids: The prompt.
        options: How to sample.
        seed: The same seed gives the same tokens. The caller's random state is left as it was.
        show: Called with each new piece of text.
    """
    inner = unwrap_model(model)
    ids = torch.tensor([prompt_ids], dtype=torch.long, device=inner.device)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        **options.generation_kwargs(),
        eos_token_id=encoder.eos_token_id,
        pad_token_id=encoder.pad_token_id,
        num_beams=1,
        use_cache=True,
    )
    streamer = _Streamer(encoder.tokenizer, show)
    try:
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
        streamer.end()  # type: ignore[no-untyped-call]  # gives what was held back as half a word
        return StreamedResponse(streamer.text.strip(), ended=False, stopped=True)
    response = sequences[0, len(prompt_ids) :].tolist()
    ended = encoder.eos_token_id in response
    return StreamedResponse(encoder.decode_response(response), ended, stopped=False)
