"""The collapse detector judged by kinds of trouble, on families of runs that were left out."""

from experiments.frame import About

ABOUT = About(
    question=(
        "How often does the collapse detector miss a trouble, flag an untroubled run or name the "
        "wrong kind, on families that were left out?"
    ),
    answer=(
        "In the lab all three demands are met, elsewhere two: on SmolLM2 a quarter of the kinds "
        "are wrong, and of made-up runs and other people's logs too few are seen."
    ),
    cost="a replay of the results of others, time not recorded",
    page="docs/collapse.md",
)
