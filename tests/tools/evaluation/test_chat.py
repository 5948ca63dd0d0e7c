import io
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from transformers import GenerationConfig

from lit_rlhf.data import DialogueEncoder, Message
from lit_rlhf.forward import LanguageModel, freeze
from lit_rlhf.rollout import SamplingOptions, generate_responses
from lit_rlhf.tools.evaluation.chat import (
    HELP,
    Chat,
    ChatReply,
    Speaker,
    load_speakers,
    stream_reply,
)
from tests.support.evaluation_folders import Folders
from tests.support.tiny_models import EOS_ID, tiny_causal_lm, tiny_tokenizer

SAMPLING = SamplingOptions(max_new_tokens=8)


class Fed:
    """Stands in for sampling: gives the responses it was made with and notes what was fed."""

    def __init__(self, *responses: ChatReply | str) -> None:
        self.responses = iter(responses)
        self.prompts: list[str] = []
        self.seeds: list[int] = []

    def __call__(
        self,
        model: LanguageModel,
        encoder: DialogueEncoder,
        *,
        prompt_ids: Sequence[int],
        sampling: SamplingOptions,
        seed: int,
        show: Callable[[str], None],
    ) -> ChatReply:
        self.prompts.append(encoder.tokenizer.decode(prompt_ids))
        self.seeds.append(seed)
        response = next(self.responses, "ok")
        if isinstance(response, str):
            response = ChatReply(response, ended=True, interrupted=False)
        show(response.text)
        return response


def said(*turns: str) -> str:
    """A dialogue as the models are fed it."""
    names = ("\n\nHuman: ", "\n\nAssistant: ")
    text = "".join(names[i % 2] + turn for i, turn in enumerate(turns))
    return f"{text}\n\nAssistant:"


def chat(*names: str, max_length: int = 64, seed: int = 0) -> Chat:
    encoder = DialogueEncoder(tiny_tokenizer(), "hh", max_length)
    model = tiny_causal_lm()
    console = Console(file=io.StringIO(), width=80)
    return Chat([Speaker(name, model, encoder) for name in names], SAMPLING, console, seed)


