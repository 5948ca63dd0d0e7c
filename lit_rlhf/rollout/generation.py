"""Sampling responses from a policy.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from lit_rlhf.checks import check_count
from lit_rlhf.forward import (
    LanguageModel,
    copy_parameter,
    eval_mode,
    forward_plan,
    gathered,
    longest_sequence,
    raise_too_long,
    replace_parameters,
    unwrap_model,
)
from lit_rlhf.models import ignore_peft_warning
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.decoder import DecodedResponses, Decoder
from lit_rlhf.rollout.sampling import SamplingOptions
from lit_rlhf.tensor_checks import check_ids, check_mask


class Sampler(Protocol):
    """Samples one response to each prompt from the model of the call, as it is then.

    The model is the policy, or in validation also the reference. A sampler with weights of its own
    takes over the model's at each call. It sets `RolloutBatch.sampler_logprobs`. PPO measures with
    them how far the sampler is from the policy, and corrects for that.
    """

    def __call__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        batch_size: int | None = None,
    ) -> RolloutBatch:
        """Sample; the arguments are as for `generate_responses`, on the device of the model."""


@torch.no_grad()
def generate_responses(
    model: LanguageModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    options: SamplingOptions,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    seed: int,
    batch_size: int | None = None,
) -> RolloutBatch:
    """Sample a response to each prompt, in evaluation mode.

    Args:
        model: A language model.
        prompt_ids: Prompts, `[B, P]` long, padded on the left.
        prompt_mask: Tokens of the prompts, `[B, P]` bool.
        options: How tokens are sampled. The generation config of the model's folder is ignored:
            tokens come from softmax(logits / temperature) unless the options say otherwise.
        eos_token_ids: Tokens of which the first ends a response; may be empty.
        pad_token_id: Padding of the responses; may be one of the EOS tokens.
        seed: Seed of all random numbers. The global random state is left as it was.
        batch_size: Sequences in progress at a time, at most; `None`: all.
    """
    inner = unwrap_model(model)
    check_prompts(inner, prompt_ids, prompt_mask, options)
    batch_size = len(prompt_ids) if batch_size is None else batch_size
    check_count("batch_size", batch_size)
    with gathered(model), adapters_merged(model):
        if forward_plan(model).chunked_logits:
            decoder = Decoder(
                model,
                prompt_ids,
                prompt_mask,
                options,
                eos_token_ids=eos_token_ids,
                seed=seed,
                n_slots=batch_size,
            )
            sampled = decoder.run()
        else:
            token_ids = _sample_with_transformers(
                inner,
                prompt_ids,
                prompt_mask,
                options,
                eos_token_ids=eos_token_ids,
                pad_token_id=pad_token_id,
                seed=seed,
                batch_size=batch_size,
            )
            sampled = DecodedResponses(token_ids, statistics=None, sampler_logprobs=None)
    # The mask counts EOS tokens and never compares with the padding token, which may be EOS: a
    # token belongs to the response if no EOS precedes it.
    is_eos = torch.isin(sampled.token_ids, sampled.token_ids.new_tensor(list(eos_token_ids)))
    response_mask = (is_eos.cumsum(dim=1) - is_eos.long()) == 0
    response_mask = response_mask[:, : int(response_mask.sum(dim=1).max())]
    statistics = sampled.statistics
    if statistics is not None:
        statistics = statistics._replace(
            logprobs=_cut(statistics.logprobs, response_mask),
            entropy=_cut(statistics.entropy, response_mask),
        )
    sampler_logprobs = sampled.sampler_logprobs
    if sampler_logprobs is not None:
        sampler_logprobs = _cut(sampler_logprobs, response_mask)
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=_cut(sampled.token_ids, response_mask, fill=pad_token_id),
        response_mask=response_mask,
        terminated=is_eos.any(dim=1),
        statistics=statistics,
        sampler_logprobs=sampler_logprobs,
    )


def _cut(values: Tensor, response_mask: Tensor, fill: float = 0) -> Tensor:
    """Cut values of tokens to the width of the mask, and fill them behind each response."""
    return values[:, : response_mask.shape[1]].masked_fill(~response_mask, fill)


def _sample_with_transformers(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    options: SamplingOptions,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    seed: int,
    batch_size: int,
) -> Tensor:
    """Sample by transformers' `generate`, for architectures that `Decoder` does not support."""
    parts = []
    with seed_temporarily(seed, prompt_ids.device):
        for start in range(0, len(prompt_ids), batch_size):
            rows = slice(start, start + batch_size)
            sequences = generate_with_transformers(
                model,
                prompt_ids[rows],
                prompt_mask[rows],
                options,
                eos_token_ids=eos_token_ids,
                pad_token_id=pad_token_id,
            )
            parts.append(sequences[:, prompt_ids.shape[1] :])
    width = max(part.shape[1] for part in parts)
    # a batch is narrower only if all of its rows have an EOS, so the padding follows their ends
    padded = [functional.pad(p, (0, width - p.shape[1]), value=pad_token_id) for p in parts]
    return torch.cat(padded)


