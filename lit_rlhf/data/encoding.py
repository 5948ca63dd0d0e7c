"""Encoding: the one code path from records to token ids.

SFT, reward model training, PPO prompts and evaluation all use `DialogueEncoder`. It tokenizes
prompt and response apart and joins them, so that

    dialogue ids == prompt ids + response ids + EOS id

holds exactly: the ids that a reward model is trained on are the ids of a rollout.
"""

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Generic, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.checks import check_choice
from lit_rlhf.data.contract import TextContract, tokenizer_hash
from lit_rlhf.data.control_text import find_control_text, match_any
from lit_rlhf.data.counts import DataCounts, EncodingError, OnBadRecord, ResponseTooLongError
from lit_rlhf.data.examples import (
    AnyExample,
    PreferenceExample,
    PromptBatch,
    PromptExample,
    TokenExample,
    Turns,
    collate_prompts,
)
from lit_rlhf.data.formats import parse_prompts
from lit_rlhf.data.records import (
    NOWHERE,
    AnyRecord,
    DemonstrationRecord,
    Location,
    Message,
    PreferenceRecord,
    Record,
    turns_as_dicts,
)
from lit_rlhf.data.templates import TEMPLATE_DATE, render_dialogue, resolve_template
from lit_rlhf.rank_zero import rank_zero_only

TrainOn = Literal["last", "all"]
"""The assistant turns that are trained on: the last one, or all of them."""

LARGEST_DIALOGUE = 1_000_000
"""Most bytes of the turns of a dialogue, or of a document, in UTF-8: 200,000 tokens and more."""

_log_info = rank_zero_only(logging.getLogger(__name__).info)
_LONG_TEXT = " ".join(["word"] * 1000)
"""More than a template would show of a turn if it shortened it."""

# Prompts of reasoning models may end with the start of the reasoning, which dialogues lack.
_REASONING_START = re.compile(r"<think>(\s*)\Z")
_ANOTHER_DATE = "1999-11-13"  # differs from `TEMPLATE_DATE` in day, weekday, month and year
_BEFORE_ANSWER = r"\s*(?:<think>\s*</think>\s*)?"


