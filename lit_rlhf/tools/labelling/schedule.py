"""What an annotator sees next, and on which side each response is.

Several people label at once. Each comparison goes to a number of different annotators; nobody sees
one twice, but for a share that is asked again later with the sides swapped. What somebody took and
did not label comes back to the others after a while.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from threading import RLock
from typing import Any, Literal, NamedTuple

from lit_rlhf.files import read_json, write_text
from lit_rlhf.tools.evaluation.labels import Choice, Comparison, Label
from lit_rlhf.tools.labelling.selection import seeded_rank
from lit_rlhf.tools.labelling.store import LabelStore, Task

ABANDONED_AFTER = 30 * 60.0
"""Seconds after which a comparison that somebody took and did not label goes to others."""
REPEAT_AFTER = 10
"""Labels of an annotator between the first and the second look at a comparison."""
_HASH_RANGE = 2**256


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Who labels what.

    Attributes:
        annotators_per_comparison: Number of people who label each comparison.
        repeat_share: Share of comparisons that an annotator is asked twice, in [0, 1].
        seed: Seed of the sides and of the choice of repeats.
    """

    annotators_per_comparison: int = 1
    repeat_share: float = 0.1
    seed: int = 0


class Progress(NamedTuple):
    """How far an annotator is.

    Attributes:
        done: Labels of the annotator so far.
        total: Labels of the annotator when nothing is left, if nobody else takes a comparison.
        seconds_left: Rough time that the rest takes; `None` before the first label.
    """

    done: int
    total: int
    seconds_left: float | None


