"""Policies compared by the judge, which is asked in both orders, in parallel, and nothing twice.

Replies are kept in a file, so that an interrupted run continues and nothing is paid for twice.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from lit_callbacks.files import Line
from lit_rlhf.files import append_to, begins_like, parse_json, split_lines, write_json_lines
from lit_rlhf.rewards import redact_url
from lit_rlhf.rewards.judge.comparing import (
    Criterion,
    JudgeReply,
    Question,
    question_messages,
    wording,
)
from lit_rlhf.terminal import print_line
from lit_rlhf.tools.evaluation.judge.options import (
    JudgeError,
    JudgeOptions,
    ask_judge,
    open_judge,
)
from lit_rlhf.tools.evaluation.outcomes import (
    HeadToHeads,
    Outcomes,
    outcome_rates,
    outcomes_table,
)
from lit_rlhf.tools.evaluation.output import make_table, print_table, progress_bar, to_json_types
from lit_rlhf.tools.evaluation.responses import Responses

ANSWERS_FILE = "answers.jsonl"
_VERDICTS_FILE = "verdicts.jsonl"
Result = Literal["win", "tie", "lose", "invalid"]
_POINTS = {"win": 1.0, "tie": 0.0, "lose": -1.0}


_BEGINNING = b'{"key": "'
"""What a line of a file of answers begins with."""


class PairVerdict(NamedTuple):
    """The judge's verdict on a policy's answer against the baseline's.

    Attributes:
        result: Who wins; `invalid` if one of the replies could not be read.
        policy_as_a: Reply with the policy's answer as A. `None` for equal answers, which are not
            shown to the judge.
        policy_as_b: Reply with the policy's answer as B.
    """

    result: Result
    policy_as_a: JudgeReply | None
    policy_as_b: JudgeReply | None


def _combine_orders(policy_as_a: JudgeReply, policy_as_b: JudgeReply) -> PairVerdict:
    """The policy wins or loses if both replies say so. Otherwise it is a tie."""
    verdicts = (policy_as_a.verdict, policy_as_b.verdict)
    agreed: dict[Any, Result] = {("A", "B"): "win", ("B", "A"): "lose"}
    return PairVerdict(
        result="invalid" if None in verdicts else agreed.get(verdicts, "tie"),
        policy_as_a=policy_as_a,
        policy_as_b=policy_as_b,
    )


def verdict_rates(verdicts: Sequence[PairVerdict]) -> Outcomes | None:
    """Compute win, tie and lose rates over the valid verdicts; `None` if there is none.

    Args:
        verdicts: A verdict for each prompt.
    """
    points = [_POINTS[verdict.result] for verdict in verdicts if verdict.result != "invalid"]
    return outcome_rates(points, [0.0] * len(points)) if points else None


def position_bias(verdicts: Sequence[PairVerdict]) -> dict[str, float] | None:
    """Compute how often the judge preferred the same place in both orders.

    Args:
        verdicts: A verdict for each prompt.

    Returns:
        Shares in [0, 1] of the `first` and of the `second` place; `None` without a pair that has
        two valid replies.
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


