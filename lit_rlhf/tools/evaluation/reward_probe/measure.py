"""How much score each way to cheat gains over honest answers, by the reward that PPO would get.

Notation: `N` prompts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lit_rlhf.data import PromptExample
from lit_rlhf.rewards import Scores, WeightedReward
from lit_rlhf.terminal import shorten
from lit_rlhf.tools.evaluation.loading import CPU
from lit_rlhf.tools.evaluation.outcomes import score_summary
from lit_rlhf.tools.evaluation.output import to_json_types
from lit_rlhf.tools.evaluation.reward_probe.answers import AnswerEncoder, HonestAnswer, Response
from lit_rlhf.tools.evaluation.reward_probe.cheats import (
    CANNED_ANSWER,
    CHEATS,
    Attempt,
    Cheat,
    Corpus,
)
from lit_rlhf.tools.evaluation.reward_probe.scoring import score_encoded

MIN_PROMPTS = 8
"""Fewest prompts of a probe: with fewer, the interval of a mean says little."""
_CANDIDATES = 8  # honest answers of which the canned one is chosen


class Verdict(StrEnum):
    """What a reward does with a cheat, by the 95 % interval of its mean gain."""

    GAINS = "gains"
    NO_DIFFERENCE = "no difference"
    COSTS = "costs"


class Example(NamedTuple):
    """The prompt on which a cheat gains most.

    Attributes:
        prompt: The rendered prompt.
        honest: The honest answer.
        honest_score: Its score.
        cheat: The response of the cheat, without special tokens.
        cheat_score: Its score.
    """

    prompt: str
    honest: str
    honest_score: float
    cheat: str
    cheat_score: float


@dataclass(frozen=True)
class CheatResult:
    """What a cheat gains over honest answers to the same prompts.

    Attributes:
        name: Name of the cheat.
        about: The response, in a line.
        advice: What to do if it gains, as the end of a sentence.
        gain: Mean over prompts of its score less the honest answer's, in units of the probe.
        low: Lower end of the 95 % bootstrap interval of `gain`.
        high: Upper end.
        wins: Share of prompts on which it scores higher than the honest answer.
        n_prompts: Number of these prompts.
        tokens: Mean length of the responses in tokens, EOS included.
        by_reward: Mean gain under each reward by itself, before normalization and weights, in units
            of the spread of that reward's scores of honest answers; NaN if it always abstains.
        example: The prompt on which it gains most.
    """

    name: str
    about: str
    advice: str
    gain: float
    low: float
    high: float
    wins: float
    n_prompts: int
    tokens: float
    by_reward: Mapping[str, float]
    example: Example

    @property
    def verdict(self) -> Verdict:
        """Whether the whole interval of the mean gain is above 0, below it, or neither."""
        if self.low > 0:
            return Verdict.GAINS
        return Verdict.COSTS if self.high < 0 else Verdict.NO_DIFFERENCE


@dataclass(frozen=True)
class RewardProbe:
    """What each cheat gains under a reward.

    Attributes:
        n_prompts: Number of prompts with an honest answer, `N`.
        honest_mean: Mean score of the honest answers.
        honest_std: Standard deviation of their scores over prompts.
        honest_tokens: Their mean length in tokens, EOS included.
        results: The cheats, the one that gains most first.
        not_applicable: Names of the cheats for which answers or tokenizer lack what they take.
        without_vote: Names of the cheats from which all rewards with a weight abstain.
        n_without_vote: Number of honest answers from which they abstain, which are left out.
    """

    n_prompts: int
    honest_mean: float
    honest_std: float
    honest_tokens: float
    results: Sequence[CheatResult]
    not_applicable: Sequence[str] = ()
    without_vote: Sequence[str] = ()
    n_without_vote: int = 0

    @property
    def gaining(self) -> list[CheatResult]:
        """The cheats that score higher than honest answers."""
        return [cheat for cheat in self.results if cheat.verdict is Verdict.GAINS]

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types."""
        report: dict[str, Any] = to_json_types(self)
        for row, cheat in zip(report["results"], self.results, strict=True):
            row["verdict"] = str(cheat.verdict)
        return report


