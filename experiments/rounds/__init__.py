"""Are two rounds of labels better than one round with as many labels?"""

from experiments.frame import About

ABOUT = About(
    question="Are two rounds of labels better than one round with as many labels?",
    answer="Not yet run.",
    cost="not yet run",
    page="docs/rounds.md",
)
