"""A probe of rewards before a run: how much score each way to cheat gains over honest answers."""

from lit_rlhf.tools.evaluation.reward_probe.answers import AnswerEncoder as AnswerEncoder
from lit_rlhf.tools.evaluation.reward_probe.answers import HonestAnswer as HonestAnswer
from lit_rlhf.tools.evaluation.reward_probe.answers import Response as Response
from lit_rlhf.tools.evaluation.reward_probe.cheats import CANNED_ANSWER as CANNED_ANSWER
from lit_rlhf.tools.evaluation.reward_probe.cheats import CHEATS as CHEATS
from lit_rlhf.tools.evaluation.reward_probe.cheats import Attempt as Attempt
from lit_rlhf.tools.evaluation.reward_probe.cheats import Cheat as Cheat
from lit_rlhf.tools.evaluation.reward_probe.cheats import Corpus as Corpus
from lit_rlhf.tools.evaluation.reward_probe.load import LoadedProbe as LoadedProbe
from lit_rlhf.tools.evaluation.reward_probe.load import load_probe as load_probe
from lit_rlhf.tools.evaluation.reward_probe.measure import MIN_PROMPTS as MIN_PROMPTS
from lit_rlhf.tools.evaluation.reward_probe.measure import CheatResult as CheatResult
from lit_rlhf.tools.evaluation.reward_probe.measure import Example as Example
from lit_rlhf.tools.evaluation.reward_probe.measure import RewardProbe as RewardProbe
from lit_rlhf.tools.evaluation.reward_probe.measure import Verdict as Verdict
from lit_rlhf.tools.evaluation.reward_probe.measure import count_responses as count_responses
from lit_rlhf.tools.evaluation.reward_probe.measure import probe_reward as probe_reward
from lit_rlhf.tools.evaluation.reward_probe.show import draw_probe as draw_probe
from lit_rlhf.tools.evaluation.reward_probe.show import print_probe as print_probe
from lit_rlhf.tools.evaluation.reward_probe.show import summarize as summarize
