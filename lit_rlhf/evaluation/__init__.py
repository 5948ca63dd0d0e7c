"""Evaluation: policies side by side on the same prompts, and how a run went."""

from lit_rlhf.evaluation.compare import (
    Comparison,
    PolicyReport,
    compared_policies,
    loaded_reward,
    shared_encoder,
)
from lit_rlhf.evaluation.comparison import (
    HeadToHead,
    Outcomes,
    ScoreSummary,
    outcomes,
    score_summary,
)
from lit_rlhf.evaluation.policies import PolicySamples, policy_samples
from lit_rlhf.evaluation.responses import Responses, saved_responses
from lit_rlhf.evaluation.tables import comparison_table, outcomes_table, print_comparison

__all__ = [
    "Comparison",
    "HeadToHead",
    "Outcomes",
    "PolicyReport",
    "PolicySamples",
    "Responses",
    "ScoreSummary",
    "compared_policies",
    "comparison_table",
    "loaded_reward",
    "outcomes",
    "outcomes_table",
    "policy_samples",
    "print_comparison",
    "saved_responses",
    "score_summary",
    "shared_encoder",
]
