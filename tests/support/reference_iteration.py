"""One PPO iteration recomputed in float64: row by row without padding, token by token.

It is written from the paper (arXiv 2307.04964) and shares no code with the package: the networks
are transformers', everything else is a loop.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_rlhf.modules import PPOModule
from lit_rlhf.rollout import Experience
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy, full_tensor
from tests.support.stages import ADAM_EPS, StepRecorder, fit_module, ppo_options, prompts
from tests.support.trajectories import ScriptedPPO

TRUNCATIONS = ("terminal", "bootstrap", "mask")
TEMPERATURE = 0.7
SHAPING = {"clip": 0.8, "kl_coef": 0.2, "missing_eos_penalty": 0.3}
GAE = {"gamma": 0.97, "lam": 0.9, "clip": 1.2}
LOSS = {"ratio_clip": 0.05, "value_clip": 0.05, "ptx_coef": 0.3}
LOSS |= {"entropy_coef": 0.1, "entropy_clip": 3.0}
POLICY = {"learning_rate": 2e-3, "weight_decay": 0.5, "grad_clip": 0.5, "eps": ADAM_EPS}
CRITIC = {"learning_rate": 3e-3, "weight_decay": 0.3, "grad_clip": 0.4, "eps": ADAM_EPS}
EPOCHS, MINIBATCH = 2, 4  # rollouts of a minibatch on all ranks

# Ten times what these loops themselves move, rounded up to one digit, when they run in float32
# with the rows of a minibatch in reverse order, or in float64 from weights with a relative noise of
# 2**-24. The most under torch's kernels for AVX-512, for AVX2 and for neither: metrics 7.9e-6,
# gradients 1.9e-5, and weights 1.2e-5 of the way that they go.
METRIC_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 2e-4
WEIGHT_TOLERANCE = 2e-4


class Sample(NamedTuple):
    """Token ids of a prompt, its response (with EOS if ended) and a text with learned targets."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    ended: bool
    text: tuple[int, ...]
    targets: tuple[bool, ...]


@dataclass(frozen=True)
class Iteration:
    """One iteration of the module on one rank.

    Attributes:
        samples: The rank's samples.
        order: Places in `samples` of each minibatch.
        start: Weights by network before the iteration.
        end: Weights by network after it.
        gradients: Clipped gradients of each step by network; empty under engines, which clip inside
            their step.
        logged: Logged metrics.
    """

    samples: list[Sample]
    order: list[list[int]]
    start: dict[str, dict[str, Tensor]]
    end: dict[str, dict[str, Tensor]]
    gradients: dict[str, list[dict[str, Tensor]]]
    logged: dict[str, float]


class Expected(NamedTuple):
    """What the reference computes: see `Iteration`."""

    end: dict[str, dict[str, Tensor]]
    gradients: dict[str, list[dict[str, Tensor]]]
    logged: dict[str, float]


# --- the iteration of the module


class RecordedPPO(ScriptedPPO):
    """Keeps the samples, and which of them are in each minibatch."""

    samples: list[Sample]
    order: list[list[int]]

    def rollout(self, batch: Any, seed: int) -> Any:
        rollouts = super().rollout(batch, seed)
        rows = zip(*rollouts[:5], *batch.ptx, strict=True)
        for prompt, real, response, own, ended, text, present, targets in rows:
            ids = (prompt[real], response[own], text[present], targets[present])
            prompt, response, text, targets = (tuple(row.tolist()) for row in ids)
            self.samples.append(Sample(prompt, response, bool(ended), text, targets))
        return rollouts

    def train_critic(self, minibatch: Experience, *arguments: Any) -> dict[str, Tensor]:
        rollouts, own_prompts = minibatch.rollouts, [sample.prompt for sample in self.samples]
        rows = zip(rollouts.prompt_ids, rollouts.prompt_mask, strict=True)
        self.order.append([own_prompts.index(tuple(ids[mask].tolist())) for ids, mask in rows])
        return super().train_critic(minibatch, *arguments)


class Recorded(PPOModule):
    """A run that is recorded."""

    ppo_class = RecordedPPO
    ppo: RecordedPPO

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ppo.samples = []
        self.ppo.order = []


