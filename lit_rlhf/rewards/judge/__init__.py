"""A language model as judge, behind an OpenAI-compatible endpoint.

It grades single responses as a reward (`grading`), and compares two answers for `lit_rlhf evaluate`
(`comparing`). Both ask through `endpoint`.
"""

from lit_rlhf.rewards.judge.endpoint import JudgeEndpoint as JudgeEndpoint
from lit_rlhf.rewards.judge.endpoint import escape_json as escape_json
from lit_rlhf.rewards.judge.grading import JudgeRule as JudgeRule
