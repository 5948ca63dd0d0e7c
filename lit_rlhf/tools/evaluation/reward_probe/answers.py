"""Honest answers to prompts, and responses as the token ids that a policy would have sampled."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from lit_rlhf.data import DialogueEncoder, Message, PromptExample
from lit_rlhf.tools.evaluation.reward_probe.cheats import Attempt


class Response(NamedTuple):
    """A response as the policy would have sampled it.

    Attributes:
        ids: Token ids, EOS included if it ended; at least one.
        ended: Whether it ended with EOS. Others were cut off.
    """

    ids: list[int]
    ended: bool


@dataclass(frozen=True)
class HonestAnswer:
    """A prompt with an honest answer.

    Attributes:
        prompt: The prompt.
        text: The answer without outer blanks.
        response: The same as token ids.
    """

    prompt: PromptExample
    text: str
    response: Response

    @property
    def request(self) -> str:
        """What the human said last; the whole rendered prompt if its turns are not known."""
        return self.prompt.turns[-1]["content"] if self.prompt.turns else self.prompt.text


class AnswerEncoder:
    """Encodes responses to prompts as the policy's chat template and tokenizer write them.

    Args:
        encoder: Encodes the prompts.
        positions: Longest sequence of prompt and response in tokens.
        max_new_tokens: Longest response in tokens, EOS included; `None`: as long as `positions`
            allow.
    """

    def __init__(
        self, encoder: DialogueEncoder, *, positions: int, max_new_tokens: int | None = None
    ) -> None:
        self.prompts = encoder
        self.positions = positions
        self.max_new_tokens = max_new_tokens
        # prompts are shortened by the other encoder, and here a response may be of any length
        self._dialogues = DialogueEncoder(
            encoder.tokenizer, max_length=sys.maxsize, eos_token=encoder.eos_token
        )

    @property
    def special_tokens(self) -> list[str]:
        """The special tokens but for EOS, at which a response would end."""
        tokens: list[str] = self.prompts.tokenizer.all_special_tokens
        return [token for token in tokens if token != self.prompts.eos_token]

    def encode(self, prompt: PromptExample, attempt: Attempt) -> Response:
        """Encode a response; one that is too long is cut off, as in a run.

        Control text, such as the marker of a turn, is removed from it.

        Args:
            prompt: The prompt.
            attempt: The response.
        """
        ids = self._encode_text(prompt, attempt.text)
        vocabulary = self.prompts.tokenizer.get_vocab()
        ids += [vocabulary[token] for token in attempt.special_tokens]
        eos = self.prompts.eos_token_id
        room = self.room(prompt)
        if not ids or (attempt.ended and len(ids) < room):
            return Response([*ids, eos], ended=True)
        return Response(ids[:room], ended=False)

    def room(self, prompt: PromptExample) -> int:
        """The longest response to a prompt in tokens."""
        room = max(self.positions - len(prompt.input_ids), 1)
        return room if self.max_new_tokens is None else min(room, self.max_new_tokens)

    def _encode_text(self, prompt: PromptExample, text: str) -> list[int]:
        """Token ids of a response without EOS."""
        control = self._dialogues.control_text
        while control.search(text):  # again, since what is left may be control text in turn
            text = control.sub("", text)
        if not text.strip():
            return []  # a template would write a blank, which a policy that ends at once does not
        turns = [Message(turn["role"], turn["content"]) for turn in prompt.turns]
        turns = turns or [Message("user", "-")]  # unknown; the text of a response is the same
        example = self._dialogues.encode_dialogue([*turns, Message("assistant", text)])
        ids: list[int] = example.input_ids[example.completion_mask].tolist()
        return ids[:-1]
