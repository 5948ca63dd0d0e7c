from typing import NamedTuple

import pytest

from tests.support.evaluation_folders import write_policy, write_prompts, write_reward


class Folders(NamedTuple):
    sft: str
    ppo: str
    copy: str  # of sft, under another name
    reward: str
    prompts: str


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Read only."""
    root = tmp_path_factory.mktemp("evaluation")
    sft = write_policy(root / "sft", seed=0)
    return Folders(
        sft=sft,
        ppo=write_policy(root / "ppo", seed=1),
        copy=write_policy(root / "copy", seed=0),
        reward=write_reward(root / "reward", sft),
        prompts=write_prompts(root / "prompts.jsonl"),
    )
