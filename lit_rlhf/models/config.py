"""Options of a network, and what the config in a model's folder says, before weights are loaded."""

import json
import math
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from lit_rlhf.checks import check_choice, check_count, check_number, check_positive
from lit_rlhf.choices import DType as DType
from lit_rlhf.files import PARTIAL, RepeatedKeyError, parse_json, read_json, read_text
from lit_rlhf.hub import find_hub_problem
from lit_rlhf.paths import WRONG_VALUES as WRONG_VALUES
from lit_rlhf.paths import check_model_path as check_model_path
from lit_rlhf.sandbox import SandboxError, try_in_fork

DTYPES: tuple[str, ...] = get_args(DType)

LARGEST_SIZES = {
    "num_hidden_layers": 1000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "head_dim": 2**20,
    "vocab_size": 2**24,
    "num_labels": 2**16,
}
"""The largest sizes that a config may state; each is many times the largest known."""

_NEW_WEIGHTS = 2**24  # in heads that a network gets when it is loaded
_TENSORS_PER_WEIGHT = 200  # experts may be stored one by one
_NEW_TENSORS = 10_000
_MOST_PER_BYTE = 8  # weights, at a bit each
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one


class _StoredSize(NamedTuple):
    """What the weight files of a model hold.

    Attributes:
        weights: Number of weights, or the most there can be.
        tensors: Number of tensors; 0 if it is not known.
    """

    weights: int
    tensors: int


@dataclass(frozen=True)
class ModelOptions:
    """Options of loading and running a network.

    Args:
        dtype: Type of the weights.
        attn_implementation: Attention implementation of transformers, for instance `sdpa`, `eager`
            or `flash_attention_2`; `None` takes the model's default. Sequences are packed without
            padding under `sdpa`, the default of most models, and flash attention.
        gradient_checkpointing: Recompute activations in the backward pass, which takes less memory
            and more time. Acts in training mode only.
        lora_rank: Rank of LoRA adapters; 0 trains all weights.
        lora_alpha: The adapters' output is multiplied by `lora_alpha / lora_rank`.
        lora_dropout: Dropout probability before the adapters, in [0, 1). PPO trains without any
            dropout, so that rollout and update have the same policy, and ignores it.
        lora_targets: Modules that get adapters, `all-linear` or a regular expression over module
            names, like peft's `target_modules`.
        trained_layers: Number of layers, from the top, that are trained, with what follows them;
            the embeddings, also where they are the output layer, and the other layers stay as they
            are. PPO keeps what those give for its rollouts, and does not compute it again. `None`
            trains all layers.
        load_in_4bit: Hold the weights of linear layers in 4 bits, by bitsandbytes (extra
            `bitsandbytes`). Only LoRA trains such a network.
        trust_remote_code: Run code that comes with the model. Leave it off unless you have read
            that code.
        fused_kernels: Run liger-kernel's norms, rotary positions and MLPs, on CUDA devices (extra
            `liger`).
        torch_compile: Backend of torch.compile for the decoder layers, for instance `inductor`;
            `None` does not compile. On a CPU, decoding stays as it is. `docs/speed.md` says where
            it pays on a CPU, and `docs/cuda.md` what is known of it on a GPU.
    """

    dtype: DType = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: str = "all-linear"
    trained_layers: int | None = None
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    fused_kernels: bool = False
    torch_compile: str | None = None

    def __post_init__(self) -> None:
        # options come from YAML, command lines and checkpoints too, which mypy does not see
        check_choice("dtype", self.dtype, DTYPES)
        check_count("lora_rank", self.lora_rank, minimum=0)
        check_positive("lora_alpha", self.lora_alpha)
        if self.trained_layers is not None:
            check_count("trained_layers", self.trained_layers)
        check_number("lora_dropout", self.lora_dropout, "a number in [0, 1)", lambda x: 0 <= x < 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a `torch.dtype`."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def check_model_folder(folder: Path) -> None:
    """Refuse folders that are easily taken for a model's, with what to do about them."""
    if folder.name.startswith(".") and folder.suffix == f".{PARTIAL}":
        raise ValueError(
            f"path: expected a folder with a model, got {folder}, which an interrupted save has "
            "left; resume the run that wrote it"
        )
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"path: expected a folder with a whole model, got {folder} with only a LoRA adapter; "
            "`lit_rlhf export` merges it into its base model"
        )
    # the multi-engine strategy saves a checkpoint as a folder
    if folder.suffix == ".ckpt" or any(folder.glob("*.ckpt")):
        raise ValueError(
            f"path: expected a folder with a model, got {folder} with a checkpoint of a run; "
            "`lit_rlhf export` makes such a folder from a checkpoint"
        )