def after(chat: Chat, fed: Fed, *lines: str) -> str:
    """What is shown when a chat has heard these lines and the input ends."""
    inputs = iter(lines)

    def read() -> str:
        line = next(inputs, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    with patch("lit_rlhf.tools.evaluation.chat.stream_reply", fed):
        chat.run(read)
    return chat.console.file.getvalue()


def test_each_model_is_fed_the_whole_dialogue_with_its_own_responses() -> None:
    fed = Fed("yes", "no")
    assert after(chat("sft"), fed, "one?", "", "two?") == "sft: yes\nsft: no\n"
    assert fed.prompts == [said("one?"), said("one?", "yes", "two?")]
    fed = Fed("a", "b")
    after(chat("sft", "ppo"), fed, "hi", "so")
    assert fed.prompts[2:] == [said("hi", "a", "so"), said("hi", "b", "so")]


def test_oldest_turns_are_forgotten_once_and_told() -> None:
    # each exchange takes 19 tokens or so of 40
    fed, talk = Fed("yes", "no", "so"), chat("sft", max_length=40)
    shown = after(talk, fed, "one", "two", "three")
    assert fed.prompts[2] == said("two", "no", "three")
    assert "forgot the 2 oldest turns" in shown.splitlines()[-1]
    left = [message.content for message in talk.speakers[0].messages]
    assert left == ["two", "no", "three", "so"]


def test_commands_forget_the_dialogue_and_end_the_chat() -> None:
    fed = Fed()
    lines = ["one", "/reset", "two", "/quit", "three"]
    shown = after(chat("sft", "ppo"), fed, *lines)
    assert fed.prompts[2:] == [said("two")] * 2
    assert fed.seeds == [0, 0, 0, 0]
    assert "the dialogue starts anew" in shown
    fed = Fed()
    after(chat("sft", "ppo", seed=5), fed, "a", "b")
    assert fed.seeds == [5, 5, 6, 6]


def test_help_and_unknown_commands_list_the_commands() -> None:
    fed = Fed()
    assert after(chat("sft"), fed, "/help") == f"{HELP}\n"
    assert after(chat("sft"), fed, "/hlep") == f"there is no command /hlep\n{HELP}\n"
    assert fed.prompts == []


def test_a_blank_before_a_slash_makes_a_message() -> None:
    fed = Fed()
    after(chat("sft"), fed, " /help", " /quit")
    assert fed.prompts == [said("/help"), said("/help", "ok", "/quit")]


@pytest.mark.parametrize(
    ("text", "interrupted", "shown", "remembered"),
    [
        ("well", True, "sft: well\n(stopped)\nppo: ", ("one", "well", "two")),
        ("", True, "sft: \n(stopped)\nppo: ", ("two",)),  # no exchange
        ("so", False, "sft: so\n(cut off at 8 tokens)\nppo: ", ("one", "so", "two")),
    ],
)
def test_text_before_a_stop_or_the_limit_is_remembered(
    text: str, interrupted: bool, shown: str, remembered: tuple[str, ...]
) -> None:
    fed = Fed(ChatReply(text, ended=False, interrupted=interrupted), "yes")
    assert after(chat("sft", "ppo"), fed, "one", "two").startswith(shown)  # the other still speaks
    assert fed.prompts[2] == said(*remembered)


def test_a_message_with_the_eos_text_gets_no_answer_and_the_chat_goes_on() -> None:
    fed = Fed()
    shown = after(chat("sft"), fed, "a</s>b", "two")
    assert "(no answer: a turn contains the text of the EOS token" in shown
    assert fed.prompts == [said("two")]


@pytest.mark.parametrize("control", ["</s>", "<pad>", "\n\nHuman:"])
def test_control_text_in_a_response_does_not_end_the_chat(control: str) -> None:
    fed = Fed(f"so {control} and on")
    after(chat("sft"), fed, "one", "two")
    assert fed.prompts[1].startswith(said("one", "so", "two").removesuffix("\n\nAssistant:"))


def test_ctrl_c_at_the_prompt_or_between_responses_does_not_end_the_chat() -> None:
    assert after(chat("sft"), Fed(), "^C", "one") == "\n/quit or Ctrl-D ends the chat\nsft: ok\n"
    events: Iterator[object] = iter([KeyboardInterrupt(), None])
    with patch.object(Chat, "handle_line", side_effect=events) as handle_line:
        shown = after(chat("sft"), Fed(), "one", "two")
    assert handle_line.call_count == 2
    assert shown == "\nstopped\n"


def test_models_are_loaded_under_their_short_names(folders: Folders) -> None:
    loaded = load_speakers([folders.sft, folders.ppo], SAMPLING)
    assert [speaker.name for speaker in loaded] == ["sft", "ppo"]
    assert loaded[0].encoder.max_prompt_length == 64
    first, second = (next(speaker.model.parameters()) for speaker in loaded)
    assert not first.requires_grad
    assert not first.equal(second)
    answer = loaded[0].reply("hi", sampling=SAMPLING, seed=0, show=lambda text: None)
    assert loaded[0].messages == [Message("user", "hi"), Message("assistant", answer.text)]


SAMPLED = SamplingOptions(max_new_tokens=40, temperature=0.8, top_p=0.9, repetition_penalty=1.1)
GREEDY = SamplingOptions(max_new_tokens=40, do_sample=False)


@pytest.fixture
def prompt(encoder: DialogueEncoder) -> list[int]:
    return encoder.encode_prompt([Message("user", "name three metals")]).input_ids.tolist()


@pytest.fixture
def model() -> LanguageModel:
    return freeze(tiny_causal_lm(seed=7))  # its greedy response has several words


@pytest.mark.parametrize(("model_seed", "ended"), [(7, False), (6, True)])
def test_pieces_are_the_response(encoder: Any, prompt: Any, model_seed: int, ended: bool) -> None:
    model, pieces = tiny_causal_lm(seed=model_seed), list[str]()
    response = stream_reply(
        model, encoder, prompt_ids=prompt, sampling=GREEDY, seed=0, show=pieces.append
    )
    ids = torch.tensor([prompt])
    mask, pad = torch.ones_like(ids).bool(), encoder.pad_token_id
    batch = generate_responses(
        model, ids, mask, GREEDY, eos_token_ids=[EOS_ID], pad_token_id=pad, seed=0
    )
    assert response.text == encoder.decode_response(batch.response_ids[0].tolist())
    assert response.ended == bool(batch.terminated[0]) == ended
    assert not response.interrupted
    assert len(pieces) > 1 or ended
    assert "".join(pieces).strip() == response.text
    assert pieces[0] == pieces[0].lstrip()


def test_seed_repeats_a_response_whatever_the_folder_says(
    model: Any, encoder: Any, prompt: Any
) -> None:
    def text(seed: int) -> str:
        reply = stream_reply(
            model,
            encoder,
            prompt_ids=prompt,
            sampling=SAMPLED,
            seed=seed,
            show=lambda piece: None,
        )
        return reply.text

    state = torch.random.get_rng_state()
    first = text(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)
    assert text(4) != first
    own = GenerationConfig(top_k=1, suppress_tokens=list(range(4, 200)))  # type: ignore[no-untyped-call]
    model.generation_config = own
    assert text(3) == first
    assert model.generation_config is own


def test_ctrl_c_keeps_what_was_said(model: Any, encoder: Any, prompt: Any) -> None:
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    own = model.generation_config
    response = stream_reply(model, encoder, prompt_ids=prompt, sampling=GREEDY, seed=0, show=show)
    whole = stream_reply(
        model, encoder, prompt_ids=prompt, sampling=GREEDY, seed=0, show=lambda piece: None
    ).text
    assert response.interrupted
    assert not response.ended
    assert response.text == "".join(pieces).strip()
    assert 0 < len(response.text) < len(whole)
    assert model.generation_config is own
