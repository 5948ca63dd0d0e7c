"""Small modules with two optimizers, for runs in separate processes."""

from itertools import pairwise
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion, OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from lit_rlhf.forward import call
from lit_rlhf.strategies import backward, clipped_step

STEPS = 20


def global_batch(index: int) -> list[Tensor]:
    """Inputs `[8, 4]` and targets `[8, 6]` of a step, by index: a resumed run sees the same."""
    generator = torch.Generator().manual_seed(100 + index)
    return [torch.randn(8, 4, generator=generator), torch.randn(8, 6, generator=generator) + 1.0]


class Network(nn.Sequential):
    """Computes in the type of its weights, like a language model, whose inputs are token ids."""

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self:
            inputs = layer(inputs.to(next(self.parameters()).dtype))
        return inputs


def network(sizes: list[int], seed: int) -> Network:
    """A tanh network with seeded weights."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(sizes):
        layer = nn.Linear(size_in, size_out)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        layers += [layer, nn.Tanh()]
    return Network(*layers[:-1])


class TwoNetworks(LightningModule):
    """Two networks, two AdamW with their own rates and schedules, a frozen network, a buffer."""

    moments: Tensor

    def __init__(self, first: list[int], second: list[int], max_norm: float | None = 0.5) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first: nn.Module = network(first, 1)
        self.second: nn.Module = network(second, 2)
        self.frozen = network(first, 3).requires_grad_(False)
        self.register_buffer("moments", torch.zeros((), dtype=torch.float64))
        self.max_norm = max_norm
        self.records: list[dict[str, Any]] = []

    def configure_optimizers(self) -> OptimizerLRScheduler:
        first = torch.optim.AdamW(self.first.parameters(), lr=1e-2)
        groups: list[dict[str, Any]] = [  # two groups, with and without weight decay
            {"params": [p for p in self.second.parameters() if p.dim() > 1]},
            {"params": [p for p in self.second.parameters() if p.dim() == 1], "lr": 1e-2},
        ]
        second = torch.optim.AdamW(groups, lr=3e-2)
        schedules = [LambdaLR(first, lambda n: 0.9**n), LambdaLR(second, lambda n: 0.95**n)]
        return [first, second], schedules

    def pair(self) -> tuple[LightningOptimizer, LightningOptimizer]:
        first, second = cast("list[LightningOptimizer]", self.optimizers())
        return first, second

    def local(self, index: int) -> list[Tensor]:
        """This rank's rows: every strategy trains on the same global batch."""
        rank, world = self.trainer.global_rank, self.trainer.world_size
        convert = self.trainer.precision_plugin.convert_input
        return [convert(tensor[rank::world].to(self.device)) for tensor in global_batch(index)]

    def finish(self, *steps: tuple[Tensor, bool]) -> None:
        """Step the schedules and keep what a test looks at."""
        schedulers: list[LRSchedulerTypeUnion] = self.lr_schedulers()  # type: ignore[assignment]
        for scheduler in schedulers:
            scheduler.step()  # type: ignore[call-arg]
        self.moments += 1
        groups = [group for optimizer in self.pair() for group in optimizer.param_groups]
        self.record(*steps, rates=[group["lr"] for group in groups])

    def record(self, *steps: tuple[Tensor, bool], **more: Any) -> None:
        norms, applied = [float(norm) for norm, _ in steps], [applied for _, applied in steps]
        place = {"step": self.trainer.fit_loop.batch_idx}
        self.records.append({**place, "norms": norms, "applied": applied, **more})


class Gan(TwoNetworks):
    """The generator's loss runs through the discriminator; both accumulate two micro-batches."""

    def __init__(self) -> None:
        super().__init__([4, 16, 6], [6, 16, 1])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        noise, real = self.local(batch_idx)
        generator, discriminator = self.pair()
        for part in noise.chunk(2):
            loss = softplus(-self.second(self.first(part))).sum() / len(noise)
            backward(self, loss, generator)
        first = clipped_step(generator, self.max_norm)
        for part, true in zip(noise.chunk(2), real.chunk(2), strict=True):
            fake = self.first(part).detach()
            loss = softplus(self.second(fake)).sum() + softplus(-self.second(true)).sum()
            backward(self, loss / len(noise), discriminator)
        self.finish(first, clipped_step(discriminator, self.max_norm))


