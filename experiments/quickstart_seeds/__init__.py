"""Does the quickstart show what it should on every machine, whatever the rounding?"""

from experiments.frame import About

ABOUT = About(
    question="Does the quickstart show what it should on every machine, whatever the rounding?",
    answer="All four claims hold in the thirty runs that decide each, with one allowed failure.",
    cost="5.6 hours of wall time summed over 60 runs, on a CPU with other work",
    page="docs/quickstart_seeds.md",
)
