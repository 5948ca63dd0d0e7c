"""Does the collapse detector flag the quickstart's collapses, and does rolling back save them?"""

from experiments.frame import About

ABOUT = About(
    question=(
        "Does the collapse detector flag the quickstart's collapses, and does rolling back save "
        "them?"
    ),
    answer=(
        "It flags 10 of 10 vanilla runs and no PPO-max run; with roll-back the final gold of "
        "all ten is no lower than SFT's."
    ),
    cost="40 runs of PPO and their models on a CPU, time not recorded",
    page="docs/collapse.md",
)
