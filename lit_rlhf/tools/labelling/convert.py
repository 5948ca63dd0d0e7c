"""Preferences in the columns that other programs read."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from lit_rlhf.data import PreferenceRecord, turns_as_dicts

_SPEAKERS = {"user": "Human", "assistant": "Assistant"}


def preference_rows(
    records: Iterable[PreferenceRecord], format: Literal["hh", "trl"]
) -> Iterator[dict[str, Any]]:
    """Write preferences in the columns of HH-RLHF or of TRL.

    Args:
        records: The preferences.
        format: `hh` for two whole dialogues as text, `trl` for the prompt and the two responses as
            lists of turns.
    """
    for record in records:
        if format == "trl":
            yield {
                "prompt": turns_as_dicts(record.prompt),
                "chosen": [{"role": "assistant", "content": record.chosen}],
                "rejected": [{"role": "assistant", "content": record.rejected}],
            }
            continue
        if record.prompt[0].role == "system":
            raise ValueError(
                f"{record.location}: expected dialogues of human and assistant, which HH-RLHF's "
                "format has, got a system turn; use the format trl"
            )
        prompt = "".join(f"\n\n{_SPEAKERS[turn.role]}: {turn.content}" for turn in record.prompt)
        yield {
            "chosen": f"{prompt}\n\nAssistant: {record.chosen}",
            "rejected": f"{prompt}\n\nAssistant: {record.rejected}",
        }
