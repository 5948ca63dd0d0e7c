"""Labels: people's choices between two responses, as `lit_rlhf label` writes and others read them.

A file of labels has one JSON object per line. A line is a label, or the note that two responses are
equal and were therefore shown to nobody.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

from lit_rlhf.data import RecordError, Row, read_file
from lit_rlhf.tools.evaluation.responses import Turns

Choice = Literal["a", "b", "tie", "both_bad", "skip"]
"""What a person chose: response A or B, a tie, a tie because both are bad, or nothing."""
Strength = Literal["slightly", "clearly"]
"""How much better the chosen response is."""
Selection = Literal["random", "spread"]
"""Why a comparison was shown: drawn at random, or because reward models disagree on it."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two responses to one prompt.

    Attributes:
        prompt: The turns of the prompt.
        response_a: Response of the first policy, the baseline.
        response_b: Response of the other policy, or another one of the same policy.
        policy_a: Name of the policy that wrote A.
        policy_b: Name of the policy that wrote B.
        ended_a: Whether A ended; `None` if that is not known.
        ended_b: Whether B ended.
        occurrence: Number among the comparisons of these policies on this prompt, from 0.
        selection: Why it is shown.
        spread: Disagreement of the reward models on it; `None` without any.
    """

    prompt: Turns
    response_a: str
    response_b: str
    policy_a: str
    policy_b: str
    ended_a: bool | None = None
    ended_b: bool | None = None
    occurrence: int = 0
    selection: Selection = "random"
    spread: float | None = None

    @cached_property
    def key(self) -> str:
        """What is compared, whatever the responses say: prompt, policies and occurrence."""
        turns = [[turn.role, turn.content] for turn in self.prompt]
        return _hash([turns, self.policy_a, self.policy_b, self.occurrence])[:32]

    @cached_property
    def text_hash(self) -> str:
        """SHA-256 of the prompt and the responses."""
        return _hash_texts(self.prompt, self.response_a, self.response_b)

    @cached_property
    def is_equal(self) -> bool:
        """Whether nobody could tell the responses apart."""
        return self.response_a.strip() == self.response_b.strip()


def _hash_texts(prompt: Turns, response_a: str, response_b: str) -> str:
    turns = [[turn.role, turn.content] for turn in prompt]
    return _hash([turns, response_a, response_b])


def _hash(value: object) -> str:
    # ASCII escapes: a response may hold half of a surrogate pair, which UTF-8 cannot encode
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Label:
    """One person's choice in one comparison, with the fields of a line in a file of labels.

    Attributes:
        comparison: Key of the comparison.
        prompt: The turns of the prompt.
        response_a: The first policy's response.
        response_b: The other response.
        policy_a: Name of the policy that wrote A.
        policy_b: Name of the policy that wrote B.
        ended_a: Whether A ended; `None` if that is not known.
        ended_b: Whether B ended.
        choice: What was chosen.
        strength: How much better the chosen response is; `None` if the annotator did not say.
        remark: The annotator's remark.
        annotator: Name of the annotator. `None`: the responses are equal and were shown to nobody.
        left: The response that was shown on the left, or above on a phone.
        repeat: Whether the annotator had seen the comparison before, with the sides swapped.
        selection: Why the comparison was shown.
        spread: Disagreement of the reward models; `None` without any.
        seconds: Time on the page; `None` if the browser did not say.
        time: When it was saved, in UTC (ISO 8601).
        text_hash: SHA-256 of the prompt and the responses.
        policies: SHA-256 of each policy, or of its file of responses, by name; `None` for a hub id.
    """

    comparison: str
    prompt: Turns
    response_a: str
    response_b: str
    policy_a: str
    policy_b: str
    ended_a: bool | None = None
    ended_b: bool | None = None
    choice: Choice
    strength: Strength | None = None
    remark: str = ""
    annotator: str | None
    left: Literal["a", "b"] | None = None
    repeat: bool = False
    selection: Selection = "random"
    spread: float | None = None
    seconds: float | None = None
    time: str = ""
    text_hash: str = ""
    policies: Mapping[str, str | None]

    def as_line(self) -> bytes:
        """The label as a line of a file."""
        # ASCII escapes keep halves of surrogate pairs
        return (json.dumps(asdict(self)) + "\n").encode()


_CHOICES = get_args(Choice)
_STRENGTHS = (None, *get_args(Strength))
_SELECTIONS = get_args(Selection)
_TEXT_FIELDS = (
    "comparison",
    "response_a",
    "response_b",
    "policy_a",
    "policy_b",
    "remark",
    "time",
    "text_hash",
)


def parse_label(row: Row | RecordError) -> Label:
    """Parse a line of a file of labels; raises its error if it is no label."""
    if isinstance(row, RecordError):
        raise row
    values: dict[str, Any] = {
        field.name: row.fields[field.name] for field in fields(Label) if field.name in row.fields
    }
    for name in ("comparison", "response_a", "response_b", "policy_a", "policy_b", "choice"):
        if name not in values:
            raise row.error("missing", field=name)
    for name in _TEXT_FIELDS:
        if not isinstance(values.get(name, ""), str):
            raise row.error("not a string", field=name, detail=type(values[name]).__name__)
    for name, allowed in (
        ("choice", _CHOICES),
        ("strength", _STRENGTHS),
        ("selection", _SELECTIONS),
        ("left", (None, "a", "b")),
        ("repeat", (False, True)),
        ("ended_a", (None, False, True)),
        ("ended_b", (None, False, True)),
    ):
        if name in values and values[name] not in allowed:
            raise row.error("unknown value", field=name, detail=repr(values[name]))
    annotator = values.setdefault("annotator", None)
    if annotator is not None and not isinstance(annotator, str):
        raise row.error("not a name", field="annotator", detail=repr(annotator))
    for name in ("seconds", "spread"):
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise row.error("not a number", field=name, detail=repr(value))
    policies = values.setdefault("policies", {})
    if not isinstance(policies, Mapping):
        raise row.error("not an object", field="policies", detail=type(policies).__name__)
    values["prompt"] = row.read_turns("prompt")
    label = Label(**values)
    texts_hash = _hash_texts(label.prompt, label.response_a, label.response_b)
    if label.text_hash not in ("", texts_hash):
        raise row.error(
            "the prompt or a response has changed since it was labelled", field="text_hash"
        )
    return label


def read_labels(*paths: str) -> list[Label]:
    """Read files of labels; an error names the line.

    Args:
        paths: The files.

    Raises:
        ValueError: If a person's label is there twice, for instance in two files.
    """
    labels = []
    earlier: set[bytes] = set()
    for row in (row for path in paths for row in read_file(path)):
        label = parse_label(row)
        line = label.as_line()
        if isinstance(row, Row) and label.annotator is not None and line in earlier:
            raise row.error(f"a label of {label.annotator!r} that an earlier line has, too")
        earlier.add(line)
        labels.append(label)
    return labels
