"""Encoding: the one code path from records to token ids.

SFT, reward model training, PPO prompts and evaluation all use `DialogueEncoder`. It tokenizes
prompt and response apart and joins them, so that

    dialogue ids == prompt ids + response ids + EOS id

holds exactly: the ids that a reward model is trained on are the ids of a rollout.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data.contract import TextContract, tokenizer_hash
from lit_rlhf.data.dataset import (
    AnyExample,
    Example,
    PreferenceExample,
    PromptBatch,
    PromptExample,
    TokenExample,
    collate_prompts,
)
from lit_rlhf.data.formats import parse_prompts
from lit_rlhf.data.records import (
    MAX_SHOWN,
    NOWHERE,
    AnyRecord,
    Location,
    Message,
    RecordError,
)
from lit_rlhf.data.templates import resolve_template

TrainOn = Literal["last", "all"]
"""The assistant turns that are trained on: the last one, or all of them."""


class EncodingError(ValueError):
    """A dialogue that cannot be encoded.

    Attributes:
        reason: What is wrong, in words that do not depend on the dialogue; records left out are
            counted by their reason.
        detail: What is particular to this dialogue.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        """Initialize the error.

        Args:
            reason: What is wrong.
            detail: What is particular to this dialogue.
        """
        self.reason = reason
        self.detail = detail
        super().__init__(reason + (f" ({detail})" if detail else ""))


class ResponseTooLongError(EncodingError):
    """A response that leaves no room for a prompt. Responses are never cut."""


class _FittedPrompt(NamedTuple):
    """A prompt within its length: what is left of its turns, their text and ids, and the loss."""

    messages: tuple[Message, ...]
    text: str
    input_ids: list[int]
    dropped_turns: int
    cut_tokens: int


