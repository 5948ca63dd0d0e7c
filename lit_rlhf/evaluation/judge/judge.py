"""Many questions of the judge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Self

from lit_rlhf.evaluation.judge.client import Answer, JudgeClient, JudgeError, JudgeOptions
from lit_rlhf.evaluation.judge.messages import (
    ChatMessage,
    Criterion,
    Question,
    judge_messages,
    wording,
)
from lit_rlhf.evaluation.judge.verdicts import EQUAL_ANSWERS, PairVerdict, pair_verdict
from lit_rlhf.evaluation.output import progress_bar
from lit_rlhf.evaluation.responses import Turns

CACHE_FILE = "answers.jsonl"


class Pair(NamedTuple):
    """Two answers to one prompt, to be judged in both orders.

    Attributes:
        criterion: What to compare them by.
        prompt: The dialogue that waits for an answer.
        ours: The answer that wins or loses.
        theirs: The one that it is compared with.
    """

    criterion: Criterion
    prompt: Turns
    ours: str
    theirs: str

    def questions(self) -> tuple[Question, Question]:
        """Our answer as A, and as B."""
        return (
            Question(self.criterion, self.prompt, self.ours, self.theirs),
            Question(self.criterion, self.prompt, self.theirs, self.ours),
        )


class Spent(NamedTuple):
    """What answers took.

    Attributes:
        requests: Requests, without those that the client repeated.
        prompt_tokens: Tokens sent, as the endpoint counts.
        completion_tokens: Tokens that came back.
        cost: In the unit of the prices; `None` if they are not known.
    """

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


class Usage(NamedTuple):
    """What was asked.

    Attributes:
        questions: Different questions; a pair has two.
        from_cache: Those that had been answered by an earlier run.
        invalid: Those without a reply that could be read.
        shortened: Those with a text longer than `max_characters`.
        now: What this run spent.
        in_all: What all the answers took, those of earlier runs too.
    """

    questions: int
    from_cache: int
    invalid: int
    shortened: int
    now: Spent
    in_all: Spent


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


class Judge:
    """A judge with its memory. A context manager: it holds connections and a file.

    Args:
        options: The judge and how it is asked; with a model.

    Raises:
        JudgeError: If the `openai` package is missing.
        ValueError: If there is no key, or the cache is damaged.
    """

    def __init__(self, options: JudgeOptions) -> None:
        if not options.model:
            raise ValueError("judge.model: expected the name of a model, got none")
        self.options = options
        self._client = JudgeClient(options)
        self._cache = AnswerCache(Path(options.folder) / CACHE_FILE)
        self._asked: dict[str, Question] = {}
        self._new: set[str] = set()

    def __enter__(self) -> Self:
        """Itself."""
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

    def verdicts(self, pairs: Sequence[Pair], label: str) -> list[PairVerdict]:
        """Judge pairs, each in both orders; equal answers tie unasked.

        Args:
            pairs: What to judge.
            label: For the progress line.

        Raises:
            JudgeError: If the endpoint does not reply. What it has answered is kept.
        """
        questions = [pair.questions() for pair in pairs if pair.ours != pair.theirs]
        answers = self._answers([question for both in questions for question in both], label)
        both_orders = iter(zip(answers[::2], answers[1::2], strict=True))
        return [
            EQUAL_ANSWERS if pair.ours == pair.theirs else pair_verdict(*next(both_orders))
            for pair in pairs
        ]

    @property
    def usage(self) -> Usage:
        """What has been asked so far."""
        answers = {key: self._known(key) for key in self._asked}
        limit = self.options.max_characters
        return Usage(
            questions=len(answers),
            from_cache=len(answers) - len(self._new),
            invalid=sum(answer.verdict is None for answer in answers.values()),
            shortened=sum(_longest(question) > limit for question in self._asked.values()),
            now=self._spent(answers[key] for key in self._new),
            in_all=self._spent(answers.values()),
        )

    def _answers(self, questions: Sequence[Question], label: str) -> list[Answer]:
        keys = [
            question_key(judge_messages(question, self.options.max_characters), self.options)
            for question in questions
        ]
        by_key = dict(zip(keys, questions, strict=True))  # a question is asked once
        missing = [key for key in by_key if self._cache.get(key) is None]
        self._asked |= by_key
        with progress_bar(label, len(missing)) as progress:
            self._ask({key: by_key[key] for key in missing}, progress)
        return [self._known(key) for key in keys]

    def _ask(self, questions: dict[str, Question], progress: Callable[[int], None]) -> None:
        first, rest = list(questions.items())[:1], list(questions.items())[1:]
        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            for item in first:  # by itself: a wrong key or address is found by one request
                self._new.add(self._ask_one(*item))
                progress(1)
            running = [pool.submit(self._ask_one, *item) for item in rest]
            for done in as_completed(running):
                self._new.add(done.result())
                progress(1)
        except JudgeError as error:
            raise JudgeError(
                f"{error}. {len(self._cache)} answers are in {self._cache.path}; the same command "
                "goes on from there"
            ) from error
        finally:  # after an error: what is under way is finished and kept, the rest not begun
            pool.shutdown(cancel_futures=True)

    def _ask_one(self, key: str, question: Question) -> str:
        answer = self._client.answer(judge_messages(question, self.options.max_characters))
        about = {"judge": self.options.model, "criterion": question.criterion}
        self._cache.add(key, answer, about)
        return key

    def _known(self, key: str) -> Answer:
        answer = self._cache.get(key)
        assert answer is not None  # asked above
        return answer

    def _spent(self, answers: Iterable[Answer]) -> Spent:
        counted = list(answers)
        sent = sum(answer.prompt_tokens for answer in counted)
        received = sum(answer.completion_tokens for answer in counted)
        cost = None
        if self.options.input_price is not None and self.options.output_price is not None:
            cost = (sent * self.options.input_price + received * self.options.output_price) / 1e6
        return Spent(sum(answer.requests for answer in counted), sent, received, cost)


def _longest(question: Question) -> int:
    texts = [turn.content for turn in question.conversation]
    return max(map(len, [*texts, question.answer_a, question.answer_b]))
