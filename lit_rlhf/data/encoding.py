"""The one code path from dialogues to token ids.

SFT, reward model training, PPO prompts and evaluation all go through :class:`DialogueEncoder`.
Prompt and response are tokenized apart and joined, so that

    dialogue ids == prompt ids + response ids + EOS id

holds exactly: the ids that a reward model is trained on are the ids that a rollout yields.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from lit_rlhf.data.contract import TextContract, tokenizer_hash
from lit_rlhf.data.records import Message
from lit_rlhf.data.templates import resolved_template

TrainOn = Literal["last", "all"]


class Encoded(NamedTuple):
    """Token ids of a prompt or a dialogue, and what was lost on the way.

    Attributes:
        input_ids: Token ids.
        completion_mask: True on the tokens to be trained on; all False for a prompt.
        dropped_turns: Oldest turns left out to fit the length (a dropped system turn counts).
        text: The text that the ids stand for.
        cut_tokens: Tokens cut from the left of the last turn because it alone was too long.
    """

    input_ids: list[int]
    completion_mask: list[bool]
    dropped_turns: int
    text: str
    cut_tokens: int = 0


class EncodedPair(NamedTuple):
    """Two dialogues with the same prompt ids."""

    chosen: Encoded
    rejected: Encoded


class EncodingError(ValueError):
    """A dialogue that cannot be encoded.

    Attributes:
        reason: What is wrong, in words that do not vary from dialogue to dialogue.
        detail: The particulars of this case.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        """Make the error.

        Args:
            reason: What is wrong; dropped dialogues are counted by it.
            detail: The particulars of this case.
        """
        self.reason = reason
        self.detail = detail
        super().__init__(reason + (f" ({detail})" if detail else ""))


class ResponseTooLongError(EncodingError):
    """A response that leaves no room for a prompt; it is never cut."""


class _Prompt(NamedTuple):
    messages: tuple[Message, ...]
    text: str
    input_ids: list[int]
    dropped_turns: int
    cut_tokens: int


class _Response(NamedTuple):
    text: str
    input_ids: list[int]


