"""What a check of the doctor says."""

from collections.abc import Callable

import pytest

from lit_rlhf.tools.doctor.report import Finding, Status, failure, warning


@pytest.mark.parametrize(("make", "status"), [(warning, Status.WARNING), (failure, Status.FAILURE)])
def test_finding_tells_an_observation_from_a_change(
    make: Callable[[str, str], Finding], status: Status
) -> None:
    finding = make("what was seen", "what to do")
    assert finding == Finding(status, observation="what was seen", change="what to do")
