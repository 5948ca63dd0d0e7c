"""What does a critic know at each token of a response?"""

from experiments.frame import About

ABOUT = About(
    question="What does a critic know at each token of a response?",
    answer=(
        "At the end it explains 0.4 to 0.8 of the variance of returns, and Monte-Carlo targets "
        "teach it no more than lambda 0.9."
    ),
    cost="six runs on the models of estimators, time not recorded",
    page="docs/estimators_compared.md",
)
