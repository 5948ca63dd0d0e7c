"""One pair of answers, put to a judge."""

from pathlib import Path
from typing import Any

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation import Responses
from lit_rlhf.tools.evaluation.judge import JudgeOptions, judge_policies
from lit_rlhf.tools.evaluation.judge.judgement import Judgement

PAIR = Responses([(Message("user", "hi"),)], {"sft": ["four"], "ppo": ["longer"]})


def judge_pair(base_url: str | None, folder: Path, **more: Any) -> Judgement:
    """Judge a longer answer against `four`; one request at a time, without retries."""
    settings: dict[str, Any] = {"criteria": ["helpful"], "max_retries": 0, "concurrency": 1} | more
    settings |= {"model": "tiny", "base_url": base_url, "folder": str(folder)}
    return judge_policies(PAIR, JudgeOptions(**settings))
