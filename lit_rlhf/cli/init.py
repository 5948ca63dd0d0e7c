"""`lit_rlhf init`: a small untrained base model, with a tokenizer trained on one's own text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_rlhf.command import Command
from lit_rlhf.paths import check_data_paths
from lit_rlhf.terminal import print_line

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from transformers import PreTrainedTokenizerFast

    from lit_rlhf.data import DataCounts, DataSource

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
_MARKERS = {"paper-zh": ("<|Human|>", "<|MOSS|>")}
"""Markers of turns that are single tokens, by template."""
_BYTES = 256
_ROLES = {"user": "\n\nHuman: ", "assistant": "\n\nAssistant: "}


@dataclass(frozen=True)
class BaseSizes:
    """Sizes of a base model.

    Attributes:
        vocab: Number of tokens, enough for all bytes, EOS and padding.
        layers: Number of layers.
        hidden: Width of the hidden states, a multiple of `2 * heads`.
        heads: Number of attention heads.
        max_positions: Longest prompt and response together, in tokens.
    """

    vocab: int = 2048
    layers: int = 3
    hidden: int = 128
    heads: int = 4
    max_positions: int = 512

    def __post_init__(self) -> None:
        if self.vocab < _BYTES + 2:
            raise ValueError(
                f"vocab: expected at least {_BYTES + 2} tokens (all bytes, EOS, padding), got "
                f"{self.vocab}"
            )
        smallest = min(self.layers, self.heads, self.max_positions)
        if smallest < 1 or self.hidden % (2 * self.heads):
            raise ValueError(
                "layers, heads, max_positions, hidden: expected numbers of at least 1 and hidden "
                f"as a multiple of 2 * heads, got {self.layers}, {self.heads}, "
                f"{self.max_positions} and {self.hidden}"
            )


def init(
    data: list[str],
    output_dir: str,
    *,
    vocab: int = BaseSizes.vocab,
    layers: int = BaseSizes.layers,
    hidden: int = BaseSizes.hidden,
    heads: int = BaseSizes.heads,
    max_positions: int = BaseSizes.max_positions,
    seed: int = 0,
) -> None:
    """Make a small base model and its tokenizer from your own text, for trials on a CPU.

    The model is an untrained Llama; SFT is what teaches it. The tokenizer is a byte-level BPE with
    the chat template of HH-RLHF.

    Args:
        data: Files of preferences, demonstrations or plain text, in any format of docs/data.md.
        output_dir: Folder for the model: a free name.
        vocab: Number of tokens. A small text may give fewer.
        layers: Number of layers.
        hidden: Size of the hidden states.
        heads: Number of attention heads.
        max_positions: Longest prompt and response together, in tokens.
        seed: Seed of the weights.
    """
    sizes = BaseSizes(
        vocab=vocab, layers=layers, hidden=hidden, heads=heads, max_positions=max_positions
    )
    if Path(output_dir).exists():
        raise ValueError(
            f"output_dir: expected a free name, got {output_dir}, which exists; delete it or "
            "choose another one"
        )
    check_data_paths(data)
    from lit_rlhf.data import DataSource

    texts = read_texts([DataSource(path) for path in data])
    make_base(texts, output_dir, sizes, seed=seed)


def make_base(
    texts: Iterable[str],
    output_dir: str,
    sizes: BaseSizes,
    *,
    template: str = "hh",
    seed: int = 0,
) -> None:
    """Write a small untrained model, and a tokenizer that is trained on texts.

    Args:
        texts: What the tokenizer is trained on.
        output_dir: Folder for the model.
        sizes: Sizes of the model. A small text may give fewer tokens.
        template: Chat template of the tokenizer, a key of `lit_rlhf.data.CHAT_TEMPLATES`.
        seed: Seed of the weights.
    """
    from lit_rlhf.models import build_untrained_llama, replace_folder

    tokenizer = _train_tokenizer(
        texts, template=template, vocab=sizes.vocab, max_positions=sizes.max_positions
    )
    model = build_untrained_llama(
        tokenizer,
        seed,
        layers=sizes.layers,
        heads=sizes.heads,
        hidden=sizes.hidden,
        intermediate=3 * sizes.hidden,
        positions=sizes.max_positions,
    )
    with replace_folder(output_dir) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print_line(
        f"Base model in {output_dir}: {model.num_parameters():,} untrained weights, "
        f"{len(tokenizer):,} tokens, {sizes.max_positions} positions"
    )


def read_texts(
    sources: "Sequence[DataSource]", counts: "DataCounts | None" = None
) -> Iterator[str]:
    """Read the texts of sources: turns with their roles, or documents.

    Args:
        sources: Where the texts are.
        counts: Takes the counts of what was left out; `None` logs them.
    """
    from lit_rlhf.data import RecordError, load_records

    for source in sources:
        try:
            dialogues = load_records("demonstration", [source], "skip", counts=counts)
        except RecordError as error:
            try:
                documents = load_records("text", [source], "skip", counts=counts)
            except RecordError:
                raise error from None
            yield from (document.text for document in documents)
        else:
            for dialogue in dialogues:
                yield from (_ROLES.get(m.role, "") + m.content for m in dialogue.messages)


def _train_tokenizer(
    texts: Iterable[str], *, template: str, vocab: int, max_positions: int
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer, which can encode any text.

    Args:
        texts: What it is trained on.
        template: Its chat template, a key of `lit_rlhf.data.CHAT_TEMPLATES`.
        vocab: Number of tokens.
        max_positions: Longest text of the model, in tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from lit_rlhf.data import CHAT_TEMPLATES

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[EOS_TOKEN, PAD_TOKEN, *_MARKERS.get(template, ())],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATES[template]
    return tokenizer


COMMAND = Command(init, lists=("data",), writes=("output_dir",))
