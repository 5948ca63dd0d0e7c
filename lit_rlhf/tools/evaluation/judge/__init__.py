"""A language model as judge of policies, behind any OpenAI-compatible endpoint."""

from lit_rlhf.tools.evaluation.judge.client import Answer, JudgeClient, JudgeError, JudgeOptions
from lit_rlhf.tools.evaluation.judge.judge import Judge, Pair, RequestTotals, Usage
from lit_rlhf.tools.evaluation.judge.judgement import (
    JudgedPolicy,
    Judgement,
    judge_policies,
    print_judgement,
)
from lit_rlhf.tools.evaluation.judge.messages import Criterion
from lit_rlhf.tools.evaluation.judge.verdicts import (
    Agreement,
    PairVerdict,
    PositionBias,
    cohens_kappa,
    human_agreement,
)

__all__ = [
    "Agreement",
    "Answer",
    "Criterion",
    "Judge",
    "JudgeClient",
    "JudgeError",
    "JudgeOptions",
    "JudgedPolicy",
    "Judgement",
    "Pair",
    "PairVerdict",
    "PositionBias",
    "RequestTotals",
    "Usage",
    "cohens_kappa",
    "human_agreement",
    "judge_policies",
    "print_judgement",
]
