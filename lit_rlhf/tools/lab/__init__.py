"""The lab: a small helpful and harmless world in which the true ("gold") reward is known.

Importing the package loads no other part of lit_rlhf, and not torch.
"""

from lit_rlhf.tools.lab.gold import GoldTerms as GoldTerms
from lit_rlhf.tools.lab.gold import Request as Request
from lit_rlhf.tools.lab.gold import gold_reward as gold_reward
from lit_rlhf.tools.lab.gold import gold_terms as gold_terms
from lit_rlhf.tools.lab.gold import parse_request as parse_request
from lit_rlhf.tools.lab.gold import well_formed as well_formed
from lit_rlhf.tools.lab.world import WORLDS as WORLDS
from lit_rlhf.tools.lab.world import ResponsePair as ResponsePair
from lit_rlhf.tools.lab.world import World as World
from lit_rlhf.tools.lab.world import WorldName as WorldName
from lit_rlhf.tools.lab.world import label_pair as label_pair
from lit_rlhf.tools.lab.world import render_prompt as render_prompt
from lit_rlhf.tools.lab.world_folder import check_no_other_world as check_no_other_world
from lit_rlhf.tools.lab.world_folder import forget_settings as forget_settings
from lit_rlhf.tools.lab.world_folder import read_world as read_world
from lit_rlhf.tools.lab.world_folder import write_world as write_world
