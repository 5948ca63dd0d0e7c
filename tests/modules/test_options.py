"""The options of PPO: its defaults, and what it refuses or warns of."""

import logging
import math
from contextlib import nullcontext
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lit_rlhf.forward import scalar_head_of
from lit_rlhf.models.heads import build_scalar_model
from lit_rlhf.modules import OptimizerOptions, PPOModule
from lit_rlhf.ppo import CriticPretrainingOptions
from tests.support.paper_options import PPO_MAX
from tests.support.stages import fit_module, ppo_options, prompts, source, trainer
from tests.support.tiny_models import tiny_causal_lm


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy_optimizer.learning_rate", 0.0),
        ("policy_optimizer.beta2", 1.0),
        ("policy_optimizer.eps", None),
        ("minibatches.minibatch_size", None),
        ("reward_shaping.clip", -1.0),
        ("reward_shaping.kl_coef", -0.1),
        ("loss.ptx_coef", -0.1),
        ("loss.dual_clip", 1.0),
        ("advantages.gamma", 1.1),
        ("advantages.lam", -0.1),
        ("minibatches.minibatch_size", 0),
        ("max_iterations", 0),
        ("max_skipped_in_a_row", 0),
        ("memory.frozen_dtype", "int8"),
        ("critic_init", "nothing"),
        ("responses_per_prompt", 1.5),
        ("reward_timeout", 0),
    ],
)
def test_an_option_out_of_range_is_named(root: Path, name: str, value: Any) -> None:
    field = name.rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"{field}: expected .*, got {value!r}"):
        PPOModule(**ppo_options(root, **{name: value}))


def test_off_policy_sampling_is_declared(root: Path) -> None:
    options = {"sampling.top_k": 5, "sampling.top_p": 0.9}
    message = "^top_p=0.9, top_k=5: rollouts are sampled from a changed .*loss.importance_cap"
    with pytest.warns(UserWarning, match=f"(?s){message}"):
        module = PPOModule(**ppo_options(root, **options))
    assert (module.sampling.top_k, module.sampling.top_p) == (5, 0.9)


def test_reward_model_of_another_template_is_refused(root: Path, tmp_path: Path) -> None:
    module = PPOModule(**ppo_options(root))
    start = {name: weight.clone() for name, weight in module.policy.state_dict().items()}
    with pytest.raises(ValueError, match=f"{root}/reward.* does not read what the policy writes"):
        fit_module(module, prompts(root, chat_template="paper-en"), tmp_path)
    assert all(torch.equal(module.policy.state_dict()[k], v) for k, v in start.items())


@pytest.mark.parametrize("command", ["validate", "test"])
def test_contract_is_checked_for_every_use(root: Path, tmp_path: Path, command: str) -> None:
    data = prompts(root, chat_template="paper-en", test_sources=source(root, "prompts"))
    run = trainer(tmp_path, limit_val_batches=None)
    with pytest.raises(ValueError, match="does not read what the policy writes"):
        getattr(run, command)(PPOModule(**ppo_options(root)), datamodule=data)


def test_defaults_are_ppo_max_of_the_paper(root: Path) -> None:
    module = PPOModule(str(root / "policy"), {str(root / "reward"): 1.0})
    defaults = signature(PPOModule).parameters["critic_init"].default
    module_defaults = {name: attrgetter(name)(module) for name in PPO_MAX if name != "critic_init"}
    assert module_defaults | {"critic_init": defaults} == PPO_MAX


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": {"tests.support.reward_functions:length": 1}}, "critic_init: 'reward' needs"),
        (
            {"reward_shaping.scaling": True},
            "reward_shaping.scaling, normalization: expected one of them, got both",
        ),
        (
            {"reward_shaping.kl_target": 4.0, "reward_shaping.kl_coef": 0.0},
            "reward_shaping.kl_target, kl_coef: expected kl_coef > 0 .* got 4.0 and 0",
        ),
        (
            {"loss.old_policy": "reference", "loss.policy_objective": "kl_penalty"},
            "loss.old_policy, policy_objective: expected old_policy: rollout with kl_penalty",
        ),
        (
            {"loss.dual_clip": 3.0, "loss.policy_objective": "unclipped"},
            "ratio_clip_high, dual_clip: expected neither with policy_objective: unclipped",
        ),
        ({"advantages.estimator": "rloo"}, "responses_per_prompt: expected at least 2 .*, got 1"),
        (
            {"advantages": {"estimator": "grpo", "truncation": "bootstrap"}},
            "truncation: expected terminal or mask with estimator: grpo, got bootstrap",
        ),
        ({"advantages.learned_prompts": 2}, "learned_prompts: expected an estimator .*, got gae"),
        ({"advantages": {"estimator": "rloo", "gamma": 0.9}}, "gamma: expected 1 .*, got 0.9"),
        ({"reward_shaping.overlong_buffer": 2}, "expected missing_eos_penalty > 0 .*, got 2 and 0"),
        ({"loss.aggregation": "mean"}, "aggregation: expected one of .*, got 'mean'"),
        (
            {"loss": {"aggregation": "sequence_mean", "policy_objective": "kl_penalty"}},
            "aggregation: expected token_mean .*, got sequence_mean",
        ),
        ({"reward_shaping.ensemble": "min"}, "ensemble: expected sum .*, got min"),
    ],
)
def test_contradictions_are_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOModule(**ppo_options(root, **options))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_estimator_whose_gradient_is_not_that_of_kl_is_warning(root: Path, estimator: str) -> None:
    options = {"reward_shaping.kl_estimator": estimator}
    with pytest.warns(UserWarning, match=f"^reward_shaping.kl_estimator={estimator}: as a reward"):
        PPOModule(**ppo_options(root, **options))
    PPOModule(**ppo_options(root, **options, **{"reward_shaping.kl_coef": 0.0}))


