"""`PPOModule.sample`: what the policy answers to given prompts, and its timeline in a fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks import SampleTimeline
from lit_rlhf.data import DialogueEncoder, RecordDataModule, encode_prompts
from lit_rlhf.modules import PPOModule
from tests.support import stages
from tests.support.tiny_models import EOS_ID, tiny_tokenizer

ASKED = list(stages.QUESTIONS)
DIALOGUE = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why"


class Asking(Callback):
    """Asks at the start of training and after the only iteration."""

    def __init__(self) -> None:
        self.answers: list[list[dict[str, Any]]] = []
        self.rollouts: list[Any] = []
        self.seeds: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state, original_rollout = torch.get_rng_state(), pl_module.ppo.rollout

        def rollout(prompts: Any, seed: int) -> Any:
            self.seeds.append(seed)
            self.rollouts.append(original_rollout(prompts, seed))
            return self.rollouts[-1]

        pl_module.ppo.rollout = rollout  # type: ignore[method-assign]
        self.answers += [pl_module.sample(ASKED), pl_module.sample(ASKED)]
        pl_module.ppo.rollout = original_rollout  # type: ignore[method-assign]
        assert torch.equal(torch.get_rng_state(), state)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.answers.append(pl_module.sample(ASKED))


@pytest.fixture(scope="module")
def asked(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Asking, PPOModule]:
    asking, folder = Asking(), tmp_path_factory.mktemp("asked")
    options = {"rewards": {"tests.support.reward_functions:length": 2.0}, "critic_init": "policy"}
    options |= {"policy_optimizer.learning_rate": 0.05, "seed": 3}
    module = PPOModule(**stages.ppo_options(root, **options))
    stages.fit_module(module, stages.prompts(root), folder, callbacks=[asking])
    return asking, module


def test_the_same_policy_gives_the_same_answers(asked: tuple[Asking, PPOModule]) -> None:
    before, again, after = asked[0].answers
    assert before == again
    assert after != before
    assert asked[0].seeds == [3, 3]  # the run's


def test_a_record_holds_response_score_kl_and_length(asked: tuple[Asking, PPOModule]) -> None:
    asking, module = asked
    records, rollouts = asking.answers[0], asking.rollouts[0]
    assert len(records) == len(ASKED)
    tokenizer = tiny_tokenizer()
    for row, record in enumerate(records):
        assert set(record) == {"response", "score", "kl", "length", "truncated"}
        # the prompt is rendered as the datamodule renders its own, without anything in front
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        assert tokenizer.decode(prompt) == f"\n\nHuman: {ASKED[row]}\n\nAssistant:"
        ids = rollouts.response_ids[row][rollouts.response_mask[row]]
        assert record["response"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert (record["score"], record["length"]) == (2 * len(record["response"]), len(ids))
        assert record["truncated"] == (EOS_ID not in ids.tolist())
        assert record["kl"] == pytest.approx(0.0, abs=1e-4)  # the policy still is the reference
    assert {True, False} == {record["truncated"] for record in records}
    assert max(abs(record["kl"]) for record in asking.answers[-1]) > 0.1  # after training
    assert module.training


def test_a_dialogue_and_a_plain_text_are_rendered_as_in_a_data_file(root: Path) -> None:
    encoder = stages.encoder_of(tiny_tokenizer())
    batch = encode_prompts([DIALOGUE, "hi"], encoder)
    first = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why\n\nAssistant:"
    assert (batch.texts, batch.index.tolist()) == ([first, "\n\nHuman: hi\n\nAssistant:"], [0, 1])
    assert batch.attention_mask[1].tolist() == sorted(batch.attention_mask[1].tolist())
    rows = zip(batch.input_ids, batch.attention_mask, strict=True)
    assert [tiny_tokenizer().decode(ids[mask]) for ids, mask in rows] == batch.texts
    data: RecordDataModule = stages.prompts(root)
    data.tokenizer = tiny_tokenizer()
    data.setup("fit")
    in_the_file = next(iter(data.make_loader("val", shuffle=False)))
    assert in_the_file.texts[:2] == encode_prompts(["hi", "how are you today"], encoder).texts


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", r"prompts\[1\]: field 'prompt': empty"),
        ("say </s>", r"prompts\[1\]: a turn contains the text of the EOS token"),
        ("\n\nHuman: hi\n\nAssistant: yes", "the prompt ends with an assistant turn"),
    ],
)
def test_a_bad_prompt_is_named(bad: Any, message: str) -> None:
    encoder = DialogueEncoder(tiny_tokenizer(), "hh", 64)
    with pytest.raises(ValueError, match=message):
        encode_prompts(["hi", bad], encoder)
    with pytest.raises(ValueError, match="expected at least one"):
        encode_prompts([], encoder)


def test_without_a_datamodule_there_is_no_encoder(root: Path, tmp_path: Path) -> None:
    module = PPOModule(**stages.ppo_options(root))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    module.trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    with pytest.raises(RuntimeError, match="sample: the trainer has no datamodule"):
        module.sample(ASKED)


def test_a_timeline_follows_ppos_iterations_and_changes_nothing(root: Path, tmp_path: Path) -> None:
    """The trained module is the same to the bit with and without it."""
    states = []
    for name in ("without", "with"):
        torch.manual_seed(0)
        module = PPOModule(**stages.ppo_options(root, critic_pretraining={"iterations": 1}))
        timeline = SampleTimeline([ASKED[0], DIALOGUE], every_n_batches=3)
        callbacks = [timeline] if name == "with" else []
        options: dict[str, Any] = {"callbacks": callbacks, "max_epochs": 2}
        stages.fit_module(module, stages.prompts(root, batch_size=4), tmp_path / name, **options)
        states.append(stages.copy_state(module))
    stages.assert_equal_states(*states)
    lines = [json.loads(x) for x in (tmp_path / "with/samples.jsonl").read_text().splitlines()]
    places = [(line["step"], line["prompt_index"]) for line in lines]
    assert places == [(0, 0), (0, 1), (3, 0), (3, 1), (4, 0), (4, 1)]
    assert lines[1]["prompt"] == DIALOGUE
    assert {"response", "score", "kl", "length", "truncated"} < lines[0].keys()
