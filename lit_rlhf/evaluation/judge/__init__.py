"""A language model as a judge of policies, behind any OpenAI-compatible endpoint."""

from lit_rlhf.evaluation.judge.client import JudgeError, JudgeOptions
from lit_rlhf.evaluation.judge.judge import Judge, Pair, Spent, Usage
from lit_rlhf.evaluation.judge.judgement import (
    JudgedPolicy,
    Judgement,
    judge_policies,
    print_judgement,
)
from lit_rlhf.evaluation.judge.messages import Criterion
from lit_rlhf.evaluation.judge.verdicts import (
    Agreement,
    PairVerdict,
    PositionBias,
    agreement,
    cohens_kappa,
)

__all__ = [
    "Agreement",
    "Criterion",
    "Judge",
    "JudgeError",
    "JudgeOptions",
    "JudgedPolicy",
    "Judgement",
    "Pair",
    "PairVerdict",
    "PositionBias",
    "Spent",
    "Usage",
    "agreement",
    "cohens_kappa",
    "judge_policies",
    "print_judgement",
]
