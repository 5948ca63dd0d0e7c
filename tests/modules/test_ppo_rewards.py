"""PPO with a reward model, rules, functions and a remote scorer: logged, resumed, failing."""

import json
import math
import re
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from lit_rlhf.data import DataSource, PromptBatch, PromptDataModule, read_file
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO
from tests.support import reward_functions, stages
from tests.support.docs_blocks import ROOT, blocks
from tests.support.faulty_stages import FaultyEstimates
from tests.support.reward_inputs import make_rollouts

BREVITY = {"rule": "length", "weight": 0.5, "longest": 3, "normalize": True}
LETTERS = {"rule": "regex", "pattern": "[a-z]", "normalize": True}


def module(root: Path, **rewards: Any) -> PPOModule:
    sources = {str(root / "reward"): {"weight": 2.0, "normalize": True}, **rewards}
    return PPOModule(**stages.ppo_options(root, rewards=sources, minibatches={"minibatch_size": 2}))


class Watching(Callback):
    """What is logged in each iteration, and a checkpoint after the second."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "second.ckpt"
        self.logged: list[dict[str, float]] = []
        self.scores: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: object) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.scores.append(outputs["scores"])
        if len(self.logged) == 2:
            trainer.save_checkpoint(self.path)


def test_a_run_goes_on_from_its_sources_moments(root: Path, tmp_path: Path) -> None:
    data = {"batch_size": 2}  # four iterations
    whole, seen = module(root, brevity=BREVITY, letters=LETTERS), Watching(tmp_path)
    stages.fit_module(whole, stages.prompts(root, **data), tmp_path / "whole", callbacks=[seen])
    assert [float(m.count) for m in whole.reward.moments.values()] == [8.0, 8.0, 8.0]
    for logged, scores in zip(seen.logged, seen.scores, strict=True):
        assert logged["rollout/score"] == pytest.approx(float(scores.mean()), abs=1e-5)
        assert logged["rollout/score/brevity"] <= 0.0
        assert 0.0 <= logged["rollout/score/letters"] <= 1.0
        assert "rollout/score/reward" in logged

    checkpoint = torch.load(seen.path, weights_only=True)
    assert checkpoint["hyper_parameters"]["rewards"]["brevity"] == BREVITY
    reward_keys = {key for key in checkpoint["state_dict"] if key.startswith("reward.")}
    names = ("0_reward", "1_brevity", "2_letters")
    assert reward_keys == {
        f"reward.moments.{n}.{b}" for n in names for b in ("mean", "m2", "count")
    }

    resumed = module(root, brevity=BREVITY, letters=LETTERS)
    stages.fit_module(
        resumed, stages.prompts(root, **data), tmp_path / "resumed", ckpt_path=seen.path
    )
    stages.assert_equal_states(stages.copy_state(resumed), stages.copy_state(whole))


@pytest.mark.filterwarnings("ignore:update of policy and critic skipped")
def test_a_skipped_iteration_leaves_the_moments_of_the_sources(root: Path, tmp_path: Path) -> None:
    small = {"critic_init": "policy", "minibatches": {"minibatch_size": 2}}
    options = stages.ppo_options(root, rewards={"brevity": BREVITY}, **small)
    stage = FaultyEstimates((1,), "values", **options)
    stages.fit_module(stage, stages.prompts(root, batch_size=2), tmp_path)
    (moments,) = stage.reward.moments.values()
    # one of four iterations was skipped
    assert float(moments.count) == float(stage.ppo.score_moments.count) == 6.0


def test_validation_learns_nothing(root: Path, tmp_path: Path) -> None:
    stage = module(root, brevity=BREVITY)
    run = stages.fit_module(stage, stages.prompts(root), tmp_path, limit_val_batches=1)
    assert [float(m.count) for m in stage.reward.moments.values()] == [8.0, 8.0]
    assert "val/rollout/score/brevity" in run.callback_metrics
    stage.sample(["hi"])


def test_the_critic_starts_from_the_reward_model_and_not_from_a_rules_name(root: Path) -> None:
    PPOModule(**stages.ppo_options(root, rewards={"brevity": BREVITY, str(root / "reward"): 1.0}))


FUNCTIONS = "tests.support.reward_functions"
EQUALS = f"{FUNCTIONS}:equals_answer"


def answered(root: Path, **fields: Any) -> PromptDataModule:
    """The prompts of `root`, with fields of their records beside them."""
    columns = [{name: column[row] for name, column in fields.items()} for row in range(8)]
    rows = [{"question": q, **more} for q, more in zip(stages.QUESTIONS, columns, strict=True)]
    return stages.prompts(root, train_sources=[DataSource(rows)], val_sources=None)


def test_answer_of_its_record_reaches_reward_of_prompt(root: Path, tmp_path: Path) -> None:
    known, said = {"rule": "contains", "field": "answer"}, {"rule": "regex", "pattern": "a"}
    options = {"rewards": {EQUALS: 1.0, "known": known, "said": said}, "gold_reward": EQUALS}
    stage = PPOModule(**stages.ppo_options(root, critic_init="policy", **options))
    with patch.object(PPO, "score", autospec=True, side_effect=PPO.score) as score:
        run = stages.fit_module(stage, answered(root, answer=list("abcdefgh")), tmp_path)
    batch: PromptBatch = score.call_args.args[2]
    seen = [(fields["question"], fields["answer"]) for fields in batch.fields]
    pairs = dict(zip(stages.QUESTIONS, "abcdefgh", strict=True))
    assert len(seen) == 8
    assert [pairs[question] for question, _ in seen] == [answer for _, answer in seen]
    assert all(q in text for text, (q, _) in zip(batch.texts, seen, strict=True))
    logged = run.callback_metrics
    assert "rollout/score/known" in logged
    assert logged["rollout/gold"] == logged["rollout/score/equals_answer"]
    # plain text has no answer to compare with
    (record,) = stage.sample(["hi"])
    assert math.isnan(record["score"])
    assert record["response"]


@pytest.mark.parametrize(
    ("option", "rewards"),
    [
        ("rewards", {EQUALS: 1.0}),
        ("rewards", {"known": {"rule": "equals", "field": "answer"}}),
        ("gold_reward", {"known": {"rule": "equals", "field": "label"}}),
    ],
)
def test_field_that_records_lack_is_named(
    root: Path, tmp_path: Path, option: str, rewards: dict[str, Any]
) -> None:
    gold = EQUALS if option == "gold_reward" else None
    options = {"rewards": rewards, "critic_init": "policy", "gold_reward": gold}
    stage = PPOModule(**stages.ppo_options(root, **options))
    label = {"rewards": next(iter(rewards)), "gold_reward": EQUALS}[option]
    message = f"{label}'.*: expected records with the field 'answer'.*the train records have "
    with pytest.raises(ValueError, match=message + "label, question"):
        stages.fit_module(stage, answered(root, label=list("abcdefgh")), tmp_path)


def test_results_of_gsm8k_are_verified(
    shared_data: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = {block.title: block.text for block in blocks(ROOT / "docs/rewards.md")}
    (tmp_path / "my_math.py").write_text(page["my_math.py"])
    monkeypatch.syspath_prepend(tmp_path)
    rewards = yaml.safe_load(page["gsm8k.yaml"])["model"]["init_args"]["rewards"]
    rows, path = read_file(str(shared_data / "gsm8k/test.jsonl.gz")), tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row.fields) + "\n" for row in islice(rows, 8)))  # type: ignore[union-attr]
    data = stages.prompts(root, train_sources=[DataSource(str(path))], val_sources=None)
    data.max_prompt_length = data.max_length = 512
    stage = PPOModule(**stages.ppo_options(root, rewards=rewards, critic_init="policy"))
    batch: PromptBatch = stages.first_batch(data, root)
    answers = [str(fields["answer"]) for fields in batch.fields]
    assert "#### 18" in answers[0]
    wrong = [answer + "0" for answer in answers]
    assert stage.ppo.score(make_rollouts(answers), batch).total.tolist() == [1.5] * 8
    assert stage.ppo.score(make_rollouts(wrong), batch).total.tolist() == [0.0] * 8
    # the result alone, without the form that the rule asks for
    alone = [answer.rpartition("#### ")[2] for answer in answers]
    assert stage.ppo.score(make_rollouts(alone), batch).total.tolist() == [1.0] * 8


CELL = """
def brevity(prompts, responses, answer):
    return [-float(len(r)) for r in responses]
