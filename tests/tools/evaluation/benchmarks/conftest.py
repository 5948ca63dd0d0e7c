import pytest


@pytest.fixture(autouse=True)
def no_environment_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness asks pip for all packages after every run, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
