"""Base of the datamodules: reading, splitting, encoding, counting and loading."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlhf.data.encoding import DialogueEncoder, EncodingCounts, encode_records
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.records import Record, RecordKind, describe_bad_records
from lit_rlhf.data.sources import (
    DataSource,
    LoadedRecords,
    OnBadRecord,
    load_records,
    prompt_of,
    repeat_by_weight,
    split_records,
)

Part = Literal["train", "val", "test"]

_log_info = rank_zero_only(logging.getLogger(__name__).info)
_log_warning = rank_zero_only(logging.getLogger(__name__).warning)

_PARTS_OF_STAGE: dict[str | None, tuple[Part, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("val",),
    None: ("train", "val", "test"),
}


class RecordDataModule(LightningDataModule, ABC):
    """Base of the datamodules: records of data sources, encoded in `setup`.

    Args:
        train_sources: Training data.
        val_sources: Validation data; default: `val_fraction` of the training prompts.
        test_sources: Test data; default: `test_fraction` of the training prompts.
        val_fraction: Share of the training prompts held out for validation.
        test_fraction: Share of the training prompts held out for test.
        seed: Seed of splits, weights and the order of the data.
        tokenizer: Path or hub id of a tokenizer, or a tokenizer; default: the `tokenizer`
            attribute of the module that is trained.
        chat_template: `"tokenizer"` for the tokenizer's own template, or `"hh"`, `"paper-en"`,
            `"paper-zh"`.
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
        loaded: The records and counts of each part, after `setup`.
        counts: Counts of what encoding left out, after `setup`.
        examples: The encoded examples of each part, after `setup`.

    Raises:
        ValueError: If both sources and a fraction are given for validation or for test.
    """

    kind: ClassVar[RecordKind]
    """The kind of records to read."""

    def __init__(
        self,
        train_sources: list[DataSource],
        val_sources: list[DataSource] | None = None,
        test_sources: list[DataSource] | None = None,
        val_fraction: float = 0.0,
        test_fraction: float = 0.0,
        seed: int = 0,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        chat_template: str = "tokenizer",
        max_length: int = 512,
        max_prompt_length: int | None = None,
        num_workers: int = 0,
        on_bad_record: OnBadRecord = "error",
        eos_token: str | None = None,
    ) -> None:
        super().__init__()
        for name, own, fraction in (
            ("val", val_sources, val_fraction),
            ("test", test_sources, test_fraction),
        ):
            if own and fraction:
                raise ValueError(
                    f"{name}_fraction: expected 0 where {name}_sources are given, got {fraction}"
                )
        self.sources: dict[Part, list[DataSource]] = {
            "train": train_sources,
            "val": val_sources or [],
            "test": test_sources or [],
        }
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.seed = seed
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
        self.loaded: dict[str, LoadedRecords[Any]] = {}
        self.counts = EncodingCounts()
        self.examples: dict[Part, list[Any]] = {}
        self._records: dict[Part, list[Record]] | None = None

    @property
    def dropped_turns(self) -> int:
        """Turns dropped so that dialogues fit, over all parts encoded so far."""
        return self.counts.dropped_turns

    @property
    def cut_prompts(self) -> int:
        """Dialogues whose last human turn was cut on the left."""
        return self.counts.cut_prompts

    @property
    def dropped_records(self) -> Counter[str]:
        """Records that encoding left out, by reason."""
        return self.counts.dropped_records

    @property
    def skipped_records(self) -> Counter[str]:
        """Bad records that reading skipped, by reason."""
        return sum((loaded.skipped for loaded in self.loaded.values()), Counter())

    @abstractmethod
    def encode_record(self, record: Any) -> Sequence[Any]:  # noqa: ANN401 - of the subclass's kind
        """Encode one record.

        Args:
            record: A record of the datamodule's kind.

        Returns:
            Its examples.

        Raises:
            EncodingError: If the record cannot be encoded.
        """

    @abstractmethod
    def make_loader(self, part: Part, shuffle: bool) -> ResumableLoader[Any]:
        """Make the loader of one part for this rank.

        Args:
            part: `"train"`, `"val"` or `"test"`.
            shuffle: Draw a new order in every epoch.

        Returns:
            The loader.
        """

    def prepare_data(self) -> None:
        """Download hub datasets, once per machine."""
        for part in self.sources.values():
            for source in part:
                if source.is_remote:
                    next(source.read_rows(), None)

    def setup(self, stage: str | None = None) -> None:
        """Read, split and encode the parts of a stage, except those that are encoded already.

        Args:
            stage: `"fit"`, `"validate"`, `"test"`, `"predict"`, or None for all parts.

        Raises:
            RecordError: If a record cannot be used and `on_bad_record` is `"error"`.
            ValueError: If a part is left without examples, or a network of the module that is
                trained does not embed every token of the tokenizer.
        """
        if self.encoder is None:
            tokenizer = self._load_tokenizer()
            self.check_vocabulary(tokenizer)
            self.encoder = DialogueEncoder(
                tokenizer,
                self.chat_template,
                self.max_length,
                self.max_prompt_length,
                self.eos_token,
            )
        self.encode_parts(stage)
        self._log_counts()

    def encode_parts(self, stage: str | None) -> None:
        """Encode the parts of a stage; `setup` logs afterwards what they lost.

        Args:
            stage: As for `setup`.
        """
        if self._records is None:
            self._records = self._read_parts()
        for part in _PARTS_OF_STAGE[stage]:
            records = self._records[part]
            if part in self.examples or not records:
                continue
            self.examples[part] = encode_records(
                records, self.encode_record, self.counts, self.on_bad_record
            )
            if not self.examples[part]:
                raise ValueError(
                    f"{part}: no example is left of {len(records)} records; left out: "
                    f"{dict(self.counts.dropped_records)}"
                )
            _log_info(f"{part}: {len(self.examples[part])} examples of {len(records)} records")

    def train_dataloader(self) -> ResumableLoader[Any]:
        """Loader of the training examples."""
        # Trainer(overfit_batches=...) needs the same batches in every epoch.
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        return self.make_loader("train", shuffle=not overfit)

    def val_dataloader(self) -> ResumableLoader[Any] | list[Any]:
        """Loader of the validation examples; an empty list if there are none."""
        return self.make_loader("val", shuffle=False) if "val" in self.examples else []

    def test_dataloader(self) -> ResumableLoader[Any]:
        """Loader of the test examples.

        Raises:
            ValueError: If there are none.
        """
        if "test" not in self.examples:
            raise ValueError(
                "test_sources, test_fraction: expected one of them for testing, got neither"
            )
        return self.make_loader("test", shuffle=False)

    def predict_dataloader(self) -> ResumableLoader[Any]:
        """Loader of the validation examples, for which predictions are made.

        Raises:
            ValueError: If there are none.
        """
        if "val" not in self.examples:
            raise ValueError(
                "val_sources, val_fraction: expected one of them for predicting, got neither"
            )
        return self.make_loader("val", shuffle=False)

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share the data."""
        return 1 if self.trainer is None else int(self.trainer.world_size)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return 0 if self.trainer is None else int(self.trainer.global_rank)

    def require_encoder(self) -> DialogueEncoder:
        """The encoder.

        Raises:
            RuntimeError: Before `setup`.
        """
        if self.encoder is None:
            raise RuntimeError("encoder: expected one, got none; call setup() first")
        return self.encoder

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self.tokenizer
        if tokenizer is None:
            module = None if self.trainer is None else self.trainer.lightning_module
            tokenizer = getattr(module, "tokenizer", None)
        if isinstance(tokenizer, str):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(
                "tokenizer: expected a path, a tokenizer, or a module with a `tokenizer` "
                f"attribute, got {tokenizer!r}"
            )
        return tokenizer

    def check_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check, before anything is encoded, that all networks of the module embed every token.

        Args:
            tokenizer: The tokenizer.

        Raises:
            ValueError: If the tokenizer has ids beyond an embedding.
        """
        module = getattr(self.trainer, "lightning_module", None)
        largest = max(tokenizer.get_vocab().values())
        modules = [*module.named_modules()] if isinstance(module, nn.Module) else []
        # reward models with a tokenizer of their own are given text
        given_text = {
            network
            for _, reward in modules
            if getattr(reward, "own_text", None) is not None
            for network in reward.modules()
        }
        for name, network in modules:
            if isinstance(network, PreTrainedModel) and network not in given_text:
                rows = len(cast(nn.Embedding, network.get_input_embeddings()).weight)
                if largest >= rows:
                    raise ValueError(
                        f"tokenizer: expected one whose tokens are all embedded by {name!r}, which "
                        f"embeds {rows}, got one with ids up to {largest}; resize the embedding "
                        "(resize_token_embeddings), or use the tokenizer that the model was "
                        "trained with"
                    )

    def _load_part(
        self, part: str, kind: RecordKind, sources: Sequence[DataSource]
    ) -> list[Record]:
        self.loaded[part] = load_records(kind, sources, self.on_bad_record)
        return self.loaded[part].records

    def _read_parts(self) -> dict[Part, list[Record]]:
        records: dict[Part, list[Record]] = {}
        train = self._load_part("train", self.kind, self.sources["train"])
        if self.val_fraction or self.test_fraction:
            splits = split_records(train, self.val_fraction, self.test_fraction, self.seed)
            train, records["val"], records["test"] = splits
        for part in ("val", "test"):
            if self.sources[part]:
                records[part] = self._load_part(part, self.kind, self.sources[part])
        held_out = {prompt_of(r) for part in ("val", "test") for r in records.get(part, [])}
        shared = sum(prompt_of(record) in held_out for record in train)
        if shared:
            _log_warning(f"{shared} training records have prompts that are also held out")
        # After the split, so that no held-out record is repeated.
        records["train"] = repeat_by_weight(train, self.sources["train"], self.seed)
        return {part: records.get(part, []) for part in self.sources}

    def _log_counts(self) -> None:
        counts = self.counts
        if counts.dropped_turns or counts.cut_prompts:
            _log_warning(
                f"dropped the {counts.dropped_turns} oldest turns of {counts.shortened} dialogues "
                f"and cut {counts.cut_prompts} prompts on the left to fit max_length="
                f"{self.max_length}"
            )
        if counts.escaped_tokens:
            _log_warning(
                f"encoded {counts.escaped_tokens} control tokens in plain text as ordinary text"
            )
        if counts.dropped_records:
            described = describe_bad_records(counts.dropped_records, counts.examples)
            left_out = f"{counts.dropped_records.total():,} of {counts.records:,} records"
            _log_warning(f"left out {left_out}: {described}")
