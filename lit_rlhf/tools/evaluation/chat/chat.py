"""A chat in which every message goes to one or more models, each with a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console

from lit_rlhf.data import DialogueEncoder, EncodingError, Message
from lit_rlhf.forward import LanguageModel
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.tools.evaluation.chat.display import Replier, ShowText, show_replies
from lit_rlhf.tools.evaluation.chat.streaming import ChatReply, stream_reply
from lit_rlhf.tools.evaluation.loading import load_encoder, load_policy, short_names
from lit_rlhf.tools.evaluation.output import NOTE_STYLE, print_text, progress_bar

HELP = """\
/reset    forget the dialogue
/seed N   sample with seed N from here on; without N, show the seed
/help     show these lines
/quit     end the chat, like Ctrl-D
Ctrl-C stops a response; what was said until then stays in the dialogue.
To begin a message with a slash, put a blank before it."""


@dataclass
class Speaker:
    """A model in a chat.

    Attributes:
        name: The model's name.
        model: A causal language model.
        encoder: Its encoder. The longest prompt leaves room for a response.
        messages: The dialogue as far as the model remembers it, in whole exchanges.
    """

    name: str
    model: LanguageModel
    encoder: DialogueEncoder
    messages: list[Message] = field(default_factory=list)

    def reply(
        self, content: str, sampling: SamplingOptions, seed: int, show: ShowText
    ) -> ChatReply:
        """Reply to a message and remember the exchange.

        An exchange that was interrupted before the first word is not remembered.

        Args:
            content: The message.
            sampling: How to sample.
            seed: Seed of the reply.
            show: Called with each new piece of the reply.

        Raises:
            EncodingError: If the message contains the text of a control token.
        """
        turns = [*self.messages, Message("user", content)]
        prompt = self.encoder.encode_prompt(turns)
        ids = prompt.input_ids.tolist()
        reply = stream_reply(self.model, self.encoder, ids, sampling, seed, show)
        if reply.text or not reply.interrupted:
            # A model can spell a control token out letter by letter, or go on with the user's turn.
            # Remembered, that text would make every later prompt one that the encoder refuses.
            said = self.encoder.control_text.split(reply.text, maxsplit=1)[0].strip()
            self.messages = [*turns[prompt.dropped_turns :], Message("assistant", said)]
        return reply._replace(dropped_turns=prompt.dropped_turns, cut_tokens=prompt.cut_tokens)


@dataclass
class Chat:
    """A chat with one or more models.

    Attributes:
        speakers: The models.
        sampling: How replies are sampled.
        console: Where the chat is shown.
        seed: Seed of the next reply; every further message adds 1. All speakers use the same seed.
        turn: Number of messages since the start, the last `/reset` or the last `/seed`.
    """

    speakers: Sequence[Speaker]
    sampling: SamplingOptions
    console: Console
    seed: int = 0
    turn: int = 0

    def run(self, read: Callable[[], str]) -> None:
        """Answer messages until `/quit` or the end of the input.

        Args:
            read: Returns the next line, or raises EOFError at the end of the input.
        """
        while True:
            try:
                line = read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._print_note("\n/quit or Ctrl-D ends the chat")
                continue
            if line.rstrip() == "/quit":
                return
            try:
                self.handle_line(line)
            except KeyboardInterrupt:  # pressed between the replies of two models
                self._print_note("\nstopped")

    def handle_line(self, line: str) -> None:
        """Handle a message, or any command but `/quit`; blank lines are ignored."""
        if line.startswith("/"):
            self._run_command(*line.split())
        elif line.strip():
            seed = self.seed + self.turn
            self.turn += 1
            show_replies(
                self.console,
                {
                    speaker.name: self._make_replier(speaker, line.strip(), seed)
                    for speaker in self.speakers
                },
            )

    def _make_replier(self, speaker: Speaker, content: str, seed: int) -> Replier:
        def reply(show: ShowText) -> str:
            try:
                reply = speaker.reply(content, self.sampling, seed, show)
            except EncodingError as error:
                return f"no answer: {error}"
            return "; ".join(self._notes(reply, speaker.encoder.max_prompt_length))

        return reply

    def _notes(self, reply: ChatReply, max_prompt_length: int) -> list[str]:
        notes = []
        if reply.interrupted:
            notes.append("stopped")
        elif not reply.ended:
            notes.append(f"cut off at {self.sampling.max_new_tokens} tokens")
        if reply.dropped_turns:
            notes.append(
                f"forgot the {reply.dropped_turns} oldest turns, which no longer fit into "
                f"{max_prompt_length} tokens"
            )
        if reply.cut_tokens:
            notes.append(f"read only the last {max_prompt_length} tokens of the message")
        return notes

    def _run_command(self, command: str, *values: str) -> None:
        if command == "/reset":
            for speaker in self.speakers:
                speaker.messages = []
            self.turn = 0
            self._print_note("the dialogue starts anew")
        elif command == "/seed" and len(values) == 1 and values[0].isdecimal():
            self.seed, self.turn = int(values[0]), 0
            self._print_note(f"seed {self.seed}")
        elif command == "/seed" and not values:
            self._print_note(f"the next response has seed {self.seed + self.turn}")
        elif command == "/seed":
            self._print_note(f"/seed: expected an integer >= 0, got {' '.join(values)}")
        elif command == "/help":
            self._print_note(HELP)
        else:
            self._print_note(f"there is no command {command}\n{HELP}")

    def _print_note(self, text: str) -> None:
        print_text(self.console, text, NOTE_STYLE)


def load_speakers(
    models: Sequence[str],
    sampling: SamplingOptions,
    model_options: ModelOptions | None = None,
    device: torch.device | None = None,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
) -> list[Speaker]:
    """Load the models of a chat; all of them stay in memory.

    Args:
        models: Folders or hub ids of causal language models.
        sampling: How replies will be sampled; `max_new_tokens` limits the memory of a dialogue.
        model_options: How models are loaded; `None` takes the defaults.
        device: Where to run; `None` is the CPU.
        chat_template: `tokenizer` for the models' own, or the name of a built-in one.
        max_prompt_length: Tokens of dialogue that a model remembers; `None` decides as
            `load_encoder` does.

    Raises:
        ValueError: If a model is given twice or cannot be used.
    """
    model_options, device = model_options or ModelOptions(), device or torch.device("cpu")
    names = short_names(models, "models")
    # all encoders before the first weights, so that an error in the last model comes at once
    encoders = [
        load_encoder(path, sampling, chat_template, max_prompt_length, model_options)
        for path in models
    ]
    speakers = []
    with progress_bar("loading models", len(models)) as progress:
        for name, path, encoder in zip(names, models, encoders, strict=True):
            speakers.append(Speaker(name, load_policy(path, model_options, device), encoder))
            progress(1)
    return speakers
