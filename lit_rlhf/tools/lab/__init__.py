"""The lab: a small helpful and harmless world in which the true ("gold") reward is known.

Importing the package loads no other part of the project, and not torch.
"""

from lit_rlhf.tools.lab.gold import (
    GoldTerms,
    Request,
    gold_reward,
    gold_terms,
    parse_request,
    well_formed,
)
from lit_rlhf.tools.lab.preferences import ResponsePair, label_pair, label_probability
from lit_rlhf.tools.lab.world import WORLDS, World, WorldName, is_held_out, render_prompt
from lit_rlhf.tools.lab.world_folder import (
    build_tokenizer,
    read_world,
    write_base_model,
    write_world,
)

__all__ = [
    "WORLDS",
    "GoldTerms",
    "Request",
    "ResponsePair",
    "World",
    "WorldName",
    "build_tokenizer",
    "gold_reward",
    "gold_terms",
    "is_held_out",
    "label_pair",
    "label_probability",
    "parse_request",
    "read_world",
    "render_prompt",
    "well_formed",
    "write_base_model",
    "write_world",
]
