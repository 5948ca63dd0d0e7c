"""Tiny tokenizers trained on a few strings."""

from collections.abc import Sequence

from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import byte_level_tokenizer

TEXTS = [
    "\n\nHuman: What is the capital of France?\n\nAssistant: Paris is the capital of France.",
    "Human:name two metals Assistant:iron and copper",
    "<|Human|>你好，请介绍一下自己。<|MOSS|>我是一个助手。",
    "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(
    eos: str = "</s>",
    pad: str | None = "<pad>",
    bos: str | None = None,
    extra: Sequence[str] = (),
    chat_template: str | None = None,
    vocab_size: int = 400,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; it begins texts with ``bos`` if there is one."""
    specials = list(dict.fromkeys([*(t for t in (pad, bos, eos) if t), *extra]))
    tokenizer = byte_level_tokenizer(TEXTS, specials, vocab_size)
    if bos is not None:
        special = [(bos, tokenizer.token_to_id(bos))]
        post = processors.TemplateProcessing(f"{bos} $A", special_tokens=special)
        tokenizer.post_processor = post
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad or eos, bos_token=bos
    )
    fast.chat_template = chat_template
    return fast