def decode_tokens(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int] | Tensor,
    *,
    skip_special_tokens: bool = False,
) -> str:
    """Decode token ids to the text that was tokenized or generated, blanks included.

    All text of lit_rlhf is decoded here. A tokenizer's own settings may clean up blanks, which
    turns `x = 3 .` into `x = 3.`: a reward would read another text than was generated.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids, one sequence.
        skip_special_tokens: Whether to leave out special tokens, such as EOS.
    """
    text = tokenizer.decode(
        ids if isinstance(ids, Tensor) else list(ids),
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return str(text)


class DialogueEncoder:
    r"""Renders and tokenizes dialogues.

    Args:
        tokenizer: A tokenizer with an EOS token. Its `chat_template` is set to the template that
            is used, so that `save_pretrained` saves it.
        chat_template: `"tokenizer"` for the tokenizer's own template, a key of
            `lit_rlhf.data.CHAT_TEMPLATES`, or the path of a file with a Jinja template.
        max_length: Longest dialogue in tokens: prompt, response and EOS.
        max_prompt_length: Longest prompt in tokens; default `max_length`. It also bounds the
            prompts of dialogues, so that all stages see the same context.
        eos_token: The token that ends a response. It becomes the tokenizer's EOS token. Default:
            the special token with which the template ends the assistant's turn, such as
            `<|im_end|>`, or the tokenizer's own if the template writes none.

    Attributes:
        contract: The text contract.
        control_text: Matches the text that no turn may contain, because it would be read as the
            template's: the text of special tokens, of other added tokens that the template writes,
            and of turn markers that are plain text, such as `"\n\nHuman:"` of `hh`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str = "tokenizer",
        max_length: int = 512,
        max_prompt_length: int | None = None,
        eos_token: str | None = None,
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
        tokenizer.chat_template = resolve_template(chat_template, tokenizer)
        self._set_eos_token(self._find_turn_end() if eos_token is None else eos_token)
        self.eos_token = str(tokenizer.eos_token)
        self.eos_token_id = int(tokenizer.eos_token_id)
        self._check_template()
        self.contract = self._make_contract()
        self._control = find_control_text(tokenizer, self.render_prompt)
        self.control_text = self._control.text
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizes = backend is None or backend.normalizer is not None

    @property
    def pad_token_id(self) -> int:
        """Token id of padding: the pad token, or EOS if the tokenizer has none."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Render a dialogue up to where the assistant speaks, with the generation prompt."""
        return self._render(messages, add_generation_prompt=True)

    def encode_prompt(self, messages: Sequence[Message]) -> PromptExample:
        """Encode a prompt of at most `max_prompt_length` tokens.

        The oldest turns are dropped until the prompt fits. A system turn is kept as long as it fits
        beside the last turn. If the last turn by itself is too long, it is cut on the left.
        """
        self._check_contents(messages)
        text = self.render_prompt(messages)
        return self._fit_prompt(tuple(messages), text, self.max_prompt_length)

    def encode_dialogue(
        self, messages: Sequence[Message], train_on: TrainOn = "last"
    ) -> TokenExample:
        """Encode a dialogue that ends with the assistant's turn and one EOS token.

        The prompt is shortened as in `encode_prompt`. The response is never shortened.

        Args:
            messages: A prompt, and the assistant's turn.
            train_on: `"last"` trains on the last response and its EOS token. `"all"` also trains on
                earlier assistant turns, each with its EOS token if the template writes one (`hh`
                closes the last turn only). The ids are the same.
        """
        if len(messages) < 2 or messages[-1].role != "assistant":
            roles = [message.role for message in messages]
            raise ValueError(
                f"messages: expected a prompt and then an assistant turn at the end, got {roles}"
            )
        check_choice("train_on", train_on, get_args(TrainOn))
        self._check_contents(messages)
        history = tuple(messages[:-1])
        rendered = self.render_prompt(history)
        response_ids = self._encode_response(history, rendered, messages[-1].content)
        prompt = self._fit_prompt(history, rendered, self._prompt_room(response_ids))
        return self._join(prompt, response_ids, train_on)

    def encode_pair(
        self,
        prompt: Sequence[Message],
        *,
        chosen: str,
        rejected: str,
        margin: float = 0.0,
        source: int = 0,
    ) -> PreferenceExample:
        """Encode two responses to one prompt, which is shortened alike for both.

        The longer response decides on the room, so that both examples have the same prompt ids.
        Responses that are the same tokens are refused.

        Args:
            prompt: Turns of the dialogue that ends with the human's.
            chosen: The preferred response.
            rejected: The other response.
            margin: By how much the chosen response is better, in units of the reward; 0 if unknown.
            source: Index of the pair's source in the datamodule's `source_names`.
        """
        responses = [Message("assistant", chosen), Message("assistant", rejected)]
        self._check_contents([*prompt, *responses])
        history = tuple(prompt)
        rendered = self.render_prompt(history)
        chosen_ids = self._encode_response(history, rendered, chosen)
        rejected_ids = self._encode_response(history, rendered, rejected)
        if chosen_ids == rejected_ids:
            # Different texts may be the same tokens, by a normalizer, unknown characters or a
            # template that drops a part. No model can tell them apart.
            raise EncodingError("chosen and rejected are the same tokens")
        room = min(self._prompt_room(chosen_ids), self._prompt_room(rejected_ids))
        shared_prompt = self._fit_prompt(history, rendered, room)
        return PreferenceExample(
            chosen=self._join(shared_prompt, chosen_ids, "last"),
            rejected=self._join(shared_prompt, rejected_ids, "last"),
            margin=margin,
            source=source,
        )

    def encode_text(self, text: str, block: int | None = None) -> list[TokenExample]:
        """Encode a plain document into consecutive blocks.

        Every token of a block but the first is a target. The document ends with the EOS token, and
        begins with the BOS token if the contract says so. A last block of one token is left out,
        since nothing would predict its token. The text of a special token is encoded as ordinary
        text and counted with the first block.

        Args:
            text: The document.
            block: Tokens per block; default `max_length`.
        """
        check_size("a document", [text])
        n_escaped = len(self._control.tokens.findall(text))
        text_ids = self._tokenize(text, split_special_tokens=n_escaped > 0)
        if not n_escaped and (n_escaped := self._control.count_ids(text_ids)):  # by a normalizer
            text_ids = self._tokenize(text, split_special_tokens=True)
        # Some tokenizers know no other ids for the text of a special token.
        if n_escaped and self._control.count_ids(text_ids):
            control_tokens = self.tokenizer.convert_ids_to_tokens(
                [*self._control.ids.intersection(text_ids)]
            )
            raise EncodingError("the text contains a control token", f"one of {control_tokens}")
        # Plain text passes no template, so its BOS token is written here.
        ids = [*text_ids, self.eos_token_id]
        if self.contract.add_bos:
            ids.insert(0, int(self.tokenizer.bos_token_id))
        size = block or self.max_length
        blocks = [ids[i : i + size] for i in range(0, len(ids), size)]
        examples = [
            TokenExample(input_ids=_to_tensor(block), completion_mask=torch.arange(len(block)) > 0)
            for block in blocks
            if len(block) > 1
        ]
        if examples:
            examples[0] = examples[0]._replace(escaped_tokens=n_escaped)
        return examples

    def decode_response(self, ids: Sequence[int]) -> str:
        """Decode a response up to its first EOS token, without special tokens and outer blanks."""
        response_ids = list(ids)
        if self.eos_token_id in response_ids:
            response_ids = response_ids[: response_ids.index(self.eos_token_id)]
        return decode_tokens(self.tokenizer, response_ids, skip_special_tokens=True).strip()

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        date: str = TEMPLATE_DATE,
    ) -> str:
        return render_dialogue(
            str(self.tokenizer.chat_template),
            turns_as_dicts(messages),
            self.tokenizer.special_tokens_map,
            add_generation_prompt,
            date,
        )

    def _find_turn_end(self) -> str:
        """The first special token behind the assistant's last turn; EOS if there is none."""
        answer = "first answer"
        turns = [Message("user", "first question"), Message("assistant", answer)]
        _, _, behind = self._render(turns, add_generation_prompt=False).rpartition(answer)
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        tokens = added.union(self.tokenizer.all_special_tokens)
        match = match_any({token for token in tokens if token.strip()}).search(behind)
        return match[0] if match else str(self.tokenizer.eos_token)

    def _check_template(self) -> None:
        """Refuse a template that leaves out what is asked or answered, or a part of it."""
        first_text = f"first {_LONG_TEXT} end"
        question = Message("user", first_text)
        prompt = self.render_prompt([question])
        dialogue = self._render_answer(question, first_text)
        for other in (f"second {_LONG_TEXT} end", f"first {_LONG_TEXT} close"):
            other_prompt = self.render_prompt([Message("user", other)])
            for part, text, other_text in (
                ("user", prompt, other_prompt),
                ("assistant", dialogue, self._render_answer(question, other)),
            ):
                if text == other_text:
                    raise ValueError(
                        f"chat_template: expected one that writes what the {part} says, got one "
                        f"that renders different turns of the {part} as the same text, "
                        f"{text!r:.200}"
                    )

    def _render_answer(self, question: Message, answer: str) -> str:
        """A dialogue of a question and its answer as text."""
        return self._render([question, Message("assistant", answer)], add_generation_prompt=False)

    def _set_eos_token(self, token: str) -> None:
        previous_token = str(self.tokenizer.eos_token)
        if token == previous_token:
            return
        if token not in self.tokenizer.get_vocab():
            raise ValueError(f"eos_token: expected a token of the tokenizer, got {token!r}")
        self.tokenizer.add_special_tokens({"eos_token": token})
        _log_info(f"responses end with {token!r}; the tokenizer's EOS token was {previous_token!r}")

    def _tokenize(self, text: str, split_special_tokens: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = repr(text[error.start])
            raise EncodingError("the text has half of a surrogate pair", half) from error
        # The template has written the BOS token where it belongs; the tokenizer must not add one.
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
        )
        return list(encoded["input_ids"])

    def _tokenize_rendered(self, text: str) -> list[int]:
        """Tokenize rendered turns, none of which contains `control_text`.

        A tokenizer's normalizer, which may write small letters, must not make control tokens.
        """
        ids = self._tokenize(text)
        if self._normalizes and self._control.count_ids(ids) > len(
            self._control.tokens.findall(text)
        ):
            raise EncodingError(
                "a turn contains the text of a control token",
                "after what the tokenizer's normalizer does to it",
            )
        return ids

    def _encode_response(
        self, history: tuple[Message, ...], prompt: str, content: str
    ) -> list[int]:
        """Token ids of a response, with EOS."""
        text = self._response_text(history, prompt, content)
        return [*self._tokenize_rendered(text), self.eos_token_id]

    def _response_text(self, history: tuple[Message, ...], prompt: str, content: str) -> str:
        """The text between the rendered prompt and the EOS token of the rendered dialogue."""
        turns = (*history, Message("assistant", content))
        dialogue = self._render(turns, add_generation_prompt=False)
        reasoning = _REASONING_START.search(prompt)
        prompt_in_dialogue = prompt
        if reasoning and not dialogue.startswith(prompt):
            prompt_in_dialogue = prompt[: reasoning.start()]
        if not dialogue.startswith(prompt_in_dialogue):
            raise ValueError(
                "chat_template: expected the rendered dialogue to start with the rendered prompt, "
                f"got\n  prompt:   {prompt!r}\n  dialogue: {dialogue!r}"
            )
        # Some templates write a newline behind EOS; a rollout ends at EOS, and so does a dialogue.
        text, _, _ = dialogue[len(prompt_in_dialogue) :].partition(self.eos_token)
        if reasoning and "</think>" not in text:
            # Records have answers without reasoning. The target closes at once what the prompt has
            # opened, so that the model is trained on text that its rollouts start with.
            text = "\n\n</think>\n\n".removeprefix(reasoning[1]) + text
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

    def _fit_prompt(self, messages: tuple[Message, ...], text: str, limit: int) -> PromptExample:
        """Drop turns, then cut tokens, until a rendered prompt has at most `limit` tokens."""
        uncut = PromptExample(
            input_ids=_to_tensor(self._tokenize_rendered(text)),
            text=text,
            turns=turns_as_dicts(messages),
        )
        if len(uncut.input_ids) <= limit:
            return uncut
        choices = _drop_turns(messages)

        def encode(choice: int) -> PromptExample:
            # The whole prompt is rendered again: a template may write its first turn differently.
            turns = choices[choice]
            text = self.render_prompt(turns)
            return PromptExample(
                input_ids=_to_tensor(self._tokenize(text)),
                text=text,
                dropped_turns=len(messages) - len(turns),
                turns=turns_as_dicts(turns),
            )

        # Bisection: one turn after the other, a dialogue of n turns would be rendered and tokenized
        # n times.
        choice = bisect_left(
            range(len(choices)), True, key=lambda i: len(encode(i).input_ids) <= limit
        )
        if choice < len(choices):
            return encode(choice)
        shortest = encode(len(choices) - 1) if choices else uncut
        return self._cut_prompt(shortest, limit)

    def _cut_prompt(self, prompt: PromptExample, limit: int) -> PromptExample:
        """Cut a prompt on the left to `limit` tokens."""
        ids = prompt.input_ids.tolist()
        # A cut prompt keeps its BOS token, which every sequence of the model starts with.
        head = ids[:1] if self.contract.add_bos and limit > 1 else []
        cut = head + ids[len(ids) - (limit - len(head)) :]
        return prompt._replace(
            input_ids=_to_tensor(cut),
            text=decode_tokens(self.tokenizer, cut),
            cut_tokens=len(ids) - len(cut),
        )

    def _join(
        self, prompt: PromptExample, response_ids: list[int], train_on: TrainOn
    ) -> TokenExample:
        prompt_mask = [False] * len(prompt.input_ids)
        if train_on == "all" and not prompt.cut_tokens:  # a cut prompt has no earlier turn left
            prompt_mask = self._history_mask(prompt.turns)
        mask = prompt_mask + [True] * len(response_ids)
        return TokenExample(
            input_ids=torch.cat([prompt.input_ids, _to_tensor(response_ids)]),
            completion_mask=torch.tensor(mask, dtype=torch.bool),
            dropped_turns=prompt.dropped_turns,
            cut_tokens=prompt.cut_tokens,
        )

    def _history_mask(self, turns: Turns) -> list[bool]:
        """True on the prompt's tokens that belong to earlier assistant turns."""
        if not self.tokenizer.is_fast:
            raise ValueError(
                "train_on: 'all' needs a fast tokenizer, which knows token offsets, got "
                f"{type(self.tokenizer).__name__}; use 'last'"
            )
        messages = tuple(Message(**turn) for turn in turns)
        text = self.render_prompt(messages)
        spans = [
            self._find_answer(messages[: turn + 1], text)
            for turn, message in enumerate(messages)
            if message.role == "assistant"
        ]
        offsets = self.tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )["offset_mapping"]
        mask = []
        for first, last in offsets:
            # the last span that starts at the token or before it; spans do not overlap
            span = bisect_right(spans, first, key=lambda span: span.start) - 1
            mask.append(span >= 0 and first < last <= spans[span].end)
        return mask

    def _find_answer(self, messages: tuple[Message, ...], text: str) -> "_Span":
        """Find the characters of the last turn, an assistant's, in a longer rendered dialogue."""
        history = messages[:-1]
        content = messages[-1].content.strip()
        rendered = self.render_prompt(history)
        prompt = _REASONING_START.sub("", rendered)
        start = len(prompt)
        # what a response starts with, such as the channel of gpt-oss; templates of reasoning
        # models leave it out of earlier turns
        head = self._response_text(history, rendered, content).partition(content)[0]
        answer = re.match(f"(?:{re.escape(head)})?{_BEFORE_ANSWER}", text[start:])
        end = start + (answer.end() if answer else 0) + len(content)
        if text[:start] != prompt or text[end - len(content) : end] != content:
            raise ValueError(
                "train_on: 'all' needs a template that repeats earlier turns unchanged, "
                f"got {text[start:end]!r} instead of {content!r}; use 'last'"
            )
        closing = re.compile(r"\s*" + re.escape(self.eos_token)).match(text, end)
        return _Span(start, closing.end() if closing else end)

    def _check_contents(self, messages: Sequence[Message]) -> None:
        check_size("a dialogue", [message.content for message in messages])
        for message in messages:
            match = self.control_text.search(message.content)
            if match:
                token = "the EOS token" if match[0] == self.eos_token else "a control token"
                raise EncodingError(f"a turn contains the text of {token}", repr(match[0]))

    def _make_contract(self) -> TextContract:
        bos = self.tokenizer.bos_token
        # A tokenizer with a BOS token need not have a template that writes it.
        turns = [Message("user", "a")]
        probe = self.render_prompt(turns)
        dated = probe != self._render(turns, add_generation_prompt=True, date=_ANOTHER_DATE)
        if dated:
            _tell_of_date()
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
            template_date=TEMPLATE_DATE if dated else None,
        )


