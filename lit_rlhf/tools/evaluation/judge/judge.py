"""Policies compared by the judge, which is asked in both orders, in parallel, and nothing twice.

Replies are kept in a file, so that an interrupted run continues and nothing is paid for twice.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from lit_rlhf.files import write_json_lines
from lit_rlhf.rewards import redact_url
from lit_rlhf.tools.evaluation.judge.client import (
    ChatMessage,
    Criterion,
    JudgeClient,
    JudgeError,
    JudgeOptions,
    JudgeReply,
    Question,
    question_messages,
    wording,
)
from lit_rlhf.tools.evaluation.outcomes import (
    HeadToHeads,
    Outcomes,
    outcome_rates,
    outcomes_table,
)
from lit_rlhf.tools.evaluation.output import make_table, print_table, progress_bar, to_json_types
from lit_rlhf.tools.evaluation.responses import Responses

ANSWERS_FILE, _VERDICTS_FILE = "answers.jsonl", "verdicts.jsonl"
Result = Literal["win", "tie", "lose", "invalid"]
_POINTS = {"win": 1.0, "tie": 0.0, "lose": -1.0}


class PairVerdict(NamedTuple):
    """The judge's verdict on a policy's answer beside the baseline's.

    It is `invalid` if one of its replies, with the policy's answer as A and as B, could not be
    read. Equal answers are not shown to the judge, so there are no replies.
    """

    result: Result
    policy_as_a: JudgeReply | None
    policy_as_b: JudgeReply | None


def _combine_orders(policy_as_a: JudgeReply, policy_as_b: JudgeReply) -> PairVerdict:
    """The policy wins or loses if both replies say so. Otherwise it is a tie."""
    verdicts = (policy_as_a.verdict, policy_as_b.verdict)
    agreed: dict[Any, Result] = {("A", "B"): "win", ("B", "A"): "lose"}
    result = "invalid" if None in verdicts else agreed.get(verdicts, "tie")
    return PairVerdict(result, policy_as_a, policy_as_b)


def verdict_rates(verdicts: Sequence[PairVerdict]) -> Outcomes | None:
    """Win, tie and lose rates over the valid verdicts; `None` if there is none."""
    points = [_POINTS[verdict.result] for verdict in verdicts if verdict.result != "invalid"]
    return outcome_rates(points, [0.0] * len(points)) if points else None


def position_bias(verdicts: Sequence[PairVerdict]) -> dict[str, float] | None:
    """Shares of pairs in which the judge preferred the first or the second answer in both orders.

    `None` without a pair that has two valid replies.
    """
    pairs = [
        (verdict.policy_as_a.verdict, verdict.policy_as_b.verdict)
        for verdict in verdicts
        if verdict.result != "invalid" and verdict.policy_as_a and verdict.policy_as_b
    ]
    if not pairs:
        return None
    return {
        "first": pairs.count(("A", "A")) / len(pairs),
        "second": pairs.count(("B", "B")) / len(pairs),
    }


def _question_key(messages: Sequence[ChatMessage], options: JudgeOptions) -> str:
    """Hash everything that a reply depends on.

    The endpoint's address is left out: a local server may come back on another port.
    """
    sampling = [options.model, options.temperature, options.max_tokens, options.max_attempts]
    parts = [list(messages), [*sampling, wording()]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _ReplyCache:
    """Replies by key in a JSON lines file, to which each is appended as it arrives.

    A last line that a crash left incomplete is dropped. Threads may share the cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        content = self.path.read_bytes() if self.path.exists() else b""
        complete, _, incomplete = content.rpartition(b"\n")
        self.replies = dict(
            self._parse(line, number) for number, line in enumerate(complete.splitlines(), 1)
        )
        self._file = self.path.open("ab")
        if incomplete:
            # else the next reply would be appended to it, and both would be lost
            self._file.truncate(len(content) - len(incomplete))

    def add(self, key: str, reply: JudgeReply, description: Mapping[str, Any]) -> None:
        """Store a reply with a description for people; the line has then left the process."""
        line = json.dumps({"key": key, **description, **reply._asdict()}) + "\n"
        with self._lock:
            self.replies[key] = reply
            self._file.write(line.encode())
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _parse(self, line: bytes, number: int) -> tuple[str, JudgeReply]:
        try:
            record = json.loads(line)
            return record["key"], JudgeReply(*(record[name] for name in JudgeReply._fields))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}:{number}: expected an answer of the judge, got {line!r:.80}; delete "
                "the line to ask its question again"
            ) from error


