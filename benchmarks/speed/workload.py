"""The work of a benchmark, alike for all sides: networks, prompts and lengths of responses.

TRL's process imports this module too, in an environment without lit_rlhf, so it needs torch,
transformers and tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS, FIRST_WORD = 0, 1, 2, 3
NEVER = -30.0  # logit of a token that is not to be sampled
Mode = Literal["ragged", "full"]
Stage = Literal["ppo", "sft", "reward"]
Precision = Literal["fp32", "bf16-mixed", "bf16-true"]
Kernels = Literal["plain", "fused", "compiled", "both"]
"""What runs in the networks of lit_rlhf: torch's own kernels (`plain`), liger-kernel's where it has
them (`fused`), decoder layers under torch.compile (`compiled`), or `both`."""
DTYPES = {"fp32": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
"""Type of the weights. `bf16-mixed` keeps them in float32 and computes in bfloat16."""


@dataclass(frozen=True)
class Workload:
    """One PPO iteration. The lengths of prompts are uniformly distributed.

    Attributes:
        mode: With `ragged` a response ends with probability `eos_probability` at every token, with
            `full` none ends before `response` tokens.
        batch: Prompts per iteration.
        minibatch: Rollouts per optimizer step of policy and critic.
        response: Longest response, in tokens.
        prompt_min: Shortest prompt, in tokens.
        prompt_max: Longest prompt, in tokens.
        hidden: Hidden size of all four networks.
        layers: Number of layers.
        heads: Number of attention heads.
        kv_heads: Number of key and value heads.
        intermediate: Width of the MLPs.
        vocab: Size of the vocabulary. Embedding and output layer are not tied.
        eos_probability: See `mode`.
        seed: Seed of weights, prompts and rollouts.
    """

    mode: Mode = "ragged"
    batch: int = 128
    minibatch: int = 32
    response: int = 64
    prompt_min: int = 16
    prompt_max: int = 64
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 8
    intermediate: int = 688
    vocab: int = 4096
    eos_probability: float = 1 / 32
    seed: int = 1


Size = Literal["tiny", "5m", "135m", "1b", "1b-long", "3b", "7b"]
_1B: dict[str, Any] = {
    "hidden": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 8,
    "intermediate": 8192,
    "vocab": 32768,
}
SIZES: dict[Size, dict[str, Any]] = {
    "tiny": {
        **{"batch": 8, "minibatch": 4, "response": 8, "prompt_min": 2, "prompt_max": 6},
        **{"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 48, "vocab": 64},
    },
    "5m": {},
    "135m": {
        **{"batch": 16, "minibatch": 8, "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3},
        **{"intermediate": 1536, "vocab": 49152},
    },
    "1b": _1B,
    "1b-long": {
        **_1B,
        "prompt_min": 64,
        "prompt_max": 192,
        "response": 512,
        "eos_probability": 1 / 300,
    },
    "3b": {
        "hidden": 3072,
        "layers": 28,
        "heads": 24,
        "kv_heads": 8,
        "intermediate": 8192,
        "vocab": 32768,
    },
    "7b": {
        "hidden": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 32,
        "intermediate": 11008,
        "vocab": 32000,
    },
}
"""Differences from the defaults of `Workload`: `tiny` to try a script in seconds, `5m` for a CPU,
`135m` with SmolLM2-135M's shape (163 million weights, with an output layer that is not tied), whose
iteration takes less than a minute and 12 GiB on two cores, `1b` and `3b` with the shapes of Llama
3.2's two smaller models and a smaller vocabulary, and `7b` with LLaMA 7B's. `1b-long` is `1b` with
longer prompts and with responses of about 246 tokens, 512 at most."""


def llama_config(work: Workload, **changes: Any) -> LlamaConfig:
    """Make the config of the networks.

    Args:
        work: Their shape.
        **changes: Further arguments of `LlamaConfig`.
    """
    return LlamaConfig(
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        max_position_embeddings=max(512, work.prompt_max + work.response),
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        **changes,
    )


def tokenizer(work: Workload) -> PreTrainedTokenizerFast:
    """Build a tokenizer with the words `w0`, `w1` and so on, one for each id."""
    words = {f"w{index}": index for index in range(work.vocab)}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(words, unk_token=f"w{work.vocab - 1}")),
        pad_token=f"w{PAD}",
        bos_token=f"w{BOS}",
        eos_token=f"w{EOS}",
        padding_side="left",
    )


def policy_network(work: Workload, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a language model with random weights.

    Args:
        work: Its shape.
        dtype: Type of its weights.
    """
    model = LlamaForCausalLM(llama_config(work))
    return cast(PreTrainedModel, nn.Module.to(model, dtype=dtype))


