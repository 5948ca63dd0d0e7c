"""Does the pipeline handle HH-RLHF as it is, on a CPU?"""

from experiments.frame import About

ABOUT = About(
    question="Does the pipeline handle HH-RLHF as it is, on a CPU?",
    answer="Yes, but a model of one million weights learns no more than length.",
    cost="six minutes with one thread",
    page="docs/hh_cpu.md",
)
