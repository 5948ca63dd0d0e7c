r"""Chat templates: HH-RLHF's dialogue format, the paper's in English and in Chinese, and none.

Each is a Jinja template as transformers defines it. A saved tokenizer carries it, and
`tokenizer.apply_chat_template` renders the same text without this project.

- `hh`: `"\n\nHuman: {x}\n\nAssistant: {y}"`. Only the last assistant turn of a complete dialogue is
  closed by the EOS token. A prompt ends with `"\n\nAssistant:"`, and the response starts with a
  space.
- `paper-en` and `paper-zh` (arXiv 2307.04964): turns are `"Human:{x}"` and `"Assistant:{y}"`, in
  Chinese `"<|Human|>{x}"` and `"<|MOSS|>{y}"`. Every turn, the human's too, is closed by the EOS
  token. A prompt ends with the assistant's marker. `<|Human|>` and `<|MOSS|>` are single tokens if
  the tokenizer has them as special tokens, and plain text otherwise.
- `none`: `"{x}{y}"` with the EOS token behind the last assistant turn, for models that were trained
  on raw prompts. Neither whitespace nor markers are added between turns.

A system turn has no marker in any of them: its text comes before the first human turn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lit_rlhf import sandbox
from lit_rlhf.data.counts import EncodingError
from lit_rlhf.files import read_text

_BOS = "{{ bos_token }}"
_HH = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '\\n\\nHuman: ' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '\\n\\nAssistant: ' + message['content'] }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{%- if loop.last and message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\n\\nAssistant:' }}{%- endif -%}"
)
_NONE = (
    "{%- for message in messages -%}{{ message['content'] }}"
    "{%- if loop.last and message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
)
_PAPER = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ 'HUMAN' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ 'ASSISTANT' }}{%- endif -%}"
    "{{ message['content'] + eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'ASSISTANT' }}{%- endif -%}"
)

CHAT_TEMPLATES: dict[str, str] = {
    "hh": _HH,
    "paper-en": _PAPER.replace("HUMAN", "Human:").replace("ASSISTANT", "Assistant:"),
    "paper-zh": _PAPER.replace("HUMAN", "<|Human|>").replace("ASSISTANT", "<|MOSS|>"),
    "none": _NONE,
}
"""The built-in templates by name, without the BOS token that `resolve_template` may add."""

TEMPLATE_DATE = "2024-07-26"
"""The date that chat templates get, whatever day it is.

Some templates, such as Llama 3.1's to 3.3's, write today's date. Stages, resumed runs and
evaluations of different days would then see different prompts. These templates write this date
themselves if they get none.
"""


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer begins every text with its BOS token by default; GPT-2's does not."""
    ids: list[int] = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Look up a chat template by a name in `CHAT_TEMPLATES` or its file, or the tokenizer's own.

    A built-in template starts with the BOS token if the tokenizer adds one by default.
    """
    built_in_names = ", ".join(repr(key) for key in CHAT_TEMPLATES)
    if name in CHAT_TEMPLATES:
        return (_BOS if adds_bos(tokenizer) else "") + CHAT_TEMPLATES[name]
    if Path(name).is_file():
        return read_text(name)
    if name != "tokenizer":
        raise ValueError(
            f"chat_template: expected 'tokenizer', one of {built_in_names} or the path of a Jinja "
            f"file, got {name!r}"
        )
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several templates by name, for instance one for tools
        template = template.get("default")
    if not template:
        raise ValueError(
            "chat_template: expected a tokenizer with a chat template of its own for 'tokenizer', "
            f"got one without; choose one of the built-in ones: {built_in_names}"
        )
    return str(template)


def render_dialogue(
    template: str,
    messages: Sequence[Mapping[str, str]],
    special_tokens: Mapping[str, Any],
    add_generation_prompt: bool = False,
    date: str = TEMPLATE_DATE,
) -> str:
    """Render a dialogue as transformers does, a foreign template in the sandbox.

    Args:
        template: Jinja text of the chat template.
        messages: The turns, each with `role` and `content`.
        special_tokens: Special tokens by their names in templates, such as `bos_token`.
        add_generation_prompt: Whether the text goes on to where the assistant speaks.
        date: The date that the template gets, in ISO format.
    """
    arguments: dict[str, Any] = {
        "conversations": [list(messages)],
        "chat_template": template,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    if template.removeprefix(_BOS) in CHAT_TEMPLATES.values():
        rendered: Any = render_jinja_template(**arguments)
        return str(rendered[0][0])  # (texts, token spans)
    try:
        return sandbox.render_template(arguments, date)
    except sandbox.SandboxError as error:
        if error.name == "TemplateError":  # for instance Gemma's, of a system turn
            raise EncodingError("the chat template refuses the dialogue", str(error)) from error
        raise ValueError(
            f"chat_template: expected one that renders a dialogue {error.expected}, got "
            f"{template!r:.200}{error.cause}; choose one of the built-in ones"
        ) from error
