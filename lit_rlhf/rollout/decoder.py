"""Incremental decoding in a fixed number of cache slots, also known as continuous batching.

A sequence that ends frees its slot for the next waiting prompt, so that no step is spent on
sequences that have ended. Notation: `B` samples, `P` prompt tokens, `T` response tokens, `S` cache
slots, `n` sequences in progress, `C` capacity of a slot in tokens, `K` key-value heads of size `D`.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_rlhf.forward import (
    AttentionInputs,
    LanguageModel,
    OneDNNLinear,
    PackedLayout,
    RowOffsets,
    cached_attention,
    eval_mode,
    forward_plan,
    logits_from_hidden,
    matmul_dtype,
    replace_parameters,
    run_with_layout,
    trunk_of,
    unwrap_model,
    varlen_attention,
    varlen_obstacle,
)
from lit_rlhf.functional import token_logprobs_and_entropy
from lit_rlhf.rollout.batch import PolicyStatistics, default_tokens_per_forward, split_by_tokens
from lit_rlhf.rollout.graphs import RowGraphs, log_once
from lit_rlhf.rollout.sampling import SamplingOptions, sample_tokens

_ADMISSION_SHARE = 4
"""Prompts are admitted once one slot in this many is free: a prefill of several costs less each."""

CPU_RELEASE_INTERVAL = 1
GPU_RELEASE_INTERVAL = 8
"""Steps between two looks at which sequences have ended; each look waits for the device."""


class DecodedResponses(NamedTuple):
    """Output of `Decoder`; it has no meaning after the first EOS of a response.

    Attributes:
        token_ids: `[B, T]` long.
        statistics: Under softmax(logits / temperature), whatever the sampling options left out.
            `None` in less than float32, where a separate forward gives other numbers.
        sampler_logprobs: Log-probs of the distribution that the tokens were drawn from, `[B, T]`
            nats; `None` where it is the policy's.
    """

    token_ids: Tensor
    statistics: PolicyStatistics | None
    sampler_logprobs: Tensor | None


class SlotState(NamedTuple):
    """The state of all slots, `[S]` each. CUDA graphs require that it changes in place only.

    Attributes:
        samples: The sample in the slot; `B` in a free one.
        lengths: Tokens in the cache; 0 in a free slot, like all that follows.
        n_sampled: Tokens sampled so far.
        last_tokens: The last of them, which is not in the cache yet.
        ended: Whether it ended the response, bool.
    """

    samples: Tensor
    lengths: Tensor
    n_sampled: Tensor
    last_tokens: Tensor
    ended: Tensor

    @classmethod
    def free(cls, n_slots: int, *, n_samples: int, device: torch.device) -> "SlotState":
        """The state of slots that are all free.

        Args:
            n_slots: Number of slots, `S`.
            n_samples: Number of samples, `B`.
            device: Where the state is.
        """
        samples = torch.full((n_slots,), n_samples, device=device)
        return cls(
            samples=samples,
            lengths=torch.zeros_like(samples),
            n_sampled=torch.zeros_like(samples),
            last_tokens=torch.zeros_like(samples),
            ended=torch.zeros_like(samples, dtype=torch.bool),
        )

    def keep(self, index: Tensor, *, n_samples: int) -> None:
        """Move the slots at `index` to the front, in this order, and free all others.

        Args:
            index: Slots, `[n]` long.
            n_samples: Number of samples, `B`.
        """
        n_left = len(index)
        for numbers in self:
            numbers[:n_left] = numbers[index]
            numbers[n_left:] = n_samples if numbers is self.samples else 0


class Decoder:
    """Samples one response to each prompt, with at most `n_slots` sequences in progress.

    The random number of a token depends only on the seed, the sample, the position in the response
    and `max_new_tokens`. So neither the number of slots nor the other prompts change a response, up
    to rounding: kernels may sum in another order for another number of rows, and in half precision
    on a GPU this may lead to another token.

    Sequences in progress occupy the first `n` slots without a gap, in the same order in the cache
    and in every tensor of the state. A step computes with as many rows as there are sequences or,
    as a CUDA graph, with the next power of two.

    Args:
        model: A language model whose plan has chunked logits.
        prompt_ids: Prompts, `[B, P]` long, padded on the left.
        prompt_mask: Tokens of the prompts, `[B, P]` bool.
        options: How tokens are sampled.
        eos_token_ids: Tokens that end a response.
        seed: Seed of the random numbers.
        n_slots: Sequences in progress at a time, at most.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        n_slots: int,
    ) -> None:
        device = prompt_ids.device
        n_samples = len(prompt_ids)
        self.model = unwrap_model(model)
        self.trunk = trunk_of(model)
        self.head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.options = options
        self.eos_token_ids = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        on_cpu = device.type == "cpu"
        self.release_interval = CPU_RELEASE_INTERVAL if on_cpu else GPU_RELEASE_INTERVAL
        generator = torch.Generator().manual_seed(seed)
        # the last column serves all tokens after the longest response, which are discarded
        shape = (n_samples, options.max_new_tokens + 1)
        uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
        # here and in the results, one more row serves the slots that are free
        self.uniforms = functional.pad(uniforms, (0, 0, 0, 1)).to(device)
        # a sequence may go on for up to an interval after its end, until `release` looks
        max_length = options.max_new_tokens + self.release_interval
        self.prompt_width = prompt_ids.shape[1]
        # slices wait for the device once, masks would wait once for each prompt
        lengths: list[int] = prompt_mask.sum(1).tolist()
        self.prompts = [ids[-length:] for ids, length in zip(prompt_ids, lengths, strict=True)]
        # Padding, the room for responses and the row of free slots repeat a prompt's first token,
        # which has occurred anyway. The repetition penalty applies to all tokens of a row, and
        # would make padding less likely, which is often EOS.
        first = prompt_ids.gather(1, prompt_mask.int().argmax(1, keepdim=True))
        filled = torch.where(prompt_mask, prompt_ids, first)
        sequences = torch.cat([filled, first.repeat(1, max_length)], dim=1)
        self.sequences = functional.pad(sequences, (0, 0, 0, 1))
        self.logprobs = torch.zeros((n_samples + 1, max_length), device=device)
        self.entropy = torch.zeros((n_samples + 1, max_length), device=device)
        self.statistics_are_exact = True
        self.sampler_logprobs: Tensor | None = None
        if options.do_sample and options.off_policy_options:
            self.sampler_logprobs = torch.zeros_like(self.logprobs)
        self.n_samples = n_samples
        self.n_slots = min(n_slots, n_samples)
        capacity = max(lengths) + max_length
        # slots beyond n_slots take the rows that a step is padded with
        self.row_padding = forward_plan(model).row_padding
        self.matmul_dtype = matmul_dtype(next(self.model.parameters()))
        n_rows = self._pad_rows(self.n_slots)
        self.cache = KVCache(n_slots=n_rows, capacity=capacity, device=device)
        self.graphs: RowGraphs | None = None
        self.waiting = list(range(n_samples))
        self.n_steps = 0
        # Tokens in the cache of the sequences in progress: what the host knows without waiting for
        # the device. There are as many sequences as numbers here.
        self.host_lengths: list[int] = []
        self.slots = SlotState.free(n_rows, n_samples=n_samples, device=device)

    def _pad_rows(self, n: int) -> int:
        """Number of rows that a step of `n` sequences computes: a multiple may be faster."""
        return n + self.row_padding.n_padding(n, self.sequences.device, self.matmul_dtype)

    @torch.no_grad()
    def run(self) -> DecodedResponses:
        """Sample all responses, in evaluation mode."""
        device = self.cache.device.type
        with (
            eval_mode(self.model),
            _cast_weights_once(self.model, device),
            _without_compiled_layers() if device == "cpu" else nullcontext(),
        ):
            while self.host_lengths or self.waiting:
                n_free = self.n_slots - len(self.host_lengths)
                if self.waiting and n_free * _ADMISSION_SHARE >= self.n_slots:
                    self.admit(n_free)
                else:
                    self.step()
                self.release()
        # graphs refer to this decoder: it would outlive the rollout, and with it the cache
        self.graphs = None
        longest = self.options.max_new_tokens
        statistics = sampler_logprobs = None
        if self.statistics_are_exact:
            statistics = PolicyStatistics(
                logprobs=self.logprobs[:-1, :longest],
                entropy=self.entropy[:-1, :longest],
                temperature=self.options.temperature,
            )
        if self.sampler_logprobs is not None:
            sampler_logprobs = self.sampler_logprobs[:-1, :longest]
        return DecodedResponses(
            token_ids=self.sequences[:-1, self.prompt_width : self.prompt_width + longest],
            statistics=statistics,
            sampler_logprobs=sampler_logprobs,
        )

    def admit(self, n_free: int) -> None:
        """Give every free slot to a waiting prompt, and sample the first tokens."""
        samples = self.waiting[:n_free]
        self.waiting = self.waiting[n_free:]
        lengths = [len(self.prompts[sample]) for sample in samples]
        # a forward of many long prompts would need more memory than scoring does
        max_tokens = default_tokens_per_forward(self.cache.device)
        for part in split_by_tokens(lengths, max_tokens):
            first_slot = len(self.host_lengths)
            slots = slice(first_slot, first_slot + len(samples[part]))
            # one copy to the device for both
            numbers = self.slots.samples.new_tensor([samples[part], lengths[part]])
            self.slots.samples[slots] = numbers[0]
            self.slots.lengths[slots] = numbers[1]
            layout = _PrefillLayout(
                self.cache, lengths[part], first_slot, device_lengths=self.slots.lengths[slots]
            )
            input_ids = torch.cat([self.prompts[sample] for sample in samples[part]]).unsqueeze(0)
            position_ids = layout.packed.position_ids
            hidden = run_with_layout(self.trunk, input_ids, position_ids, layout)
            self.host_lengths += lengths[part]
            # the slot was free, but steps may have sampled for it
            for state in (self.slots.n_sampled, self.slots.last_tokens, self.slots.ended):
                state[slots] = 0
            self.sample(hidden[0, layout.last_tokens], slots)

    def step(self) -> None:
        """Process the last token of every sequence in progress, and sample the next."""
        n = len(self.host_lengths)
        if self.graphs is None and not self.cache.varlen_obstacle:
            self.graphs = RowGraphs(self._decode, self.trunk, self._graph_settings())
        elif self.graphs is None and self.cache.device.type == "cuda":
            log_once(
                self.trunk,
                f"decodes without varlen_attn and CUDA graphs: {self.cache.varlen_obstacle}",
            )
        if self.graphs is not None:
            # a graph for each power of two: slots that are free cost less than more graphs
            self.graphs.run(min(1 << (n - 1).bit_length(), self.n_slots))
        else:
            self._decode(n, width=max(self.host_lengths) + 1)
        self.host_lengths = [length + 1 for length in self.host_lengths]
        self.n_steps += 1

    def _graph_settings(self) -> Hashable:
        """What the kernels of a step depend on, see `RowGraphs`.

        `None` where a step may do more than launch kernels: compiled layers may compile for what
        they have not met, and autocast may cast a weight that it then keeps.
        """
        is_compiled = any(module._compiled_call_impl is not None for module in self.trunk.modules())
        if is_compiled or torch.is_autocast_enabled(self.cache.device.type):
            return None
        return self.options, self.matmul_dtype, torch.is_inference_mode_enabled()

    def _decode(self, n: int, width: int | None = None) -> None:
        """Process the last tokens of the first `n` slots, and sample the next.

        `width` is the longest sequence with the new token. Free slots have token 0 at position 0 of
        their cache, where the next prompt overwrites it. A free slot among the first `n` grows by a
        token per step, like a sequence. It stays within the cache, because `release` resets it
        whenever a sequence ends, and no sequence is longer than the cache.
        """
        n_rows = self._pad_rows(n)
        lengths = self.slots.lengths[:n_rows]
        layout = _DecodeLayout(self.cache, lengths, width or self.cache.capacity)
        # a sequence that has ended goes on until it is released, but learned position embeddings
        # may have no row for what comes after the longest possible response
        positions = lengths.clamp(max=self.cache.capacity - self.release_interval - 1)
        last_tokens = self.slots.last_tokens[:n_rows].unsqueeze(1)
        hidden = run_with_layout(self.trunk, last_tokens, positions.unsqueeze(1), layout)
        self.sample(hidden[:, 0], slice(n))
        # at the end, as RowGraphs requires: until here, a step that raises can be repeated
        self.slots.lengths[:n] += 1

    def sample(self, hidden: Tensor, slots: slice) -> None:
        """Sample the next tokens of some slots.

        Args:
            hidden: Hidden states of the slots' last tokens, `[m, H]`, and then of padding.
            slots: The slots.
        """
        samples = self.slots.samples[slots]
        columns = self.slots.n_sampled[slots]
        # the head multiplies the padding too, for the same reason as the trunk
        logits = logits_from_hidden(self.model, self.head, hidden)[: len(samples)]
        # only the repetition penalty looks at the tokens so far; else spare the gather
        penalized = self.options.repetition_penalty != 1
        seen = self.sequences[samples if penalized else samples[:0]]
        sampled = sample_tokens(
            logits,
            self.uniforms[samples, columns.clamp(max=self.options.max_new_tokens)],
            self.options,
            eos_token_ids=self.eos_token_ids,
            seen=seen,
            n_new=columns,
        )
        tokens = sampled.token_ids
        self.sequences[samples, self.prompt_width + columns] = tokens
        if self.sampler_logprobs is not None and sampled.logprobs is not None:
            self.sampler_logprobs[samples, columns] = sampled.logprobs
        self.statistics_are_exact &= logits.dtype == torch.float32
        if self.statistics_are_exact:
            logprobs, entropy = token_logprobs_and_entropy(
                logits[None], tokens[None], self.options.temperature
            )
            self.logprobs[samples, columns] = logprobs[0]
            self.entropy[samples, columns] = entropy[0]
        self.slots.last_tokens[slots] = tokens
        self.slots.n_sampled[slots] += 1
        # not torch.isin, which waits for the device where there are many EOS tokens
        is_eos = (tokens.unsqueeze(1) == self.eos_token_ids).any(1)
        is_last = self.slots.n_sampled[slots] >= self.options.max_new_tokens
        self.slots.ended[slots] |= is_eos | is_last

    def release(self) -> None:
        """Free the slots of sequences that have ended, and close the gaps."""
        if self.n_steps % self.release_interval:
            return
        ended = self.slots.ended[: len(self.host_lengths)].tolist()  # waits for the device
        n_left = ended.count(False)
        if n_left == len(ended):
            return
        # Sequences beyond the first n_left slots move to slots whose sequences have ended. This
        # copies the fewest keys and values that leaves no gap.
        gaps = [slot for slot in range(n_left) if ended[slot]]
        movers = [slot for slot in range(n_left, len(ended)) if not ended[slot]]
        order = list(range(n_left))
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        self.host_lengths = [self.host_lengths[slot] for slot in order]
        # one copy to the device for all of them
        indices = self.slots.samples.new_tensor([*order, *movers, *gaps])
        index, sources, targets = torch.split(indices, [n_left, len(gaps), len(gaps)])
        if gaps:
            self.cache.move(sources=sources, targets=targets, width=max(self.host_lengths))
        self.slots.keep(index, n_samples=self.n_samples)


