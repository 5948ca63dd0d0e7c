"""Does the strength of pairs find wrong labels, and do remedies help?"""

from experiments.frame import About

ABOUT = About(
    question="Does the strength of pairs find wrong labels, and do remedies help?",
    answer=(
        "Not reliably: a tenth of flipped labels is found, more is not, and no remedy is better "
        "or worse by the criterion; by intervals two gain gold where 30 % is flipped."
    ),
    cost="one CPU hour",
    page="docs/label_noise.md",
)
