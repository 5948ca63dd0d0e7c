"""Learning rates: the table of docs/recipe.md, and what must not happen to a schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from transformers import SchedulerType

from lit_rlhf.modules import OptimizerOptions, PPOModule, RewardModule, SFTModule
from lit_rlhf.modules.options import SCHEDULES
from lit_rlhf.modules.schedules import build_schedule, learning_rate_factor
from tests.support import stages

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipe.md"


class Rates(stages.StepRecorder):
    """The learning rate of each step, by network."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[str, list[float]] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        network = "critic" if optimizer is trainer.optimizers[-1] else "policy"
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        self.rates.setdefault(network, []).append(rate)


def percents(rates: list[float], peak: float) -> str:
    return " ".join(f"{100 * rate / peak:.0f}" for rate in rates)


def one_network(module: LightningModule, data: Any, folder: Path, **options: Any) -> dict[str, str]:
    rates = Rates()
    stages.fit_module(module, data, folder, callbacks=[rates], **options)
    return {"": percents(rates.rates["critic"], 1e-3)}


def sft(root: Path, folder: Path) -> dict[str, str]:
    module = SFTModule(str(root / "policy"), optimizer={"learning_rate": 1e-3})
    return one_network(module, stages.demonstrations(root), folder, max_epochs=4)


def reward(root: Path, folder: Path) -> dict[str, str]:
    optimizer = {"learning_rate": 1e-3, "warmup_ratio": 0.5}
    module = RewardModule(str(root / "policy"), optimizer=optimizer)
    limits = {"max_epochs": -1, "max_steps": 8}
    return one_network(module, stages.preferences(root), folder, **limits)


def ppo(name: str, iterations: int, target: float | None) -> Callable[[Path, Path], dict[str, str]]:
    def run(root: Path, folder: Path) -> dict[str, str]:
        options = stages.ppo_options(
            root,
            policy_optimizer={"lr_scheduler": name, "warmup_ratio": 0.5},
            critic_optimizer={"lr_scheduler": name, "warmup_ratio": 0.5},
            critic_pretraining={"iterations": iterations, "target_value_loss": target},
            minibatches={"minibatch_size": 4, "ppo_epochs": 1},
            max_iterations=5,
        )
        module, rates = PPOModule(**options), Rates()
        stages.fit_module(module, stages.prompts(root), folder, max_epochs=-1, callbacks=[rates])
        return {network: percents(seen, 1e-3) for network, seen in rates.rates.items()}

    return run


RUNS: dict[str, Callable[[Path, Path], dict[str, str]]] = {
    "SFT, `cosine_with_min_lr`": sft,
    "reward model, `constant_with_warmup`": reward,
    "PPO, no critic pre-training": ppo("constant_with_warmup", 0, None),
    "PPO, 2 iterations of critic pre-training": ppo("constant_with_warmup", 2, None),
    "PPO, `linear`, pre-training ended after 1 of at most 3": ppo("linear", 3, 1e9),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_rates_are_those_of_the_table(root: Path, tmp_path: Path, name: str) -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {name}")]
    shown = {
        network.strip(): " ".join(rate for rate in rates.split() if rate != "-")
        for _, _, network, rates, _ in (row.split("|") for row in rows)
    }
    assert shown == RUNS[name](root, tmp_path)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 1.0])
def test_no_rate_is_0_and_none_climbs_after_warmup(name: str, warmup_ratio: float) -> None:
    options = OptimizerOptions(1e-3, lr_scheduler=name, warmup_ratio=warmup_ratio)
    warmup = round(40 * warmup_ratio)
    factors = [
        learning_rate_factor(options, update=update, total=40, warmup=warmup)
        for update in range(100)
    ]
    assert factors[:warmup] == pytest.approx([(k + 1) / warmup for k in range(warmup)])
    assert min(factors) > 0
    assert max(factors) <= 1
    after = factors[max(warmup - 1, 0) :]
    assert after == sorted(after, reverse=True)
    assert len(set(factors[39:])) == 1


def test_each_network_follows_its_own_schedule(root: Path, tmp_path: Path) -> None:
    options = stages.ppo_options(
        root,
        policy_optimizer={"lr_scheduler": "linear", "warmup_ratio": 0.0},
        critic_optimizer={"lr_scheduler": "constant"},
        minibatches={"minibatch_size": 4, "ppo_epochs": 1},
        max_iterations=2,
    )
    rates = Rates()
    data = stages.prompts(root)
    stages.fit_module(PPOModule(**options), data, tmp_path, max_epochs=-1, callbacks=[rates])
    shown = {network: percents(seen, 1e-3) for network, seen in rates.rates.items()}
    assert shown == {"policy": "100 75 50 25", "critic": "100 100 100 100"}


def test_warmup_takes_at_least_its_share_of_the_updates() -> None:
    options = OptimizerOptions(1e-3, lr_scheduler="constant_with_warmup", warmup_ratio=0.5)
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1e-3)
    (factor,) = build_schedule(optimizer, options, lambda: 5.0).lr_lambdas
    # half of five updates is rounded up to three
    assert [factor(update) for update in range(5)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_schedules_that_need_more_than_a_length_are_refused() -> None:
    others = {"reduce_lr_on_plateau", "greedy", "warmup_stable_decay"}
    assert {s.value for s in SchedulerType} - set(SCHEDULES) == others
    with pytest.raises(ValueError, match=r"lr_scheduler: expected one of linear, .*got 'greedy'"):
        OptimizerOptions(1e-3, lr_scheduler="greedy")


def test_a_resumed_schedule_knows_when_pretraining_ended(root: Path, tmp_path: Path) -> None:
    options = stages.ppo_options(
        root,
        policy_optimizer={"lr_scheduler": "linear", "warmup_ratio": 0.0},
        critic_pretraining={"iterations": 3, "target_value_loss": 1e9},
        minibatches={"minibatch_size": 8, "ppo_epochs": 1},
        max_iterations=5,
    )

    class Save(Rates):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: object) -> None:
            if int(module.ppo.iteration) == 3:
                trainer.save_checkpoint(tmp_path / "third.ckpt")

    whole, rest = Save(), Rates()
    data = stages.prompts(root)
    stages.fit_module(PPOModule(**options), data, tmp_path, max_epochs=-1, callbacks=[whole])
    module, third = PPOModule(**options), {"ckpt_path": tmp_path / "third.ckpt"}
    stages.fit_module(module, data, tmp_path, max_epochs=-1, callbacks=[rest], **third)
    assert whole.rates["policy"] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert (rest.rates["policy"], int(module.ppo.iteration)) == (whole.rates["policy"][2:], 5)