class Judge(AbstractContextManager["Judge"]):
    """A judge with a cache of its replies; a context manager, which closes connections and file.

    `questions` are all that were put, by key, and `asked` the keys of those that this run asked.
    """

    def __init__(self, options: JudgeOptions) -> None:
        if not options.model:
            raise ValueError("judge.model: expected the name of a model, got none")
        self.options = options
        self._client = JudgeClient(options)
        self._cache = _ReplyCache(Path(options.folder) / ANSWERS_FILE)
        self.questions: dict[str, Question] = {}
        self.asked: set[str] = set()

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._cache.close()

    def judge_pairs(self, pairs: Sequence[Question], label: str) -> list[PairVerdict]:
        """Judge pairs, each in both orders. Pairs of equal answers tie without a question.

        The policy's answer is A and the baseline's B. If the endpoint does not reply, the replies
        received so far are kept.
        """
        different = [pair for pair in pairs if pair.answer_a != pair.answer_b]
        replies = self._ask_all([q for pair in different for q in (pair, pair.swapped)], label)
        both_orders = iter(zip(replies[::2], replies[1::2], strict=True))
        return [
            _combine_orders(*next(both_orders))
            if pair.answer_a != pair.answer_b
            else PairVerdict("tie", None, None)
            for pair in pairs
        ]

    def count_questions(self) -> dict[str, int]:
        """Number of different questions, of those that an earlier run asked, and of bad ones."""
        limit = self.options.max_characters
        return {
            "questions": len(self.questions),
            "from_cache": len(self.questions) - len(self.asked),
            "invalid": sum(self._cache.replies[key].verdict is None for key in self.questions),
            "shortened": sum(question.longest > limit for question in self.questions.values()),
        }

    def _ask_all(self, questions: Sequence[Question], label: str) -> list[JudgeReply]:
        keys = [
            _question_key(question_messages(question, self.options.max_characters), self.options)
            for question in questions
        ]
        by_key = dict(zip(keys, questions, strict=True))  # asks a repeated question once
        self.questions |= by_key
        missing = [item for item in by_key.items() if item[0] not in self._cache.replies]
        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            with progress_bar(label, len(missing)) as progress:
                # the first question by itself: a wrong key or address then costs one request
                for group in (missing[:1], missing[1:]):
                    running = [pool.submit(self._ask, *item) for item in group]
                    for done in as_completed(running):
                        self.asked.add(done.result())
                        progress(1)
        except JudgeError as error:
            raise JudgeError(
                f"{error}. {len(self._cache.replies)} answers are in {self._cache.path}; the same "
                "command continues from there"
            ) from error
        finally:
            # after an error: requests in progress are awaited and their replies kept, as they are
            # paid for; the others are not sent
            pool.shutdown(cancel_futures=True)
        return [self._cache.replies[key] for key in keys]

    def _ask(self, key: str, question: Question) -> str:
        reply = self._client.ask(question_messages(question, self.options.max_characters))
        description = {"judge": self.options.model, "criterion": question.criterion}
        self._cache.add(key, reply, description)
        return key


@dataclass(frozen=True)
class JudgedPolicy:
    """One policy against the baseline by one criterion.

    The rates leave out `invalid` prompts, those without a valid verdict.
    """

    policy: str
    criterion: Criterion
    against_baseline: Outcomes | None
    invalid: int
    position_bias: dict[str, float] | None


