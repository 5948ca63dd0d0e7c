"""The chat templates of model families, written anew: what they render, without tools and dates."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizers import tiny_tokenizer


class PublishedTemplate(NamedTuple):
    """What a family's template writes around the turns, with `@` for their content.

    `system` is None if it refuses one, `end` comes behind a dialogue that is no prompt, and `last`
    is the assistant's last turn, where it is written in another way.
    """

    eos: str
    user: str
    assistant: str
    prompt: str
    system: str | None = "@\n\n"
    begin: str = ""
    end: str = ""
    last: str | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tiny tokenizer that has the template, and its markers as special tokens."""
        written = "".join(part for part in self if part)
        markers = set(re.findall(r"<[^<>\s]+>|\[\|[^\]]+\|\]", written))
        extra = sorted(markers - {"<think>", "</think>"})
        return tiny_tokenizer(self.eos, extra=extra, chat_template=self.jinja())

    def jinja(self) -> str:
        """The template."""
        system = "{{ raise_exception('System role not supported') }}"
        if self.system is not None:
            system = _turn(self.system)
        last = self.assistant if self.last is None else self.last
        return (
            f"{{{{ {self.begin!r} }}}}{{% for m in messages %}}"
            f"{{% if m.role == 'system' %}}{system}"
            f"{{% elif m.role == 'user' %}}{_turn(self.user)}"
            f"{{% elif loop.last %}}{_turn(last)}{{% else %}}{_turn(self.assistant)}{{% endif %}}"
            f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {self.prompt!r} }}}}"
            f"{{% else %}}{{{{ {self.end!r} }}}}{{% endif %}}"
        )


def _turn(text: str) -> str:
    before, after = text.split("@")
    return f"{{{{ {before!r} + m.content + {after!r} }}}}"


_WRITTEN = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
TEMPLATES = {name: PublishedTemplate(**fields) for name, fields in _WRITTEN.items()}
