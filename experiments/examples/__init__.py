"""What do the ready examples learn of their reward, and of what was meant?"""

from experiments.frame import About

ABOUT = About(
    question="What do the ready examples learn of their reward, and of what was meant?",
    answer="A cheap rule is enough to learn a form, and what it does not ask for is not learned.",
    cost="1.9 CPU hours",
    page="docs/examples.md",
)
