"""Which estimator of advantages learns sums best with SmolLM2-135M?"""

from experiments.frame import About

ABOUT = About(
    question="Which estimator of advantages learns sums best with SmolLM2-135M?",
    answer=(
        "REINFORCE++ is better than PPO-max by tokens and RLOO on unseen sums at the end; other "
        "differences are smaller or not there with each seed."
    ),
    cost="3.3 CPU hours",
    page="docs/estimator_sums.md",
)
