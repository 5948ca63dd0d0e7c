"""Labels by people, made up by tests."""

from typing import Any

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation.labels import Label


def make_label(comparison: str, choice: str, annotator: str | None = "ann", **values: Any) -> Label:
    """A label whose prompt is the comparison's key, of a short and a longer response."""
    return Label(
        **{
            "comparison": comparison,
            "prompt": (Message("user", comparison),),
            "response_a": "short",
            "response_b": "a longer one",
            "policy_a": "sft",
            "policy_b": "ppo",
            "choice": choice,
            "annotator": annotator,
            "left": "a",
            "policies": {},
            **values,
        }
    )
