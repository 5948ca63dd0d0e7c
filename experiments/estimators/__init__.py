"""Which estimator of advantages is best in the lab?"""

from experiments.frame import About

ABOUT = About(
    question="Which estimator of advantages is best in the lab?",
    answer="No difference from PPO-max is shown.",
    cost="0.2 CPU hours, and the models of reproduce that the arms start from",
    page="docs/estimators_compared.md",
)
