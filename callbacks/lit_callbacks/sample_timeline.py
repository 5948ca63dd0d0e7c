"""What the model answers to the same few prompts, step by step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lit_callbacks.loggers import markdown_text, write_text, x_axis
from lit_callbacks.prompts import fixed_prompts
from lit_callbacks.text import number_text

Record = dict[str, Any]  # values: str, float, int or bool
OWN_KEYS = ("step", "prompt_index", "prompt")  # of a line, so a record must not have them


class SampleTimeline(Callback):
    """Ask the module for responses to the same prompts, again and again.

    The module has a method ``sample(prompts: list[str]) -> list[dict[str, str | float | int |
    bool]]`` that returns one record for each prompt, with at least ``response``; other entries
    (score, KL, length...) are shown as they come. It is called before the first batch, every
    `every_n_batches` training batches and at the end of fit, on every rank, in evaluation mode and
    without gradients. Training goes on as if it had not been called: the training modes and the
    random state of torch, NumPy and Python are put back.

    Rank 0 writes each response

    - to TensorBoard as the text ``samples/<index of the prompt>``, so that its slider is the
      timeline;
    - to a file of JSON lines, ``{"step": ..., "prompt_index": ..., "prompt": ..., **record}``.
      Numbers that are not finite are written as Python's `json` reads them (``NaN``).

    ``step`` is the loggers' x axis: what the module logs as ``step``, or else the optimizer steps.
    A step is sampled once. A fit that goes on from a checkpoint appends to the file and first
    drops the lines behind the checkpoint; a fit that starts anew starts the file anew. A file that
    is no timeline is left alone. With `fast_dev_run` nothing is written.

    Args:
        prompts: texts, or the path of a file: ``.jsonl`` with a field ``prompt`` (a text or the
            turns of a chat), or any other with one prompt per line.
        every_n_batches: training batches between two samplings, counted over all epochs.
        method: name of the module's method.
        file: the file of JSON lines; default ``samples.jsonl`` in the trainer's ``log_dir``.
        n_prompts: how many prompts are read from a file; a list is used as a whole.

    Raises:
        ValueError: without prompts, for a file or a line of it that cannot be used, and for a
            number that is less than 1; in fit if the module has no such method, if it does not
            return such records, and if there is a file that is no timeline.
    """

    def __init__(
        self,
        prompts: list[str] | str,
        every_n_batches: int = 10,
        method: str = "sample",
        file: str | None = None,
        n_prompts: int = 4,
    ) -> None:
        super().__init__()
        if every_n_batches < 1:
            raise ValueError(f"every_n_batches: expected at least 1, got {every_n_batches}")
        self.prompts = fixed_prompts(prompts, n_prompts)
        self.every_n_batches = every_n_batches
        self.method = method
        self.file = file
        self._sampled: int | None = None  # the step of the newest lines

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the module has the method."""
        if stage == "fit" and not callable(getattr(pl_module, self.method, None)):
            raise ValueError(
                f"method: expected {type(pl_module).__name__} to have a method {self.method!r} "
                "that takes a list of prompts and returns one record (a dict with 'response') for "
                "each, got no such method"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave in the file what this fit goes on from; sample if it goes on from nothing."""
        path, anew = self._path(trainer), trainer.fit_loop.total_batch_idx < 0
        if anew:
            self._sampled = None
        if _is_writer(trainer):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A checkpoint from before this callback does not say what is behind it.
            unknown = -math.inf if anew else math.inf
            _keep_lines(path, unknown if self._sampled is None else self._sampled)
        if anew:
            self._sample(trainer, pl_module, step=0)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Sample if it is time to."""
        if (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0:
            self._sample(trainer, pl_module, x_axis(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sample from the finished model."""
        self._sample(trainer, pl_module, x_axis(trainer))

    def state_dict(self) -> dict[str, Any]:
        """The step of the newest lines."""
        return {"sampled": self._sampled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take note of the step of the newest lines that are not behind the checkpoint."""
        self._sampled = state_dict["sampled"]

    def _sample(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if step == self._sampled:
            return
        path = self._path(trainer)  # asks all ranks, so before only one of them goes on
        # Asking for the GPUs' random state would start CUDA in a fit that does not use it.
        with _evaluating(pl_module), isolate_rng(include_cuda=pl_module.device.type == "cuda"):
            returned = getattr(pl_module, self.method)(list(self.prompts))
        records = _checked_records(
            returned, self.prompts, f"{type(pl_module).__name__}.{self.method}"
        )
        self._sampled = step
        if not _is_writer(trainer):
            return
        for index, (prompt, record) in enumerate(zip(self.prompts, records, strict=True)):
            write_text(trainer, f"samples/{index}", _table(prompt, record), step)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(
                _line({"step": step, "prompt_index": index, "prompt": prompt, **record})
                for index, (prompt, record) in enumerate(zip(self.prompts, records, strict=True))
            )

    def _path(self, trainer: Trainer) -> Path:
        log_dir = trainer.log_dir or trainer.default_root_dir
        return Path(log_dir) / "samples.jsonl" if self.file is None else Path(self.file)


def _is_writer(trainer: Trainer) -> bool:
    # Lightning sets `fast_dev_run` without declaring it.
    return trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each part is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def _checked_records(returned: object, prompts: Sequence[str], method: str) -> list[Record]:
    if not isinstance(returned, list) or len(returned) != len(prompts):
        got = f"{len(returned)} records" if isinstance(returned, list) else repr(returned)
        raise ValueError(f"{method}: expected a list of {len(prompts)} records, got {got:.100}")
    for index, record in enumerate(returned):
        if not isinstance(record, dict) or not isinstance(record.get("response"), str):
            raise ValueError(
                f"{method}: expected a dict with the text 'response' as record {index}, "
                f"got {record!r:.100}"
            )
        for key, value in record.items():
            if key in OWN_KEYS or not isinstance(value, str | float | int | bool):
                raise ValueError(
                    f"{method}: expected a str, float, int or bool under other keys than "
                    f"{', '.join(OWN_KEYS)} in record {index}, got {key!r}: {value!r:.100}"
                )
    return returned


def _line(entries: Record) -> str:
    return json.dumps(entries, ensure_ascii=False) + "\n"


def _keep_lines(path: Path, newest: float) -> None:
    """Rewrite a timeline, if there is one, with the steps up to `newest` alone."""
    if not path.exists():
        return
    kept = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                break  # only a write that was cut off leaves a line without an end
            try:
                if json.loads(line)["step"] <= newest:
                    kept.append(line)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path}:{number}: expected a line of a timeline, a JSON object with the "
                    f"number 'step', got {line!r:.100}"
                ) from error
    # The whole new file or the whole old one, whenever this is cut off.
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("".join(kept), "utf-8")
    os.replace(temporary, path)


def _table(prompt: str, record: Record) -> str:
    rows = [("prompt", prompt), ("response", record["response"])]
    rows += [(key, _shown(value)) for key, value in record.items() if key != "response"]
    lines = [f"| {markdown_text(key)} | {markdown_text(text)} |" for key, text in rows]
    return "\n".join([lines[0], "|---|---|", *lines[1:]])


def _shown(value: str | float | int | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number_text(value) if isinstance(value, float) else str(value)
