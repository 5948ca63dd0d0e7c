"""One row of each published dataset, in its own fields and with made-up text.

In every row `GOOD` is preferred to `BAD`, and both answer `ASK`. Fields that carry no text for
training, such as the annotations of a row, are left out where there are many.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from lit_rlhf.data import RecordKind

ASK, GOOD, BAD = "Which metal rusts?", "Iron rusts.", "No metal does."
BE_BRIEF = "Be brief."


class PublishedRow(NamedTuple):
    """A dataset's row.

    Attributes:
        fields: The row.
        kinds: The kinds of records that it can be read as.
        settings: Settings of its source.
        margin: Field of its margin; empty for none.
    """

    fields: Any
    kinds: tuple[RecordKind, ...] = ("preference", "demonstration", "prompt")
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    margin: str = ""


_WRITTEN = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
PUBLISHED = {name: PublishedRow(**fields) for name, fields in _WRITTEN.items()}
