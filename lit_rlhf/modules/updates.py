"""Updates of a network, in micro-batches, and skipped where a number is not finite.

A NaN in a loss would reach every weight of a network and every moment of its optimizer. The step is
skipped on all ranks instead; a run that skips too many in a row ends with an error.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers.pytorch_utils import Conv1D

from lit_rlhf.checks import check_count
from lit_rlhf.errors import UserError
from lit_rlhf.forward import LanguageModel, trunk_of, unwrap_model
from lit_rlhf.rollout import split_by_tokens
from lit_rlhf.stats import global_max, global_sum, world_size
from lit_rlhf.strategies import backward, clipped_step, local_part

_MAX_NAMES = 4  # of quantities in a message
HELP = "a lower learning rate or clip norm, float32 weights, or a look at data and rewards."

ACTIVATION_BYTES = 2**30
"""Most that the activations of a micro-batch may take on a CPU where no size is set: 1 GiB."""

BatchT = TypeVar("BatchT", bound=tuple[Any, ...])

Share = tuple[float, Tensor, Mapping[str, Tensor]]
"""A micro-batch: the factor of its loss and metrics, its loss, 0-dim, and its metrics."""


class TooManySkippedUpdates(UserError):
    """A network could not be updated so often in a row that training stops.

    This is an exception and not a quiet end of training, since the run has not done its work: no
    finished model is saved, and whatever follows the run does not start.
    """


class _NotFiniteError(Exception):
    """Named numbers of an iteration are not finite; only `UpdateGuard.iteration` sees it."""


def trained_networks(module: LightningModule) -> list[tuple[LightningOptimizer, LRScheduler]]:
    """Each network's optimizer and schedule, in the order of `configure_optimizers`."""
    optimizers, schedules = module.optimizers(), cast(Any, module.lr_schedulers())
    if not isinstance(optimizers, list):
        return [(optimizers, schedules)]
    return list(zip(optimizers, schedules, strict=True))


def step_schedule(schedule: LRScheduler) -> None:
    """Step the learning rate even after a skipped update, so that a batch's stays the same."""
    with warnings.catch_warnings():
        # torch takes a skipped first update for a schedule that steps before its optimizer
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        schedule.step()


class UpdateGuard:
    """Makes updates, skips those in which a number is not finite, and counts these.

    Every rank has to call its methods at the same points, since ranks agree on what is skipped.
    `skipped` says whether the last iteration ended early, as a number was not finite. Training
    stops at `max_in_a_row` skipped updates of a network in a row.
    """

    def __init__(self, max_in_a_row: int) -> None:
        check_count("max_skipped_in_a_row", max_in_a_row)
        self.max_in_a_row = max_in_a_row
        self.in_a_row: dict[str, int] = {}
        self.skipped = False
        self._count = 0

    def update(
        self,
        module: LightningModule,
        network: str,
        optimizer: LightningOptimizer,
        shares: Iterable[Share],
        max_norm: float | None,
        place: str,
    ) -> tuple[dict[str, Tensor], Tensor, bool]:
        """Clip and step, or skip the step where a loss or the gradient norm is not finite.

        Returns summed metrics, the gradient norm before clipping, and whether a step was made.

        Gradients and metrics of the `shares` add up; losses are the metrics whose key ends with
        `loss`. Messages say what is updated (`network`) and where in the run (`place`).
        """
        totals: dict[str, Tensor] = {}
        for factor, loss, metrics in shares:
            backward(module, factor * loss, optimizer)
            for key, value in metrics.items():
                share = factor * value.detach()
                totals[key] = totals[key] + share if key in totals else share
        losses = {key: value for key, value in totals.items() if key.endswith("loss")}
        if found := find_non_finite(losses):
            # else its gradient would be added to the next update's
            optimizer.zero_grad()
            norm = torch.full((), torch.nan, device=next(iter(losses.values())).device)
            applied = False
        else:
            norm, applied = clipped_step(optimizer, max_norm)
            found = [] if applied else ["its gradient norm"]
        self._count_update(module.trainer, network, found, place)
        return totals, norm, applied

    @contextmanager
    def iteration(self, trainer: Trainer, networks: str, place: str) -> Iterator[None]:
        """Run an iteration, and leave the block where `require_finite` finds NaN.

        Messages name the `networks` that are not updated then, and the `place` in the run.
        """
        found: list[str] = []
        try:
            yield
        except _NotFiniteError as error:
            found = list(error.args)
        self.skipped = bool(found)
        self._count_update(trainer, networks, found, place)

    def require_finite(self, quantities: Mapping[str, Tensor]) -> None:
        """End the iteration unless these named tensors are finite on all ranks."""
        if found := find_non_finite(quantities):
            raise _NotFiniteError(*found)

    def check_end(self, trainer: Trainer) -> None:
        """Refuse to end a run well whose last update of a network was skipped."""
        if skipped := [network for network, row in self.in_a_row.items() if row]:
            raise TooManySkippedUpdates(
                f"the run ends with skipped updates of {', '.join(skipped)}, so that no finished "
                f"model is saved: a number was not finite. {_advise(trainer)}"
            )

    def pop_count(self) -> Tensor:
        """Number of skipped updates since the last call, 0-dim float32, as metrics are."""
        count, self._count = self._count, 0
        return torch.tensor(float(count))

    def _count_update(
        self, trainer: Trainer, network: str, not_finite: list[str], place: str
    ) -> None:
        """Count an update, and tell of a skipped one; too many of these in a row end the run."""
        if not not_finite:
            self.in_a_row[network] = 0
            return
        row = self.in_a_row[network] = self.in_a_row.get(network, 0) + 1
        self._count += 1
        skipped = f"update of {network} skipped at {place}: non-finite: {join_names(not_finite)}"
        if row < self.max_in_a_row:
            rank_zero_warn(
                f"{skipped}. Weights and moments are as before; {row} in a row, and training stops "
                f"after {self.max_in_a_row} (max_skipped_in_a_row)",
                category=UserWarning,
            )
            return
        raise TooManySkippedUpdates(
            f"{skipped}. It was number {row} in a row (max_skipped_in_a_row). {_advise(trainer)}"
        )


