"""`lit_rlhf export --push_to_hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi

from lit_rlhf.cli.export import main
from tests.cli.test_export import refused
from tests.export.folders import Runs, assert_same_model

IDS = torch.arange(4, 40).reshape(3, 12)


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


class TestHub:
    def arguments(self, runs: Runs, output: Path, *more: str) -> list[str]:
        return ["--checkpoint", str(runs("sft").checkpoint), "--output", str(output), *more]

    def test_nothing_is_uploaded_by_default(
        self, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = Hub(monkeypatch)
        main(self.arguments(runs, tmp_path / "m"))
        assert hub.made == hub.uploaded == []

    @pytest.mark.parametrize("private", [True, False])
    def test_the_folder_is_uploaded_if_asked(
        self,
        private: bool,
        runs: Runs,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        hub = Hub(monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        more = [] if private else ["--private", "false"]
        main(self.arguments(runs, tmp_path / "m", "--push_to_hub", "someone/model", *more))
        assert hub.made == [{"repo_id": "someone/model", "private": private, "exist_ok": True}]
        assert hub.uploaded[0]["repo_id"] == "someone/model"
        assert hub.uploaded[0]["files"] == {path.name for path in (tmp_path / "m").iterdir()}
        printed = capsys.readouterr()
        assert "Uploaded: https://hub/someone/model" in printed.out
        assert "hf_secret" not in printed.out + printed.err

    def test_a_missing_token_is_said_before_anything_is_done(
        self, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = Hub(monkeypatch)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        said = refused(*self.arguments(runs, tmp_path / "m", "--push_to_hub", "someone/model"))
        assert "`hf auth login`, or set HF_TOKEN" in said
        assert hub.made == []
        assert list(tmp_path.iterdir()) == []

    def test_a_name_that_is_none_is_refused(self, runs: Runs, tmp_path: Path) -> None:
        said = refused(*self.arguments(runs, tmp_path / "m", "--push_to_hub", "a/b/c"))
        assert "a/b/c" in said
        assert list(tmp_path.iterdir()) == []

    def test_a_refusal_leaves_the_folder_and_says_how_to_go_on(
        self, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Hub(monkeypatch, refuses=True)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        said = refused(*self.arguments(runs, tmp_path / "m", "--push_to_hub", "someone/model"))
        assert "uploading to someone/model failed: cut off" in said
        assert "hf upload someone/model" in said
        assert_same_model(tmp_path / "m", runs("sft").finished)
