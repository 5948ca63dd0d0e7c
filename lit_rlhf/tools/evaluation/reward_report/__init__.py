"""A report on a reward model, measured on preference data: an HTML page and JSON."""

from lit_rlhf.tools.evaluation.reward_report.render import print_reward_report, report_html
from lit_rlhf.tools.evaluation.reward_report.report import RewardReport, measure_reward_model
from lit_rlhf.tools.evaluation.reward_report.scores import ScoredPairs, score_pairs

__all__ = [
    "RewardReport",
    "ScoredPairs",
    "measure_reward_model",
    "print_reward_report",
    "report_html",
    "score_pairs",
]