class DialogueEncoder:
    """Renders and tokenizes dialogues.

    Args:
        tokenizer: A tokenizer with an EOS token. Its `chat_template` is set to the template that
            is used, so that `save_pretrained` saves it.
        chat_template: `"tokenizer"` for the tokenizer's own template, or a key of
            `lit_rlhf.data.CHAT_TEMPLATES`.
        max_length: Longest dialogue in tokens: prompt, response and EOS.
        max_prompt_length: Longest prompt in tokens; default `max_length`. It also bounds the
            prompts of dialogues, so that all stages see the same context.

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
            raise ValueError(
                "tokenizer: expected one with an EOS token, got one without; set `eos_token`"
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_prompt_length = max_prompt_length or max_length
        self.eos_token = str(tokenizer.eos_token)
        self.eos_token_id = int(tokenizer.eos_token_id)
        tokenizer.chat_template = resolve_template(chat_template, tokenizer)
        self.contract = self._make_contract()

    @property
    def pad_token_id(self) -> int:
        """Token id of padding: the pad token, or EOS if the tokenizer has none."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Render a dialogue up to the point where the assistant speaks.

        Args:
            messages: Turns; the last one is the human's.

        Returns:
            The text, with the template's generation prompt.
        """
        return self._render(messages, add_generation_prompt=True)

    def encode_prompt(self, messages: Sequence[Message]) -> PromptExample:
        """Encode a prompt of at most `max_prompt_length` tokens.

        The oldest turns are dropped until the prompt fits. A system turn is kept as long as it fits
        beside the last turn. If the last turn alone is too long, it is cut on the left.

        Args:
            messages: Turns; the last one is the human's.

        Returns:
            The prompt.

        Raises:
            EncodingError: If a turn contains the text of the EOS token.
        """
        self._check_contents(messages)
        prompt = self._fit_prompt(
            tuple(messages), self.render_prompt(messages), self.max_prompt_length
        )
        return PromptExample(
            _to_tensor(prompt.input_ids), prompt.text, prompt.dropped_turns, prompt.cut_tokens
        )

    def encode_dialogue(
        self, messages: Sequence[Message], train_on: TrainOn = "last"
    ) -> TokenExample:
        """Encode a dialogue that ends with the assistant's turn and one EOS token.

        The prompt is shortened as in `encode_prompt`. The response is never shortened.

        Args:
            messages: Turns; the last one is the assistant's.
            train_on: `"last"` trains on the last response and its EOS token. `"all"` also trains
                on earlier assistant turns, each with its EOS token if the template writes one
                (`hh` closes the last turn only). The ids are the same.

        Returns:
            The dialogue.

        Raises:
            ResponseTooLongError: If the response and one prompt token do not fit into `max_length`.
            EncodingError: If a turn contains the text of the EOS token.
            ValueError: If the last turn is not the assistant's, or the rendered dialogue does not
                start with the rendered prompt.
        """
        if len(messages) < 2 or messages[-1].role != "assistant":
            got = [message.role for message in messages]
            raise ValueError(
                f"messages: expected a prompt and then an assistant turn at the end, got {got}"
            )
        if train_on not in ("last", "all"):
            raise ValueError(f"train_on: expected 'last' or 'all', got {train_on!r}")
        self._check_contents(messages)
        history = tuple(messages[:-1])
        rendered = self.render_prompt(history)
        response_ids = self._encode_response(history, rendered, messages[-1].content)
        prompt = self._fit_prompt(history, rendered, self._prompt_room(response_ids))
        return self._join(prompt, response_ids, train_on)

    def encode_pair(
        self,
        prompt: Sequence[Message],
        chosen: str,
        rejected: str,
        margin: float = 0.0,
        source: int = 0,
    ) -> PreferenceExample:
        """Encode two responses to one prompt, which is shortened alike for both.

        Args:
            prompt: Turns; the last one is the human's.
            chosen: The preferred response.
            rejected: The other response.
            margin: By how much the chosen response is better.
            source: Index of the pair's source.

        Returns:
            The pair, with identical prompt ids.

        Raises:
            EncodingError: As for `encode_dialogue`.
        """
        contents = [Message("assistant", chosen), Message("assistant", rejected)]
        self._check_contents([*prompt, *contents])
        history = tuple(prompt)
        rendered = self.render_prompt(history)
        responses = [
            self._encode_response(history, rendered, message.content) for message in contents
        ]
        # The longer response decides on the room, or the two would not share their prompt.
        room = min(self._prompt_room(response_ids) for response_ids in responses)
        fitted = self._fit_prompt(history, rendered, room)
        first, second = (self._join(fitted, response_ids, "last") for response_ids in responses)
        return PreferenceExample(first, second, margin, source)

    def encode_text(self, text: str) -> list[TokenExample]:
        """Encode a plain document into blocks of at most `max_length` tokens.

        Args:
            text: The document.

        Returns:
            Consecutive blocks without overlap, trained on everywhere but at the first position. The
            document ends with the EOS token, and begins with the BOS token if the contract says so.
            A last block of one token is left out, since nothing would predict its token.
        """
        # Plain text passes no template, so its BOS token is written here.
        ids = [*self._tokenize(text), self.eos_token_id]
        if self.contract.add_bos:
            ids.insert(0, int(self.tokenizer.bos_token_id))
        blocks = [ids[i : i + self.max_length] for i in range(0, len(ids), self.max_length)]
        return [
            TokenExample(_to_tensor(block), torch.arange(len(block)) > 0)
            for block in blocks
            if len(block) > 1
        ]

    def decode_response(self, ids: Sequence[int]) -> str:
        """Decode a response up to its first EOS token.

        Args:
            ids: Token ids of a response, as generated or as encoded.

        Returns:
            The content of the assistant's turn, without special tokens and outer whitespace.
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

    def _tokenize(self, text: str) -> list[int]:
        # The template has written the BOS token where it belongs; the tokenizer must not add one.
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    def _encode_response(
        self, history: tuple[Message, ...], prompt: str, content: str
    ) -> list[int]:
        """Token ids of a response, with EOS."""
        return [*self._tokenize(self._response_text(history, prompt, content)), self.eos_token_id]

    def _response_text(self, history: tuple[Message, ...], prompt: str, content: str) -> str:
        """The text between the rendered prompt and the EOS token of the rendered dialogue."""
        turns = (*history, Message("assistant", content))
        dialogue = self._render(turns, add_generation_prompt=False)
        # A template may render a prompt with markers that a dialogue lacks, such as "<think>".
        # A model would then be trained on other text than its rollouts start with.
        if not dialogue.startswith(prompt):
            raise ValueError(
                "chat_template: expected the rendered dialogue to start with the rendered prompt, "
                f"got\n  prompt:   {prompt!r}\n  dialogue: {dialogue!r}"
            )
        # Some templates write a newline behind EOS; a rollout ends at EOS, and so does a dialogue.
        text, _, _ = dialogue[len(prompt) :].partition(self.eos_token)
        return text

    def _prompt_room(self, response_ids: list[int]) -> int:
        """Number of tokens that a response leaves for its prompt."""
        room = self.max_length - len(response_ids)
        if room < 1:
            raise ResponseTooLongError(
                "the response alone is longer than max_length",
                f"{len(response_ids)} tokens with EOS, max_length {self.max_length}",
            )
        return min(room, self.max_prompt_length)

    def _fit_prompt(self, messages: tuple[Message, ...], text: str, limit: int) -> _FittedPrompt:
        """Drop turns, then cut tokens, until a rendered prompt has at most `limit` tokens."""
        kept = messages
        while True:
            ids = self._tokenize(text)
            dropped = len(messages) - len(kept)
            if len(ids) <= limit:
                return _FittedPrompt(kept, text, ids, dropped, 0)
            shorter = _drop_oldest_turns(kept)
            if shorter is None:
                break
            # The whole prompt is rendered again: a template may write its first turn differently.
            kept = shorter
            text = self.render_prompt(kept)
        # A cut prompt keeps its BOS token, which every sequence of the model starts with.
        head = ids[:1] if self.contract.add_bos and limit > 1 else []
        cut = head + ids[len(ids) - (limit - len(head)) :]
        text = str(self.tokenizer.decode(cut, clean_up_tokenization_spaces=False))
        return _FittedPrompt(kept, text, cut, dropped, len(ids) - len(cut))

    def _join(
        self, prompt: _FittedPrompt, response_ids: list[int], train_on: TrainOn
    ) -> TokenExample:
        prompt_mask = [False] * len(prompt.input_ids)
        if train_on == "all" and not prompt.cut_tokens:  # a cut prompt has no earlier turn left
            prompt_mask = self._history_mask(prompt)
        mask = prompt_mask + [True] * len(response_ids)
        return TokenExample(
            _to_tensor(prompt.input_ids + response_ids),
            torch.tensor(mask, dtype=torch.bool),
            prompt.dropped_turns,
            prompt.cut_tokens,
        )

    def _history_mask(self, prompt: _FittedPrompt) -> list[bool]:
        """True on the prompt's tokens that belong to earlier assistant turns."""
        if not self.tokenizer.is_fast:
            raise ValueError(
                "train_on: 'all' needs a fast tokenizer, which knows token offsets, got "
                f"{type(self.tokenizer).__name__}; use 'last'"
            )
        # Render the dialogue up to each assistant turn to find the turn's characters, then take
        # the tokens that lie within them.
        text = self.render_prompt(prompt.messages)
        spans = []
        for turn, message in enumerate(prompt.messages):
            if message.role == "assistant":
                before = prompt.messages[:turn]
                rendered = self.render_prompt(before)
                response = self._response_text(before, rendered, message.content)
                start = len(rendered)
                end = start + len(response)
                if text[start:end] != response:
                    raise ValueError(
                        "train_on: 'all' needs a template that repeats earlier turns unchanged, "
                        f"got {text[start:end]!r} instead of {response!r}; use 'last'"
                    )
                end += len(self.eos_token) if text.startswith(self.eos_token, end) else 0
                spans.append((start, end))
        offsets = self.tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )["offset_mapping"]
        return [
            any(start <= first and last <= end and first < last for start, end in spans)
            for first, last in offsets
        ]

    def _check_contents(self, messages: Sequence[Message]) -> None:
        # EOS in the middle of a turn would end it there, and a model would learn to stop there.
        for message in messages:
            if self.eos_token in message.content:
                raise EncodingError(
                    "a turn contains the text of the EOS token", f"{self.eos_token!r}"
                )

    def _make_contract(self) -> TextContract:
        bos = self.tokenizer.bos_token
        # A tokenizer with a BOS token need not have a template that writes it.
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