def test_an_entropy_bound_that_no_token_reaches_is_a_warning(root: Path) -> None:
    module = PPOModule(**ppo_options(root, loss={"entropy_coef": 0.1, "entropy_clip": 2.0}))
    largest = math.log(module.policy.config.vocab_size)
    with pytest.warns(UserWarning, match=f"^loss.entropy_clip=35.0: .* at most {largest:.1f} nats"):
        PPOModule(**ppo_options(root, loss={"entropy_coef": 0.1, "entropy_clip": 35.0}))
    PPOModule(**ppo_options(root, loss={"entropy_clip": 35.0}))  # no bonus, no bound


def test_missing_ptx_source_is_told_where_its_loss_is_asked_for(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = "ppo: no data.ptx_sources, so there is no language-model loss (Eq. 17)"
    for ptx, coef, times in ((False, 0.1, 1), (True, 0.1, 0), (False, 0.0, 0)):
        caplog.clear()
        module = PPOModule(**ppo_options(root, loss={"ptx_coef": coef}))
        with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
            fit_module(module, prompts(root, ptx=ptx, batch_size=4), tmp_path)
        assert caplog.text.count(message) == times


def test_max_iterations_is_the_length_of_the_run(root: Path, tmp_path: Path) -> None:
    module = PPOModule(**ppo_options(root, max_iterations=3))
    run = fit_module(module, prompts(root, batch_size=4), tmp_path, max_epochs=-1)
    assert int(module.ppo.iteration) == 3
    run.save_checkpoint(tmp_path / "end.ckpt")
    resumed = PPOModule(**ppo_options(root, max_iterations=3))
    end = {"ckpt_path": tmp_path / "end.ckpt"}
    fit_module(resumed, prompts(root, batch_size=4), tmp_path, max_epochs=-1, **end)
    assert int(resumed.ppo.iteration) == 3  # and not one more


def test_lightnings_max_steps_is_refused_with_advice(root: Path, tmp_path: Path) -> None:
    refusal = r"trainer.max_steps: expected -1 \(off\), got 12: .* set model.max_iterations"
    with pytest.raises(ValueError, match=refusal):
        fit_module(PPOModule(**ppo_options(root)), prompts(root), tmp_path, max_steps=12)
    # a trial sets it for itself
    fit_module(PPOModule(**ppo_options(root)), prompts(root), tmp_path, fast_dev_run=True)


def test_critic_pretraining_as_long_as_the_run_is_a_warning(root: Path, tmp_path: Path) -> None:
    module = PPOModule(**ppo_options(root, critic_pretraining={"iterations": 2}))
    with pytest.warns(UserWarning, match=r"iterations=2: the run has 2 iterations, so that the"):
        fit_module(module, prompts(root), tmp_path, max_epochs=2)


def test_critic_pretraining_longer_than_the_run_is_refused(root: Path, tmp_path: Path) -> None:
    module = PPOModule(**ppo_options(root, critic_pretraining={"iterations": 3}))
    with pytest.raises(ValueError, match=r"pretraining.iterations: expected at most the 2 iter"):
        fit_module(module, prompts(root), tmp_path, max_epochs=2)


@pytest.mark.filterwarnings("ignore:.*limit_train_batches=0")
def test_run_without_a_batch_is_refused_before_its_pretraining(root: Path, tmp_path: Path) -> None:
    module = PPOModule(**ppo_options(root, critic_pretraining={"iterations": 3}))
    with pytest.raises(ValueError, match="expected at least one batch to train on, got none"):
        fit_module(module, prompts(root), tmp_path, limit_train_batches=0)


@pytest.mark.parametrize(
    ("batches", "max_iterations", "pretraining", "expected", "warns"),
    [
        (5, None, 0, 5, False),
        (5, 3, 0, 3, False),
        (5, 7, 4, 5, False),
        (math.inf, 3, 2, 3, False),
        (5, 3, 3, 3, True),
    ],
)
def test_run_has_the_fewer_of_its_batches_and_iterations(
    monkeypatch: pytest.MonkeyPatch,
    batches: float,
    max_iterations: int | None,
    pretraining: int,
    expected: float,
    warns: bool,
) -> None:
    module: Any = SimpleNamespace(
        trainer=SimpleNamespace(estimated_stepping_batches=batches),
        max_iterations=max_iterations,
        critic_pretraining=CriticPretrainingOptions(iterations=pretraining),
    )
    monkeypatch.setattr("lit_rlhf.modules.ppo.is_trial", lambda trainer: False)
    with pytest.warns(UserWarning, match="the run has 3 iter") if warns else nullcontext():
        assert PPOModule._plan_iterations(module) == expected


def test_critic_pretraining_may_be_longer_if_it_can_end_early_or_the_run_is_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = SimpleNamespace(
        trainer=SimpleNamespace(estimated_stepping_batches=2),
        max_iterations=None,
        critic_pretraining=CriticPretrainingOptions(iterations=3, target_value_loss=0.5),
    )
    monkeypatch.setattr("lit_rlhf.modules.ppo.is_trial", lambda trainer: False)
    with pytest.warns(UserWarning, match="iterations=3: the run has 2 iterations"):
        assert PPOModule._plan_iterations(module) == 2
    module.critic_pretraining = CriticPretrainingOptions(iterations=3)
    monkeypatch.setattr("lit_rlhf.modules.ppo.is_trial", lambda trainer: True)
    assert PPOModule._plan_iterations(module) == 2


@pytest.mark.parametrize(
    ("max_new_tokens", "ptx_sources", "expected"),
    # prompts of at most 40 tokens, and text of at most 100
    [(30, [], 40 + 30), (30, ["text"], 100), (80, ["text"], 40 + 80)],
)
def test_networks_are_set_up_for_the_longest_sequence_of_the_run(
    max_new_tokens: int, ptx_sources: list[str], expected: int
) -> None:
    encoder = SimpleNamespace(max_prompt_length=40, max_length=100, contract=object())
    source = Mock()
    module: Any = SimpleNamespace(
        encoder=encoder,
        datamodule=SimpleNamespace(ptx_sources=ptx_sources),
        sampling=SimpleNamespace(max_new_tokens=max_new_tokens),
        reward=SimpleNamespace(models=[source]),
        ppo=Mock(),
    )
    PPOModule.setup(module, "validate")
    module.ppo.set_longest_sequence.assert_called_once_with(expected)
    source.check_contract.assert_called_once_with(encoder.contract)


def test_head_on_the_policys_trunk_has_the_critics_rate_and_decay() -> None:
    critic = build_scalar_model(tiny_causal_lm("llama"))
    (head,) = scalar_head_of(critic).parameters()
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.1, weight_decay=0.0)
    options = OptimizerOptions(learning_rate=0.5, weight_decay=0.25)
    module: Any = SimpleNamespace(critic_optimizer=options)
    PPOModule._add_head_group(module, optimizer, critic)
    trunk, own = optimizer.param_groups
    assert [id(parameter) for parameter in own["params"]] == [id(head)]
    assert (own["lr"], own["weight_decay"]) == (0.5, 0.25)
    assert len(trunk["params"]) == len(list(critic.parameters())) - 1
    assert all(parameter is not head for parameter in trunk["params"])
    assert (trunk["lr"], trunk["weight_decay"]) == (0.1, 0.0)


def test_adam_has_its_betas_and_decays_matrices_alone(root: Path) -> None:
    options = OptimizerOptions(1e-3, weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6)
    module = PPOModule(**ppo_options(root))
    decayed, not_decayed = module.build_optimizer(module.policy, options).param_groups
    for group, decay in ((decayed, 0.1), (not_decayed, 0.0)):
        assert group["weight_decay"] == decay
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.95), 1e-6, 1e-3)
    names = {id(p): name for name, p in module.policy.named_parameters()}
    assert {p.dim() for p in decayed["params"]} == {2}
    assert all("norm" in names[id(p)] for p in not_decayed["params"])
    assert len(decayed["params"]) + len(not_decayed["params"]) == len(names)
