"""Does the detector flag an exploited rule under TRL's GRPO?"""

from experiments.frame import About

ABOUT = About(
    question="Does the detector flag an exploited rule under TRL's GRPO?",
    answer="Yes, three of three runs, and none of the three that learn the truth.",
    cost="seven runs of 150 updates on a CPU, time not recorded; needs trl",
    page="docs/collapse.md",
)