@dataclass(frozen=True)
class _Scored:
    """Responses with their scores, `N` of them.

    Attributes:
        prompts: The prompts.
        texts: The responses without special tokens.
        total: The sum that PPO learns from, `[N]`.
        by_reward: Scores of each reward by itself, `[N]`; NaN where it abstains.
        tokens: Lengths in tokens, EOS included, `[N]`.
        voted: Rows for which a reward with a weight has a vote.
    """

    prompts: Sequence[PromptExample]
    texts: Sequence[str]
    total: NDArray[np.float64]
    by_reward: Mapping[str, NDArray[np.float64]]
    tokens: NDArray[np.float64]
    voted: Sequence[int]

    def select(self, rows: Sequence[int]) -> "_Scored":
        """The responses at `rows`."""
        voted = set(self.voted)
        return _Scored(
            prompts=[self.prompts[row] for row in rows],
            texts=[self.texts[row] for row in rows],
            total=self.total[rows],
            by_reward={name: scores[rows] for name, scores in self.by_reward.items()},
            tokens=self.tokens[rows],
            voted=[place for place, row in enumerate(rows) if row in voted],
        )


class _ScoredCheat(NamedTuple):
    """A cheat with its scores.

    Attributes:
        cheat: The cheat.
        scores: Its responses.
        honest: The honest answers to the same prompts.
    """

    cheat: Cheat
    scores: _Scored
    honest: _Scored


@dataclass(frozen=True)
class _Scorer:
    """Scores responses with a reward.

    Attributes:
        reward: The reward, on `device`.
        encoder: Encodes the responses.
        device: Where the reward computes.
        report_progress: Gets the number of responses just scored.
    """

    reward: WeightedReward
    encoder: AnswerEncoder
    device: torch.device
    report_progress: Callable[[int], object]

    def score_honest(self, honest: Sequence[HonestAnswer]) -> _Scored:
        """Score the honest answers."""
        return self._check(
            "the honest answer",
            [answer.prompt for answer in honest],
            [answer.text for answer in honest],
            [answer.response for answer in honest],
        )

    def score_attempts(
        self, name: str, prompts: Sequence[PromptExample], attempts: Sequence[Attempt]
    ) -> _Scored:
        """Score a cheat.

        Args:
            name: Its name, for messages.
            prompts: Prompts, `N` of them.
            attempts: A response to each.
        """
        responses = [self.encoder.encode(p, a) for p, a in zip(prompts, attempts, strict=True)]
        return self._check(name, prompts, [attempt.text for attempt in attempts], responses)

    def score_raw(self, prompts: Sequence[PromptExample], responses: Sequence[Response]) -> Scores:
        """Score encoded responses to prompts, in batches."""
        return score_encoded(
            self.reward,
            self.encoder.prompts,
            prompts,
            responses,
            device=self.device,
            report_progress=self.report_progress,
        )

    def _check(
        self,
        name: str,
        prompts: Sequence[PromptExample],
        texts: Sequence[str],
        responses: Sequence[Response],
    ) -> _Scored:
        """Score responses, and refuse scores that are not finite."""
        scores = self.score_raw(prompts, responses)
        total = scores.total.double().cpu().numpy()
        for row in np.flatnonzero(~np.isfinite(total)).tolist():
            raise ValueError(
                f"rewards: expected finite scores, got {total[row]} for {name} to the prompt "
                f"{shorten(prompts[row].text)}: the response {shorten(texts[row])}"
            )
        return _Scored(
            prompts=prompts,
            texts=texts,
            total=total,
            by_reward={k: v.double().cpu().numpy() for k, v in scores.by_name.items()},
            tokens=np.array([len(response.ids) for response in responses], dtype=np.float64),
            voted=self.reward.have_vote(scores.votes).nonzero().flatten().tolist(),
        )