@dataclass(frozen=True)
class Judgement:
    """The judge's comparison of policies, criterion by criterion, which is also in `file`.

    `base_url` has no user or password; `None` is OpenAI's. `usage` is `Judge.count_questions()`.
    """

    model: str
    base_url: str | None
    baseline: str
    policies: list[JudgedPolicy]
    usage: dict[str, int]
    file: Path

    @property
    def head_to_heads(self) -> list[HeadToHeads]:
        """Each policy against the baseline, by each criterion."""
        by_criterion: dict[str, dict[str, Outcomes | None]] = {}
        for row in self.policies:
            by_criterion.setdefault(row.criterion, {})[row.policy] = row.against_baseline
        return [HeadToHeads(judge=name, outcomes=rates) for name, rates in by_criterion.items()]

    def as_dict(self) -> dict[str, Any]:
        """Convert the result to JSON types."""
        left_out = ("baseline", "file")
        return dict(to_json_types({k: v for k, v in vars(self).items() if k not in left_out}))


def judge_policies(responses: Responses, options: JudgeOptions) -> Judgement:
    """Let a language model compare policies with the first of them, and write its verdicts.

    If the judge cannot be asked, its replies so far are kept for the next run.
    """
    baseline, *others = responses.by_policy
    if not others:
        raise ValueError(f"policies: expected two or more for the judge, got only {baseline!r}")
    if not options.criteria:
        raise ValueError("judge.criteria: expected at least one, got none")
    of_baseline = responses.by_policy[baseline]
    groups = [(criterion, policy) for criterion in options.criteria for policy in others]
    pairs = [
        Question(criterion, *texts)
        for criterion, policy in groups
        for texts in zip(responses.prompts, responses.by_policy[policy], of_baseline, strict=True)
    ]
    with Judge(options) as judge:
        # one call for all groups, so that they share the progress bar and the requests in parallel
        verdicts = judge.judge_pairs(pairs, f"verdicts of {options.model}")
        usage = judge.count_questions()
    n = len(responses.prompts)
    by_group = {key: verdicts[i * n : (i + 1) * n] for i, key in enumerate(groups)}
    policies = [policy for _, policy in groups for _ in range(n)]
    file = write_json_lines(
        Path(options.folder) / _VERDICTS_FILE,
        [
            {
                "criterion": pair.criterion,
                "policy": policy,
                "baseline": baseline,
                "prompt": to_json_types(pair.conversation),
                "response": pair.answer_a,
                "baseline_response": pair.answer_b,
                **to_json_types(verdict),
            }
            for policy, pair, verdict in zip(policies, pairs, verdicts, strict=True)
        ],
    )
    return Judgement(
        model=str(options.model),
        base_url=None if options.base_url is None else redact_url(options.base_url),
        baseline=baseline,
        policies=[
            JudgedPolicy(
                policy,
                criterion,
                verdict_rates(group),
                sum(verdict.result == "invalid" for verdict in group),
                position_bias(group),
            )
            for (criterion, policy), group in by_group.items()
        ],
        usage=usage,
        file=file,
    )


def print_judgement(judgement: Judgement) -> None:
    """Print who wins, the position bias, what was asked, and where the reasons are."""
    print_table(outcomes_table(judgement.head_to_heads, judgement.baseline))
    table = make_table(
        "both orders of a pair",
        ["by", "policy", "first, %", "second, %", "invalid"],
        n_names=2,
        caption="first, second: preferred in both orders because of its position; a tie",
    )
    for row in judgement.policies:
        bias = row.position_bias
        cells = ["-", "-"] if bias is None else [f"{100 * share:.0f}" for share in bias.values()]
        table.add_row(row.criterion, row.policy, *cells, str(row.invalid))
    print_table(table)
    usage = judgement.usage
    print(
        f"Judge {judgement.model}: {usage['questions']} questions, {usage['from_cache']} of them "
        "answered by an earlier run"
    )
    if usage["invalid"]:
        print(
            f"{usage['invalid']} questions got no answer that could be read, their pairs are "
            "invalid: see 'malformed' in the verdicts. A model that follows instructions better or "
            f"a larger judge.max_tokens helps; delete their lines in {ANSWERS_FILE} to ask again."
        )
    if usage["shortened"]:
        print(
            f"{usage['shortened']} questions had texts that were cut off after "
            "judge.max_characters."
        )
    print(f"Verdicts and reasons: {judgement.file}")
