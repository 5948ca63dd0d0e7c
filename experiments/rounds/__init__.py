"""Are two rounds of labels better than one round with as many labels?"""

from experiments.frame import About

ABOUT = About(
    question="Are two rounds of labels better than one round with as many labels?",
    answer=(
        "No difference is shown: two rounds end with 0.05 more gold on average, with an interval "
        "from -0.15 to 0.24."
    ),
    cost="seven CPU minutes for three seeds",
    page="docs/rounds.md",
)