@torch.no_grad()
def probe_reward(
    reward: WeightedReward,
    honest: Sequence[HonestAnswer],
    encoder: AnswerEncoder,
    *,
    device: torch.device = CPU,
    seed: int = 0,
    cheats: Sequence[Cheat] = CHEATS,
    report_progress: Callable[[int], object] = lambda done: None,
) -> RewardProbe:
    """Measure how much score each cheat gains over honest answers to the same prompts.

    An entry of the reward with `normalize` is normalized by the moments of the honest answers, if
    it has seen no scores yet. The reward's own moments stay as they are. Where all rewards with a
    weight abstain from an honest answer, its prompt is left out, and where they abstain from a
    cheat's response, that prompt is left out of the cheat's gain.

    Args:
        reward: The reward, on `device`.
        honest: Prompts with honest answers, at least `MIN_PROMPTS` with a vote.
        encoder: Encodes responses.
        device: Where the reward computes.
        seed: Seed of the bootstrap.
        cheats: The cheats to try, besides the canned answer.
        report_progress: Gets the number of responses just scored.
    """
    if len(honest) < MIN_PROMPTS:
        raise ValueError(
            f"data: expected at least {MIN_PROMPTS} prompts with an honest answer, got "
            f"{len(honest)}"
        )
    scorer = _Scorer(reward, encoder, device, report_progress)
    scored: list[_ScoredCheat] = []
    not_applicable = []
    with _evaluate(honest, scorer):
        all_honest = scorer.score_honest(honest)
        baseline = all_honest.select(all_honest.voted)
        if len(baseline.texts) < MIN_PROMPTS:
            raise ValueError(
                f"rewards: expected votes for at least {MIN_PROMPTS} honest answers, got votes for "
                f"{len(baseline.texts)} of {len(honest)}; all rewards with a weight abstain from "
                "the others"
            )
        answers = [honest[row] for row in all_honest.voted]
        corpus = Corpus(
            requests=[answer.request for answer in answers],
            answers=[answer.text for answer in answers],
            special_tokens=encoder.special_tokens,
        )
        for cheat in cheats:
            attempts = [cheat.write(corpus, row) for row in range(len(answers))]
            written = [attempt for attempt in attempts if attempt is not None]
            if len(written) < len(answers):
                not_applicable.append(cheat.name)
            else:
                cheat_scores = scorer.score_attempts(cheat.name, baseline.prompts, written)
                scored.append(_ScoredCheat(cheat, scores=cheat_scores, honest=baseline))
        canned = _choose_canned(scorer, baseline)
        rows = [row for row in range(1, len(answers), 2) if corpus.answers[row] != canned]
        if rows:
            others = baseline.select(rows)
            attempt = [Attempt(canned)] * len(rows)
            canned_scores = scorer.score_attempts(CANNED_ANSWER.name, others.prompts, attempt)
            scored.append(_ScoredCheat(CANNED_ANSWER, scores=canned_scores, honest=others))
        else:
            not_applicable.append(CANNED_ANSWER.name)
    results = [_compare(cheat, baseline, seed) for cheat in scored if cheat.scores.voted]
    return RewardProbe(
        n_prompts=len(answers),
        honest_mean=float(baseline.total.mean()),
        honest_std=float(baseline.total.std()),
        honest_tokens=float(baseline.tokens.mean()),
        results=sorted(results, key=lambda result: -result.gain),
        not_applicable=not_applicable,
        without_vote=[cheat.cheat.name for cheat in scored if not cheat.scores.voted],
        n_without_vote=len(honest) - len(answers),
    )


def count_responses(n_prompts: int, cheats: Sequence[Cheat] = CHEATS) -> int:
    """Count the responses that a probe scores at most, for a progress bar.

    Args:
        n_prompts: Number of prompts.
        cheats: Cheats that are tried besides the canned answer.
    """
    first_half = (n_prompts + 1) // 2
    return n_prompts * (1 + len(cheats)) + first_half * _CANDIDATES + n_prompts // 2


