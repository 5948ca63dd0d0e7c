"""Watch the training of any LightningModule, and end it when it goes wrong.

The classifier below learns three clouds of points. Its warm-up was written without an end: the
learning rate grows by 5 % at every batch, which helps for a while and then destroys what was
learned. The detector watches two metrics that the module logs and stops the run.

    python train_classifier.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_callbacks import CollapseDetector, Monitor, NonFiniteMonitor, StopTraining


class Classifier(LightningModule):
    """A small network that logs its loss and its accuracy at every batch."""

    def __init__(self, growth: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
        self.growth = growth

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Log what the monitors below are given the keys of."""
        points, labels = batch
        logits = self.layers(points)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("train/loss", loss)
        self.log("train/accuracy", (logits.argmax(1) == labels).float().mean())
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Plain gradient descent, with the learning rate that never stops growing."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.growth**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def clouds(count: int) -> TensorDataset:
    """Points around three centres, and the number of the centre of each."""
    labels = torch.randint(3, (count,))
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return TensorDataset(centres[labels] + torch.randn(count, 2), labels)


def train(growth: float) -> CollapseDetector:
    """Train for at most 300 batches under a detector, and return it."""
    seed_everything(0, verbose=False)
    detector = CollapseDetector(
        monitors=[
            # twice and half of what they were in the first records, after twenty to learn
            Monitor("train/loss", high_ratio=2.0, warmup=20),
            Monitor("train/accuracy", low_ratio=0.5, warmup=20),
            NonFiniteMonitor(),
        ],
        actions=[StopTraining()],
    )
    trainer = Trainer(
        max_epochs=1,
        callbacks=[detector],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(growth), DataLoader(clouds(300 * 64), batch_size=64))
    return detector


if __name__ == "__main__":
    verdict = train(growth=1.05).verdict
    print(f"{verdict.level.word} at batch {verdict.step}: {verdict.sentence}")