def check_text_files(folder: Path) -> None:
    """Refuse configs that are no JSON object, and texts in a model's folder that are not in UTF-8.

    The error names the file. transformers names none, or goes on without it.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt") and file.is_file():
            read_json(file, dict) if file.name.endswith("config.json") else read_text(file)


def check_hub(model: str) -> None:
    """Refuse a model of the hub that is not in the cache if the hub cannot be reached.

    Args:
        model: Id of the model on the hub.
    """
    if problem := find_hub_problem(model, "config.json", "model"):
        raise ValueError(
            f"path: expected the folder of a model, or a model of the hub, got {model}: there is "
            f"no such folder, and {problem}"
        )


def read_config(path: str | Path, options: ModelOptions) -> PreTrainedConfig:
    """Read the config of the model at `path`."""
    check_model_path(path)
    if path != "" and Path(path).is_dir():
        check_model_folder(Path(path))
    else:
        check_hub(str(path))
    if not options.trust_remote_code:
        file = cached_file(str(path), "config.json", _raise_exceptions_for_missing_entries=False)
        if file is not None:
            content = Path(file).read_bytes()
            _check_keys(Path(file), content)
            _try_config(Path(file), content)
    try:
        return _build_config(path, options.trust_remote_code)
    except (ZeroDivisionError, StrictDataclassError, *WRONG_VALUES) as error:
        zero = "a size of 0" if isinstance(error, ZeroDivisionError) else "a wrong value"
        raise ValueError(
            f"path: expected a config.json that a model can be built from in {path}, got {zero}: "
            f"{textwrap.shorten(str(error), 1000)}"
        ) from error


def _check_keys(file: Path, content: bytes) -> None:
    """Refuse a config.json that gives a key twice: the last would win."""
    try:
        parse_json(content)
    except RepeatedKeyError as error:
        raise ValueError(f"path: expected each key of {file} once, got {error}") from error
    except ValueError:
        return  # what else is wrong is found when it is built


def _build_config(path: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"path: expected a model at {path}, got none: {error}") from error
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise ValueError(
            f"path: expected a model whose weights are not quantized, got the quantization_config "
            f"{method} in config.json of {path}"
        )
    text_config = config.get_text_config()
    if not isinstance(text_config, PreTrainedConfig):
        raise TypeError(f"unexpected text_config of a {config.model_type}")
    for name, largest in LARGEST_SIZES.items():
        size = getattr(text_config, name, None)
        if isinstance(size, int) and not 1 <= size <= largest:
            raise ValueError(
                f"path: expected {name} from 1 to {largest} in config.json of {path}, got {size}"
            )
    kernels = str(getattr(config, "_attn_implementation", None))
    if "/" in kernels and not trust_remote_code:
        raise ValueError(
            f"path: expected a model that runs no code from the hub, got the attention {kernels} "
            f"in config.json of {path}"
        )
    return config


@cache
def _try_config(file: Path, content: bytes) -> None:
    """Build a network without weights in a process with limits, and match its modules' names.

    Weights would be allocated before they are compared with the files: a network that is many times
    larger than its files is refused here.
    """

    def build() -> None:
        config = _build_config(file.parent)
        with torch.device("meta"):
            model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
        _check_size(model, _count_stored(file.parent))

    try:
        try_in_fork(build)
    except SandboxError as error:
        raise ValueError(
            f"path: expected a network that can be built {error.expected}, and that its weights "
            f"fill, got a config.json in {file.parent} that takes more"
        ) from error


def _check_size(model: PreTrainedModel, stored: _StoredSize | None) -> None:
    """Raise MemoryError if a network is far larger than what its files hold.

    Args:
        model: The network, without weights.
        stored: What is in the files; `None` if there are none.
    """
    if stored is None:
        return
    weights = [*model.parameters()]
    if sum(weight.numel() for weight in weights) > 2 * stored.weights + _NEW_WEIGHTS:
        raise MemoryError
    if stored.tensors > _TENSORS_PER_WEIGHT * len(weights) + _NEW_TENSORS:
        raise MemoryError


def _count_stored(folder: Path) -> _StoredSize | None:
    """Count what the weight files in a folder hold, by their headers."""
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]
    if not files:
        files += folder.glob("pytorch_model*.bin")
        size = sum(file.stat().st_size for file in files)
        return _StoredSize(weights=_MOST_PER_BYTE * size, tensors=0) if files else None
    weights = 0
    tensors = 0
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, _LONGEST_HEADER)))
        header.pop("__metadata__", None)
        weights += sum(math.prod(entry["shape"]) for entry in header.values())
        tensors += len(header)
    return _StoredSize(weights=weights, tensors=tensors)


def check_gguf_size(path: Path, config: PreTrainedConfig) -> None:
    """Refuse a GGUF file that describes a network far larger than the file.

    Args:
        path: The file.
        config: The network that it describes.
    """

    def build() -> None:
        with torch.device("meta"):
            model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
        _check_size(model, _StoredSize(weights=_MOST_PER_BYTE * path.stat().st_size, tensors=0))

    try:
        try_in_fork(build)
    except SandboxError as error:
        raise ValueError(
            f"checkpoint: expected a network that can be built {error.expected}, and that its "
            f"weights fill, got {path}, which describes a larger one"
        ) from error


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether the config names a sequence classifier's class."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def check_causal(config: PreTrainedConfig, path: str | Path) -> None:
    """Refuse the config of a sequence classifier where a causal language model is expected."""
    if is_classifier(config):
        raise ValueError(
            f"path: expected a causal language model, got a reward model or classifier in {path}"
        )


def max_positions(path: str | Path, options: ModelOptions = ModelOptions()) -> int | None:
    """Number of positions of a causal language model, `None` without a limit, by its config."""
    config = read_config(path, options)
    check_causal(config, path)
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def check_embedding_size(
    tokenizer: PreTrainedTokenizerBase, path: str | Path, options: ModelOptions = ModelOptions()
) -> None:
    """Check that a model embeds every token of its tokenizer, by its config.

    Args:
        tokenizer: The tokenizer.
        path: Folder or hub id of the model.
        options: How the model is loaded.
    """
    rows = read_config(path, options).get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ValueError(
            f"model {str(path)!r}: expected an embedding for every token of its tokenizer, whose "
            f"largest id is {largest}, got {rows}; resize the embedding (resize_token_embeddings), "
            "or use the tokenizer that the model was trained with"
        )