class Schedule:
    """Gives out comparisons.

    A page that was given out by a process that was killed meanwhile is still valid: sides and
    repeats depend on the seed, and not on the process. With a file of open tasks the next process
    also knows what each annotator was looking at: they see it again, and nobody else gets it.
    Threads may share a schedule.

    Args:
        order: Comparisons in the order in which they are given out.
        store: The labels so far.
        options: Who labels what.
        policies: SHA-256 of each policy, or of its file of responses, by name, for the labels.
        open_tasks: JSON file of what each annotator is looking at, written whenever that changes;
            it need not exist. `None`: a restart forgets it.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        order: Sequence[Comparison],
        store: LabelStore,
        options: ScheduleOptions,
        *,
        policies: Mapping[str, str | None] | None = None,
        open_tasks: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order = order
        self.store = store
        self.options = options
        self.policies = dict(policies or {})
        self._open_tasks = open_tasks
        self._clock = clock
        self._mutex = RLock()
        self._taken: dict[str, dict[str, float]] = {one.key: {} for one in order}
        self._current: dict[str, Task] = {}
        self._by_annotator: dict[str, list[Task]] = {}
        self._labelled: dict[str, set[str]] = {one.key: set() for one in order}
        self._noted = {label.comparison for label in store.labels if label.annotator is None}
        self._repeated = {
            one.key
            for one in order
            if seeded_rank(options.seed, "repeat", one.key) < options.repeat_share * _HASH_RANGE
        }
        for label in store.labels:
            self._count(label)
        self._restore_open_tasks()

    def next_task(self, annotator: str) -> Task | None:
        """Choose what an annotator sees next: the same until it is labelled; `None` for nothing.

        A pair of equal responses is shown to nobody. It is noted as a tie when its turn comes, so
        that the labelled part of the order is a fair sample of prompts.
        """
        with self._mutex:
            now = self._clock()
            current = self._current.get(annotator)
            if current is not None and self.store.find(current) is None:
                self._take(current, now)
                return current
            task = self._due_repeat(annotator, gap=REPEAT_AFTER)
            if task is None:
                task = self._next_new(annotator, now)
            if task is None:
                task = self._due_repeat(annotator, gap=0)
            if task is not None:
                self._take(task, now)
                self._set_current(task)
            return task

    def left_side(self, task: Task) -> Literal["a", "b"]:
        """Which response is on the left, drawn by the seed; a repeat has the sides swapped."""
        rank = seeded_rank(self.options.seed, "side", task.comparison, task.annotator)
        return "a" if (rank % 2 == 0) != task.repeat else "b"

    def is_known(self, task: Task) -> bool:
        """Whether the task may have been given out by this process or an earlier one."""
        return task.comparison in self._labelled and (
            not task.repeat or self._is_repeated(task.comparison)
        )

    def save(self, task: Task, choice: Choice, **answer: Any) -> bool:
        """Store a choice, and return whether it is new; see `LabelStore.add`.

        Args:
            task: What was labelled.
            choice: What was chosen.
            **answer: Further fields of the label.
        """
        return self._store(
            self._make_label(
                task.comparison,
                choice=choice,
                annotator=task.annotator,
                left=self.left_side(task),
                repeat=task.repeat,
                **answer,
            )
        )

    def undo(self, annotator: str) -> Task | None:
        """Take back the last label of an annotator, who then sees that comparison again."""
        with self._mutex:
            done = self._by_annotator.get(annotator, [])
            if not done:
                return None
            task = done[-1]
            self.store.remove(task)
            done.pop()
            if not task.repeat:
                self._labelled[task.comparison].discard(annotator)
            self._set_current(task)
            return task

    def progress(self, annotator: str) -> Progress:
        """Count an annotator's labels, and estimate what is left."""
        with self._mutex:
            now = self._clock()
            done = self._by_annotator.get(annotator, [])
            seen = {task.comparison for task in done}
            to_come = [
                one.key
                for one in self.order
                if one.key not in seen
                and not one.is_equal
                and self._is_open(one.key, annotator="", now=now)
            ]
            current = self._current.get(annotator)
            if current and current.comparison not in seen and current.comparison not in to_come:
                to_come.append(current.comparison)
            repeated = {task.comparison for task in done if task.repeat}
            n_left = len(to_come) + sum(
                self._is_repeated(key) for key in {*seen, *to_come} - repeated
            )
            seconds = [
                label.seconds
                for task in done
                if (label := self.store.find(task)) is not None and label.seconds is not None
            ]
            return Progress(
                done=len(done),
                total=len(done) + n_left,
                seconds_left=median(seconds) * n_left if seconds else None,
            )

    def _store(self, label: Label) -> bool:
        with self._mutex:
            is_new = self.store.add(label)
            if is_new:
                self._count(label)
            return is_new

    def _make_label(self, comparison: str, **answer: Any) -> Label:
        compared = self.store.comparisons[comparison]
        return Label(
            comparison=comparison,
            prompt=compared.prompt,
            response_a=compared.response_a,
            response_b=compared.response_b,
            policy_a=compared.policy_a,
            policy_b=compared.policy_b,
            ended_a=compared.ended_a,
            ended_b=compared.ended_b,
            selection=compared.selection,
            spread=compared.spread,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            text_hash=compared.text_hash,
            policies=self.policies,
            **answer,
        )

    def _count(self, label: Label) -> None:
        """Note a label in the memory of the schedule."""
        if label.comparison not in self._labelled or label.annotator is None:
            return
        task = Task(label.annotator, label.comparison, label.repeat)
        self._by_annotator.setdefault(label.annotator, []).append(task)
        if not label.repeat:
            self._labelled[label.comparison].add(label.annotator)
            self._taken[label.comparison].pop(label.annotator, None)

    def _take(self, task: Task, now: float) -> None:
        if not task.repeat:
            self._taken[task.comparison][task.annotator] = now

    def _set_current(self, task: Task) -> None:
        """Note what an annotator is looking at, for a restart too."""
        self._current[task.annotator] = task
        if self._open_tasks is not None:
            tasks = [one for one in self._current.values() if self.store.find(one) is None]
            write_text(self._open_tasks, json.dumps([one._asdict() for one in tasks]))

    def _restore_open_tasks(self) -> None:
        """Give annotators what they were looking at before a restart, unless it was labelled."""
        if self._open_tasks is None or not self._open_tasks.exists():
            return
        kept = read_json(self._open_tasks, list)
        try:
            tasks = [Task(**fields) for fields in kept]
        except TypeError as error:
            raise ValueError(
                f"{self._open_tasks}: expected open tasks, got something else; delete it"
            ) from error
        for task in tasks:
            if self.is_known(task) and self.store.find(task) is None:
                self._current[task.annotator] = task
                self._take(task, self._clock())

    def _is_repeated(self, comparison: str) -> bool:
        return comparison in self._repeated

    def _due_repeat(self, annotator: str, gap: int) -> Task | None:
        """The oldest comparison to be asked again, with at least `gap` labels after its first."""
        done = self._by_annotator.get(annotator, [])
        seen_twice = {task.comparison for task in done if task.repeat}
        for task in done[: max(len(done) - gap, 0)]:
            if task.repeat or task.comparison in seen_twice:
                continue
            if self._is_repeated(task.comparison):
                return task._replace(repeat=True)
        return None

    def _next_new(self, annotator: str, now: float) -> Task | None:
        for comparison in self.order:
            if comparison.is_equal:
                if comparison.key not in self._noted:
                    self._store(self._make_label(comparison.key, choice="tie", annotator=None))
                    self._noted.add(comparison.key)
            elif annotator not in self._labelled[comparison.key] and self._is_open(
                comparison.key, annotator=annotator, now=now
            ):
                return Task(annotator, comparison.key)
        return None

    def _is_open(self, comparison: str, *, annotator: str, now: float) -> bool:
        """Whether somebody may take a comparison: too few have labelled it or look at it."""
        busy = {
            name
            for name, since in self._taken[comparison].items()
            if name != annotator and now - since < ABANDONED_AFTER
        }
        n_taken = len(self._labelled[comparison] | busy)
        return n_taken < self.options.annotators_per_comparison