@cache
def _tell_of_date() -> None:
    """Say once in a process that prompts have a date, which is not today's."""
    _log_info(
        f"the chat template writes today's date; here it always writes {TEMPLATE_DATE}, so that "
        "all stages see the same prompts. Other programs write the day's"
    )


class _Span(NamedTuple):
    """A part of a text, from the character `start` up to, but not including, `end`."""

    start: int
    end: int


def _drop_turns(messages: tuple[Message, ...]) -> list[tuple[Message, ...]]:
    """List all ways to shorten a dialogue, from the longest result to the shortest.

    The oldest human turn goes with its answer, then the next one, and at last the system turn.
    """
    n_system = int(messages[0].role == "system")
    later_questions = [
        turn for turn in range(n_system + 1, len(messages)) if messages[turn].role == "user"
    ]
    choices = [messages[:n_system] + messages[turn:] for turn in later_questions]
    if n_system:
        choices.append(messages[later_questions[-1] if later_questions else 1 :])
    return choices


def check_size(what: str, texts: Sequence[str]) -> None:
    """Refuse what is too long before it is tokenized, which takes hundreds of times its memory.

    Args:
        what: What the texts are, for the error.
        texts: Turns, or a document.
    """
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if size > LARGEST_DIALOGUE:
        raise EncodingError(
            f"{what} is too long",
            f"{size:,} bytes of UTF-8, expected at most {LARGEST_DIALOGUE:,}",
        )


