"""`lit_rlhf export --push_to_hub`."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from tests.cli.test_export import main, refused
from tests.export.folders import Runs, assert_same_model


class Hub:
    """What the hub is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool = False) -> None:
        self.made: list[dict[str, Any]] = []
        self.uploaded: list[dict[str, Any]] = []

        def create(_: HfApi, repo_id: str, **more: Any) -> Any:
            self.made.append({"repo_id": repo_id, **more})

            class Address(str):
                repo_id = "someone/model"

            return Address("https://hub/someone/model")

        def upload(_: HfApi, **more: Any) -> None:
            if refuses:
                raise ConnectionError("cut off")
            files = {path.name for path in Path(more["folder_path"]).iterdir()}
            self.uploaded.append({**more, "files": files})

        monkeypatch.setattr(HfApi, "create_repo", create)
        monkeypatch.setattr(HfApi, "upload_folder", upload)


def arguments(runs: Runs, output: Path, *more: str) -> list[str]:
    return ["--checkpoint", str(runs("sft").checkpoint), "--output", str(output), *more]


def test_no_upload_by_default(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    main(arguments(runs, tmp_path / "m"))
    assert hub.made == hub.uploaded == []


@pytest.mark.parametrize("private", [True, False])
def test_folder_is_uploaded_if_asked(
    private: bool, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    hub = Hub(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    more = [] if private else ["--private", "false"]
    main(arguments(runs, tmp_path / "m", "--push_to_hub", "someone/model", *more))
    assert hub.made == [{"repo_id": "someone/model", "private": private, "exist_ok": True}]
    assert hub.uploaded[0]["repo_id"] == "someone/model"
    assert hub.uploaded[0]["files"] == {path.name for path in (tmp_path / "m").iterdir()}
    printed = capsys.readouterr()
    assert "Uploaded: https://hub/someone/model" in printed.out
    assert "hf_secret" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [(None, "someone/model", "`hf auth login`, or set HF_TOKEN"), ("hf", "a/b/c", "a/b/c")],
)
def test_refused_first(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: Any, name: str, message: str
) -> None:
    hub = Hub(monkeypatch)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    assert message in refused(*arguments(runs, tmp_path / "m", "--push_to_hub", name))
    assert hub.made == list(tmp_path.iterdir()) == []


def test_refusal_of_the_hub(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, refuses=True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    said = refused(*arguments(runs, tmp_path / "m", "--push_to_hub", "someone/model"))
    assert "uploading to someone/model failed: cut off" in said
    assert "hf upload someone/model" in said
    assert_same_model(tmp_path / "m", runs("sft").finished)
