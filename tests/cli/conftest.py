import pytest

from tests.export.fixtures import runs

__all__ = ["runs"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    # LightningCLI looks at the test runner's own arguments otherwise
    monkeypatch.setattr("sys.argv", ["lit_rlhf"])
    # Lightning 2.6.6 makes classes in a way that jsonargparse 4.53 deprecates
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
