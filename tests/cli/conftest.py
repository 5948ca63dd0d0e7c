from collections.abc import Iterator

import pytest

from tests.support.exported_runs import runs

__all__ = ["runs"]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # LightningCLI looks at the test runner's own arguments otherwise
        patch.setattr("sys.argv", ["lit_rlhf"])
        # Lightning 2.6.6 makes classes in a way that jsonargparse 4.53 deprecates
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        yield
