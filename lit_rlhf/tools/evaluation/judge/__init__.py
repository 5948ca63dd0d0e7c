"""A language model as judge of policies, behind any OpenAI-compatible endpoint."""

from lit_rlhf.tools.evaluation.judge.client import JudgeOptions as JudgeOptions
from lit_rlhf.tools.evaluation.judge.judge import judge_policies as judge_policies
from lit_rlhf.tools.evaluation.judge.judge import print_judgement as print_judgement
