"""Watch PPO on CartPole in Lightning: with updates that are too large, it forgets what it learned.

The loop is the usual one of reinforcement learning in Lightning: an environment of gymnasium, a
LightningModule with policy and value network, and batches that the policy itself collects.

    pip install gymnasium lit-callbacks    # from the folder `callbacks` of a clone
    python lightning_cartpole.py
"""

from __future__ import annotations

import gymnasium
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_callbacks import CollapseDetector, Monitor, NonFiniteMonitor, StopTraining

STEPS, GAMMA, CLIP = 512, 0.99, 0.2


class CartPole(LightningModule):
    """PPO with one network for the policy and one for the value."""

    def __init__(self, growth: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.environment = gymnasium.make("CartPole-v1")
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.growth = growth

    @torch.no_grad()
    def collect(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """Observations, actions and returns of whole episodes, and their mean length."""
        observations, actions, returns, lengths = [], [], [], []
        while len(returns) < STEPS:
            state, _ = self.environment.reset(seed=int(torch.randint(2**31, ())))
            length, is_over = 0, False
            while not is_over:
                observations.append(torch.as_tensor(state))
                logits = self.policy(observations[-1])
                actions.append(torch.distributions.Categorical(logits=logits).sample())
                state, _, ended, cut, _ = self.environment.step(int(actions[-1]))
                length, is_over = length + 1, ended or cut
            lengths.append(length)
            returns += [(1 - GAMMA ** (length - t)) / (1 - GAMMA) for t in range(length)]
        mean = sum(lengths) / len(lengths)
        return torch.stack(observations), torch.stack(actions), torch.tensor(returns), mean

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """An iteration: episodes, and ten updates on them."""
        observations, actions, returns, length = self.collect()
        old = torch.distributions.Categorical(logits=self.policy(observations).detach())
        advantages = returns - self.value(observations).squeeze(-1).detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * self.growth**batch_idx
        for _ in range(10):
            new = torch.distributions.Categorical(logits=self.policy(observations))
            ratio = (new.log_prob(actions) - old.log_prob(actions)).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.min(ratio * advantages, clipped * advantages).mean()
            error = (self.value(observations).squeeze(-1) - returns).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss + 0.01 * error)
            optimizer.step()
        new = torch.distributions.Categorical(logits=self.policy(observations))
        kl = torch.distributions.kl_divergence(old, new).mean()
        self.log_dict({"episode_length": length, "kl": kl, "entropy": new.entropy().mean()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam; the learning rate is set in each iteration."""
        return torch.optim.Adam(self.parameters())


def train(growth: float, iterations: int = 80) -> CollapseDetector:
    """Train for a limited number of iterations under a detector, and return it."""
    seed_everything(0, verbose=False)
    detector = CollapseDetector(
        monitors=[
            Monitor("episode_length", low_ratio=0.5, warmup=20),
            Monitor("kl", high_ratio=4.0, warmup=20),
            Monitor("entropy", low_ratio=0.5, warmup=20),
            NonFiniteMonitor(),
        ],
        actions=[StopTraining()],
        votes=2,  # one alone, such as short episodes, may be bad luck
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[detector],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(CartPole(growth), DataLoader(range(iterations)))  # type: ignore[arg-type]
    print(f"growth {growth}: ended after {trainer.global_step // 10} iterations:", end=" ")
    print(f"{detector.verdict.level.word}: {detector.verdict.sentence}")
    print({key: round(float(value), 3) for key, value in trainer.callback_metrics.items()})
    return detector


if __name__ == "__main__":
    train(1.0)
    train(1.1)
