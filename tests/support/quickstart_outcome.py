"""The outcome of a quickstart in which everything went as its page says."""

from lit_rlhf.tools.commands.quickstart import Outcome

EXPECTED_OUTCOME = Outcome(
    sft_gold=0.5,
    sft_std=1.4,
    vanilla_gold=-4.0,
    max_gold=1.0,
    vanilla_score=2.0,
    max_score=0.5,
    sft_well_formed=0.95,
    vanilla_well_formed=0.02,
    max_well_formed=0.9,
)
