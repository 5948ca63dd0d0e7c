"""Does a probe of the reward name beforehand what PPO then exploits?"""

from experiments.frame import About

ABOUT = About(
    question="Does a probe of the reward name beforehand what PPO then exploits?",
    answer=(
        "In the lab, yes: it names what PPO ended with for 11 of 11 exploited rewards, and nothing "
        "for 15 of 15 others; of SmolLM2 it names nothing."
    ),
    cost="half a CPU hour, for six reward models of the lab and one of SmolLM2",
    page="docs/reward_probe.md",
)
