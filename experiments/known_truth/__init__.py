"""Does PPO exploit a learned reward of a pretrained model where a rule knows the truth?"""

from experiments.frame import About

ABOUT = About(
    question=(
        "Does PPO exploit a learned reward of a pretrained model where a rule knows the truth?"
    ),
    answer=(
        "The criterion is not met: vanilla PPO's truth collapses with two of three seeds; PPO-"
        "max improves it with all three."
    ),
    cost="3.2 CPU hours for three seeds, one of them on an H100",
    page="docs/known_truth.md",
)
