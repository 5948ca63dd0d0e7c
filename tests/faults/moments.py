"""Moments of a command at which a fault can strike: one hook per phase.

A hook is installed in a process that was forked for one run, and calls a function the nth time that
the run reaches the phase.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

import lit_callbacks.rollback
from lit_rlhf.modules import PPOModule
from lit_rlhf.remote import RemoteClient

Strike = Callable[[], None]


class Moments:
    """Counts the moments of a phase and strikes at the nth.

    Args:
        phase: A key of `PHASES`.
        nth: Number of the moment, from 1; 0 never strikes.
        strike: What happens there.
    """

    def __init__(self, phase: str, nth: int, strike: Strike) -> None:
        self.nth, self.strike = nth, strike
        self.count = 0
        self.training = self.validating = False
        PHASES[phase](self)

    def passed(self) -> None:
        self.count += 1
        if self.count == self.nth:
            self.strike()

    def before(self, owner: Any, name: str) -> None:
        """Pass a moment before each call of `owner.name`."""
        function = getattr(owner, name)

        def called(*arguments: Any, **options: Any) -> Any:
            self.passed()
            return function(*arguments, **options)

        setattr(owner, name, called)

    def follow(self, hook: str, **state: bool) -> None:
        """Set attributes of this object before a hook of PPO runs."""
        original = getattr(PPOModule, hook)

        def called(module: PPOModule, *arguments: Any) -> Any:
            vars(self).update(state)
            return original(module, *arguments)

        setattr(PPOModule, hook, called)


def forwards(wanted: Callable[[Moments], bool]) -> Callable[[Moments], None]:
    """Forward passes of a network's trunk, while `wanted` holds."""

    def install(moments: Moments) -> None:
        moments.follow("on_train_start", training=True)
        moments.follow("on_validation_start", validating=True)
        moments.follow("on_validation_end", validating=False)

        def trunk_called(module: torch.nn.Module, *_: Any) -> None:
            trunk = isinstance(module, PreTrainedModel) and module.base_model is module
            if trunk and wanted(moments):
                moments.passed()

        torch.nn.modules.module.register_module_forward_pre_hook(trunk_called)

    return install


def update(moments: Moments) -> None:
    """Forward passes with gradients, and optimizer steps."""
    forwards(lambda m: m.training and torch.is_grad_enabled())(moments)
    register_optimizer_step_pre_hook(lambda *_: moments.passed())


def write(moments: Moments) -> None:
    """Writes to a checkpoint."""
    serialize: Callable[..., None] = torch.save

    def announced(content: object, file: Any) -> None:
        class Announced:
            flush = file.flush

            def write(self, data: bytes) -> Any:
                moments.passed()
                return file.write(data)

        serialize(content, Announced())

    owner: Any = torch
    owner.save = announced


def place(moments: Moments) -> None:
    """Steps that force a file or folder to disk and give it its name."""
    moments.before(os, "fsync")
    moments.before(Path, "replace")


def load(moments: Moments) -> None:
    """Loading of weights."""
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def called(cls: type, *arguments: Any, **options: Any) -> Any:
        moments.passed()
        return original(cls, *arguments, **options)

    owner: Any = PreTrainedModel
    owner.from_pretrained = classmethod(called)


PHASES: dict[str, Callable[[Moments], None]] = {
    "load": load,
    "tokenize": lambda m: m.before(transformers.PreTrainedTokenizerBase, "__call__"),
    "rollout": forwards(lambda m: m.training and not torch.is_grad_enabled() and not m.validating),
    "update": update,
    "validate": forwards(lambda m: m.training and m.validating),
    "write": write,
    "place": place,
    "finish": lambda m: m.before(PreTrainedModel, "save_pretrained"),
    "restore": lambda m: m.before(lit_callbacks.rollback, "restore"),
    "forward": forwards(lambda _: True),
    "request": lambda m: m.before(RemoteClient, "post"),
}
"""How the moments of each phase are found."""
