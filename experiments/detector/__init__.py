"""The collapse detector judged by kinds of trouble, on families of runs that were left out."""

from experiments.frame import About

ABOUT = About(
    question=(
        "How often does the collapse detector miss a trouble, flag an untroubled run or name the "
        "wrong kind, on families that were left out?"
    ),
    answer=(
        "All three demands are met in the lab and none on SmolLM2; on made-up runs and on other "
        "people's logs only the kinds are right."
    ),
    cost="a replay of the results of others, time not recorded",
    page="docs/collapse.md",
)