def scalar_network(work: Workload, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a reward model or critic with random weights.

    Args:
        work: Its shape.
        dtype: Type of its weights.
    """
    config = llama_config(work, num_labels=1)
    model: nn.Module = LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
    return cast(PreTrainedModel, model.to(dtype=dtype))


def save_networks(
    work: Workload, folder: Path, precision: Precision = "fp32", device: str = "cpu"
) -> None:
    """Write a policy and a reward model with random weights.

    Args:
        work: Their shape and seed.
        folder: They go to `policy` and `reward` in this folder, each with a tokenizer.
        precision: Precision of the run, which decides the type of the weights.
        device: Where they are made. On a GPU large ones take much less time, and get other numbers.
    """
    dtype = DTYPES[precision]
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(work.seed)
        networks = {"policy": policy_network(work, dtype), "reward": scalar_network(work, dtype)}
    for name, network in networks.items():
        network.save_pretrained(folder / name)
        tokenizer(work).save_pretrained(folder / name)


def eos_bias(work: Workload) -> float:
    """Bias of EOS's logit that gives EOS the probability `eos_probability` before training.

    The last hidden states have a root mean square of 1 and the output layer's weights a standard
    deviation of 0.02, so the other logits are normal with variance `0.02^2 * hidden`. Their
    exponentials are log-normal, which gives their mean.
    """
    if work.mode == "full":
        return NEVER
    odds = work.eos_probability / (1 - work.eos_probability)
    return math.log(odds * (work.vocab - FIRST_WORD)) + 0.02**2 * work.hidden / 2


def bias_lm_head(model: nn.Module, work: Workload) -> None:
    """Give a Llama's output layer a bias that rules out PAD and BOS and sets EOS's probability.

    With random weights alone a response would end once in `vocab` tokens.

    Args:
        model: The language model.
        work: The probability of EOS.
    """
    head: Any = model.lm_head
    bias = head.weight.new_zeros(head.out_features)
    bias[[PAD, BOS, EOS]] = bias.new_tensor([NEVER, NEVER, eos_bias(work)])
    head.bias = nn.Parameter(bias, requires_grad=head.weight.requires_grad)


def prompts(work: Workload, iterations: int) -> list[list[torch.Tensor]]:
    """Draw the prompts of each iteration: random words, by the workload's seed.

    Args:
        work: Number and length of the prompts, and the seed.
        iterations: Number of iterations.

    Returns:
        Ids by iteration and prompt.
    """
    generator = torch.Generator().manual_seed(work.seed + 1)
    lengths = torch.randint(
        work.prompt_min, work.prompt_max + 1, (iterations, work.batch), generator=generator
    )
    return [
        [
            torch.randint(FIRST_WORD, work.vocab, (length,), generator=generator)
            for length in iteration
        ]
        for iteration in lengths.tolist()
    ]


def completions(work: Workload, steps: int, per_prompt: int) -> list[list[list[torch.Tensor]]]:
    """Responses for SFT and reward modelling: random words, then EOS, as long as PPO's.

    Args:
        work: The batch, the lengths and the seed. A response of full length has no EOS.
        steps: Number of optimizer steps.
        per_prompt: Number of responses to each prompt.

    Returns:
        Ids by step, prompt and response.
    """
    generator = torch.Generator().manual_seed(work.seed + 2)
    longest = 1.0 if work.mode == "full" else 0.0

    def response() -> torch.Tensor:
        ids = torch.randint(FIRST_WORD, work.vocab, (work.response,), generator=generator)
        draws = torch.rand(work.response, generator=generator)
        ends = (draws + longest < work.eos_probability).nonzero()
        if len(ends) == 0:
            return ids
        ids[ends[0, 0]] = EOS
        return ids[: int(ends[0, 0]) + 1]

    return [
        [[response() for _ in range(per_prompt)] for _ in range(work.batch)] for _ in range(steps)
    ]


def left_padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack rows of ids, `[P]` each, with PAD on the left."""
    return nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=PAD, padding_side="left"
    )


def response_lengths(responses: torch.Tensor, ends: bool) -> list[int]:
    """Count the tokens of each response, EOS included.

    Args:
        responses: Ids, `[B, T]`.
        ends: Whether a response ends at its first EOS; if not, all are `T` tokens long.
    """
    is_eos = responses.eq(EOS) & ends
    first = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, responses.shape[1])
    return [int(length) for length in first]
