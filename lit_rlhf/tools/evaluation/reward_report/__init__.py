"""A report on a reward model, measured on preference data: an HTML page and JSON."""

from lit_rlhf.tools.evaluation.reward_report.measures import RewardReport as RewardReport
from lit_rlhf.tools.evaluation.reward_report.measures import (
    measure_reward_model as measure_reward_model,
)
from lit_rlhf.tools.evaluation.reward_report.measures import read_strengths as read_strengths
from lit_rlhf.tools.evaluation.reward_report.render import (
    print_reward_report as print_reward_report,
)
from lit_rlhf.tools.evaluation.reward_report.render import print_strengths as print_strengths
from lit_rlhf.tools.evaluation.reward_report.render import report_html as report_html
from lit_rlhf.tools.evaluation.reward_report.scores import score_pairs as score_pairs
