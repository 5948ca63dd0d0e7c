import json
from pathlib import Path

import pytest

from lit_rlhf.cli.main import main as command

CALM = {"my/kl": 0.01, "tokens": 50.0}
FAR = {"my/kl": 0.4, "tokens": 150.0}
NAMES = "{rollout/kl_per_token: my/kl, rollout/response_length: tokens}"


@pytest.mark.parametrize(("far", "status"), [(3, 1), (0, None)])
def test_verdicts_are_printed_and_a_collapse_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], far: int, status: int | None
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in [CALM] * 10 + [FAR] * far))
    found = None
    try:
        command(["watch", str(log), "--map", NAMES])
    except SystemExit as end:
        found = end.code
    assert found == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{log}: {'collapsed after 13' if far else 'healthy after 10'} steps")