class DialogueEncoder:
    """Renders and tokenizes dialogues; sets the tokenizer's chat template to the one it uses.

    Args:
        tokenizer: A tokenizer with an EOS token. Its ``chat_template`` is set, so that
            ``save_pretrained`` carries it.
        chat_template: ``"tokenizer"`` for the tokenizer's own, or a name of
            :data:`lit_rlhf.data.templates.CHAT_TEMPLATES`.
        max_length: Longest dialogue, prompt and response and EOS, in tokens.
        max_prompt_length: Longest prompt, in tokens; default ``max_length``. It also holds for the
            prompts of dialogues, so that both stages see the same context.

    Raises:
        ValueError: If a length is out of range, the template is unknown, or the tokenizer has no
            EOS token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str = "tokenizer",
        max_length: int = 512,
        max_prompt_length: int | None = None,
    ) -> None:
        if max_length < 2:
            raise ValueError(f"max_length: expected at least 2 tokens, got {max_length}")
        if max_prompt_length is not None and not 1 <= max_prompt_length <= max_length:
            raise ValueError(
                f"max_prompt_length: expected 1 to max_length={max_length}, got {max_prompt_length}"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer: expected one with an EOS token, got one without")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_prompt_length = max_prompt_length or max_length
        self.eos_token = str(tokenizer.eos_token)
        self.eos_token_id = int(tokenizer.eos_token_id)
        tokenizer.chat_template = resolved_template(chat_template, tokenizer)
        self.contract = self._contract()

    @property
    def pad_token_id(self) -> int:
        """What padding is filled with: the pad token, or EOS where there is none."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Render a dialogue up to where the assistant is to speak.

        Args:
            messages: Turns; the last one is the human's.

        Returns:
            The text, with the template's generation prompt.
        """
        return self._render(messages, add_generation_prompt=True)

    def encode_prompt(self, messages: Sequence[Message]) -> Encoded:
        """Encode a prompt of at most ``max_prompt_length`` tokens.

        Oldest turns are dropped until it fits; a leading system turn is kept as long as it fits
        beside the last turn. If the last turn alone is too long its tokens are cut on the left.

        Args:
            messages: Turns; the last one is the human's.

        Returns:
            The prompt, without a response: no token is trained on.

        Raises:
            EncodingError: If a turn contains the text of the EOS token.
        """
        self._check_contents(messages)
        kept = tuple(messages)
        prompt = self._fitted_prompt(kept, self.render_prompt(kept), self.max_prompt_length)
        mask = [False] * len(prompt.input_ids)
        return Encoded(prompt.input_ids, mask, prompt.dropped_turns, prompt.text, prompt.cut_tokens)

    def encode_dialogue(self, messages: Sequence[Message], train_on: TrainOn = "last") -> Encoded:
        """Encode a dialogue that ends with the assistant's turn, closed by one EOS token.

        The prompt is shortened as in :meth:`encode_prompt`; the response never is.

        Args:
            messages: Turns; the last one is the assistant's.
            train_on: ``"last"`` trains on the last response and its EOS token. ``"all"`` trains on
                earlier assistant turns too, each with its EOS token where the template writes one
                (``hh`` closes the last turn only). The ids are the same for both.

        Returns:
            The dialogue.

        Raises:
            ResponseTooLongError: If the response does not fit into ``max_length`` with one prompt
                token.
            EncodingError: If a turn contains the text of the EOS token.
            ValueError: If the last turn is not the assistant's, or the template renders the
                dialogue in a way that does not continue the prompt.
        """
        if len(messages) < 2 or messages[-1].role != "assistant":
            raise ValueError("messages: expected a prompt and then an assistant turn at the end")
        if train_on not in ("last", "all"):
            raise ValueError(f"train_on: expected 'last' or 'all', got {train_on!r}")
        self._check_contents(messages)
        history = tuple(messages[:-1])
        rendered = self.render_prompt(history)
        response = self._response(history, rendered, messages[-1].content)
        prompt = self._fitted_prompt(history, rendered, self._prompt_room(response))
        return self._joined(prompt, response, train_on)

    def encode_pair(self, prompt: Sequence[Message], chosen: str, rejected: str) -> EncodedPair:
        """Encode two responses behind one prompt, shortened alike for both.

        Args:
            prompt: Turns; the last one is the human's.
            chosen: The preferred response.
            rejected: The other one.

        Returns:
            Both dialogues, with identical prompt ids.

        Raises:
            EncodingError: As for :meth:`encode_dialogue`.
        """
        contents = [Message("assistant", chosen), Message("assistant", rejected)]
        self._check_contents([*prompt, *contents])
        history = tuple(prompt)
        rendered = self.render_prompt(history)
        responses = [self._response(history, rendered, message.content) for message in contents]
        room = min(self._prompt_room(response) for response in responses)
        fitted = self._fitted_prompt(history, rendered, room)
        return EncodedPair(*(self._joined(fitted, response, "last") for response in responses))

    def encode_text(self, text: str) -> list[list[int]]:
        """Encode a plain document into blocks of at most ``max_length`` tokens.

        Args:
            text: The document.

        Returns:
            Blocks that follow each other without overlap. The document ends with the EOS token and
            begins with the BOS token if the contract says so. A last block of one token, which has
            nothing to predict, is left out.
        """
        ids = [*self._token_ids(text), self.eos_token_id]
        if self.contract.add_bos:
            ids.insert(0, int(self.tokenizer.bos_token_id))
        blocks = [ids[i : i + self.max_length] for i in range(0, len(ids), self.max_length)]
        return [block for block in blocks if len(block) > 1]

    def decode_response(self, ids: Sequence[int]) -> str:
        """Read a response: up to its first EOS token, without special tokens and outer whitespace.

        Args:
            ids: Token ids of a response, as generated or as encoded.

        Returns:
            The content of the assistant's turn.
        """
        kept = list(ids)
        if self.eos_token_id in kept:
            kept = kept[: kept.index(self.eos_token_id)]
        text = self.tokenizer.decode(
            kept, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text).strip()

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return str(
            self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _token_ids(self, text: str) -> list[int]:
        # The template has written the BOS token where it belongs; the tokenizer must not add one.
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    def _response(self, history: tuple[Message, ...], prompt: str, content: str) -> _Response:
        text = self._response_text(history, prompt, content)
        return _Response(text, [*self._token_ids(text), self.eos_token_id])

    def _response_text(self, history: tuple[Message, ...], prompt: str, content: str) -> str:
        turns = (*history, Message("assistant", content))
        dialogue = self._render(turns, add_generation_prompt=False)
        if not dialogue.startswith(prompt):
            raise ValueError(
                "chat_template: expected the rendered dialogue to start with the rendered prompt, "
                f"got\n  prompt:   {prompt!r}\n  dialogue: {dialogue!r}"
            )
        text, _, _ = dialogue[len(prompt) :].partition(self.eos_token)
        return text

    def _prompt_room(self, response: _Response) -> int:
        room = self.max_length - len(response.input_ids)
        if room < 1:
            raise ResponseTooLongError(
                "the response alone is longer than max_length",
                f"{len(response.input_ids)} tokens with EOS, max_length {self.max_length}",
            )
        return min(room, self.max_prompt_length)

    def _fitted_prompt(self, messages: tuple[Message, ...], text: str, limit: int) -> _Prompt:
        kept = messages
        while True:
            ids = self._token_ids(text)
            dropped = len(messages) - len(kept)
            if len(ids) <= limit:
                return _Prompt(kept, text, ids, dropped, 0)
            shorter = _without_oldest_turns(kept)
            if shorter is None:
                break
            kept = shorter
            text = self.render_prompt(kept)
        head = ids[:1] if self.contract.add_bos and limit > 1 else []
        cut = head + ids[len(ids) - (limit - len(head)) :]
        text = str(self.tokenizer.decode(cut, clean_up_tokenization_spaces=False))
        return _Prompt(kept, text, cut, dropped, len(ids) - len(cut))

    def _joined(self, prompt: _Prompt, response: _Response, train_on: TrainOn) -> Encoded:
        history = [False] * len(prompt.input_ids)
        if train_on == "all" and not prompt.cut_tokens:  # a cut prompt has no earlier turn left
            history = self._history_mask(prompt)
        return Encoded(
            prompt.input_ids + response.input_ids,
            history + [True] * len(response.input_ids),
            prompt.dropped_turns,
            prompt.text + response.text + self.eos_token,
            prompt.cut_tokens,
        )

    def _history_mask(self, prompt: _Prompt) -> list[bool]:
        """True on the prompt's tokens that earlier assistant turns consist of."""
        if not self.tokenizer.is_fast:
            raise ValueError("train_on: 'all' needs a fast tokenizer, which knows token offsets")
        text = self.render_prompt(prompt.messages)
        spans = []
        for turn, message in enumerate(prompt.messages):
            if message.role == "assistant":
                before = prompt.messages[:turn]
                rendered = self.render_prompt(before)
                spoken = self._response_text(before, rendered, message.content)
                start = len(rendered)
                end = start + len(spoken)
                if text[start:end] != spoken:
                    raise ValueError(
                        "train_on: 'all' needs a template that repeats earlier turns unchanged, "
                        f"got {text[start:end]!r} instead of {spoken!r}"
                    )
                end += len(self.eos_token) if text.startswith(self.eos_token, end) else 0
                spans.append((start, end))
        offsets = self.tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )["offset_mapping"]
        return [any(s <= a and b <= e and a < b for s, e in spans) for a, b in offsets]

    def _check_contents(self, messages: Sequence[Message]) -> None:
        # It would end the turn in the middle, and the model would learn to stop there.
        for message in messages:
            if self.eos_token in message.content:
                raise EncodingError(
                    "a turn contains the text of the EOS token", f"{self.eos_token!r}"
                )

    def _contract(self) -> TextContract:
        bos = self.tokenizer.bos_token
        probe = self.render_prompt([Message("user", "a")])
        return TextContract(
            chat_template=str(self.tokenizer.chat_template),
            eos_token=self.eos_token,
            eos_token_id=self.eos_token_id,
            bos_token=None if bos is None else str(bos),
            add_bos=bos is not None and probe.startswith(str(bos)),
            truncation_side="left",
            max_length=self.max_length,
            vocab_size=len(self.tokenizer),
            tokenizer_hash=tokenizer_hash(self.tokenizer),
        )


def _without_oldest_turns(messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
    """Drop the oldest human turn with its answer, or else the system turn; None if neither."""
    system = messages[:1] if messages[0].role == "system" else ()
    body = messages[len(system) :]
    for turn in range(1, len(body)):
        if body[turn].role == "user":
            return system + body[turn:]
    return body if system else None
