"""A language model as judge of policies, behind any OpenAI-compatible endpoint."""

from lit_rlhf.tools.evaluation.judge.judge import judge_policies as judge_policies
from lit_rlhf.tools.evaluation.judge.judge import print_judgement as print_judgement
from lit_rlhf.tools.evaluation.judge.options import JudgeOptions as JudgeOptions
