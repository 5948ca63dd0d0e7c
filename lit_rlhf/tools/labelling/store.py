"""The file of labels: every label is on disk before the page moves on, and none is there twice."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from lit_rlhf.errors import UserError
from lit_rlhf.files import begins_like, fsync, replace_file
from lit_rlhf.tools.evaluation.labels import Comparison, Label, read_labels

_BEGINNING = b'{"comparison": "'
"""What a line of a file of labels begins with."""


class Task(NamedTuple):
    """One look of one annotator at one comparison.

    Attributes:
        annotator: Name of the annotator.
        comparison: Key of the comparison.
        repeat: Whether it is shown for the second time, with the sides swapped.
    """

    annotator: str
    comparison: str
    repeat: bool = False


class LabelStore:
    """Labels in a JSON lines file, to which each is appended and forced to disk.

    Whoever opens it has locked the file. A last line that a crash left incomplete was never
    confirmed to its annotator and is dropped. Threads may share a store.

    Args:
        path: The file; it need not exist.
        comparisons: What is compared, in any order. The file may have labels of others, too.

    Raises:
        OSError: If the file is a link, which may lead to any file.
        ValueError: If the file has labels of responses that have changed since, and the message
            both hashes; or if it has something else than labels.
    """

    def __init__(self, path: str | Path, comparisons: Sequence[Comparison]) -> None:
        self.path = Path(path)
        self.comparisons: Mapping[str, Comparison] = {one.key: one for one in comparisons}
        self._mutex = RLock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()
        try:
            self._size = self._drop_incomplete_line()
            self.labels = read_labels(str(self.path)) if self._size else []
            self._check_texts()
            fsync(self.path.parent)
        except BaseException:
            os.close(self._file)
            raise
        self._by_task = {
            Task(label.annotator, label.comparison, label.repeat): label
            for label in self.labels
            if label.annotator is not None
        }
        self._equal = {label.comparison for label in self.labels if label.annotator is None}

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            os.close(self._file)

    def find(self, task: Task) -> Label | None:
        """The label of a task; `None` if there is none yet."""
        return self._by_task.get(task)

    def add(self, label: Label) -> bool:
        """Append a label, and return when it is on disk.

        Returns:
            Whether it was added. A second label of the same task is not, because a browser that got
            no answer sends its form again.

        Raises:
            UserError: If it cannot be written, for instance because the disk is full. The file is
                then as it was before.
        """
        with self._mutex:
            if label.annotator is None:
                if label.comparison in self._equal:
                    return False
                self._append(label.as_line())
                self._equal.add(label.comparison)
            else:
                task = Task(label.annotator, label.comparison, label.repeat)
                if task in self._by_task:
                    return False
                self._append(label.as_line())
                self._by_task[task] = label
            self.labels.append(label)
            return True

    def remove(self, task: Task) -> Label | None:
        """Take back the label of a task, and return it; `None` if there is none.

        The file is replaced by one without the label, so that its readers need not know about undo.
        """
        with self._mutex:
            label = self._by_task.get(task)
            if label is None:
                return None
            remaining = [*self.labels]
            remaining.remove(label)
            content = b"".join(one.as_line() for one in remaining)
            with replace_file(self.path) as file:
                file.write(content)
            os.close(self._file)
            self._file = self._open()
            self._size = len(content)
            self.labels = remaining
            del self._by_task[task]
            return label

    def _open(self) -> int:
        """Open the end of the file; a link, which may lead to any file, is refused."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)

    def _append(self, line: bytes) -> None:
        """Write a whole line, or leave the file as it is."""
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise UserError(f"{self.path}: the label could not be saved: {error}") from error
        self._size += len(line)

    def _drop_incomplete_line(self) -> int:
        """Cut off a line without its end, and return the size of the others in bytes."""
        content = self.path.read_bytes()
        complete = content.rfind(b"\n") + 1
        incomplete = content[complete:]
        if not begins_like(incomplete, _BEGINNING):  # somebody's file, of which nothing may be lost
            raise ValueError(
                f"{self.path}: expected a file of labels, got one that ends with {incomplete!r:.80}"
            )
        if incomplete:
            os.ftruncate(self._file, complete)
            os.fsync(self._file)
        return complete

    def _check_texts(self) -> None:
        for number, label in enumerate(self.labels, start=1):
            comparison = self.comparisons.get(label.comparison)
            if comparison is not None and comparison.text_hash != label.text_hash:
                raise ValueError(
                    f"{self.path}:{number}: expected a label of the responses with the SHA-256 "
                    f"{comparison.text_hash}, got one of {label.text_hash}: the responses have "
                    "changed since. Restore them, or give another --output"
                )
