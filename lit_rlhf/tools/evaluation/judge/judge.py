"""Put many pairs of answers to the judge: in both orders, in parallel, and each question only once.

Answers are kept in a file, so that an interrupted run continues and nothing is paid for twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Self

from lit_rlhf.tools.evaluation.judge.client import Answer, JudgeClient, JudgeError, JudgeOptions
from lit_rlhf.tools.evaluation.judge.messages import (
    ChatMessage,
    Criterion,
    Question,
    question_messages,
    wording,
)
from lit_rlhf.tools.evaluation.judge.verdicts import EQUAL_ANSWERS, PairVerdict, combine_orders
from lit_rlhf.tools.evaluation.output import progress_bar
from lit_rlhf.tools.evaluation.responses import Turns

ANSWERS_FILE = "answers.jsonl"


class Pair(NamedTuple):
    """Two answers to one prompt, to be judged in both orders.

    Attributes:
        criterion: What to compare the answers by.
        prompt: The turns before the answers.
        answer: The policy's answer, which wins, ties or loses.
        baseline: The answer that it is compared with.
    """

    criterion: Criterion
    prompt: Turns
    answer: str
    baseline: str

    def questions(self) -> tuple[Question, Question]:
        """Build the questions with the policy's answer as A, and as B."""
        return (
            Question(self.criterion, self.prompt, self.answer, self.baseline),
            Question(self.criterion, self.prompt, self.baseline, self.answer),
        )


class Usage(NamedTuple):
    """Questions put to the judge, and the requests of this run.

    Attributes:
        questions: Number of different questions; a pair has two.
        from_cache: Questions that an earlier run had asked already.
        invalid: Questions without a reply that could be read.
        shortened: Questions with a text longer than `max_characters`.
        requests: Requests of this run, without the repetitions of failed ones.
        prompt_tokens: Tokens sent in this run, as counted by the endpoint.
        completion_tokens: Tokens received in this run.
    """

    questions: int
    from_cache: int
    invalid: int
    shortened: int
    requests: int
    prompt_tokens: int
    completion_tokens: int


def question_key(messages: Sequence[ChatMessage], options: JudgeOptions) -> str:
    """Hash everything that an answer depends on.

    The endpoint's address is left out: a local server may come back on another port.
    """
    sampling = [options.model, options.temperature, options.max_tokens, options.max_attempts]
    parts = [list(messages), [*sampling, wording()]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class AnswerCache:
    """Answers by key in a JSON lines file, to which each is appended as it arrives.

    A last line that a crash left incomplete is dropped. Threads may share the cache.

    Raises:
        ValueError: If a line other than an incomplete last one is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        content = self.path.read_bytes() if self.path.exists() else b""
        complete, _, incomplete = content.rpartition(b"\n")
        self._answers = dict(
            self._parse(line, number) for number, line in enumerate(complete.splitlines(), 1)
        )
        self._file = self.path.open("ab")
        if incomplete:
            # else the next answer would be appended to it, and both would be lost
            self._file.truncate(len(content) - len(incomplete))

    def __len__(self) -> int:
        """Number of answers."""
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """Look up the answer to a question; `None` if it has not been asked."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer, description: Mapping[str, Any]) -> None:
        """Store an answer, with a description for people who read the file.

        The line has left the process when this returns.
        """
        line = json.dumps({"key": key, **description, **asdict(answer)}) + "\n"
        with self._lock:
            self._answers[key] = answer
            self._file.write(line.encode())
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _parse(self, line: bytes, number: int) -> tuple[str, Answer]:
        try:
            record = json.loads(line)
            fields = {name: record[name] for name in Answer.__dataclass_fields__}
            return record["key"], Answer(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}:{number}: expected an answer of the judge, got {line!r:.80}; delete "
                "the line to ask its question again"
            ) from error


