"""A language model as judge of policies, behind any OpenAI-compatible endpoint."""

from lit_rlhf.tools.evaluation.judge.client import JudgeError, JudgeOptions
from lit_rlhf.tools.evaluation.judge.judgement import Judgement, judge_policies, print_judgement

__all__ = ["JudgeError", "JudgeOptions", "Judgement", "judge_policies", "print_judgement"]
