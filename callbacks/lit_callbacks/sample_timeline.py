"""Samples of the model's responses to the same few prompts, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lit_callbacks.files import (
    append_to,
    check_output_path,
    json_lines,
    parse_json,
    replace_file,
    split_lines,
)
from lit_callbacks.output import escape_markdown, log_text, logger_step
from lit_callbacks.runs import LEVEL_KEY, SAMPLES_FILE
from lit_callbacks.trainer_attributes import is_dry_run
from lit_callbacks.words import format_number

Sample = dict[str, Any]
"""A response and what is known of it; the values are str, float, int or bool."""
OWN_KEYS = ("step", "prompt_index", "prompt")
"""Keys of a line that a sample must not have."""
SPEAKERS = {"user": "Human", "assistant": "Assistant"}
"""Names of the speakers in a prompt by their roles in a chat."""


class SampleTimeline(Callback):
    """Asks the module for responses to the same prompts at regular intervals.

    The module has a method `sample(prompts: list[str]) -> list[dict[str, str | float | int |
    bool]]` that returns one record for each prompt, with at least `response`; other entries
    (score, KL, length...) are shown unchanged. It is called before the first batch, every
    `every_n_batches` training batches, when a `CollapseDetector` before this callback has changed
    its level, and at the end of fit, on every rank, in evaluation mode and without gradients. The
    training modes and the random state of torch, NumPy and Python are restored.

    Rank 0 writes each response to every logger as the text `samples/<index of the prompt>`, and to
    a file of JSON lines, `{"step": ..., "prompt_index": ..., "prompt": ..., **record}`.

    `step` is the loggers' x axis, see `logger_step`, and each is sampled once. A resumed fit first
    drops the lines that are newer than its checkpoint, and then appends to the file; a new fit
    starts the file anew. A file that is not a timeline is never changed. With `fast_dev_run`
    nothing is written.

    Args:
        prompts: Texts, or the path of a file: `.jsonl` with a field `prompt` (a text or the turns
            of a chat), or any other with one prompt per line.
        every_n_batches: Number of training batches between two samples, counted over all epochs, at
            least 1.
        method: Name of the module's method.
        file: The file of JSON lines; by default `samples.jsonl` in the trainer's `log_dir`.
        n_prompts: Number of prompts to read from a file, at least 1; a list is used as a whole.
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
        self.prompts = load_prompts(prompts, n_prompts)
        self.every_n_batches = every_n_batches
        self.method = method
        self.file = None if file is None else check_output_path("file", file)
        self._sampled: int | None = None  # step of the newest lines
        self._level: float | None = None  # the latest level of a detector
        self._has_trained = False  # a batch in this fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the module has the method.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            stage: `fit`, `validate`, `test` or `predict`.
        """
        if stage == "fit" and not callable(getattr(pl_module, self.method, None)):
            raise ValueError(
                f"method: expected {type(pl_module).__name__} to have a method {self.method!r} "
                "that takes a list of prompts and returns one record (a dict with 'response') for "
                "each, got no such method"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the lines newer than the checkpoint; sample once unless the fit is resumed."""
        self._has_trained = False
        path = self._path(trainer)
        is_new = trainer.fit_loop.total_batch_idx < 0
        if is_new:
            self._sampled = None
        if _is_writer(trainer):
            path.parent.mkdir(parents=True, exist_ok=True)
            # the checkpoint of a run without this callback does not say which lines are newer, so a
            # resumed fit keeps them all
            newest = -math.inf if is_new else math.inf
            _keep_lines(path, newest if self._sampled is None else self._sampled)
        if is_new:
            self._sample(trainer, pl_module, step=0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Sample every `every_n_batches` batches, and at each new level of a detector."""
        self._has_trained = True
        level = trainer.callback_metrics.get(LEVEL_KEY)
        previous_level, self._level = self._level, None if level is None else float(level)
        is_new = None not in (previous_level, self._level) and previous_level != self._level
        if is_new or (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0:
            self._sample(trainer, pl_module, logger_step(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sample from the trained model, unless a fit was resumed at its very end."""
        if not self._has_trained:
            return
        self._sample(trainer, pl_module, logger_step(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Step of the newest lines, and the level of the detector."""
        return {"sampled": self._sampled, "level": self._level}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step of the newest lines that the checkpoint knows, and the level."""
        self._sampled = state_dict["sampled"]
        self._level = state_dict.get("level")  # older versions have not kept it

    def _sample(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if step == self._sampled:
            return
        # `log_dir` communicates between ranks, so read it before the other ranks return
        path = self._path(trainer)
        # reading the GPUs' random state would initialize CUDA in a fit that does not use it
        with _evaluating(pl_module), isolate_rng(include_cuda=pl_module.device.type == "cuda"):
            returned = getattr(pl_module, self.method)(list(self.prompts))
        samples = _check_samples(
            returned, self.prompts, f"{type(pl_module).__name__}.{self.method}"
        )
        self._sampled = step
        if not _is_writer(trainer):
            return
        lines = []
        for index, (prompt, sample) in enumerate(zip(self.prompts, samples, strict=True)):
            log_text(trainer, f"samples/{index}", _table(prompt, sample), step)
            lines.append({"step": step, "prompt_index": index, "prompt": prompt, **sample})
        with append_to(path) as file:
            file.write(json_lines(lines).encode())

    def _path(self, trainer: Trainer) -> Path:
        log_dir = trainer.log_dir or trainer.default_root_dir
        return Path(log_dir) / SAMPLES_FILE if self.file is None else Path(self.file)


def _is_writer(trainer: Trainer) -> bool:
    return trainer.is_global_zero and not is_dry_run(trainer)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each submodule's mode is restored afterwards."""
    # `module.train()` at the end would also switch submodules that were in evaluation mode
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def _check_samples(returned: object, prompts: Sequence[str], method: str) -> list[Sample]:
    if not isinstance(returned, list) or len(returned) != len(prompts):
        got = f"{len(returned)} records" if isinstance(returned, list) else repr(returned)
        raise ValueError(f"{method}: expected a list of {len(prompts)} records, got {got:.100}")
    for index, record in enumerate(returned):
        if not isinstance(record, dict) or not isinstance(record.get("response"), str):
            expected = "a dict with the text 'response'"
            got = repr(record)
        elif bad := {
            key: value
            for key, value in record.items()
            if key in OWN_KEYS or not isinstance(value, str | float | int | bool)
        }:
            expected = f"a str, float, int or bool under other keys than {', '.join(OWN_KEYS)}"
            got = repr(bad)
        else:
            continue
        raise ValueError(f"{method}: expected {expected} as record {index}, got {got:.100}")
    return returned


def _keep_lines(path: Path, newest: float) -> None:
    """Rewrite a timeline, if there is one, without the steps after `newest`."""
    if not path.exists():
        return
    earlier_lines = []
    # bytes that are not UTF-8 stay as they are
    for line in split_lines(path.read_bytes().decode(errors="surrogateescape")):
        if not line.is_complete:
            break  # an interrupted write left the last line incomplete
        try:
            if parse_json(line.text)["step"] <= newest:
                earlier_lines.append(line.text + "\n")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{line.number}: expected a line of a timeline, a JSON object with the "
                f"number 'step', got {line.text!r:.100}"
            ) from error
    with replace_file(path) as file:
        file.write("".join(earlier_lines).encode(errors="surrogateescape"))


def _table(prompt: str, sample: Sample) -> str:
    rows = {"prompt": prompt, "response": sample["response"], **sample}
    lines = []
    for key, value in rows.items():
        cell = format_number(value) if isinstance(value, float) else str(value)
        cell = {True: "yes", False: "no"}[value] if isinstance(value, bool) else cell
        lines.append(f"| {escape_markdown(key)} | {escape_markdown(cell)} |")
    return "\n".join([lines[0], "|---|---|", *lines[1:]])


def load_prompts(prompts: Sequence[str] | str, n_prompts: int) -> list[str]:
    r"""Read the fixed prompts of a timeline.

    Turns of a chat are `{"role": ..., "content": ...}`. A chat of one turn is that turn's text; a
    longer one becomes `\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...`. Blank lines are skipped.

    Args:
        prompts: Texts, or the path of a file, see `SampleTimeline`.
        n_prompts: Number of prompts to read from a file, at least 1.
    """
    if n_prompts < 1:
        raise ValueError(f"n_prompts: expected at least 1, got {n_prompts}")
    texts: list[Any] = list(prompts)
    if isinstance(prompts, str):
        if not Path(prompts).is_file():
            raise ValueError(
                f"prompts: expected a list of texts or the path of a file, got {prompts!r}; "
                "a single prompt goes into a list"
            )
        texts = list(islice(_read_prompts(Path(prompts)), n_prompts))
    if not texts:
        raise ValueError(f"prompts: expected at least one, got none in {prompts!r}")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"prompts[{index}]: expected a text, got {text!r}")
    return texts


def _read_prompts(path: Path) -> Iterator[str]:
    for line in split_lines(path.read_text("utf-8-sig")):
        text = line.text.strip()
        if path.suffix != ".jsonl":
            yield text
            continue
        try:
            yield _prompt_text(parse_json(text)["prompt"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"prompts: {path}:{line.number}: expected an object whose field 'prompt' is a "
                "text, or a list of turns {role, content} of user and assistant, "
                f"got {text!r:.100}"
            ) from error


def _prompt_text(prompt: str | list[dict[str, str]]) -> str:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    spoken = [(SPEAKERS[turn["role"]], turn["content"]) for turn in turns]
    if not spoken or not all(isinstance(text, str) and text.strip() for _, text in spoken):
        raise ValueError("a blank prompt")
    if len(spoken) == 1:
        return spoken[0][1]
    return "".join(f"\n\n{speaker}: {text}" for speaker, text in spoken)