class KeysAndValues(NamedTuple):
    """Cache of one attention layer.

    Attributes:
        keys: `[S, C, K, D]`.
        values: `[S, C, K, D]`.
    """

    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of up to `n_slots` sequences, each at its own length of up to `capacity`.

    A sequence has a slot: a row of buffers that are written in place.
    """

    def __init__(self, n_slots: int, capacity: int, device: torch.device) -> None:
        self.n_slots = n_slots
        self.capacity = capacity
        self.device = device
        self.varlen_obstacle = ""  # why `varlen_attention` cannot read all layers, if so
        # keys and values `[S, C, K, D]` by attention module: a layout learns nothing else of the
        # layer that it is called from
        self._layers: dict[nn.Module, KeysAndValues] = {}

    def write(
        self, module: nn.Module, key: Tensor, value: Tensor, slots: Tensor, columns: Tensor
    ) -> KeysAndValues:
        """Write the keys and values of `m` tokens, and return all of the layer.

        Args:
            module: The attention layer.
            key: Keys, `[m, K, D]`.
            value: Values, `[m, K, D]`.
            slots: Slot of each token, `[m]` long.
            columns: Position of each token in its sequence, `[m]` long.
        """
        if module not in self._layers:
            # allocated at the first write, when shape and dtype are known. Under autocast, rotary
            # embeddings leave keys in float32; attention casts them to the type of the values.
            n_heads, size = value.shape[1:]
            if obstacle := varlen_obstacle(value):
                # kernels that multiply one head at a time, whose keys lie next to each other
                self.varlen_obstacle = obstacle
                shape = (self.n_slots, n_heads, self.capacity, size)
                order = (0, 2, 1, 3)
            else:
                shape = (self.n_slots, self.capacity, n_heads, size)
                order = (0, 1, 2, 3)
            self._layers[module] = KeysAndValues(
                keys=value.new_zeros(shape).permute(order),
                values=value.new_zeros(shape).permute(order),
            )
        layer = self._layers[module]
        layer.keys[slots, columns] = key.to(value.dtype)
        layer.values[slots, columns] = value
        return layer

    def move(self, *, sources: Tensor, targets: Tensor, width: int) -> None:
        """Copy sequences from slots to other slots, in two kernels for each buffer.

        Args:
            sources: Slots to copy from, `[m]` long.
            targets: Slots to copy to, `[m]` long, none of which is a source.
            width: Tokens of the longest of all sequences.
        """
        for layer in self._layers.values():
            for buffer in layer:
                tokens = buffer[:, :width]
                tokens[targets] = tokens[sources]


class _PrefillLayout:
    """Attention of packed prompts, whose keys and values go to the slots from `first_slot`.

    Args:
        cache: Where they go.
        lengths: Tokens of each prompt.
        first_slot: Slot of the first prompt.
        device_lengths: `lengths` on the device, `[m]` long.

    Attributes:
        last_tokens: Index of each prompt's last token among the packed ones, `[m]` long.
    """

    def __init__(
        self, cache: KVCache, lengths: list[int], first_slot: int, *, device_lengths: Tensor
    ) -> None:
        self.cache = cache
        self.packed = PackedLayout(lengths, cache.device)
        slots = torch.arange(first_slot, first_slot + len(lengths), device=cache.device)
        # given its size, repeat_interleave does not wait for the device
        self.slots = slots.repeat_interleave(device_lengths, output_size=sum(lengths))
        self.last_tokens = device_lengths.cumsum(0) - 1

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """Causal attention within each prompt, see `AttentionLayout`; caches keys and values."""
        columns = self.packed.position_ids[0]
        key, value = (states[0].transpose(0, 1) for states in (inputs.key, inputs.value))
        self.cache.write(module, key, value, self.slots, columns)
        return self.packed.attend(module, inputs)


class _DecodeLayout:
    """Attention of one new token in each of the first slots.

    `lengths` are the tokens of each sequence before the new one, `[n]` long, and `width` is the
    length of the longest sequence with it.
    """

    def __init__(self, cache: KVCache, lengths: Tensor, width: int) -> None:
        self.cache = cache
        self.width = width
        self.slots = torch.arange(len(lengths), device=cache.device)
        self.columns = lengths  # a new token's position is the number of tokens before it
        # by window, the keys that each token attends to, [n, 1, 1, width]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """Attention of each token to its sequence so far, see `AttentionLayout`; `N` is 1."""
        value = inputs.value[:, :, 0]
        layer = self.cache.write(module, inputs.key[:, :, 0], value, self.slots, self.columns)
        keys, values = (buffer[: len(self.slots)] for buffer in layer)
        if not varlen_obstacle(value):
            by_token = inputs._replace(
                query=inputs.query[:, :, 0], key=keys.flatten(0, 1), value=values.flatten(0, 1)
            )
            output = varlen_attention(
                by_token,
                queries=self._query_rows,
                keys=self._key_rows,
                n_keys=self._n_keys,
            )
            return output.unsqueeze(1)
        keys, values = (buffer[:, : self.width].transpose(1, 2) for buffer in (keys, values))
        cached = inputs._replace(key=keys, value=values)
        window = inputs.window
        if window not in self._masks:  # once for all layers
            columns = torch.arange(self.width, device=self.columns.device)
            mask = columns <= self.columns[:, None]
            if window is not None:
                mask &= columns > self.columns[:, None] - window
            self._masks[window] = mask[:, None, None]
        return cached_attention(cached, self._masks[window]).transpose(1, 2)

    @cached_property
    def _query_rows(self) -> RowOffsets:
        """Rows of one query each."""
        offsets = torch.arange(len(self.slots) + 1, dtype=torch.int32, device=self.cache.device)
        return RowOffsets(offsets, longest=1)

    @cached_property
    def _key_rows(self) -> RowOffsets:
        """The slots, which hold the keys of each row."""
        capacity = self.cache.capacity
        return RowOffsets(self._query_rows.offsets * capacity, longest=capacity)

    @cached_property
    def _n_keys(self) -> Tensor:
        """Keys of each row in its slot, the new one included."""
        return self.columns.int() + 1


@contextmanager
def _without_compiled_layers() -> Iterator[None]:
    """Run layers as they are: on a CPU, calling a compiled one takes longer than its few rows."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _cast_weights_once(model: nn.Module, device: str) -> Iterator[None]:
    """Under autocast, cast each weight once and not at every step.

    Where only linear layers multiply, they do it without autocast, which costs a step of few rows a
    fifth of its time on a CPU. Other networks stay under autocast, with its cache of weights.
    """
    if not torch.is_autocast_enabled(device):
        yield
        return
    dtype = torch.get_autocast_dtype(device)
    if _only_linear_layers_multiply(model):
        with _cast_linear_layers(model, dtype), torch.autocast(device, enabled=False):
            yield
        return
    try:
        with torch.autocast(device, dtype=dtype, cache_enabled=True):
            yield
    finally:
        # an enclosing autocast would keep the casts of weights that the update then changes
        torch.clear_autocast_cache()


def _only_linear_layers_multiply(model: nn.Module) -> bool:
    """Whether all matrices of a network are in embeddings and plain linear layers."""
    return all(
        type(module) in (nn.Linear, OneDNNLinear)
        or isinstance(module, nn.Embedding)
        or all(weight.dim() < 2 for weight in module.parameters(recurse=False))
        for module in model.modules()
    )


class _CastLinear(nn.Linear):
    """A linear layer whose weights have the dtype that it multiplies in."""

    def forward(self, input: Tensor) -> Tensor:  # the name that nn.Linear gave it
        """`nn.Linear.forward`, of an input in any dtype."""
        return functional.linear(input.to(self.weight.dtype), self.weight, self.bias)


@contextmanager
def _cast_linear_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let linear layers multiply in `dtype` inside the context; all else keeps its dtype."""

    def cast(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to(dtype), requires_grad=False)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    kinds = [type(layer) for layer in layers]
    with replace_parameters(layers, cast):
        for layer in layers:
            # torch.compile compiles once for a class, but anew for each layer with its own forward
            layer.__class__ = _CastLinear
        try:
            yield
        finally:
            for layer, kind in zip(layers, kinds, strict=True):
                layer.__class__ = kind