def _drop_oldest_turns(messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
    """Drop the oldest human turn with its answer, or else the system turn; None if neither."""
    system = messages[:1] if messages[0].role == "system" else ()
    body = messages[len(system) :]
    for turn in range(1, len(body)):
        if body[turn].role == "user":
            return system + body[turn:]
    return body if system else None


def _to_tensor(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


@dataclass
class EncodingCounts:
    """Counts of what encoding left out of records.

    Attributes:
        dropped_turns: Oldest turns dropped so that dialogues fit.
        shortened: Dialogues that lost turns.
        cut_prompts: Dialogues whose last human turn was cut on the left.
        dropped_records: Records left out, by reason.
        examples: The first few records left out, as messages with file and line.
    """

    dropped_turns: int = 0
    shortened: int = 0
    cut_prompts: int = 0
    dropped_records: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, example: Example) -> None:
        """Count what an example lost. What the shared prompt of a pair lost counts once.

        Args:
            example: The example.
        """
        self.dropped_turns += example.dropped_turns
        self.shortened += example.dropped_turns > 0
        self.cut_prompts += example.cut_tokens > 0

    def drop(self, location: Location, error: EncodingError) -> None:
        """Count a record that is left out.

        Args:
            location: Where the record was read from.
            error: Why it is left out.
        """
        self.dropped_records[error.reason] += 1
        if len(self.examples) < MAX_SHOWN:
            self.examples.append(f"{location}: {error}")


def encode_records(
    records: Sequence[AnyRecord],
    encode: Callable[[AnyRecord], Sequence[AnyExample]],
    counts: EncodingCounts,
    on_bad_record: Literal["error", "skip"],
) -> list[AnyExample]:
    """Encode records and count what is lost.

    Args:
        records: The records.
        encode: Encodes one record into its examples.
        counts: The counts, which are added to.
        on_bad_record: For a record that cannot be encoded: `"error"` raises, `"skip"` counts. A
            response longer than `max_length` is not a bad record and always counted.

    Returns:
        The examples in the order of the records.

    Raises:
        RecordError: At the first bad record, if `on_bad_record` is `"error"`.
    """
    examples: list[AnyExample] = []
    for record in records:
        try:
            encoded = encode(record)
        except EncodingError as error:
            location = Location(record.source) if record.location == NOWHERE else record.location
            if on_bad_record == "error" and not isinstance(error, ResponseTooLongError):
                raise RecordError(location, error.reason, detail=error.detail) from error
            counts.drop(location, error)
            continue
        for example in encoded:
            counts.add(example)
        examples += encoded
    return examples


def encode_prompts(prompts: Sequence[str], encoder: DialogueEncoder) -> PromptBatch:
    """Render and tokenize prompts that were given as plain texts.

    Args:
        prompts: As for `parse_prompts`.
        encoder: The encoder.

    Returns:
        One batch of all prompts, in order.

    Raises:
        ValueError: If there is no prompt, or one cannot be used.
    """
    examples = []
    for index, record in enumerate(parse_prompts(prompts)):
        try:
            example = encoder.encode_prompt(record.prompt)
        except EncodingError as error:
            raise ValueError(f"prompts[{index}]: {error}, got {prompts[index]!r:.100}") from error
        examples.append(example._replace(index=index))
    return collate_prompts(examples, encoder.pad_token_id)
