"""Does Figure 4 come out with labels that people gave?"""

from experiments.frame import About

ABOUT = About(
    question="Does Figure 4 come out with labels that people gave?",
    answer="No: the criterion is met with no seed, and we do not know why.",
    cost="6.4 CPU hours for three seeds",
    page="docs/preferences.md",
)
