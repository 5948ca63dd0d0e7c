"""Does a probe of the reward name beforehand what PPO then exploits?"""

from experiments.frame import About

ABOUT = About(
    question="Does a probe of the reward name beforehand what PPO then exploits?",
    answer="Not run yet; the criterion is fixed.",
    cost="not known yet",
    page="docs/reward_probe.md",
)
