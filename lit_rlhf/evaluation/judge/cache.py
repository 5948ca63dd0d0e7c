"""Answers of the judge on disk: an interrupted run goes on, and no question is paid twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from lit_rlhf.evaluation.judge.answers import Answer
from lit_rlhf.evaluation.judge.options import JudgeOptions
from lit_rlhf.evaluation.judge.prompts import ChatMessage, wording


def question_key(messages: Sequence[ChatMessage], options: JudgeOptions) -> str:
    """What an answer is kept under: a hash of all that it depends on.

    That is the messages (criterion, conversation and both answers in their order), how an answer
    that cannot be read is asked for again, the judge's name and the settings of its sampling. The
    endpoint's address is not part of it: a local server may come back on another port.
    """
    settings = [
        options.model,
        options.temperature,
        options.max_tokens,
        options.max_attempts,
        wording(),
    ]
    return hashlib.sha256(json.dumps([list(messages), settings]).encode()).hexdigest()


class AnswerCache:
    """Answers by key, one line of a JSON lines file each, appended as they come.

    A last line that was torn by a crash is dropped. Threads may share it.

    Args:
        path: The file; it and its folder are made when missing.

    Raises:
        ValueError: If a line other than a torn last one is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        content = self.path.read_bytes() if self.path.exists() else b""
        whole, _, torn = content.rpartition(b"\n")
        self._answers = dict(
            self._read(line, number) for number, line in enumerate(whole.splitlines(), 1)
        )
        self._file = self.path.open("ab")
        if torn:
            self._file.truncate(len(content) - len(torn))

    def __len__(self) -> int:
        """Number of answers."""
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """The answer to a question, if it has been asked before."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer, about: Mapping[str, Any]) -> None:
        """Keep an answer, on disk before this returns.

        Args:
            key: See `question_key`.
            answer: The answer.
            about: What else to write into the line, for its reader.
        """
        line = json.dumps({"key": key, **about, **asdict(answer)}) + "\n"
        with self._lock:
            self._answers[key] = answer
            self._file.write(line.encode())
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, line: bytes, number: int) -> tuple[str, Answer]:
        try:
            record = json.loads(line)
            fields = {name: record[name] for name in Answer.__dataclass_fields__}
            return record["key"], Answer(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}:{number}: expected an answer of the judge, got {line!r:.80}; delete "
                "the line, then its question is asked again"
            ) from error