def _to_tensor(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def _is_label(record: Record) -> bool:
    """Whether a person labelled responses of policies, which may hold any text."""
    return isinstance(record, DemonstrationRecord | PreferenceRecord) and record.is_label


class EncodedRecord(NamedTuple, Generic[AnyRecord, AnyExample]):
    """A record and what it becomes.

    Attributes:
        record: The record.
        examples: Its examples: one, or as many as a plain text fills.
    """

    record: AnyRecord
    examples: Sequence[AnyExample]


def encode_each(
    records: Sequence[AnyRecord],
    encode: Callable[[AnyRecord], Sequence[AnyExample]],
    counts: DataCounts,
    on_bad_record: OnBadRecord,
) -> Iterator[EncodedRecord[AnyRecord, AnyExample]]:
    """Encode records in order, and yield those that can be encoded.

    Args:
        records: The records.
        encode: Encodes one record into its examples.
        counts: Takes the counts of what is lost.
        on_bad_record: What to do about a record that cannot be encoded, see `DataCounts.drop`. A
            person's label is always left out then: what policies wrote is no fault of its file.
    """
    counts.records += len(records)
    for record in records:
        try:
            examples = encode(record)
        except EncodingError as error:
            # a record that was not read from a file has at least a source
            location = Location(record.source) if record.location == NOWHERE else record.location
            counts.drop(location, error, "skip" if _is_label(record) else on_bad_record)
            continue
        for example in examples:
            counts.add(example)
        yield EncodedRecord(record=record, examples=examples)


def encode_records(
    records: Sequence[AnyRecord],
    encode: Callable[[AnyRecord], Sequence[AnyExample]],
    counts: DataCounts,
    on_bad_record: OnBadRecord,
) -> list[AnyExample]:
    """Encode records into the examples of all of them; see `encode_each`.

    Args:
        records: The records.
        encode: Encodes one record into its examples.
        counts: Takes the counts of what is lost.
        on_bad_record: What to do about a record that cannot be encoded.
    """
    encoded = encode_each(records, encode, counts, on_bad_record)
    return [example for kept in encoded for example in kept.examples]


def encode_prompts(prompts: Sequence[str], encoder: DialogueEncoder) -> PromptBatch:
    """Parse plain texts as prompts, see `parse_prompts`, and encode them with `encoder`."""
    examples = []
    for index, record in enumerate(parse_prompts(prompts)):
        try:
            example = encoder.encode_prompt(record.prompt)
        except EncodingError as error:
            raise ValueError(f"prompts[{index}]: {error}, got {prompts[index]!r:.100}") from error
        examples.append(example._replace(index=index))
    return collate_prompts(examples, encoder.pad_token_id)
