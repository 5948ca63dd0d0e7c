"""Text for a reward model that has another tokenizer than the policy.

The policy's responses are decoded, rendered with their prompts by the reward model's own chat
template, and tokenized by its own tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import DialogueEncoder, Message, Turns


class ResponseEncoder:
    """Encodes prompts and responses as a reward model was trained to read them.

    Args:
        tokenizer: The reward model's, with a chat template of its own.
        max_length: Longest dialogue in tokens; `None` for no limit. The oldest turns are dropped.

    Raises:
        ValueError: If the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> None:
        self._encoder = DialogueEncoder(tokenizer, max_length=max_length or sys.maxsize)

    @property
    def pad_token_id(self) -> int:
        """Token id of padding."""
        return self._encoder.pad_token_id

    def encode(
        self, dialogues: Sequence[Turns], responses: Sequence[str], terminated: Sequence[bool]
    ) -> list[Tensor]:
        """Encode prompts with their responses.

        Control tokens of the reward model are ordinary text to the policy. They are removed, or a
        response could write a turn of its own.

        Args:
            dialogues: The turns of each prompt.
            responses: The texts of the responses.
            terminated: Whether each ended with EOS. If not, it is encoded without EOS.

        Returns:
            Token ids of each, `(L,)` int32.

        Raises:
            ValueError: If a response does not fit, or the template refuses a dialogue.
        """
        encoded = []
        for turns, response, ended in zip(dialogues, responses, terminated, strict=True):
            messages = [Message(turn["role"], self._clean(turn["content"])) for turn in turns]
            messages.append(Message("assistant", self._clean(response).strip()))
            ids = self._encoder.encode_dialogue(messages).input_ids
            encoded.append(ids if ended else ids[:-1])
        return encoded

    def _clean(self, text: str) -> str:
        # again, since what is left may be control text in turn
        while self._encoder.control_text.search(text):
            text = self._encoder.control_text.sub("", text)
        return text