class PolicyAndCritic(TwoNetworks):
    """PPO's shape: the critic alone at first, then the policy with two losses and one step."""

    def __init__(self, pretraining: int = 5) -> None:
        super().__init__([4, 16, 6], [4, 12, 1])
        self.pretraining = pretraining

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        inputs, targets = self.local(batch_idx)
        policy, critic = self.pair()
        for part, goal in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            loss = (self.second(part)[:, 0] - goal.sum(1)).square().sum() / len(inputs)
            backward(self, loss, critic)
        steps = [clipped_step(critic, self.max_norm)]
        if batch_idx >= self.pretraining:
            loss = (self.first(inputs) - targets).square().mean()
            penalty = (self.first(inputs) - self.frozen(inputs)).square().mean()
            backward(self, loss + 0.1 * penalty, policy)
            extra = self.first(-inputs).square().mean()  # like a ptx loss: a second backward
            backward(self, 0.3 * extra, policy)
            steps.append(clipped_step(policy, self.max_norm))
        self.finish(*steps)


class WithFaults(PolicyAndCritic):
    """The inputs are NaN in batch 7, and in batch 9 on the last rank alone."""

    def local(self, index: int) -> list[Tensor]:
        inputs, targets = super().local(index)
        last = self.trainer.global_rank == self.trainer.world_size - 1
        if index == 7 or (index == 9 and last):
            inputs = inputs * torch.nan
        return [inputs, targets]


class Probe(TwoNetworks):
    """Plain gradient descent of rate 1: what a step moves is the gradient after clipping."""

    def __init__(self, scale_first: float, script: str = "step") -> None:
        super().__init__([4, 8, 6], [4, 8, 1], max_norm=0.25)
        self.scale_first = scale_first
        self.script = script
        self.start: dict[str, Tensor] = {}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.first, self.second)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        inputs, targets = self.local(batch_idx)
        first, second = self.pair()
        self.start = {k: v.detach().clone().cpu() for k, v in self.state_dict().items()}
        loss_first = (self.first(inputs) - targets).square().mean() * self.scale_first
        loss_second = self.second(inputs).square().mean()
        if self.script in ("abandon", "abandon_more"):  # a backward that is given up, then another
            backward(self, 3 * self.second(inputs).mean(), second)
            second.zero_grad()
        if self.script == "abandon_more":  # a loss of the last layer alone
            loss_second = call(self.second, self.loss_of_last_layer, inputs)
        backward(self, loss_first, first)
        backward(self, loss_second, second)
        if self.script == "lightning":  # clipping through Lightning's own manual-mode calls
            for optimizer in (first, second):
                self.clip_gradients(cast("Optimizer", optimizer), 0.25, "norm")
                optimizer.step()
                optimizer.zero_grad()
            return
        self.record(*(clipped_step(optimizer, self.max_norm) for optimizer in (first, second)))

    def loss_of_last_layer(self, inputs: Tensor) -> Tensor:
        layers = cast("Network", self.second)
        return layers[-1](layers[:-1](inputs).detach()).square().mean()

    def moved(self) -> dict[str, Tensor]:
        """What the last step changed."""
        return {k: v.detach().cpu() - self.start[k] for k, v in self.state_dict().items()}


class LanguageModels(TwoNetworks):
    """A causal LM with tied embeddings and recomputed activations, and a scalar model."""

    def __init__(self) -> None:
        super().__init__([4, 4], [4, 4])
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
        config = LlamaConfig(pad_token_id=0, tie_word_embeddings=True, **sizes)
        config.num_labels = 1
        with torch.random.fork_rng():
            torch.manual_seed(5)
            policy = LlamaForCausalLM(config)
            self.second = LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
        policy.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
        self.first = policy

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        inputs, targets = self.local(batch_idx)
        tokens = 1 + (inputs.repeat(1, 2).abs() * 7).long().clamp(max=30)
        policy, critic = self.pair()
        self.train()
        for part in tokens.chunk(2):
            logits = self.first(input_ids=part).logits[:, :-1].float()
            loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            backward(self, loss / tokens[:, 1:].numel(), policy)
        values = self.second(input_ids=tokens).logits[:, 0].float()
        backward(self, (values - targets.sum(1)).square().mean(), critic)
        self.finish(clipped_step(policy, self.max_norm), clipped_step(critic, self.max_norm))
