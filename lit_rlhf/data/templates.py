r"""Chat templates: HH-RLHF's dialogue format, and the paper's in English and in Chinese.

Each is a Jinja template as transformers defines it. A saved tokenizer carries it, and
`tokenizer.apply_chat_template` renders the same text without this project.

- `hh`: `"\n\nHuman: {x}\n\nAssistant: {y}"`. Only the last assistant turn of a complete dialogue is
  closed by the EOS token. A prompt ends with `"\n\nAssistant:"`, and the response starts with a
  space.
- `paper-en` and `paper-zh` (arXiv 2307.04964): turns are `"Human:{x}"` and `"Assistant:{y}"`, in
  Chinese `"<|Human|>{x}"` and `"<|MOSS|>{y}"`. Every turn, the human's too, is closed by the EOS
  token. A prompt ends with the assistant's marker. `<|Human|>` and `<|MOSS|>` are single tokens if
  the tokenizer has them as special tokens, and plain text otherwise. Nothing is added to the
  vocabulary, so embeddings keep their size.

A system turn has no marker in any of them: its text comes before the first human turn.
"""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from lit_rlhf.time_limit import call_with_timeout

TEMPLATE_SECONDS = 10.0
"""Longest time that a chat template may take for one dialogue."""

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
}
"""The built-in templates by name, without the BOS token that `resolve_template` may add."""


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer by default begins every text with its BOS token.

    Args:
        tokenizer: The tokenizer.

    Returns:
        True if it does; False for a tokenizer such as GPT-2's, which has a BOS token and does not
        add it.
    """
    ids: list[int] = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Look up a chat template.

    A built-in template starts with the BOS token if the tokenizer adds one by default. The
    tokenizer's own template is taken as it is.

    Args:
        name: A key of `CHAT_TEMPLATES`, or `"tokenizer"` for the tokenizer's own.
        tokenizer: The tokenizer the template is for.

    Returns:
        The Jinja text.

    Raises:
        ValueError: If the name is unknown, or the tokenizer has no template of its own.
    """
    known = ", ".join(repr(key) for key in CHAT_TEMPLATES)
    if name in CHAT_TEMPLATES:
        return (_BOS if adds_bos(tokenizer) else "") + CHAT_TEMPLATES[name]
    if name != "tokenizer":
        raise ValueError(f"chat_template: expected 'tokenizer' or one of {known}, got {name!r}")
    own = tokenizer.chat_template
    if isinstance(own, dict):  # several templates by name, for instance one for tools
        own = own.get("default")
    if not own:
        raise ValueError(
            "chat_template: expected a tokenizer with a chat template of its own for 'tokenizer', "
            f"got one without; choose one of the built-in ones: {known}"
        )
    return str(own)


def render_in_time(render: Callable[[], str], template: str) -> str:
    """Render a dialogue within `TEMPLATE_SECONDS`.

    Templates come with models and are programs: a few words of Jinja can run for years.

    Args:
        render: Renders the dialogue.
        template: Jinja text of the template.

    Returns:
        The text.

    Raises:
        ValueError: If it takes longer.
    """
    if template.removeprefix(_BOS) in CHAT_TEMPLATES.values():
        return render()  # a thread would cost as much time as the rendering
    rendered = call_with_timeout(render, TEMPLATE_SECONDS)
    if not rendered.done():
        raise ValueError(
            "chat_template: expected one that renders a dialogue within "
            f"{TEMPLATE_SECONDS:g} seconds, got {template!r:.200}; choose one of the built-in ones"
        )
    return rendered.result()
