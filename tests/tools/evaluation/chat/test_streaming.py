import signal
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from lit_rlhf.data import DialogueEncoder, Message
from lit_rlhf.forward import LanguageModel, freeze
from lit_rlhf.rollout import SamplingOptions, generate_responses
from lit_rlhf.tools.evaluation.chat import stream_reply
from tests.support.tiny_models import EOS_ID, tiny_causal_lm, tiny_tokenizer

SAMPLED = SamplingOptions(max_new_tokens=40, temperature=0.8, top_p=0.9, repetition_penalty=1.1)
GREEDY = SamplingOptions(max_new_tokens=40, do_sample=False)


@pytest.fixture
def encoder() -> DialogueEncoder:
    return DialogueEncoder(tiny_tokenizer(), "hh", max_length=64)


@pytest.fixture
def prompt(encoder: DialogueEncoder) -> list[int]:
    return encoder.encode_prompt([Message("user", "name three metals")]).input_ids.tolist()


@pytest.fixture
def model() -> LanguageModel:
    return freeze(tiny_causal_lm(seed=7))  # its greedy response has several words


@pytest.mark.parametrize(("model_seed", "ended"), [(7, False), (6, True)])
def test_pieces_are_the_response(encoder: Any, prompt: Any, model_seed: int, ended: bool) -> None:
    model, pieces = tiny_causal_lm(seed=model_seed), list[str]()
    response = stream_reply(model, encoder, prompt, GREEDY, 0, pieces.append)
    ids = torch.tensor([prompt])
    mask, pad = torch.ones_like(ids).bool(), encoder.pad_token_id
    batch = generate_responses(model, ids, mask, GREEDY, [EOS_ID], pad, seed=0)
    assert response.text == encoder.decode_response(batch.response_ids[0].tolist())
    assert response.ended == bool(batch.terminated[0]) == ended
    assert not response.interrupted
    assert len(pieces) > 1 or ended
    assert "".join(pieces).strip() == response.text
    assert pieces[0] == pieces[0].lstrip()


def test_the_seed_repeats_a_response(model: Any, encoder: Any, prompt: Any) -> None:
    def text(seed: int) -> str:
        return stream_reply(model, encoder, prompt, SAMPLED, seed, lambda piece: None).text

    state = torch.random.get_rng_state()
    first = text(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)
    assert text(3) == first
    assert text(4) != first


def test_settings_in_the_models_folder_have_no_say(model: Any, encoder: Any, prompt: Any) -> None:
    def text() -> str:
        return stream_reply(model, encoder, prompt, SAMPLED, 0, lambda piece: None).text

    first = text()
    own = GenerationConfig(top_k=1, suppress_tokens=list(range(4, 200)))  # type: ignore[no-untyped-call]
    model.generation_config = own
    assert text() == first
    assert model.generation_config is own


def test_ctrl_c_keeps_what_was_said(model: Any, encoder: Any, prompt: Any, request: Any) -> None:
    # a shell's background jobs ignore Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    own = model.generation_config
    response = stream_reply(model, encoder, prompt, GREEDY, 0, show)
    whole = stream_reply(model, encoder, prompt, GREEDY, 0, lambda piece: None).text
    assert response.interrupted
    assert not response.ended
    assert response.text == "".join(pieces).strip()
    assert 0 < len(response.text) < len(whole)
    assert model.generation_config is own
