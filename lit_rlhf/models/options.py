"""How a network is loaded: one small record shared by every stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelOptions:
    """How a network is loaded from a Hugging Face folder or hub id.

    Attributes:
        dtype: Type of the weights: `float32`, `bfloat16` or `float16`.
        attn_implementation: transformers' attention, for instance `eager`, `sdpa` or
            `flash_attention_2`; `None` takes the model's default.
        gradient_checkpointing: Recompute activations in the backward pass to save memory. Acts in
            training mode only.
        lora_rank: Rank of LoRA adapters; 0 trains all weights.
        lora_alpha: LoRA's scale is `lora_alpha / lora_rank`.
        lora_dropout: Dropout probability before the adapters.
        lora_targets: Modules that get adapters, as peft's `target_modules`: `all-linear` or a
            regular expression over module names.
        trust_remote_code: Run code that comes with the model.
        fused_kernels: Run liger-kernel's norms, rotary positions and MLPs, on CUDA devices.
        torch_compile: Backend of torch.compile for the trunk, for instance `inductor`; `None`: off.
        pickled_weights: Take `pytorch_model.bin` where there is no safetensors file. It is read as
            plain data: code in it is not run.
        differences: The weights are differences from another model's, see
            `lit_rlhf.models.differences`.

    Raises:
        ValueError: If an option is out of its range.
    """

    dtype: str = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: str = "all-linear"
    trust_remote_code: bool = False
    fused_kernels: bool = False
    torch_compile: str | None = None
    pickled_weights: bool = False
    differences: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank: expected an integer >= 0, got {self.lora_rank}")
        if self.lora_alpha <= 0:
            raise ValueError(f"lora_alpha: expected a value > 0, got {self.lora_alpha}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout: expected 0 <= value < 1, got {self.lora_dropout}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