def _question_key(question: Question, options: JudgeOptions) -> str:
    """Hash everything that a reply depends on.

    The endpoint's address is left out: a local server may come back on another port.
    """
    sampling = [options.model, options.temperature, options.max_tokens, options.max_attempts]
    messages = question_messages(question, options.max_characters)
    parts = [messages, [*sampling, wording()]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _ReplyCache:
    """Replies by key in a JSON lines file, to which each is appended as it arrives.

    A last line that a crash left incomplete is dropped. Threads may share the cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = Lock()
        content = self.path.read_bytes() if self.path.exists() else b""
        self.replies: dict[str, JudgeReply] = {}
        for line in split_lines(content.decode(errors="replace")):
            if line.is_complete:
                self._read_line(line)
        n_complete = content.rfind(b"\n") + 1
        if not begins_like(content[n_complete:], _BEGINNING):  # nothing of it may be lost
            raise ValueError(
                f"{self.path}: expected answers of the judge, got a file that ends with "
                f"{content[n_complete:]!r:.80}"
            )
        self._opened = ExitStack()
        self._file = self._opened.enter_context(append_to(self.path))
        # else the next reply would be appended to an incomplete line, and both would be lost
        self._file.truncate(n_complete)

    def add(self, key: str, reply: JudgeReply, description: Mapping[str, Any]) -> None:
        """Store a reply; its line has then left the process.

        Args:
            key: Hash of the question.
            reply: The reply.
            description: Further fields of the line, for people who read the file.
        """
        line = json.dumps({"key": key, **description, **reply._asdict()}) + "\n"
        with self._lock:
            self.replies[key] = reply
            self._file.write(line.encode())
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _read_line(self, line: Line) -> None:
        """Take the reply in a line."""
        try:
            record = parse_json(line.text)
            reply = JudgeReply(**{name: record[name] for name in JudgeReply._fields})
            self.replies[record["key"]] = reply
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}:{line.number}: expected an answer of the judge, got "
                f"{line.text!r:.80}; delete the line to ask its question again"
            ) from error


class Judge(AbstractContextManager["Judge"]):
    """A judge with a cache of its replies; a context manager, which closes connections and file.

    Whoever opens it has locked the folder of the replies.

    Attributes:
        options: Options of the judge.
        questions: All questions by key, whether this run or an earlier one asked them.
        asked_keys: Keys of the questions that this run asked.
    """

    def __init__(self, options: JudgeOptions) -> None:
        if not options.model:
            raise ValueError("judge.model: expected the name of a model, got none")
        self.options = options
        with ExitStack() as opened:
            self._endpoint = open_judge(options)
            opened.callback(self._endpoint.close)
            self._cache = _ReplyCache(Path(options.folder) / ANSWERS_FILE)
            opened.callback(self._cache.close)
            self._opened = opened.pop_all()
        self.questions: dict[str, Question] = {}
        self.asked_keys: set[str] = set()

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def judge_pairs(self, pairs: Sequence[Question], label: str) -> list[PairVerdict]:
        """Judge pairs, each in both orders. Pairs of equal answers tie without a question.

        The policy's answer is A and the baseline's B. If the endpoint does not reply, the replies
        received so far stay in the file.

        Args:
            pairs: A question for each pair.
            label: Name of the progress bar.

        Returns:
            A verdict for each pair, in their order.
        """
        different = [pair for pair in pairs if pair.answer_a != pair.answer_b]
        questions = [question for pair in different for question in (pair, pair.swapped)]
        replies = iter(self._ask_all(questions, label))
        verdicts = []
        for pair in pairs:
            if pair.answer_a == pair.answer_b:
                verdict = PairVerdict(result="tie", policy_as_a=None, policy_as_b=None)
            else:
                policy_as_a = next(replies)
                policy_as_b = next(replies)
                verdict = _combine_orders(policy_as_a=policy_as_a, policy_as_b=policy_as_b)
            verdicts.append(verdict)
        return verdicts

    def count_questions(self) -> dict[str, int]:
        """Count the different questions, the ones that an earlier run asked, and the bad ones."""
        limit = self.options.max_characters
        return {
            "questions": len(self.questions),
            "from_cache": len(self.questions) - len(self.asked_keys),
            "invalid": sum(self._cache.replies[key].verdict is None for key in self.questions),
            "shortened": sum(question.longest > limit for question in self.questions.values()),
        }

    def _ask_all(self, questions: Sequence[Question], label: str) -> list[JudgeReply]:
        """Ask all questions without a reply in the cache; return the replies in their order."""
        keys = [_question_key(question, self.options) for question in questions]
        by_key = dict(zip(keys, questions, strict=True))  # asks a repeated question once
        self.questions |= by_key
        missing = [key for key in by_key if key not in self._cache.replies]
        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            with progress_bar(label, len(missing)) as progress:
                # the first question by itself: a wrong key or address then costs one request
                for group in (missing[:1], missing[1:]):
                    running = [pool.submit(self._ask, key, by_key[key]) for key in group]
                    for done in as_completed(running):
                        self.asked_keys.add(done.result())
                        progress(1)
        except JudgeError as error:
            raise JudgeError(
                f"{error}. {len(self._cache.replies)} answers are in {self._cache.path}; the same "
                "command continues from there"
            ) from error
        finally:
            # After an error, requests in progress are awaited and their replies stored, since they
            # are paid for. The others are not sent.
            pool.shutdown(cancel_futures=True)
        return [self._cache.replies[key] for key in keys]

    def _ask(self, key: str, question: Question) -> str:
        """Ask a question, keep the reply, and return the key."""
        reply = ask_judge(self._endpoint, question, self.options)
        description = {"judge": self.options.model, "criterion": question.criterion}
        self._cache.add(key, reply, description)
        return key


@dataclass(frozen=True)
class JudgedPolicy:
    """One policy against the baseline by one criterion.

    Attributes:
        policy: Name of the policy.
        criterion: The criterion.
        against_baseline: Rates over the prompts with a valid verdict; `None` without any.
        invalid: Number of prompts without a valid verdict.
        position_bias: See `position_bias`.
    """

    policy: str
    criterion: Criterion
    against_baseline: Outcomes | None
    invalid: int
    position_bias: dict[str, float] | None


@dataclass(frozen=True)
class Judgement:
    """The judge's comparison of policies, criterion by criterion.

    Attributes:
        model: Name of the judge.
        base_url: Address of the judge without secrets; `None` for OpenAI's.
        baseline: Name of the policy that the others are compared with.
        policies: Each other policy by each criterion.
        usage: Numbers of questions, see `Judge.count_questions`.
        file: JSON lines file of all verdicts.
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


class JudgedGroup(NamedTuple):
    """A group of verdicts that are summed up together.

    Attributes:
        criterion: What the answers are compared by.
        policy: Name of the policy that is compared with the baseline.
    """

    criterion: Criterion
    policy: str


def judge_policies(responses: Responses, options: JudgeOptions) -> Judgement:
    """Let a language model compare policies with the first of them, and write its verdicts.

    If the judge cannot be asked, its replies so far stay in the file for the next run.

    Args:
        responses: Responses of two or more policies to the same prompts, the baseline first.
        options: Options of the judge, which may not be without `model`.
    """
    baseline, *others = responses.by_policy
    if not others:
        raise ValueError(f"policies: expected two or more for the judge, got only {baseline!r}")
    if not options.criteria:
        raise ValueError("judge.criteria: expected at least one, got none")
    groups = [JudgedGroup(criterion, policy) for criterion in options.criteria for policy in others]
    pairs = [
        Question(criterion=criterion, conversation=prompt, answer_a=answer, answer_b=of_baseline)
        for criterion, policy in groups
        for prompt, answer, of_baseline in zip(
            responses.prompts,
            responses.by_policy[policy],
            responses.by_policy[baseline],
            strict=True,
        )
    ]
    with Judge(options) as judge:
        # one call for all groups, so that they share the progress bar and the requests in parallel
        verdicts = judge.judge_pairs(pairs, f"verdicts of {options.model}")
        usage = judge.count_questions()
    n = len(responses.prompts)
    by_group = {group: verdicts[i * n : (i + 1) * n] for i, group in enumerate(groups)}
    policies = [group.policy for group in groups for _ in range(n)]
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
                policy=group.policy,
                criterion=group.criterion,
                against_baseline=verdict_rates(of_group),
                invalid=sum(verdict.result == "invalid" for verdict in of_group),
                position_bias=position_bias(of_group),
            )
            for group, of_group in by_group.items()
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
    print_line(
        f"Judge {judgement.model}: {usage['questions']} questions, {usage['from_cache']} of them "
        "answered by an earlier run"
    )
    if usage["invalid"]:
        print_line(
            f"{usage['invalid']} questions got no answer that could be read, their pairs are "
            "invalid: see 'malformed' in the verdicts. A model that follows instructions better or "
            f"a larger judge.max_tokens helps; delete their lines in {ANSWERS_FILE} to ask again."
        )
    if usage["shortened"]:
        print_line(
            f"{usage['shortened']} questions had texts that were cut off after "
            "judge.max_characters."
        )
    print_line(f"Verdicts and reasons: {judgement.file}")
