"""Does PPO over-optimize a learned reward of a pretrained model, as Gao et al. measured it?"""

from experiments.frame import About

ABOUT = About(
    question="Does PPO over-optimize a small reward model whose labels a gold model gave?",
    answer="Not known yet: the runs are not complete.",
    cost="about 22 CPU hours, estimated from the first of twelve runs of PPO",
    page="docs/overoptimization.md",
)