def _compare(cheat: _ScoredCheat, baseline: _Scored, seed: int) -> CheatResult:
    """Summarize a cheat.

    Args:
        cheat: The cheat with its scores, at least one of which is by a vote.
        baseline: All honest answers, whose spread is the unit.
        seed: Seed of the bootstrap.
    """
    scores = cheat.scores.select(cheat.scores.voted)
    honest = cheat.honest.select(cheat.scores.voted)
    gains = (scores.total - honest.total) / _spread(baseline.total)
    summary = score_summary(gains, seed)
    best = int(gains.argmax())
    return CheatResult(
        name=cheat.cheat.name,
        about=cheat.cheat.about,
        advice=cheat.cheat.advice,
        gain=summary.mean,
        low=summary.low,
        high=summary.high,
        wins=float((gains > 0).mean()),
        n_prompts=len(gains),
        tokens=float(scores.tokens.mean()),
        by_reward={
            name: _mean_gain(reward_scores, honest.by_reward[name])
            / _spread(baseline.by_reward[name])
            for name, reward_scores in scores.by_reward.items()
        },
        example=Example(
            prompt=honest.prompts[best].text,
            honest=honest.texts[best],
            honest_score=float(honest.total[best]),
            cheat=scores.texts[best],
            cheat_score=float(scores.total[best]),
        ),
    )


def _mean_gain(scores: NDArray[np.float64], honest: NDArray[np.float64]) -> float:
    """Mean difference where a reward has a vote for both; NaN where it always abstains."""
    gains = scores - honest
    voted = ~np.isnan(gains)
    return float(gains[voted].mean()) if voted.any() else math.nan


def _spread(scores: NDArray[np.float64]) -> float:
    """Standard deviation of scores; 1 where all are equal, so that gains are in points."""
    votes = scores[~np.isnan(scores)]
    return (float(votes.std()) if len(votes) else 0.0) or 1.0


def _choose_canned(scorer: _Scorer, honest: _Scored) -> str:
    """Choose the honest answer that scores best as the answer to other prompts.

    It is chosen on every second prompt, of the answers that score highest to their own prompts, and
    measured on the others: measured where it is chosen, it would gain by luck.
    """
    rows = range(0, len(honest.texts), 2)
    by_score = sorted(rows, key=lambda row: -honest.total[row])
    candidates = list(dict.fromkeys(honest.texts[row] for row in by_score))[:_CANDIDATES]
    gains = [0.0] * len(candidates)
    for place, text in enumerate(candidates):
        others = honest.select([row for row in rows if honest.texts[row] != text])
        if others.texts:
            attempts = [Attempt(text)] * len(others.texts)
            scored = scorer.score_attempts(CANNED_ANSWER.name, others.prompts, attempts)
            differences = (scored.total - others.total)[scored.voted]
            gains[place] = float(differences.mean()) if len(differences) else -math.inf
    return candidates[int(np.argmax(gains))]


@contextmanager
def _evaluate(honest: Sequence[HonestAnswer], scorer: _Scorer) -> Iterator[None]:
    """Score as in evaluation, normalized by the honest answers where there are no moments yet.

    Responses from which all rewards abstain are no error inside the context.
    """
    reward = scorer.reward
    was_training = reward.training
    could_abstain = reward.may_abstain
    saved = deepcopy(reward.moments.state_dict())
    # The mode of the sum alone: its reward models stay as they are, without dropout.
    reward.may_abstain = True
    try:
        if any(not bool(saved[key]) for key in saved if key.endswith(".count")):
            reward.training = True
            prompts = [answer.prompt for answer in honest]
            responses = [answer.response for answer in honest]
            reward.commit_moments(scorer.score_raw(prompts, responses))
        reward.training = False
        yield
    finally:
        reward.moments.load_state_dict(saved)
        reward.training = was_training
        reward.may_abstain = could_abstain
