"""The text contract: how a model was shown text, saved beside its weights.

A reward model that reads another template, EOS token or vocabulary than it was trained with
returns meaningless scores without any error. Every saved model therefore carries its contract, and
the stage that loads it compares the two.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import get_type_hints

from transformers import PreTrainedTokenizerBase

from lit_rlhf.data.templates import TEMPLATE_DATE, render_dialogue
from lit_rlhf.files import read_json, write_text

CONTRACT_FILE = "text_contract.json"
"""Name of the contract's file in a model folder."""

_EXAMPLE = (
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
)
# Two tokenizers may share a vocabulary and still split text differently, by their merges,
# normalizers or byte fallback. The ids of this text tell them apart.
_PROBE = (
    "Hello  world, it's 12,345 o'clock.\n\nHuman: \u4f60\u597d\u3002 caf\u00e9 \u00bd\tdef f(x):"
)


@dataclass(frozen=True)
class TextContract:
    """The properties that two models must share to read the same token ids as the same text.

    Attributes:
        chat_template: Jinja text of the chat template.
        eos_token: The token that closes a response.
        eos_token_id: Id of the EOS token.
        bos_token: The BOS token of the tokenizer, None if it has none.
        add_bos: Whether sequences begin with the BOS token.
        truncation_side: The side on which dialogues that are too long lose text: `"left"`.
        max_length: Longest sequence in training, in tokens. For information only: models that
            differ in it still read the same text.
        vocab_size: Number of tokens of the tokenizer.
        tokenizer_hash: Hash of the tokenizer, see `tokenizer_hash`.
        template_date: The date, in ISO format, that a template got in place of today's; `None` for
            templates without a date, and in contracts of older versions.
    """

    chat_template: str
    eos_token: str
    eos_token_id: int
    bos_token: str | None
    add_bos: bool
    truncation_side: str
    max_length: int
    vocab_size: int
    tokenizer_hash: str
    template_date: str | None = None

    def save(self, folder: str | Path) -> Path:
        """Write the contract into a model folder, which is created if missing."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        return write_text(Path(folder) / CONTRACT_FILE, text)

    @classmethod
    def load(cls, folder: str | Path) -> "TextContract":
        """Read the contract of a model folder."""
        path = Path(folder) / CONTRACT_FILE
        return cls.parse(read_json(path, dict), str(path))

    @classmethod
    def parse(cls, values: object, place: str) -> "TextContract":
        """Build a contract from its fields by name, which may be anybody's.

        Args:
            values: The fields.
            place: Where they were read from, for errors.
        """
        names = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not isinstance(values, dict) or not needed <= set(values) <= names:
            actual = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"{place}: expected the fields {sorted(needed)}, got {actual}")
        for name, kind in get_type_hints(cls).items():
            if name in values and not isinstance(values[name], kind):
                raise ValueError(
                    f"{place}: expected {name} of the type {getattr(kind, '__name__', kind)}, got "
                    f"{values[name]!r:.100}"
                )
        contract = cls(**values)
        try:
            date.fromisoformat(contract.template_date or TEMPLATE_DATE)
        except ValueError as error:
            raise ValueError(f"{place}: template_date: {error}") from error
        return contract

    @classmethod
    def find(cls, folder: str | Path) -> "TextContract | None":
        """Read the contract of a folder; `None` for a hub id, or a folder without one."""
        return cls.load(folder) if (Path(folder) / CONTRACT_FILE).is_file() else None

    def render(self, messages: Sequence[dict[str, str]] = _EXAMPLE) -> str:
        """Render a complete dialogue, by default a short example, with this contract's template."""
        tokens = {"bos_token": self.bos_token or "", "eos_token": self.eos_token}
        written_date = self.template_date or TEMPLATE_DATE
        return render_dialogue(self.chat_template, messages, tokens, date=written_date)

    def mismatch(self, other: "TextContract") -> str | None:
        """Compare with another contract; `None` if both models read text alike.

        `max_length` may differ. Chat templates are described by an example rendered by both.
        """
        other_settings = asdict(other)
        ignored = {"chat_template", "max_length", "tokenizer_hash"}
        if None in (self.template_date, other.template_date):  # an older version's is not known
            ignored.add("template_date")
        differences = [
            f"{name} is {value!r} here and {other_settings[name]!r} there"
            for name, value in asdict(self).items()
            if value != other_settings[name] and name not in ignored
        ]
        if self.tokenizer_hash != other.tokenizer_hash:
            differences.append("the tokenizers split text differently (tokenizer_hash)")
        if self.chat_template != other.chat_template:
            differences.append(
                "the chat templates differ; an example dialogue reads\n"
                f"  here:  {self.render()!r}\n  there: {other.render()!r}"
            )
        return "; ".join(differences) or None


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of how a tokenizer turns text into ids: its vocabulary, and the ids of a probe text.

    It does not depend on the pad token, the padding side or the chat template, and does not change
    when the tokenizer is saved and loaded.
    """
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), list(probe)])
    return hashlib.sha256(content.encode("utf-8")).hexdigest()
