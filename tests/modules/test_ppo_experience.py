"""PPO before the update: sampling, values, rewards, advantages."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lit_rlhf.data import PromptBatch
from lit_rlhf.forward import response_values
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO, Collected, iteration_draws
from lit_rlhf.rewards import Scores
from lit_rlhf.rollout import Experience, RolloutBatch, RolloutMetrics, TokenStatistics
from tests.support.stages import (
    first_batch,
    fit_module,
    nested,
    ppo_options,
    prompts,
    with_algorithm,
    write_data,
    write_models,
)
from tests.support.tiny_models import with_dropout

# no whitening: advantages can be worked out by hand
PLAIN = dict.fromkeys(("advantages.normalization", "reward_shaping.normalization"), False)
PLAIN |= {"reward_shaping.clip": None}


@pytest.fixture(scope="module")
def batch(root: Path) -> PromptBatch:
    return first_batch(prompts(root), root)


def rollouts_of(batch: PromptBatch, terminated: list[bool], lengths: list[int]) -> RolloutBatch:
    """Responses of given lengths to the first prompts; those that terminated end with EOS."""
    n_rows, width = len(lengths), max(lengths)
    ids = torch.randint(5, 280, (n_rows, width), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    for row, (ended, length) in enumerate(zip(terminated, lengths, strict=True)):
        if ended:
            ids[row, length - 1] = 2
    return RolloutBatch(
        prompt_ids=batch.input_ids[:n_rows],
        prompt_mask=batch.attention_mask[:n_rows],
        response_ids=ids.masked_fill(~mask, 0),
        response_mask=mask,
        terminated=torch.tensor(terminated),
    )


def estimates_of(rollouts: RolloutBatch) -> TokenStatistics:
    """Arbitrary numbers, 0 behind the responses."""
    generator = torch.Generator().manual_seed(0)
    shape, mask = rollouts.response_mask.shape, rollouts.response_mask

    def numbers() -> Tensor:
        return torch.randn(shape, generator=generator).masked_fill(~mask, 0.0)

    by_response = torch.randn(shape[0], generator=generator)
    return TokenStatistics(
        logprobs=-numbers().abs(),
        ref_logprobs=-numbers().abs(),
        entropy=numbers().abs(),
        values=numbers(),
        next_values=by_response,
        ref_prompt_entropy=by_response,
    )


def test_sampling_is_on_and_follows_the_seed(root: Path, batch: PromptBatch) -> None:
    module = PPOModule(**ppo_options(root))
    rollouts, repeated, other_seed = (module.ppo.rollout(batch, seed=seed) for seed in (1, 1, 2))
    for field, repeated_field in zip(rollouts[:5], repeated[:5], strict=True):
        assert torch.equal(field, repeated_field)
    assert not torch.equal(rollouts.response_ids[:, :1], other_seed.response_ids[:, :1])


def test_an_update_learns_from_prompts_with_unlike_scores(root: Path, tmp_path: Path) -> None:
    learned: list[Experience] = []

    class Scored(PPO):
        def score(self, rollouts: RolloutBatch, batch: PromptBatch) -> Scores:
            self.prompt_ids = batch.input_ids
            # two responses to each of eight prompts, alike but for the fourth and the seventh
            return Scores(torch.tensor([*[1.0] * 6, 0.0, 1.0, *[1.0] * 4, 1.0, 0.0, 1.0, 1.0]))

        def update(self, experience: Experience, *arguments: Any) -> dict[str, Tensor]:
            learned.append(experience)
            return super().update(experience, *arguments)

    options: dict[str, Any] = {
        "responses_per_prompt": 2,
        "advantages": {"estimator": "rloo", "learned_prompts": 2},
        "minibatches": {"minibatch_size": 1, "ppo_epochs": 1},
        "policy_optimizer": {"lr_scheduler": "linear"},
    }
    module = with_algorithm(Scored)(**ppo_options(root, **options))
    run = fit_module(module, prompts(root, ptx=True), tmp_path)
    ids, width = module.ppo.prompt_ids[[6, 7, 12, 13]], learned[0].rollouts.prompt_ids.shape[1]
    assert torch.equal(learned[0].rollouts.prompt_ids, ids[:, -width:])
    assert float(run.callback_metrics["rollout/informative_share"]) == 2 / 8
    # four updates, one of warm-up and 3, 2 and 1 thirds of the rate
    assert int(module.ppo.ppo_step) == 4
    assert run.lr_scheduler_configs[0].scheduler.get_last_lr()[0] == pytest.approx(1e-3 / 3)
    module = PPOModule(**ppo_options(root, **nested(options, {"advantages.learned_prompts": 9})))
    with pytest.raises(ValueError, match=r"learned_prompts: expected at most data.batch_size=8"):
        fit_module(module, prompts(root), tmp_path)


def test_draws_depend_on_seed_iteration_and_rank() -> None:
    places = [(s, i, r) for s in range(3) for i in range(20) for r in range(8)]
    draws = {
        (s, i, r): iteration_draws(seed=s, iteration=i, rank=r).rollout_seed for s, i, r in places
    }
    assert len(set(draws.values())) == len(places)
    assert iteration_draws(seed=1, iteration=2, rank=3).rollout_seed == draws[1, 2, 3]
    # a resumed run repeats them, whatever version it was begun with
    generator = torch.Generator().manual_seed(1_000_003 + 2 * 7_919 + 3 * 104_729)
    assert int(torch.randint(2**31, (), generator=generator)) == draws[1, 2, 3]


def test_an_iteration_returns_scores_and_lengths_for_callbacks(root: Path, tmp_path: Path) -> None:
    outputs_of_steps, rollouts_of_steps = [], []

    class Watched(PPO):
        def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
            rollouts = super().rollout(batch, seed)
            if self.training:
                rollouts_of_steps.append(rollouts)
            return rollouts

    outputs = LambdaCallback(
        on_train_batch_end=lambda _, __, step_outputs, *___: outputs_of_steps.append(step_outputs)
    )
    options = {"rewards": {"tests.support.reward_functions:ended": 2.0}, "critic_init": "policy"}
    module = with_algorithm(Watched)(**ppo_options(root, **options))
    logged = fit_module(module, prompts(root), tmp_path, callbacks=[outputs]).callback_metrics
    tokens = logged["throughput/response_tokens_per_second"] * logged["time/iteration"]
    total = int(outputs_of_steps[-1]["response_lengths"].sum())
    assert float(tokens) == pytest.approx(total, rel=1e-5)
    for step_outputs, rollouts in zip(outputs_of_steps, rollouts_of_steps, strict=True):
        assert step_outputs["response_lengths"].tolist() == rollouts.response_mask.sum(1).tolist()
        assert step_outputs["scores"].tolist() == (4.0 * rollouts.terminated - 2.0).tolist()


def test_ratio_is_taken_against_rollout_policy_or_reference(root: Path, batch: PromptBatch) -> None:
    rollouts = rollouts_of(batch, [True, False], [3, 2])
    estimates, rewards = estimates_of(rollouts), torch.zeros(2, 3)
    old = {"rollout": estimates.logprobs, "reference": estimates.ref_logprobs}
    for old_policy, expected in old.items():
        module = PPOModule(**ppo_options(root, loss={"old_policy": old_policy}))
        assert torch.equal(
            module.ppo.experience(rollouts, rewards, estimates).old_logprobs, expected
        )


@pytest.mark.parametrize(
    ("normalization", "scaling", "clip"),
    [
        (True, False, 0.8),
        (True, False, None),
        (False, True, None),
        (False, False, 1.5),
        (False, False, None),
    ],
)
def test_scores_are_reparameterized_by_the_moments_of_the_whole_stream(
    root: Path, normalization: bool, scaling: bool, clip: float | None
) -> None:
    shaping = {"normalization": normalization, "scaling": scaling, "clip": clip}
    module = PPOModule(**ppo_options(root, reward_shaping=shaping))
    if normalization:  # a single response has a reward
        fresh = PPOModule(**ppo_options(root, reward_shaping=shaping))
        assert fresh.ppo.reparameterize(torch.tensor([3.0])).tolist() == [0.0]
    scores = [1.0, 4.0, -2.0, 7.0, 0.5]
    module.ppo.reparameterize(torch.tensor(scores[:3]))
    actual = module.ppo.reparameterize(torch.tensor(scores[3:])).tolist()
    mean = sum(scores) / 5
    std = (sum((x - mean) ** 2 for x in scores) / 5) ** 0.5
    for shaped, score in zip(actual, scores[3:], strict=True):
        expected = (score - mean * normalization) / (std if normalization or scaling else 1.0)
        if clip is not None:
            expected = min(max(expected, -clip), clip)
        assert shaped == pytest.approx(expected, rel=1e-6)
    assert float(module.ppo.score_moments.count) == 5


def test_responses_that_end_at_once_are_legal(root: Path, batch: PromptBatch) -> None:
    rollouts, module = rollouts_of(batch, [True] * 4, [1] * 4), PPOModule(**ppo_options(root))
    estimates, four_prompts = module.ppo.estimate(rollouts), batch.select(range(4))
    scores = module.ppo.score(rollouts, four_prompts)
    metrics = module.ppo.measure(Collected(four_prompts, rollouts, scores, estimates)).compute()
    rewards = module.ppo.shape_rewards(rollouts, scores, estimates)
    experience = module.ppo.experience(rollouts, rewards, estimates)
    policy, _ = module.ppo.policy_loss(experience, torch.tensor(4.0))
    critic, _ = module.ppo.critic_loss(experience, torch.tensor(4.0))
    assert torch.isfinite(torch.stack([policy, critic, *metrics.values()])).all()
    assert float(metrics["rollout/response_length"]) == 1.0


@pytest.mark.parametrize("pretraining", [0, 1])
def test_coefficient_waits_for_training(pretraining: int, root: Path, tmp_path: Path) -> None:
    shaping = {"kl_coef": 0.2, "kl_target": 4.0, "kl_horizon": 100}
    options = {"reward_shaping": shaping, "critic_pretraining.iterations": pretraining}
    module = PPOModule(**ppo_options(root, **options))
    warning = pytest.warns(UserWarning, match="the policy is not trained")
    with warning if pretraining else nullcontext():
        fit_module(module, prompts(root), tmp_path, limit_train_batches=1, max_epochs=1)
    assert (float(module.ppo.kl_coef) == 0.2) == bool(pretraining)


def test_the_coefficient_of_the_iteration_is_logged_and_kl_of_a_response_moves_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**shaping: Any) -> tuple[PPOModule, dict[str, float]]:
        module = PPOModule(**ppo_options(root, reward_shaping={"kl_coef": 0.2, **shaping}))
        with torch.no_grad():
            for parameter in module.policy.parameters():
                parameter.mul_(1.1)
        logged = fit_module(module, prompts(root), tmp_path).callback_metrics
        return module, {key: float(value) for key, value in logged.items()}

    _, fixed = run()
    # a target that KL per response is above and KL per token below
    target = (fixed["rollout/kl"] * fixed["rollout/kl_per_token"]) ** 0.5
    assert fixed["rollout/kl"] > 1.3 * target > 1.3 * 1.3 * fixed["rollout/kl_per_token"] > 0
    module, logged = run(kl_target=target, kl_horizon=100)
    assert logged["rollout/kl"] == fixed["rollout/kl"]
    assert logged["ppo/kl_coef"] == pytest.approx(0.2)
    assert float(module.ppo.kl_coef) == pytest.approx(0.2 * (1 + 0.2 * 8 / 100), rel=1e-6)
    compute = RolloutMetrics.compute
    on_three_ranks = {"rollout/responses": torch.tensor(24.0)}
    monkeypatch.setattr(RolloutMetrics, "compute", lambda self: compute(self) | on_three_ranks)
    module, _ = run(kl_target=target, kl_horizon=100)
    assert float(module.ppo.kl_coef) == pytest.approx(0.2 * (1 + 0.2 * 24 / 100), rel=1e-6)


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_entropy_is_computed_for_its_bonus_alone(root: Path, tmp_path: Path, coef: float) -> None:
    options = {"loss.entropy_coef": coef, "loss.entropy_clip": 1.0}
    logged = fit_module(PPOModule(**ppo_options(root, **options)), prompts(root), tmp_path)
    assert ("ppo/entropy_loss" in logged.callback_metrics) == (coef > 0)


def test_the_critic_has_no_dropout(tmp_path: Path) -> None:
    folder = write_models(write_data(tmp_path), with_dropout("gpt2"))
    module = PPOModule(**ppo_options(folder)).train()
    rollouts = rollouts_of(first_batch(prompts(folder), folder), [True, False], [3, 2])
    first_values, second_values = (
        response_values(module.critic, rollouts.sequence_ids, rollouts.sequence_mask, 3)
        for _ in range(2)
    )
    assert torch.equal(first_values[rollouts.response_mask], second_values[rollouts.response_mask])


def test_iterations_draw_anew_and_validations_alike(root: Path, tmp_path: Path) -> None:
    seeds, iterations = [], []

    class Watched(PPO):
        def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
            (iterations if self.training else seeds).append(seed)
            return super().rollout(batch, seed)

    options = ppo_options(root, seed=5, minibatches={"minibatch_size": 4})
    module = with_algorithm(Watched)(**options)
    fit_module(module, prompts(root, batch_size=4), tmp_path, max_epochs=2, limit_val_batches=2)
    assert (int(module.ppo.iteration), len(set(iterations))) == (4, 4)
    # the first validation samples the responses of the start too
    first_seed, second_seed = seeds[0], seeds[2]
    # the run's seed and the number of the batch
    assert (first_seed, second_seed) == (5, 6)
    assert seeds == [first_seed, first_seed, second_seed, second_seed, first_seed, second_seed]


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("clip", {"ratio_clip": 0.2, "ratio_clip_high": 0.3, "dual_clip": 1.5}),
        ("unclipped", {}),
        ("kl_penalty", {"kl_penalty_coef": 0.7}),
        ("policy_gradient", {}),
    ],
)
def test_each_objective_is_its_sum_over_tokens_by_the_denominator(
    root: Path, batch: PromptBatch, objective: str, options: dict[str, Any]
) -> None:
    rollouts = rollouts_of(batch, [True, False], [4, 3])
    estimates, rewards = estimates_of(rollouts), torch.randn(2, 4)
    module = PPOModule(**ppo_options(root, loss={"policy_objective": objective, **options}))
    experience = module.ppo.experience(rollouts, rewards, estimates)
    logprobs = estimates.logprobs + torch.linspace(-0.9, 0.9, 8).view(2, 4)
    total = 0.0
    for row, step in rollouts.response_mask.nonzero().tolist():
        new, old = float(logprobs[row, step]), float(experience.old_logprobs[row, step])
        advantage, ratio = float(experience.advantages[row, step]), math.exp(new - old)
        loss = -advantage * (new if objective == "policy_gradient" else ratio)
        if objective == "clip":
            loss = max(loss, -advantage * min(max(ratio, 0.8), 1.3))
            loss = min(loss, -advantage * 1.5) if advantage < 0 else loss
        if objective == "kl_penalty":
            loss += 0.7 * (ratio - 1 - (new - old))
        total += loss
    output = module.ppo.policy_objective(logprobs, experience, torch.tensor(50.0))
    assert float(output.loss) == pytest.approx(total / 50, rel=1e-5)
