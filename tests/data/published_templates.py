"""The chat templates of model families, written anew: what they render, without tools and dates."""

import re
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from tests.data.tiny_tokenizers import tiny_tokenizer


class PublishedTemplate(NamedTuple):
    """What a family's template writes around the turns.

    Attributes:
        eos: The EOS token of the tokenizer as it is published.
        user: A human turn, `@` for its content.
        assistant: An assistant turn.
        prompt: What a prompt ends with.
        system: A system turn; None if the template refuses one.
        begin: The text before the first turn.
        end: The text behind a dialogue that is no prompt.
        last: The assistant's last turn, where it is written in another way.
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


def _chatml(eos: str = "<|im_end|>", begin: str = "") -> PublishedTemplate:
    turn = "<|im_start|>{}\n@<|im_end|>\n"
    return PublishedTemplate(
        eos,
        turn.format("user"),
        turn.format("assistant"),
        "<|im_start|>assistant\n",
        turn.format("system"),
        begin,
    )


_QWEN3 = _chatml()
_NO_REASONING = "<|im_start|>assistant\n<think>\n\n</think>\n\n@<|im_end|>\n"
_DEEPSEEK = PublishedTemplate(
    "<｜end▁of▁sentence｜>",
    "<｜User｜>@",
    "<｜Assistant｜>@<｜end▁of▁sentence｜>",
    "<｜Assistant｜>",
    "@",
    "<｜begin▁of▁sentence｜>",
)

TEMPLATES: dict[str, PublishedTemplate] = {
    "ChatML (Qwen2.5, SmolLM2, Yi, Hermes)": _chatml(),
    "ChatML on a base model (Qwen2.5)": _chatml("<|endoftext|>"),
    "InternLM2": _chatml("</s>", "<s>"),
    "LFM2": _chatml(begin="<|startoftext|>"),
    "Qwen3": _QWEN3._replace(last=_NO_REASONING),
    "Qwen3 Thinking": _QWEN3._replace(
        last=_NO_REASONING, prompt="<|im_start|>assistant\n<think>\n"
    ),
    "DeepSeek-V2": PublishedTemplate(
        "<｜end▁of▁sentence｜>",
        "User: @\n\n",
        "Assistant: @<｜end▁of▁sentence｜>",
        "Assistant:",
        begin="<｜begin▁of▁sentence｜>",
    ),
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-V3.1": _DEEPSEEK._replace(
        assistant="<｜Assistant｜></think>@<｜end▁of▁sentence｜>", prompt="<｜Assistant｜></think>"
    ),
    "DeepSeek-R1": _DEEPSEEK._replace(prompt="<｜Assistant｜><think>\n"),
    "DeepSeek-Coder": PublishedTemplate(
        "<|EOT|>",
        "### Instruction:\n@\n",
        "### Response:\n@\n<|EOT|>\n",
        "### Response:\n",
        "@",
        "<｜begin▁of▁sentence｜>",
    ),
    "Llama 2": PublishedTemplate(
        "</s>", "<s>[INST] @ [/INST]", " @ </s>", "", "<<SYS>>\n@\n<</SYS>>\n\n"
    ),
    "Llama 3": PublishedTemplate(
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n@<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n@<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>system<|end_header_id|>\n\n@<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "Mistral v0.2": PublishedTemplate("</s>", "[INST] @ [/INST]", "@</s>", "", None, "<s>"),
    "Mistral v0.3": PublishedTemplate("</s>", "[INST] @[/INST]", " @</s>", "", begin="<s>"),
    "Mistral Nemo": PublishedTemplate("</s>", "[INST]@[/INST]", "@</s>", "", begin="<s>"),
    "Zephyr, TinyLlama": PublishedTemplate(
        "</s>",
        "<|user|>\n@</s>\n",
        "<|assistant|>\n@</s>\n",
        "<|assistant|>\n",
        "<|system|>\n@</s>\n",
    ),
    "Vicuna": PublishedTemplate("</s>", "USER: @\n", "ASSISTANT: @</s>\n", "ASSISTANT:"),
    "OpenChat": PublishedTemplate(
        "<|end_of_turn|>",
        "GPT4 Correct User: @<|end_of_turn|>",
        "GPT4 Correct Assistant: @<|end_of_turn|>",
        "GPT4 Correct Assistant:",
        "GPT4 Correct System: @<|end_of_turn|>",
        "<s>",
    ),
    "AlphaMonarch": PublishedTemplate(
        "</s>",
        "<s>user\n@</s>\n",
        "<s>assistant\n@</s>\n",
        "<s>assistant\n",
        "<s>system\n@</s>\n",
    ),
    "Orion": PublishedTemplate("</s>", "Human: @\n\nAssistant: </s>", "@</s>", "", begin="<s>"),
    "Gemma, Gemma 2": PublishedTemplate(
        "<eos>",
        "<start_of_turn>user\n@<end_of_turn>\n",
        "<start_of_turn>model\n@<end_of_turn>\n",
        "<start_of_turn>model\n",
        None,
        "<bos>",
    ),
    "Phi-3 mini": PublishedTemplate(
        "<|endoftext|>",
        "<|user|>\n@<|end|>\n",
        "<|assistant|>\n@<|end|>\n",
        "<|assistant|>\n",
        "<|system|>\n@<|end|>\n",
        end="<|endoftext|>",
    ),
    "Phi-4 mini": PublishedTemplate(
        "<|endoftext|>",
        "<|user|>@<|end|>",
        "<|assistant|>@<|end|>",
        "<|assistant|>",
        "<|system|>@<|end|>",
        end="<|endoftext|>",
    ),
    "Phi-4": PublishedTemplate(
        "<|im_end|>",
        "<|im_start|>user<|im_sep|>@<|im_end|>",
        "<|im_start|>assistant<|im_sep|>@<|im_end|>",
        "<|im_start|>assistant<|im_sep|>",
        "<|im_start|>system<|im_sep|>@<|im_end|>",
    ),
    "ChatGLM3": PublishedTemplate(
        "</s>",
        "<|user|>\n @",
        "<|assistant|>\n @",
        "<|assistant|>",
        "<|system|>\n @",
        "[gMASK]sop",
    ),
    "GLM-4": PublishedTemplate(
        "<|endoftext|>",
        "<|user|>\n@",
        "<|assistant|>\n@",
        "<|assistant|>\n",
        "<|system|>\n@",
        "[gMASK]<sop>",
    ),
    "GLM-4.5": PublishedTemplate(
        "<|endoftext|>",
        "<|user|>\n@",
        "<|assistant|>\n<think></think>\n@",
        "<|assistant|>",
        "<|system|>\n@",
        "[gMASK]<sop>",
    ),
    "MiniCPM": PublishedTemplate("</s>", "<用户>@<AI>", "@", "", "@"),
    "Command R, Aya": PublishedTemplate(
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
    ),
    "Granite 3": PublishedTemplate(
        "<|end_of_text|>",
        "<|start_of_role|>user<|end_of_role|>@<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>@<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|start_of_role|>system<|end_of_role|>@<|end_of_text|>\n",
    ),
    "OLMo 2": PublishedTemplate(
        "<|endoftext|>",
        "<|user|>\n@\n",
        "<|assistant|>\n@<|endoftext|>\n",
        "<|assistant|>\n",
        "<|system|>\n@\n",
        "<|endoftext|>",
        last="<|assistant|>\n@<|endoftext|>",
    ),
    "EXAONE 3": PublishedTemplate(
        "[|endofturn|]",
        "[|user|]@\n",
        "[|assistant|]@[|endofturn|]\n",
        "[|assistant|]",
        "[|system|]@[|endofturn|]\n",
    ),
    "Seed-OSS": PublishedTemplate(
        "<seed:eos>",
        "<seed:bos>user\n@<seed:eos>",
        "<seed:bos>assistant\n@<seed:eos>",
        "<seed:bos>assistant\n",
        "<seed:bos>system\n@<seed:eos>",
    ),
    "Kimi K2": PublishedTemplate(
        "[EOS]",
        "<|im_user|>user<|im_middle|>@<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>@<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_system|>system<|im_middle|>@<|im_end|>",
    ),
    "Nemotron Mini": PublishedTemplate(
        "</s>",
        "<extra_id_1>User\n@\n<extra_id_1>Assistant\n",
        "@\n",
        "",
        "<extra_id_0>System\n@\n\n",
    ),
    "Nemotron Nano 2": PublishedTemplate(
        "<SPECIAL_12>",
        "<SPECIAL_11>User\n@\n",
        "<SPECIAL_11>Assistant\n@\n<SPECIAL_12>\n\n",
        "<SPECIAL_11>Assistant\n<think>\n\n",
        "<SPECIAL_10>System\n@\n\n",
        last="<SPECIAL_11>Assistant\n<think>\n\n@\n<SPECIAL_12>\n\n",
    ),
    "gpt-oss": PublishedTemplate(
        "<|return|>",
        "<|start|>user<|message|>@<|end|>",
        "<|start|>assistant<|channel|>final<|message|>@<|end|>",
        "<|start|>assistant",
        "<|start|>developer<|message|># Instructions\n\n@<|end|>",
        last="<|start|>assistant<|channel|>final<|message|>@<|return|>",
    ),
}
