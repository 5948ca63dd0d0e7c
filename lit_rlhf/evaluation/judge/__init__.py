"""A language model as a judge of policies, behind any OpenAI-compatible endpoint."""

from lit_rlhf.evaluation.judge.agreement import Agreement, agreement, cohens_kappa
from lit_rlhf.evaluation.judge.asking import Judge, Pair, Spent, Usage
from lit_rlhf.evaluation.judge.client import JudgeError
from lit_rlhf.evaluation.judge.judgement import JudgedPolicy, Judgement, judgement
from lit_rlhf.evaluation.judge.options import Criterion, JudgeOptions
from lit_rlhf.evaluation.judge.tables import print_judgement
from lit_rlhf.evaluation.judge.verdicts import PairVerdict, PositionBias

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
    "judgement",
    "print_judgement",
]
