"""Base of the datamodules: reading, splitting, encoding, counting and loading."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, cast

import datasets
from lightning.pytorch import LightningDataModule
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlhf.data.cache import EncodedPart, PartRecords, RecordEncoder, encode_part, hash_part
from lit_rlhf.data.counts import DataCounts, OnBadRecord
from lit_rlhf.data.encoding import DialogueEncoder
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.records import Record, RecordKind
from lit_rlhf.data.sources import DataSource, load_records
from lit_rlhf.data.splits import prompt_of, repeat_by_weight, split_records
from lit_rlhf.rank_zero import rank_zero_only
from lit_rlhf.sandbox import check_tokenizer_file

Part = Literal["train", "val", "test", "ptx", "meta"]

_log_info = rank_zero_only(logging.getLogger(__name__).info)

_PARTS_OF_STAGE: dict[str | None, tuple[Part, ...]] = {
    "fit": ("train", "val", "ptx", "meta"),
    "validate": ("val",),
    "test": ("test",),
    None: ("train", "val", "test", "ptx", "meta"),
}


class RecordDataModule(LightningDataModule, ABC):
    """Base of the datamodules: records of data sources, encoded once and cached.

    `prepare_data` encodes the records on one rank of each node, and `setup` opens the examples on
    every rank, see `lit_rlhf.data.cache`.

    Args:
        train_sources: Training data.
        val_sources: Validation data; default: `val_fraction` of the training prompts.
        test_sources: Test data; default: `test_fraction` of the training prompts.
        val_fraction: Share of the training prompts held out for validation.
        test_fraction: Share of the training prompts held out for test.
        seed: Seed of splits, weights and the order of the data.
        split_seed: Seed of what is held out by a fraction; default: `seed`.
        tokenizer: Path or hub id of a tokenizer, or a tokenizer; default: the `tokenizer`
            attribute of the module that is trained.
        chat_template: `"tokenizer"` for the tokenizer's own template, `"hh"`, `"paper-en"`,
            `"paper-zh"`, `"none"`, or the path of a Jinja file.
        eos_token: The token that ends a response; default: the one with which the template ends the
            assistant's turn, see `DialogueEncoder`.
        max_length: Longest dialogue or ptx example in tokens, including EOS.
        max_prompt_length: Longest prompt in tokens; default `max_length`.
        num_workers: Worker processes that collate batches; 0 collates in the training process.
        on_bad_record: `"error"` raises at the first bad record with its file and line, `"skip"`
            counts bad records.

    Attributes:
        encoder: The encoder, after `setup`.
        source_names: Names of all sources; the source indices of batches refer to them.
        counts: Counts of what reading and encoding left out, after `setup`.
        examples: The encoded examples of each part, after `setup`.
    """

    kind: ClassVar[RecordKind]
    """The kind of records to read."""

    def __init__(
        self,
        train_sources: list[DataSource],
        *,
        val_sources: list[DataSource] | None = None,
        test_sources: list[DataSource] | None = None,
        val_fraction: float = 0.0,
        test_fraction: float = 0.0,
        seed: int = 0,
        split_seed: int | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        chat_template: str = "tokenizer",
        max_length: int = 512,
        max_prompt_length: int | None = None,
        num_workers: int = 0,
        on_bad_record: OnBadRecord = "error",
        eos_token: str | None = None,
    ) -> None:
        super().__init__()
        for name, part_sources, fraction in (
            ("val", val_sources, val_fraction),
            ("test", test_sources, test_fraction),
        ):
            if part_sources and fraction:
                raise ValueError(
                    f"{name}_fraction: expected 0 where {name}_sources are given, got {fraction}"
                )
        if not train_sources:
            raise ValueError("train_sources: expected at least one source, got none")
        self.sources: dict[Part, list[DataSource]] = {
            "train": train_sources,
            "val": val_sources or [],
            "test": test_sources or [],
            "ptx": [],
            "meta": [],
        }
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.seed = seed
        self.split_seed = seed if split_seed is None else split_seed
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.eos_token = eos_token
        self.max_length = max_length
        self.max_prompt_length = max_prompt_length
        self.num_workers = num_workers
        self.on_bad_record: OnBadRecord = on_bad_record
        self.source_names = list(
            dict.fromkeys(source.label for part in self.sources.values() for source in part)
        )
        self.encoder: DialogueEncoder | None = None
        self.counts = DataCounts()
        self.examples: dict[Part, Sequence[Any]] = {}
        self._encoded: dict[Part, EncodedPart] = {}
        self._records: dict[Part, PartRecords] = {}
        self._counted: set[str] = set()  # parts whose reading is counted

    @abstractmethod
    def make_record_encoder(self) -> RecordEncoder:
        """Make the function that encodes a record of any part.

        It is a `functools.partial` with the encoder and all options as keywords, which the hash
        that names the examples in the cache covers.
        """

    @abstractmethod
    def make_loader(self, part: Part, shuffle: bool) -> ResumableLoader[Any]:
        """Make the loader of a `part`, `"train"`, `"val"` or `"test"`, for this rank.

        With `shuffle`, every epoch has a new order.
        """

    def prepare_data(self) -> None:
        """Download hub datasets and encode what the cache lacks, once per machine."""
        self._make_encoder()
        self._encode_parts(None if self.trainer is None else self.trainer.state.fn)

    def setup(self, stage: str | None = None) -> None:
        """Open or encode the parts of a stage that are not open yet; `None` means all parts.

        All networks of the trained module have to embed every token.
        """
        self._make_encoder()
        self._encode_parts(stage)
        for part in _PARTS_OF_STAGE[stage]:
            if part in self._encoded and part not in self.examples:
                self.examples[part] = self._encoded[part].examples
                self._count_part(part)
        self.counts.log_encoded(self.max_length)

    def _encode_parts(self, stage: str | None) -> None:
        """Encode the parts of a stage that the cache lacks. Nothing is logged yet."""
        fractions = {"val": self.val_fraction, "test": self.test_fraction}
        for part in _PARTS_OF_STAGE[stage]:
            if part in self._encoded or not (self.sources[part] or fractions.get(part)):
                continue
            encode = self.make_record_encoder()
            self._encoded[part] = encode_part(
                part,
                key=self._hash_part(part, encode),
                read=partial(self._read_part, part),
                encode=encode,
                on_bad_record=self.on_bad_record,
            )
            self._records.pop(part, None)  # many times larger than the examples

    def _count_part(self, part: Part) -> None:
        """Add what a part lost to the counts, and log what was read."""
        encoded = self._encoded[part]
        # each part of a split has the read counts of all its parts
        for name, counts in encoded.read_counts.items():
            if name not in self._counted:
                counts.log_read()
                self.counts.update(counts)
        self._counted |= encoded.read_counts.keys()
        self.counts.update(encoded.encoding_counts)
        n_records = encoded.encoding_counts.records
        _log_info(f"{part}: {len(encoded.examples)} examples of {n_records} records")

    def train_dataloader(self) -> ResumableLoader[Any]:
        """Loader of the training examples."""
        # Trainer(overfit_batches=...) needs the same batches in every epoch.
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        return self.make_loader("train", shuffle=not overfit)

    def val_dataloader(self) -> ResumableLoader[Any] | list[Any]:
        """Loader of the validation examples; an empty list if there are none."""
        return self.make_loader("val", shuffle=False) if "val" in self.examples else []

    def test_dataloader(self) -> ResumableLoader[Any]:
        """Loader of the test examples."""
        if "test" not in self.examples:
            raise ValueError("test_sources, test_fraction: expected one of them, got neither")
        return self.make_loader("test", shuffle=False)

    def sampler_options(self, shuffle: bool) -> dict[str, Any]:
        """The options of a sampler that shares the data among the ranks."""
        trainer = self.trainer
        return {
            "shuffle": shuffle,
            "seed": self.seed,
            "num_replicas": 1 if trainer is None else trainer.world_size,
            "rank": 0 if trainer is None else trainer.global_rank,
        }

    def require_encoder(self) -> DialogueEncoder:
        """The encoder, after `setup`."""
        if self.encoder is None:
            raise RuntimeError("encoder: expected one, got none; call setup() first")
        return self.encoder

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self.tokenizer
        if tokenizer is None:
            module = None if self.trainer is None else self.trainer.lightning_module
            tokenizer = getattr(module, "tokenizer", None)
        if isinstance(tokenizer, str):
            check_tokenizer_file(tokenizer)
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(
                "tokenizer: expected a path, a tokenizer, or a module with a `tokenizer` "
                f"attribute, got {tokenizer!r}"
            )
        return tokenizer

    def check_embedded_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check, before anything is encoded, that all networks of the module embed every token."""
        module = getattr(self.trainer, "lightning_module", None)
        largest = max(tokenizer.get_vocab().values())
        modules = [*module.named_modules()] if isinstance(module, nn.Module) else []
        # reward models with another tokenizer read text and not the ids of this one
        reads_text = {
            network
            for _, reward in modules
            if getattr(reward, "own_text", None) is not None
            for network in reward.modules()
        }
        for name, network in modules:
            if isinstance(network, PreTrainedModel) and network not in reads_text:
                rows = len(cast(nn.Embedding, network.get_input_embeddings()).weight)
                if largest >= rows:
                    raise ValueError(
                        f"tokenizer: expected one whose tokens are all embedded by {name!r}, which "
                        f"embeds {rows}, got one with ids up to {largest}; resize the embedding "
                        "(resize_token_embeddings), or use the tokenizer that the model was "
                        "trained with"
                    )

    def _make_encoder(self) -> None:
        if self.encoder is None:
            tokenizer = self._load_tokenizer()
            self.check_embedded_tokens(tokenizer)
            self.encoder = DialogueEncoder(
                tokenizer,
                chat_template=self.chat_template,
                max_length=self.max_length,
                max_prompt_length=self.max_prompt_length,
                eos_token=self.eos_token,
            )

    @cached_property
    def _content_hashes(self) -> list[str | None]:
        return [source.content_hash() for part in self.sources.values() for source in part]

    def _hash_part(self, part: str, encode: RecordEncoder) -> str | None:
        """Hash of everything that the examples of a part depend on; `None` if they are not cached.

        All sources count: which of a file's records are held out depends on the others.
        """
        if not datasets.is_caching_enabled() or None in self._content_hashes:
            return None
        settings = {
            "part": [part, self.kind, self.on_bad_record],
            "split": [self.val_fraction, self.test_fraction, self.split_seed],
            "contents": self._content_hashes,
            "sources": {
                name: [source.settings() for source in sources]
                for name, sources in self.sources.items()
            },
        }
        return hash_part(encode, self.require_encoder(), settings)

    def _read_part(self, part: Part) -> PartRecords:
        if part in ("ptx", "meta"):
            return self._read_single_part(part)
        if part not in self._records:
            self._records = self._read_splits()
        return self._records[part]

    def _read_single_part(self, part: Part) -> PartRecords:
        """Read a part that no other part is split from."""
        counts = DataCounts()
        kind: RecordKind = "ptx" if part == "ptx" else self.kind
        records = load_records(kind, self.sources[part], self.on_bad_record, counts=counts)
        return PartRecords(
            records=repeat_by_weight(records, self.sources[part], self.seed),
            read_counts={part: counts},
        )

    def _read_splits(self) -> dict[Part, PartRecords]:
        """Read training, validation and test records, which have no prompt in common by splits."""
        counts: dict[str, DataCounts] = {}
        records: dict[Part, list[Record]] = {}
        for part in ("train", "val", "test"):
            if self.sources[part]:
                counts[part] = DataCounts()
                records[part] = load_records(
                    self.kind, self.sources[part], self.on_bad_record, counts=counts[part]
                )
        if self.val_fraction or self.test_fraction:
            splits = split_records(
                records["train"],
                val_fraction=self.val_fraction,
                test_fraction=self.test_fraction,
                seed=self.split_seed,
            )
            # a part with sources of its own has no fraction
            records.setdefault("val", splits.val)
            records.setdefault("test", splits.test)
            records["train"] = splits.train
        held_out = {prompt_of(r) for part in ("val", "test") for r in records.get(part, [])}
        counts["train"].shared_prompts = sum(prompt_of(r) in held_out for r in records["train"])
        # After the split, so that no held-out record is repeated.
        records["train"] = repeat_by_weight(records["train"], self.sources["train"], self.seed)
        return {
            part: PartRecords(records=part_records, read_counts=counts)
            for part, part_records in records.items()
        }
