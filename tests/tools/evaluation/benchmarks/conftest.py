import pytest


@pytest.fixture(autouse=True)
def _no_environment_report(no_environment_report: None) -> None:
    """All tests of this folder run the harness."""
