"""What a reward model is worth on preference data: numbers, one HTML page and JSON."""

from lit_rlhf.evaluation.reward_report.render import print_reward_report, report_html
from lit_rlhf.evaluation.reward_report.report import Mistake, RewardReport, reward_report
from lit_rlhf.evaluation.reward_report.scores import ScoredPairs, scored_pairs

__all__ = [
    "Mistake",
    "RewardReport",
    "ScoredPairs",
    "print_reward_report",
    "report_html",
    "reward_report",
    "scored_pairs",
]
