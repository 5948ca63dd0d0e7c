"""Generation that keeps a fixed number of sequences going: who ends makes room for who waits.

Notation: `B` samples, `T` longest response, `n` sequences in progress, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lit_rlhf.forward import LanguageModel, eval_mode, head_logits, unwrap_model
from lit_rlhf.forward.attention import AttentionLayout, layout_arguments
from lit_rlhf.forward.cpu import ROWS, filling
from lit_rlhf.forward.networks import trunk_of
from lit_rlhf.functional import token_logprobs_and_entropy
from lit_rlhf.rollout.batch import PolicyStatistics, default_tokens_per_forward, split_by_tokens
from lit_rlhf.rollout.sampling import SamplingOptions, sample_tokens
from lit_rlhf.rollout.slots import PromptLayout, Slots, StepLayout

ADMISSION = 4
"""Prompts wait until one slot in this many is free: reading several at once is cheaper."""

GPU_STEPS = 8
"""Steps on a GPU between two looks at who has ended, as each look waits for the device."""


class Generated(NamedTuple):
    """Responses as they were drawn.

    Attributes:
        response_ids: `[B, T]` long; what follows a response's end is meaningless.
        statistics: Of the policy itself, softmax(logits / temperature), alike; `None` where another
            forward would give other numbers, as the model computes in less than float32.
    """

    response_ids: Tensor
    statistics: PolicyStatistics | None


@torch.no_grad()
def generated(
    model: LanguageModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    options: SamplingOptions,
    eos_token_ids: Sequence[int],
    seed: int,
    n_slots: int,
) -> Generated:
    """A response to each prompt, sampled in evaluation mode.

    A token is drawn with a number that depends on the seed, the row and the place in the response
    alone: neither the number of slots nor the other prompts have a say in it.

    Args:
        model: A causal language model that `supports_chunked_logits`.
        prompt_ids: `[B, P]` long, padded on the left.
        prompt_mask: Real tokens, `[B, P]` bool.
        options: How to sample.
        eos_token_ids: Tokens that end a response.
        seed: Of the draws.
        n_slots: Most sequences in progress at a time.
    """
    with eval_mode(model), _weights_cast_once(prompt_ids.device):
        run = _Run(model, prompt_ids, prompt_mask, options, eos_token_ids, seed, n_slots)
        while run.in_progress or run.waiting:
            if run.has_room():
                run.admit()
            else:
                run.step()
            run.let_go()
    return run.result()


class _Run:
    """The state of a generation. Rows in progress fill the first slots."""

    def __init__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        eos_token_ids: Sequence[int],
        seed: int,
        n_slots: int,
    ) -> None:
        device, n_samples = prompt_ids.device, len(prompt_ids)
        self.model = unwrap_model(model)
        self.trunk = trunk_of(model)
        self.head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.options = options
        self.eos_token_ids = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        self.interval = 1 if device.type == "cpu" else GPU_STEPS
        # a row may go on for some steps after its end before anybody looks
        longest = options.max_new_tokens + self.interval
        shape = (n_samples, longest)
        generator = torch.Generator().manual_seed(seed)
        self.uniforms = torch.rand(shape, generator=generator, dtype=torch.float64).to(device)
        self.prompts = [ids[mask] for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]
        self.sequences = _filled_with_first(prompt_ids, prompt_mask, longest)
        self.n_prompt = prompt_ids.shape[1]
        self.logprobs = torch.zeros(shape, device=device)
        self.entropy = torch.zeros(shape, device=device)
        self.exact = True
        sizes = [len(prompt) for prompt in self.prompts]
        self.n_slots = min(n_slots, n_samples)
        n_filling = filling(self.model, self.n_slots, ROWS)
        self.slots = Slots(self.n_slots + n_filling, max(sizes) + longest, device)
        self.waiting = list(range(n_samples))
        # of the rows in progress, by slot: their numbers and how many tokens were read, as the host
        # knows it and on the device; tokens drawn, the last of them, and whether it was the end
        self.in_progress: list[int] = []
        self.widths: list[int] = []
        self.rows = self.lengths = torch.empty(0, dtype=torch.long, device=device)
        self.drawn = self.tokens = self.rows
        self.ended = torch.empty(0, dtype=torch.bool, device=device)
        self.steps = 0

    def has_room(self) -> bool:
        """Whether waiting prompts should be read now."""
        free = self.n_slots - len(self.in_progress)
        return bool(self.waiting) and free * ADMISSION >= self.n_slots

    def admit(self) -> None:
        """Read as many prompts as there are free slots, and draw their first tokens."""
        n_free = self.n_slots - len(self.in_progress)
        new = self.waiting[:n_free]
        del self.waiting[:n_free]
        sizes = [len(self.prompts[row]) for row in new]
        for part in split_by_tokens(sizes, default_tokens_per_forward(self.rows.device)):
            self.read(new[part], sizes[part])

    def read(self, new: list[int], sizes: list[int]) -> None:
        """Read prompts of these rows and sizes, and draw their first tokens."""
        first = len(self.in_progress)
        prompts = [self.prompts[row] for row in new]
        layout = PromptLayout(self.slots, sizes, first)
        states = self.states(torch.cat(prompts).unsqueeze(0), layout.packed.position_ids, layout)
        self.in_progress += new
        self.widths += sizes
        added = self.rows.new_tensor(new)
        self.rows = torch.cat([self.rows, added])
        self.lengths = torch.cat([self.lengths, self.lengths.new_tensor(sizes)])
        self.drawn = torch.cat([self.drawn, torch.zeros_like(added)])
        self.tokens = torch.cat([self.tokens, added])  # set when they are drawn
        self.ended = torch.cat([self.ended, torch.zeros_like(added, dtype=torch.bool)])
        self.draw(states[0, layout.last_tokens], first)

    def step(self) -> None:
        """Read the last token of every row in progress, and draw the next."""
        n_filling = filling(self.model, len(self.in_progress), ROWS)  # in slots that are free
        tokens, lengths = (
            functional.pad(numbers, (0, n_filling)) for numbers in (self.tokens, self.lengths)
        )
        layout = StepLayout(self.slots, lengths, max(self.widths) + 1)
        # rows that have ended go on until they are let go, but not beyond the model's positions
        positions = lengths.clamp(max=self.slots.capacity - self.interval - 1)
        states = self.states(tokens.unsqueeze(1), positions.unsqueeze(1), layout)
        self.lengths = self.lengths + 1
        self.widths = [width + 1 for width in self.widths]
        self.draw(states[:, 0], 0)
        self.steps += 1

    def states(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
        """What the trunk hands to its head."""
        states: Tensor = self.trunk(
            input_ids=input_ids,
            position_ids=position_ids,
            **layout_arguments(layout, input_ids.device),
        ).last_hidden_state
        return states

    def draw(self, states: Tensor, first: int) -> None:
        """Draw a token after each of the `states`, of the rows in progress from `first` on.

        What there is more of `states` than of rows is of no use.
        """
        rows, places = self.rows[first:], self.drawn[first:]
        logits = head_logits(self.model, self.head, states)[: len(rows)]
        # nothing but the repetition penalty looks at them
        seen = self.sequences[rows if self.options.repetition_penalty != 1 else rows[:0]]
        tokens = sample_tokens(
            logits,
            self.uniforms[rows, places],
            self.options,
            self.eos_token_ids,
            seen,
            places,
        )
        self.sequences[rows, self.n_prompt + places] = tokens
        self.exact &= logits.dtype == torch.float32
        if self.exact:
            temperature = self.options.temperature
            known = token_logprobs_and_entropy(logits[None], tokens[None], temperature)
            self.logprobs[rows, places], self.entropy[rows, places] = known[0][0], known[1][0]
        self.tokens[first:] = tokens
        self.drawn[first:] += 1
        self.ended[first:] |= torch.isin(tokens, self.eos_token_ids)
        self.ended[first:] |= self.drawn[first:] >= self.options.max_new_tokens

    def let_go(self) -> None:
        """Free the slots of rows that have ended."""
        if self.steps % self.interval:
            return
        ended = self.ended.tolist()
        n_left = ended.count(False)
        if n_left == len(ended):
            return
        # the last ones move into the slots that become free before them
        free = [slot for slot in range(n_left) if ended[slot]]
        moved = [slot for slot in range(n_left, len(ended)) if not ended[slot]]
        order = list(range(n_left))
        for place, source in zip(free, moved, strict=True):
            order[place] = source
        self.in_progress = [self.in_progress[slot] for slot in order]
        self.widths = [self.widths[slot] for slot in order]
        self.slots.move(moved, free, max(self.widths, default=0))
        index = self.rows.new_tensor(order)
        self.rows, self.lengths = self.rows[index], self.lengths[index]
        self.drawn, self.tokens = self.drawn[index], self.tokens[index]
        self.ended = self.ended[index]

    def result(self) -> Generated:
        """What came out."""
        longest = self.options.max_new_tokens
        statistics = PolicyStatistics(
            self.logprobs[:, :longest], self.entropy[:, :longest], self.options.temperature
        )
        responses = self.sequences[:, self.n_prompt : self.n_prompt + longest]
        return Generated(responses, statistics if self.exact else None)


def _filled_with_first(prompt_ids: Tensor, prompt_mask: Tensor, n_new: int) -> Tensor:
    """Prompts with room for `n_new` tokens, and their first token instead of padding.

    A repetition penalty looks at all that is in a row, and would else penalize the padding token,
    which may be EOS.
    """
    first = prompt_ids.gather(1, prompt_mask.int().argmax(1, keepdim=True))
    sequences = first.repeat(1, prompt_ids.shape[1] + n_new)
    sequences[:, : prompt_ids.shape[1]] = torch.where(prompt_mask, prompt_ids, first)
    return sequences


@contextmanager
def _weights_cast_once(device: torch.device) -> Iterator[None]:
    """Under autocast, cast the weights at their first use and not at every step."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    try:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=True):
            yield
    finally:
        # an enclosing autocast keeps the casts, and the weights will change under them
        torch.clear_autocast_cache()
