"""Evaluation: policies side by side on the same prompts, and how a run went."""

from lit_rlhf.evaluation.compare import (
    Comparison,
    PolicyReport,
    compared_policies,
    loaded_reward,
    shared_encoder,
)
from lit_rlhf.evaluation.comparison import Outcomes, ScoreSummary, outcomes, score_summary
from lit_rlhf.evaluation.policies import PolicySamples, policy_samples
from lit_rlhf.evaluation.tables import comparison_table, print_comparison

__all__ = [
    "Comparison",
    "Outcomes",
    "PolicyReport",
    "PolicySamples",
    "ScoreSummary",
    "compared_policies",
    "comparison_table",
    "loaded_reward",
    "outcomes",
    "policy_samples",
    "print_comparison",
    "score_summary",
    "shared_encoder",
]