"""


def test_a_function_of_a_notebook_is_a_reward(root: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, names)  # as a cell does
    brevity = names["brevity"]
    options = stages.ppo_options(root, critic_init="policy", minibatches={"minibatch_size": 2})

    def stage(reward: Any) -> PPOModule:
        return PPOModule(**options | {"rewards": reward, "gold_reward": brevity})

    def data() -> PromptDataModule:
        data = answered(root, answer=list("abcdefgh"))
        data.batch_size = 2  # four iterations
        return data

    whole, seen = stage(brevity), Watching(tmp_path)
    stages.fit_module(whole, data(), tmp_path / "whole", callbacks=[seen])
    assert "rollout/score/brevity" in seen.logged[0]
    checkpoint = torch.load(seen.path, weights_only=True)
    assert checkpoint["hyper_parameters"]["rewards"] == {"__main__:brevity": 1.0}
    assert checkpoint["hyper_parameters"]["gold_reward"] == "__main__:brevity"
    assert "how are you" not in str(checkpoint["resume_settings"])  # rows are no setting

    resumed = stage([brevity])
    stages.fit_module(resumed, data(), tmp_path / "resumed", ckpt_path=seen.path)
    stages.assert_equal_states(stages.copy_state(resumed), stages.copy_state(whole))

    with pytest.raises(ValueError, match=r"rewards: the checkpoint names __main__:brevity, .* ob"):
        PPOModule.load_from_checkpoint(seen.path)
    loaded = PPOModule.load_from_checkpoint(seen.path, rewards=brevity, gold_reward=brevity)
    assert int(loaded.ppo.iteration) == 2


def test_a_model_without_a_folder_cannot_start_the_critic(root: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(root / "reward")
    model.config._name_or_path = ""
    with pytest.raises(ValueError, match=r"critic_init: .* that was loaded from a folder, got <L"):
        PPOModule(**stages.ppo_options(root, rewards=model))


def failing(root: Path, function: str, **options: Any) -> PPOModule:
    rewards = {f"{FUNCTIONS}:{function}": 1.0}
    options = {"critic_init": "policy", "minibatches.minibatch_size": 2, **options}
    return PPOModule(**stages.ppo_options(root, rewards=rewards, **options))


def test_failure_of_a_function_ends_the_run(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reward_functions, "calls", 0)
    broken, data = failing(root, "fails_from_the_third_call"), stages.prompts(root, batch_size=2)
    with pytest.raises(RuntimeError) as error:  # in the third of four iterations
        stages.fit_module(broken, data, tmp_path)
    message = "fails_from_the_third_call' raised ConnectionError: .* Called with prompt '.*Human: "
    assert re.search(message, str(error.value))
    assert int(broken.ppo.iteration) == 2
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("source", ["rewards", "gold_reward"])
def test_the_time_limit_holds_for_every_function(root: Path, tmp_path: Path, source: str) -> None:
    reward_functions.released.clear()
    slow = f"{FUNCTIONS}:waits"
    options: dict[str, Any] = {"gold_reward": slow} if source == "gold_reward" else {}
    name = "length" if source == "gold_reward" else "waits"
    stage = failing(root, name, reward_timeout=2.0, **options)
    try:
        with pytest.raises(TimeoutError, match=r"waits': no scores after 2 seconds .reward_time"):
            stages.fit_module(stage, stages.prompts(root), tmp_path)
    finally:
        reward_functions.released.set()
