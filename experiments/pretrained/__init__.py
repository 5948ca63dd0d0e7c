"""What does each stage do to SmolLM2-135M on HH-RLHF?"""

from experiments.frame import About

ABOUT = About(
    question="What does each stage do to SmolLM2-135M on HH-RLHF?",
    answer=(
        "SFT and the reward model learn; within 32 iterations PPO-max and vanilla PPO do not "
        "differ by more than the intervals."
    ),
    cost="4.6 CPU hours",
    page="docs/pretrained.md",
)
