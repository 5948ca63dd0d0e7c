import pytest

from tests.support.evaluation_folders import Folders, write_policy, write_prompts, write_reward


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


@pytest.fixture
def no_environment_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness asks pip for all packages after every run, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
