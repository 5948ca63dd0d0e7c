"""Which of the paper's claims on PPO hold in the built-in world?"""

from experiments.frame import About

ABOUT = About(
    question="Which of the paper's claims on PPO hold in the built-in world?",
    answer=(
        "Of 37 claims 15 are confirmed, 3 contradicted, and the others partly, undecided or not "
        "at this scale."
    ),
    cost="11 CPU hours",
    page="docs/reproduction.md",
)