def weight_sums(network: nn.Module, name: str) -> dict[str, Tensor]:
    """Sum of each weight of a network; it is finite only if all numbers of the weight are."""
    # Unlike `isfinite`, a sum takes no memory.
    return {
        f"weights of {name} ({key})": local_part(weight.detach()).sum(dtype=torch.float32)
        for key, weight in network.named_parameters()
    }


def find_non_finite(quantities: Mapping[str, Tensor]) -> list[str]:
    """Names of the quantities that hold NaN or infinity on any rank, the same on all ranks."""
    flags = torch.stack([~torch.isfinite(value).all() for value in quantities.values()])
    counts, n_ranks = global_sum(flags.int()).tolist(), world_size()
    return [
        name if n_ranks == 1 else f"{name} (on {count} of {n_ranks} ranks)"
        for name, count in zip(quantities, counts, strict=True)
        if count
    ]


def join_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others: all weights may be NaN at once."""
    others = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {others} more" if others > 0 else "")


def require_finite_weights(module: nn.Module, name: str, where: str) -> None:
    """Refuse weights that are not finite, on all ranks; messages say `where` they come from."""
    if found := find_non_finite(weight_sums(module, name)):
        raise ValueError(
            f"{where}: expected finite numbers, got NaN or infinity in {join_names(found)}"
        )


def _advise(trainer: Trainer) -> str:
    checkpoint = find_last_saved(trainer.checkpoint_callbacks)
    last = f"The last checkpoint is {checkpoint}: resume from it with --ckpt_path"
    return f"{last if checkpoint else 'There is no checkpoint'}. What helps: {HELP}"


def find_last_saved(callbacks: Iterable[Any]) -> str | None:
    """The newest checkpoint that a run's checkpoint callbacks have saved and that still exists."""
    saved = [
        Path(path)
        for callback in callbacks
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, ""))
    ]
    existing = [path for path in saved if path.exists()]
    return str(max(existing, key=lambda path: path.stat().st_mtime)) if existing else None


def slice_batch(batch: BatchT, rows: slice) -> BatchT:
    """Rows of a NamedTuple of tensors, lists and nested NamedTuples; `None` stays `None`."""

    def cut(field: Any) -> Any:  # noqa: ANN401  # whatever a batch holds
        if isinstance(field, tuple):
            return slice_batch(field, rows)
        return None if field is None else field[rows]

    return type(batch)(*map(cut, batch))


def split_rows(lengths: Tensor, max_rows: int | None, max_tokens: int | None) -> Iterator[slice]:
    """Split rows of `lengths` `[B]` real tokens into consecutive parts within the given limits.

    A longer row than `max_tokens` is a part by itself.

    Examples:
        >>> import torch
        >>> [(part.start, part.stop) for part in split_rows(torch.tensor([3, 3, 3, 9]), None, 6)]
        [(0, 2), (2, 3), (3, 4)]
    """
    whole = slice(0, len(lengths))
    parts = [whole] if max_tokens is None else split_by_tokens(lengths.tolist(), max_tokens)
    for part in parts:
        size = max_rows or part.stop - part.start
        for start in range(part.start, part.stop, size):
            yield slice(start, min(start + size, part.stop))


def split_batch(
    model: LanguageModel, lengths: Tensor, max_rows: int | None, max_tokens: int | None
) -> list[tuple[slice, float]]:
    """Split this rank's batch, with `lengths` `[B]`, into the same number of parts on every rank.

    A part is rows, and the factor of their loss: 1, or 0 for rows that a rank takes again, as it
    has none left. Every backward may wait for the other ranks, but ranks differ in tokens, and in
    the dynamic batches of Section 4.2 in rows. Without any limit, a CPU takes as many tokens as fit
    into `ACTIVATION_BYTES`.
    """
    if max_rows is None and max_tokens is None and lengths.device.type == "cpu":
        max_tokens = tokens_within_memory(model)
    parts = [(rows, 1.0) for rows in split_rows(lengths, max_rows, max_tokens)]
    if max_rows is not None or max_tokens is not None:
        most = global_max(len(parts))
        parts += [(parts[0][0], 0.0)] * (most - len(parts))
    return parts


def tokens_within_memory(model: LanguageModel) -> int:
    """Number of tokens whose activations take about `ACTIVATION_BYTES` in `model`, at least 1."""
    return max(ACTIVATION_BYTES // activation_bytes(model), 1)


def activation_bytes(model: LanguageModel) -> int:
    """About what a token's activations take until the backward, in bytes.

    A layer keeps the inputs and outputs of its matmuls, and half as much again for norms, rotary
    positions and the activation function: measured on Llamas in float32. GPT-2 keeps twice that, as
    its activation function is written out in several operations. With gradient checkpointing there
    are the inputs of the layers, and one layer in full.
    """
    network = unwrap_model(model)
    with suppress(ValueError):  # without its own trunk it computes all logits: they count
        network = trunk_of(model)
    matmuls = [m for m in network.modules() if isinstance(m, nn.Linear | Conv1D)]
    widths = 1.5 * sum(sum(m.weight.shape) for m in matmuls)
    config = network.config.get_text_config()
    if any(getattr(module, "gradient_checkpointing", False) for module in network.modules()):
        n_layers = config.num_hidden_layers
        widths = widths / n_layers + n_layers * config.hidden_size
    return int(widths * next(network.parameters()).itemsize)