def build_module(root: Path, truncation: str, n_ranks: int = 1) -> Recorded:
    """The module with all tricks on, and a policy that has moved away from its reference."""
    constant = {"lr_scheduler": "constant"}
    sizes = {"minibatch_size": MINIBATCH // n_ranks, "ppo_epochs": EPOCHS}
    sizes |= {"micro_batch_size": 3 // n_ranks}  # does not divide the minibatch of one rank
    options = {
        "sampling.temperature": TEMPERATURE,
        "reward_shaping": {"normalization": True, "kl_estimator": "k1", **SHAPING, "kl_coef": 0.1},
        "advantages": {"normalization": True, "truncation": truncation, **GAE},
        "loss": LOSS,
        "policy_optimizer": {**POLICY, **constant},
        "critic_optimizer": {**CRITIC, **constant},
        "minibatches": sizes,
        "memory": {"shard_frozen": n_ranks > 1},
    }
    module = Recorded(**ppo_options(root, **options))
    module.ppo.kl_coef.fill_(SHAPING["kl_coef"])  # as the adaptive controller moves it
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return module


def run_iteration(
    root: Path, folder: Path, truncation: str, n_ranks: int = 1, **trainer: Any
) -> Iteration:
    """Run one iteration on eight prompts."""
    module, recorder = build_module(root, truncation, n_ranks), StepRecorder()
    start = states(module)
    datamodule = prompts(root, ptx=True, batch_size=8 // n_ranks)
    engines = isinstance(trainer.get("strategy"), MultiEngineDeepSpeedStrategy)
    run = fit_module(module, datamodule, folder, callbacks=[] if engines else [recorder], **trainer)
    logged = {key: float(value) for key, value in run.callback_metrics.items()}
    return Iteration(
        samples=module.ppo.samples,
        order=module.ppo.order,
        start=start,
        end=states(module),
        gradients=recorder.steps,
        logged=logged,
    )


def states(module: PPOModule) -> dict[str, dict[str, Tensor]]:
    networks = {"policy": module.policy, "critic": module.critic}
    return {
        name: {k: full_tensor(p.detach()).clone() for k, p in network.named_parameters()}
        for name, network in networks.items()
    }


# --- the same by loops


class Score(NamedTuple):
    """What is known of a response before the update; one number per token."""

    old_logprobs: list[float]
    old_values: list[float]
    advantages: list[float]
    returns: list[float]
    kl: float
    reward: float
    learned: bool


def load(auto: Any, folder: Path, state: dict[str, Tensor] | None = None) -> nn.Module:
    model: nn.Module = auto.from_pretrained(folder, dtype=torch.float64).eval()
    if state is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state[name])
    return model


def log_distributions(model: Any, before: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits of each token given what precedes it, `[len(tokens), V]`."""
    ids = torch.tensor([[*before, *tokens]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(before) - 1 : len(before) + len(tokens) - 1]


def read_policy(model: Any, sample: Sample) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-prob and entropy of each token of the response at the sampling temperature."""
    logits = log_distributions(model, sample.prompt, sample.response) / TEMPERATURE
    for token, row in zip(sample.response, logits, strict=True):
        logs = row - row.logsumexp(0)
        yield logs[token], -(logs.exp() * logs).sum()


def read_values(model: Any, sample: Sample) -> Tensor:
    """Value before each token of the response, and after the last one."""
    ids = torch.tensor([[*sample.prompt, *sample.response]])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    values: Tensor = model.score(hidden)[len(sample.prompt) - 1 :, 0]
    return values


def mean_and_std(numbers: Sequence[float]) -> tuple[float, float]:
    mean = sum(numbers) / len(numbers)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))


def clip(number: float, bound: float) -> float:
    return max(-bound, min(bound, number))


@torch.no_grad()
def score_samples(
    policy: nn.Module, critic: nn.Module, root: Path, samples: list[Sample], truncation: str
) -> list[Score]:
    reference = load(AutoModelForCausalLM, root / "policy")
    reward_model = load(AutoModelForSequenceClassification, root / "reward")
    raw = [float(read_values(reward_model, sample)[-1]) for sample in samples]
    mean, std = mean_and_std(raw)
    scores = []
    for sample, score in zip(samples, raw, strict=True):
        reward = clip((score - mean) / std, SHAPING["clip"])
        if not sample.ended:
            reward -= SHAPING["missing_eos_penalty"]
        logprobs = [float(logprob) for logprob, _ in read_policy(policy, sample)]
        others = [float(logprob) for logprob, _ in read_policy(reference, sample)]
        kls = [logprob - other for logprob, other in zip(logprobs, others, strict=True)]
        rewards = [-SHAPING["kl_coef"] * kl for kl in kls]
        rewards[-1] += reward
        *values, after = read_values(critic, sample).tolist()
        bootstraps = truncation == "bootstrap" and not sample.ended
        following = [*values[1:], after if bootstraps else 0.0]
        steps = zip(rewards, following, values, strict=True)
        deltas = [r + GAE["gamma"] * n - v for r, n, v in steps]
        advantages = [
            sum(
                (GAE["gamma"] * GAE["lam"]) ** (later - t) * deltas[later]
                for later in range(t, len(deltas))
            )
            for t in range(len(deltas))
        ]
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        learned = sample.ended or truncation != "mask"
        scores.append(
            Score(
                old_logprobs=logprobs,
                old_values=values,
                advantages=advantages,
                returns=returns,
                kl=sum(kls),
                reward=sum(rewards),
                learned=learned,
            )
        )
    return scores


def whiten(scores: list[Score]) -> list[Score]:
    """Normalize and clip advantages like the advantages of one minibatch."""
    mean, std = mean_and_std([a for score in scores for a in score.advantages])
    bounded = [[clip((a - mean) / std, GAE["clip"]) for a in s.advantages] for s in scores]
    return [s._replace(advantages=own) for s, own in zip(scores, bounded, strict=True)]


class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101), after clipping by the norm."""

    def __init__(self, network: nn.Module, options: dict[str, float]) -> None:
        self.parameters = dict(network.named_parameters())
        self.options = options
        self.steps = 0
        self.m = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.gradients: list[dict[str, Tensor]] = []
        self.norms: list[float] = []

    def step(self, loss: Tensor) -> None:
        names, parameters = list(self.parameters), list(self.parameters.values())
        raw_gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in raw_gradients))
        factor = min(1.0, self.options["grad_clip"] / norm)
        gradients = {name: factor * g for name, g in zip(names, raw_gradients, strict=True)}
        self.norms.append(norm)
        self.gradients.append(gradients)
        self.steps += 1
        rate = self.options["learning_rate"]
        decay = self.options["weight_decay"]
        eps = self.options["eps"]
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                gradient = gradients[name]
                self.m[name] = 0.9 * self.m[name] + 0.1 * gradient
                self.v[name] = 0.999 * self.v[name] + 0.001 * gradient * gradient
                m = self.m[name] / (1 - 0.9**self.steps)
                v = self.v[name] / (1 - 0.999**self.steps)
                shrunk = (
                    parameter if parameter.dim() == 1 else parameter - rate * decay * parameter
                )  # norms keep their scale
                parameter.copy_(shrunk - rate * m / (v.sqrt() + eps))


def critic_loss(critic: nn.Module, batch: list[tuple[Sample, Score]], tokens: int) -> Any:
    """The loss of Eq. 16, and its metrics."""
    total, clips = torch.zeros((), dtype=torch.float64), 0
    for sample, score in batch:
        values = read_values(critic, sample)
        for value, old, target in zip(values, score.old_values, score.returns, strict=False):
            moved = float(value.detach()) - old
            plain = (value - target) ** 2
            if abs(moved) <= LOSS["value_clip"]:
                total = total + 0.5 * plain
                continue
            bounded = (old + clip(moved, LOSS["value_clip"]) - target) ** 2
            clips += bounded > float(plain.detach())
            total = total + 0.5 * (plain if float(plain.detach()) >= bounded else bounded)
    loss = total / tokens
    return loss, {"ppo/value_loss": float(loss.detach()), "ppo/value_clip_fraction": clips / tokens}


def policy_loss(
    policy: nn.Module, batch: list[tuple[Sample, Score]], tokens: int, texts: list[Sample]
) -> Any:
    """The loss of Eqs. 15 and 17 with the entropy bonus, and its metrics."""
    surrogate, bonus, text_nll = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    clips, kl, ratios = 0, 0.0, 0.0
    for sample, score in batch:
        read = read_policy(policy, sample)
        rows = zip(read, score.old_logprobs, score.advantages, strict=True)
        for (logprob, entropy), old, advantage in rows:
            ratio = (logprob - old).exp()
            bound = 1 + math.copysign(LOSS["ratio_clip"], advantage)
            plain_ratio = float(ratio.detach())
            is_clipped = plain_ratio > bound if advantage > 0 else plain_ratio < bound
            surrogate = surrogate - advantage * (bound if is_clipped else ratio)
            clips += is_clipped
            ratios += plain_ratio
            bonus = bonus + entropy.clamp(max=LOSS["entropy_clip"])
            moved = float(logprob.detach()) - old
            kl += math.exp(moved) - 1 - moved
    text_tokens = sum(sum(sample.targets) for sample in texts)
    for sample in texts:
        logits = log_distributions(policy, sample.text[:1], sample.text[1:])
        for token, target, row in zip(sample.text[1:], sample.targets[1:], logits, strict=True):
            if target:
                text_nll = text_nll - (row[token] - row.logsumexp(0))
    surrogate, entropy_loss = surrogate / tokens, -bonus / tokens
    text_nll = text_nll / text_tokens
    loss = surrogate + LOSS["entropy_coef"] * entropy_loss + LOSS["ptx_coef"] * text_nll
    return loss, {
        "ppo/policy_loss": float(surrogate.detach()),
        "ppo/entropy_loss": float(entropy_loss.detach()),
        "ppo/ptx_loss": float(text_nll.detach()),
        "ppo/clip_fraction": clips / tokens,
        "ppo/approx_kl": kl / tokens,
        "ppo/ratio": ratios / tokens,
    }


def recompute(root: Path, truncation: str, ranks: Sequence[Iteration]) -> Expected:
    """The iteration that these ranks ran, in one process."""
    start = ranks[0].start
    policy = load(AutoModelForCausalLM, root / "policy", start["policy"])
    critic = load(AutoModelForSequenceClassification, root / "reward", start["critic"])
    samples = [sample for rank in ranks for sample in rank.samples]
    scores = score_samples(policy, critic, root, samples, truncation)
    offsets = [sum(len(rank.samples) for rank in ranks[:n]) for n in range(len(ranks))]
    optimizers = {"policy": AdamW(policy, POLICY), "critic": AdamW(critic, CRITIC)}
    history: list[dict[str, float]] = []
    for parts in zip(*(rank.order for rank in ranks), strict=True):
        rows = [offset + row for offset, part in zip(offsets, parts, strict=True) for row in part]
        batch = [(samples[row], scores[row]) for row in rows if scores[row].learned]
        tokens = sum(len(sample.response) for sample, _ in batch)
        value_loss, metrics = critic_loss(critic, batch, tokens)
        optimizers["critic"].step(value_loss)
        learned, own = zip(*batch, strict=True)
        batch = list(zip(learned, whiten(list(own)), strict=True))
        loss, more = policy_loss(policy, batch, tokens, [samples[row] for row in rows])
        optimizers["policy"].step(loss)
        history.append(metrics | more)
    logged = {key: sum(step[key] for step in history) / len(history) for key in history[0]}
    for name, optimizer in optimizers.items():
        logged[f"ppo/{name}_grad_norm"] = sum(optimizer.norms) / len(optimizer.norms)
    left = [r - v for s in scores for r, v in zip(s.returns, s.old_values, strict=True)]
    _, unexplained = mean_and_std(left)
    _, total = mean_and_std([r for s in scores for r in s.returns])
    logged["ppo/explained_variance"] = 1 - unexplained**2 / total**2
    logged["rollout/kl"] = sum(score.kl for score in scores) / len(scores)
    logged["rollout/reward"] = sum(score.reward for score in scores) / len(scores)
    end = {n: {key: p.detach() for key, p in o.parameters.items()} for n, o in optimizers.items()}
    return Expected(end, {name: o.gradients for name, o in optimizers.items()}, logged)


def assert_follows_reference(actual: Iteration, expected: Expected) -> None:
    """Metrics, gradients and weights agree up to the rounding of float32."""
    unlike = {
        key: (actual.logged[key], value)
        for key, value in expected.logged.items()
        if abs(actual.logged[key] - value) > METRIC_TOLERANCE * max(abs(value), 0.1)
    }
    assert unlike == {}
    for network, steps in actual.gradients.items():
        for step_gradients, target in zip(steps, expected.gradients[network], strict=True):
            named = {name: step_gradients[f"{network}.{name}"] for name in target}
            assert distance(named, target) < GRADIENT_TOLERANCE * distance(target, {})
    for network, weights in expected.end.items():
        way = distance(actual.start[network], weights)
        assert distance(actual.end[network], weights) < WEIGHT_TOLERANCE * way


def distance(actual: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """L2 norm of the difference; the norm of `actual` if `reference` is empty."""
    gaps = [
        x.double() - reference.get(name, torch.zeros(())).double() for name, x in actual.items()
    ]
    return math.sqrt(sum(float(gap.square().sum()) for gap in gaps))
