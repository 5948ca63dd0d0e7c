"""A chat with one or more models, each of which has a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from rich.console import Console

from lit_rlhf.data import DialogueEncoder, EncodingError, Message
from lit_rlhf.evaluation.chat.display import Ask, Show, show_replies
from lit_rlhf.evaluation.chat.streaming import StreamedResponse, stream_response
from lit_rlhf.evaluation.loading import load_encoder, load_policy, short_names
from lit_rlhf.evaluation.output import REMARK, print_text, progress_bar
from lit_rlhf.forward import LanguageModel
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import SamplingOptions

HELP = """\
/reset    forget the dialogue
/seed N   sample with seed N from here on; without N, tell the seed
/help     show these lines
/quit     end the chat, as Ctrl-D does
Ctrl-C stops a response; what was said until then stays in the dialogue.
To begin a message with a slash, put a blank before it."""


class Answer(NamedTuple):
    """A response, and what was left out of the dialogue to make room for it.

    Attributes:
        response: What was said.
        dropped_turns: Oldest turns that the model no longer remembers.
        cut_tokens: Tokens cut from the beginning of the message, which alone was too long.
    """

    response: StreamedResponse
    dropped_turns: int
    cut_tokens: int


@dataclass
class Speaker:
    """A model in a chat.

    Attributes:
        name: What it is called.
        model: A causal language model.
        encoder: Its encoder, whose longest prompt leaves room for a response.
        messages: The dialogue as far as the model remembers it: whole exchanges.
    """

    name: str
    model: LanguageModel
    encoder: DialogueEncoder
    messages: list[Message] = field(default_factory=list)

    def answer(self, content: str, sampling: SamplingOptions, seed: int, show: Show) -> Answer:
        """Answer a message; the exchange is remembered unless nothing was said before a stop.

        Args:
            content: The message.
            sampling: How to sample.
            seed: Of the response.
            show: Called with each new piece of the response.

        Raises:
            EncodingError: If the message contains the text of the EOS token.
        """
        turns = [*self.messages, Message("user", content)]
        prompt = self.encoder.encode_prompt(turns)
        ids = prompt.input_ids.tolist()
        response = stream_response(self.model, self.encoder, ids, sampling, seed, show)
        if response.text or not response.stopped:
            # its letters alone, not as the token, would make the dialogue one that has no encoding
            said = response.text.partition(self.encoder.eos_token)[0].strip()
            self.messages = [*turns[prompt.dropped_turns :], Message("assistant", said)]
        return Answer(response, prompt.dropped_turns, prompt.cut_tokens)


@dataclass
class Chat:
    """A chat: every message goes to all speakers.

    Attributes:
        speakers: The models.
        sampling: How responses are sampled.
        console: Where everything is shown.
        seed: The next response has this seed, the ones after it the numbers after it; the same for
            all speakers.
        turn: Messages since the start, the last `/reset` or the last `/seed`.
    """

    speakers: Sequence[Speaker]
    sampling: SamplingOptions
    console: Console
    seed: int = 0
    turn: int = 0

    def run(self, read: Callable[[], str]) -> None:
        """Answer until `/quit` or the end of the input.

        Args:
            read: Returns the next line; EOFError where there is none.
        """
        while True:
            try:
                line = read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._remark("\n/quit or Ctrl-D ends the chat")
                continue
            if line.rstrip() == "/quit":
                return
            try:
                self.hear(line)
            except KeyboardInterrupt:  # it came between two responses
                self._remark("\nstopped")

    def hear(self, line: str) -> None:
        """Take a line: a message, or a command other than `/quit`."""
        if line.startswith("/"):
            self._obey(*line.split())
        elif line.strip():
            seed = self.seed + self.turn
            self.turn += 1
            asks = {
                speaker.name: self._ask(speaker, line.strip(), seed) for speaker in self.speakers
            }
            show_replies(self.console, asks)

    def _ask(self, speaker: Speaker, content: str, seed: int) -> Ask:
        def ask(show: Show) -> str:
            try:
                answer = speaker.answer(content, self.sampling, seed, show)
            except EncodingError as error:
                return f"no answer: {error}"
            return "; ".join(self._remarks(answer, speaker.encoder.max_prompt_length))

        return ask

    def _remarks(self, answer: Answer, limit: int) -> list[str]:
        remarks = []
        if answer.response.stopped:
            remarks.append("stopped")
        elif not answer.response.ended:
            remarks.append(f"cut off at {self.sampling.max_new_tokens} tokens")
        if answer.dropped_turns:
            remarks.append(
                f"forgot the {answer.dropped_turns} oldest turns, which no longer fit into {limit} "
                "tokens"
            )
        if answer.cut_tokens:
            remarks.append(f"read only the last {limit} tokens of the message")
        return remarks

    def _obey(self, command: str, *values: str) -> None:
        if command == "/reset":
            for speaker in self.speakers:
                speaker.messages = []
            self.turn = 0
            self._remark("the dialogue starts anew")
        elif command == "/seed" and len(values) == 1 and values[0].isdecimal():
            self.seed, self.turn = int(values[0]), 0
            self._remark(f"seed {self.seed}")
        elif command == "/seed" and not values:
            self._remark(f"the next response has seed {self.seed + self.turn}")
        elif command == "/seed":
            self._remark(f"/seed: expected an integer >= 0, got {' '.join(values)}")
        elif command == "/help":
            self._remark(HELP)
        else:
            self._remark(f"there is no command {command}\n{HELP}")

    def _remark(self, text: str) -> None:
        print_text(self.console, text, REMARK)


def load_speakers(
    models: Sequence[str],
    sampling: SamplingOptions,
    options: ModelOptions | None = None,
    device: torch.device | None = None,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
) -> list[Speaker]:
    """Load the models of a chat; all of them stay in memory.

    Args:
        models: Folders or hub ids of causal language models.
        sampling: Says how long a response may become.
        options: How models are loaded; `None` takes the defaults.
        device: Where to run; `None` is the CPU.
        chat_template: `tokenizer` for the models' own, or the name of a built-in one.
        max_prompt_length: Longest prompt, so longest memory, in tokens; `None` takes what
            `load_encoder` finds.

    Raises:
        ValueError: If a model is named twice or cannot be used.
    """
    options, device = options or ModelOptions(), device or torch.device("cpu")
    names = short_names(models, "models")
    encoders = [
        load_encoder(path, sampling, chat_template, max_prompt_length, options) for path in models
    ]
    loaded = []
    with progress_bar("loading models", len(models)) as progress:
        for name, path, encoder in zip(names, models, encoders, strict=True):
            loaded.append(Speaker(name, load_policy(path, options, device), encoder))
            progress(1)
    return loaded