def generate_with_transformers(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    options: SamplingOptions,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    streamer: BaseStreamer | None = None,
    **settings: Any,
) -> Any:  # noqa: ANN401  # sequences, or what `settings` ask for
    """Call transformers' `generate` in evaluation mode, by the options and further settings alone.

    It fills what these leave open from the model's generation config, which came with its folder
    (`top_k`, `suppress_tokens`, ...) and would change the sampling distribution: an empty one is in
    its place meanwhile.

    Args:
        model: The transformers model.
        prompt_ids: Prompts, `[B, P]` long, padded on the left.
        prompt_mask: Tokens of the prompts, `[B, P]` bool.
        options: How tokens are sampled.
        eos_token_ids: Tokens of which the first ends a response; may be empty.
        pad_token_id: Padding of the responses.
        streamer: Gets the tokens as they come.
        **settings: Further settings of a `GenerationConfig`.
    """
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        **options.generation_kwargs()
        | {"eos_token_id": list(eos_token_ids) or None, "pad_token_id": pad_token_id}
        | {"num_beams": 1, "use_cache": True, **settings}
    )
    original_config = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with eval_mode(model):
            return model.generate(  # type: ignore[operator]
                input_ids=prompt_ids,
                attention_mask=prompt_mask.long(),
                generation_config=config,
                streamer=streamer,
            )
    finally:
        model.generation_config = original_config


def adapters_merged(model: LanguageModel) -> AbstractContextManager[None]:
    """Merge LoRA adapters, if any, into the weights inside the context, where that loses nothing.

    A linear layer with adapters then costs one matmul instead of three. In half precision adapters
    stay apart: a weight takes up no change below half a step between its numbers, which nine tenths
    of adapters after ten updates are (measured).
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    base_layers = [layer.get_base_layer() for layer in layers]
    weights = [weight for layer in base_layers for weight in layer.parameters(recurse=False)]
    in_float32 = all(weight.dtype == torch.float32 for weight in weights)
    autocast = torch.is_autocast_enabled(unwrap_model(model).device.type)
    disabled = any(layer.disable_adapters or layer.merged for layer in layers)
    if not isinstance(model, PeftModel) or not in_float32 or disabled or autocast:
        return nullcontext()
    return _merge_into_copies(model, base_layers)


@contextmanager
def _merge_into_copies(model: PeftModel, base_layers: list[nn.Module]) -> Iterator[None]:
    """Merge adapters into copies of the weights below, so that these stay the same to the bit.

    The copies are parameters of their own: a tied embedding must not change with the output layer.
    """
    with replace_parameters(base_layers, copy_parameter):
        try:
            with ignore_peft_warning():
                model.merge_adapter()
            yield
        finally:
            model.unmerge_adapter()  # it changes the copies by rounding


@contextmanager
def seed_temporarily(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators that `generate` draws from, and restore their state at the end."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        # not torch.manual_seed: it seeds every device, and fork_rng restores only these two
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def check_prompts(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, options: SamplingOptions
) -> None:
    """Raise ValueError unless prompts are padded on the left and responses fit the model.

    Args:
        model: The model, whose number of positions is the limit.
        prompt_ids: Prompts, `[B, P]` long.
        prompt_mask: Tokens of the prompts, `[B, P]` bool.
        options: Of which `max_new_tokens` is read.
    """
    check_ids(2, prompt_ids=prompt_ids)
    check_mask(prompt_ids.shape, prompt_mask=prompt_mask)
    if 0 in prompt_ids.shape:
        raise ValueError(
            f"prompt_ids: expected shape [B, P] with B, P >= 1, got {tuple(prompt_ids.shape)}"
        )
    left_padded = prompt_mask[:, -1].all() and (prompt_mask[:, 1:] >= prompt_mask[:, :-1]).all()
    if not bool(left_padded):
        raise ValueError(
            "prompt_mask: expected prompts of at least one token, padded on the left, got a row "
            "with padding after a token or without a token"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = int(prompt_mask.sum(dim=1).max()) + options.max_new_tokens
    rotary_limit = longest_sequence(model)
    if rotary_limit is not None and longest > rotary_limit:
        raise_too_long(model, longest)
    if limit is not None and longest > limit:
        raise ValueError(
            f"options.max_new_tokens: expected prompt and response within the model's {limit} "
            f"positions, got {longest} ({options.max_new_tokens} of them new)"
        )
