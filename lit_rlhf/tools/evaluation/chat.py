"""A chat in which every message goes to one or more models, which remember it separately."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TextStreamer

from lit_rlhf.data import DialogueEncoder, EncodingError, Message
from lit_rlhf.forward import (
    LanguageModel,
    set_longest_sequence,
    stop_token_ids,
    unwrap_model,
)
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import SamplingOptions, generate_with_transformers, seed_temporarily
from lit_rlhf.tools.evaluation.loading import CPU, load_encoders, load_policy, short_names
from lit_rlhf.tools.evaluation.output import NAME_STYLE, NOTE_STYLE, print_text, progress_bar

ShowText: TypeAlias = Callable[[str], None]
"""Takes the next piece of a reply."""

HELP = """\
/reset    forget the dialogue
/help     show these lines
/quit     end the chat, like Ctrl-D
Ctrl-C stops a response; the text until then stays in the dialogue.
To begin a message with a slash, put a blank before it."""


class ChatReply(NamedTuple):
    """A model's reply to a message. One that did not end was interrupted or cut off.

    Attributes:
        text: The reply.
        ended: Whether the model ended it.
        interrupted: Whether Ctrl-C ended it; else it was cut off at `max_new_tokens`.
        dropped_turns: Number of the oldest turns that were dropped to make room.
        cut_tokens: Number of tokens that were cut from a message that was too long by itself.
    """

    text: str
    ended: bool
    interrupted: bool
    dropped_turns: int = 0
    cut_tokens: int = 0


class _Streamer(TextStreamer):
    """Passes text on word by word, without the response's leading whitespace."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: ShowText) -> None:
        super().__init__(
            tokenizer,
            skip_prompt=True,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        self.show = show
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if not self.text:
            text = text.lstrip()
        if text:
            self.text += text
            self.show(text)


@torch.no_grad()
def stream_reply(
    model: LanguageModel,
    encoder: DialogueEncoder,
    *,
    prompt_ids: Sequence[int],
    sampling: SamplingOptions,
    seed: int,
    show: ShowText,
) -> ChatReply:
    """Sample a response and show it while it grows.

    The generation settings in the model's folder are ignored, as in `generate_responses`. Equal
    seeds give equal tokens on a CPU or CUDA device; the caller's random state is restored.
    KeyboardInterrupt (Ctrl-C) ends the response and is not raised again.

    Args:
        model: The model.
        encoder: Decodes the response.
        prompt_ids: Token ids of the prompt.
        sampling: How the response is sampled.
        seed: Seed of the sampling.
        show: Takes the pieces of the response.
    """
    inner = unwrap_model(model)
    stop_ids = stop_token_ids(model, encoder.tokenizer)
    ids = torch.tensor([prompt_ids], dtype=torch.long, device=inner.device)
    streamer = _Streamer(encoder.tokenizer, show)
    try:
        with seed_temporarily(seed, inner.device):
            sequences = generate_with_transformers(
                inner,
                prompt_ids=ids,
                prompt_mask=torch.ones_like(ids),
                options=sampling,
                eos_token_ids=stop_ids,
                pad_token_id=encoder.pad_token_id,
                streamer=streamer,
            )
    except KeyboardInterrupt:
        # the streamer holds the last word back until it is complete; `end` flushes it
        streamer.end()  # type: ignore[no-untyped-call]
        return ChatReply(text=streamer.text.strip(), ended=False, interrupted=True)
    response = sequences[0, len(prompt_ids) :].tolist()
    ended = not set(stop_ids).isdisjoint(response)
    return ChatReply(text=encoder.decode_response(response), ended=ended, interrupted=False)


@dataclass
class Speaker:
    """A model in a chat.

    Attributes:
        name: Its name in the chat.
        model: The model.
        encoder: Encodes the dialogue; its longest prompt leaves room for a response.
        messages: The whole exchanges that it remembers.
    """

    name: str
    model: LanguageModel
    encoder: DialogueEncoder
    messages: list[Message] = field(default_factory=list)

    def reply(
        self, content: str, *, sampling: SamplingOptions, seed: int, show: ShowText
    ) -> ChatReply:
        """Reply to a message and remember the exchange.

        An exchange that was interrupted before the first word is not remembered.

        Args:
            content: The user's message.
            sampling: How the reply is sampled.
            seed: Seed of the sampling.
            show: Takes the pieces of the reply.
        """
        turns = [*self.messages, Message("user", content)]
        prompt = self.encoder.encode_prompt(turns)
        reply = stream_reply(
            self.model,
            self.encoder,
            prompt_ids=prompt.input_ids.tolist(),
            sampling=sampling,
            seed=seed,
            show=show,
        )
        if reply.text or not reply.interrupted:
            # A model can spell out a control token letter by letter, or continue with the user's
            # turn. If that text were remembered, the encoder would refuse every later prompt.
            text = self.encoder.control_text.split(reply.text, maxsplit=1)[0].strip()
            self.messages = [*turns[prompt.dropped_turns :], Message("assistant", text)]
        return reply._replace(dropped_turns=prompt.dropped_turns, cut_tokens=prompt.cut_tokens)


@dataclass
class Chat:
    """A chat with one or more models.

    Attributes:
        speakers: The models.
        sampling: How replies are sampled.
        console: Where the chat is shown.
        seed: Seed of the first reply after the start or a `/reset`. Each further message adds 1,
            and all speakers use the same seed.
        turn: Number of messages since the start or the last `/reset`.
    """

    speakers: Sequence[Speaker]
    sampling: SamplingOptions
    console: Console
    seed: int = 0
    turn: int = 0

    def run(self, read: Callable[[], str]) -> None:
        """Answer the lines of `read` until `/quit`, or EOFError at the end of the input."""
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
            self._run_command(line.split()[0])
        elif line.strip():
            seed = self.seed + self.turn
            self.turn += 1
            for speaker in self.speakers:
                print_text(self.console, f"{speaker.name}: ", style=NAME_STYLE, end="")
                note = self._reply(speaker, line.strip(), seed)
                print_text(self.console, "")
                if note:
                    self._print_note(f"({note})")

    def _reply(self, speaker: Speaker, content: str, seed: int) -> str:
        """Show a model's reply as it grows; return a note on it, which may be empty."""
        try:
            reply = speaker.reply(
                content,
                sampling=self.sampling,
                seed=seed,
                show=lambda text: print_text(self.console, text, end=""),
            )
        except EncodingError as error:
            return f"no answer: {error}"
        notes = []
        longest = speaker.encoder.max_prompt_length
        if reply.interrupted:
            notes.append("stopped")
        elif not reply.ended:
            notes.append(f"cut off at {self.sampling.max_new_tokens} tokens")
        if reply.dropped_turns:
            dropped = f"the {reply.dropped_turns} oldest turns"
            notes.append(f"forgot {dropped}, which no longer fit into {longest} tokens")
        if reply.cut_tokens:
            notes.append(f"read only the last {longest} tokens of the message")
        return "; ".join(notes)

    def _run_command(self, command: str) -> None:
        if command == "/reset":
            for speaker in self.speakers:
                speaker.messages = []
            self.turn = 0
            self._print_note("the dialogue starts anew")
        elif command == "/help":
            self._print_note(HELP)
        else:
            self._print_note(f"there is no command {command}\n{HELP}")

    def _print_note(self, text: str) -> None:
        print_text(self.console, text, style=NOTE_STYLE)


def load_speakers(
    models: Sequence[str],
    sampling: SamplingOptions,
    *,
    model_options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
) -> list[Speaker]:
    """Load the models of a chat; all of them stay in memory.

    Args:
        models: Folders or hub ids.
        sampling: How replies are sampled.
        model_options: How the models are loaded.
        device: Where they compute.
        chat_template: Template of the dialogues; `tokenizer` for each model's own.
        max_prompt_length: Longest dialogue that a model remembers, in tokens; see `load_encoder`.
    """
    names = short_names(models, "models")
    encoders = load_encoders(
        models,
        sampling,
        chat_template=chat_template,
        max_prompt_length=max_prompt_length,
        model_options=model_options,
    )
    speakers = []
    with progress_bar("loading models", len(models)) as progress:
        for name, path, encoder in zip(names, models, encoders, strict=True):
            model = load_policy(path, model_options, device, encoder.tokenizer)
            set_longest_sequence(model, encoder.max_prompt_length + sampling.max_new_tokens)
            speakers.append(Speaker(name=name, model=model, encoder=encoder))
            progress(1)
    return speakers
