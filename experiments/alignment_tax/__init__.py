"""What does PPO cost on a benchmark, and does PPO-ptx mitigate it?"""

from experiments.frame import About

ABOUT = About(
    question="What does PPO cost on a benchmark, and does PPO-ptx mitigate it?",
    answer=(
        "Without the language-model loss all six runs read unseen text worse, with it better; "
        "MMLU measures nothing at this size."
    ),
    cost="twelve runs of three to four minutes on a shared H100",
    page="docs/alignment_tax.md",
)