class Judge:
    """A judge with a cache of its answers; a context manager, which closes connections and file.

    Args:
        options: The judge and how it is asked; `model` has to be set.

    Raises:
        JudgeError: If the `openai` package is missing.
        ValueError: If there is no model or key, or the cache is damaged.
    """

    def __init__(self, options: JudgeOptions) -> None:
        if not options.model:
            raise ValueError("judge.model: expected the name of a model, got none")
        self.options = options
        self._client = JudgeClient(options)
        self._cache = AnswerCache(Path(options.folder) / ANSWERS_FILE)
        self._questions: dict[str, Question] = {}  # all that were put, by key
        self._new: set[str] = set()  # keys of those that this run asked

    def __enter__(self) -> Self:
        """Return the judge."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close connections and file."""
        self._client.close()
        self._cache.close()

    def judge_pairs(self, pairs: Sequence[Pair], label: str) -> list[PairVerdict]:
        """Judge pairs, each in both orders. Pairs of equal answers tie without a question.

        Args:
            pairs: The pairs.
            label: Label of the progress bar.

        Raises:
            JudgeError: If the endpoint does not reply. The answers received so far are kept.
        """
        questions = [pair.questions() for pair in pairs if pair.answer != pair.baseline]
        answers = self._answer([question for both in questions for question in both], label)
        both_orders = iter(zip(answers[::2], answers[1::2], strict=True))
        return [
            EQUAL_ANSWERS if pair.answer == pair.baseline else combine_orders(*next(both_orders))
            for pair in pairs
        ]

    @property
    def usage(self) -> Usage:
        """What has been asked so far."""
        answers = {key: self._get(key) for key in self._questions}
        new, limit = [answers[key] for key in self._new], self.options.max_characters
        return Usage(
            questions=len(answers),
            from_cache=len(answers) - len(new),
            invalid=sum(answer.verdict is None for answer in answers.values()),
            shortened=sum(_max_length(question) > limit for question in self._questions.values()),
            requests=sum(answer.requests for answer in new),
            prompt_tokens=sum(answer.prompt_tokens for answer in new),
            completion_tokens=sum(answer.completion_tokens for answer in new),
        )

    def _answer(self, questions: Sequence[Question], label: str) -> list[Answer]:
        keys = [
            question_key(question_messages(question, self.options.max_characters), self.options)
            for question in questions
        ]
        by_key = dict(zip(keys, questions, strict=True))  # asks a repeated question once
        missing = [key for key in by_key if self._cache.get(key) is None]
        self._questions |= by_key
        with progress_bar(label, len(missing)) as progress:
            self._ask_all({key: by_key[key] for key in missing}, progress)
        return [self._get(key) for key in keys]

    def _ask_all(self, questions: dict[str, Question], progress: Callable[[int], None]) -> None:
        items = list(questions.items())
        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            # the first question by itself: a wrong key or address then costs one request
            for item in items[:1]:
                self._new.add(self._ask(*item))
                progress(1)
            running = [pool.submit(self._ask, *item) for item in items[1:]]
            for done in as_completed(running):
                self._new.add(done.result())
                progress(1)
        except JudgeError as error:
            raise JudgeError(
                f"{error}. {len(self._cache)} answers are in {self._cache.path}; the same command "
                "continues from there"
            ) from error
        finally:
            # after an error: requests in progress are awaited and their answers kept, as they are
            # paid for; the others are not sent
            pool.shutdown(cancel_futures=True)

    def _ask(self, key: str, question: Question) -> str:
        answer = self._client.ask(question_messages(question, self.options.max_characters))
        description = {"judge": self.options.model, "criterion": question.criterion}
        self._cache.add(key, answer, description)
        return key

    def _get(self, key: str) -> Answer:
        answer = self._cache.get(key)
        assert answer is not None  # for mypy: `_answer` has asked all questions
        return answer


def _max_length(question: Question) -> int:
    texts = [turn.content for turn in question.conversation]
    return max(map(len, [*texts, question.answer_a, question.answer_b]))
