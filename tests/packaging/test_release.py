"""The files of a release and the workflows name what exists."""

import re
import runpy
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read_yaml(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(content, dict)
    return content


def test_citation_has_the_version_and_licence_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert f"## {project['version']} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_workflows_pin_each_action_to_one_commit() -> None:
    uses = {u for path in WORKFLOWS for u in re.findall(r"uses: (.*)", path.read_text("utf-8"))}
    assert uses
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [line for line in uses if not pinned.fullmatch(line)] == []
    assert len(uses) == len({use.partition("@")[0] for use in uses})


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "Dockerfile", ROOT / "Makefile"], ids=str)
def test_index_of_packages_is_the_only_one(path: Path) -> None:
    text = path.read_text("utf-8").upper().replace("-", "_")
    assert [word for word in ("EXTRA_INDEX", "UNSAFE_BEST_MATCH") if word in text] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    steps = [step for job in read_yaml(path)["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    made = [line.split()[1:] for c in commands for line in c.splitlines() if line[:5] == "make "]
    assert {word for words in made for word in words if "=" not in word} <= targets
    assert commands or path.stem == "release"


def test_front_pages_of_a_release_have_absolute_links(tmp_path: Path) -> None:
    for file in ("README.md", "pyproject.toml", "callbacks/README.md", "callbacks/pyproject.toml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    script = runpy.run_path(str(ROOT / ".github/add_repository_links.py"))
    script["main"](tmp_path, "https://example.org/a/b", "v1")

    repository = "git+https://example.org/a/b@v1"
    for notebook in (tmp_path / "notebooks").glob("*.ipynb"):
        root = "" if notebook.stem.startswith("05") else f" {repository}"
        packages = f'PACKAGES = \\"{repository}#subdirectory=callbacks{root}\\"'
        assert packages in notebook.read_text("utf-8")
    for folder in ("", "callbacks"):
        project = tomllib.loads((tmp_path / folder / "pyproject.toml").read_text("utf-8"))
        assert project["project"]["urls"]["Source"] == "https://example.org/a/b"
        text = (tmp_path / folder / "README.md").read_text("utf-8")
        links = re.findall(r"\]\(([^)#][^)]*)\)", text)
        assert [link for link in links if not link.startswith("https://")] == []
        ours = [link for link in links if link.startswith("https://example.org/a/b/")]
        for link in ours:
            kind, tag, path = link.removeprefix("https://example.org/a/b/").split("/", 2)
            assert (kind, tag) == ("raw" if path.endswith(".png") else "blob", "v1")
            assert (ROOT / path.partition("#")[0]).is_file(), link
        assert ours


def test_image_is_built_of_files_that_are_sent_to_the_builder() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    copied = {w for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.M) for w in line.split()}
    sent = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE))
    assert copied == sent
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_image_does_not_run_as_root_and_checks_hashes() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    users = [line.removeprefix("USER ") for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
    assert any("--require-hashes -r requirements/build_hashes.txt" in line for line in lines)
    assert any(
        "--require-hashes --no-build-isolation -r requirements/hashes.txt" in line for line in lines
    )


def test_hooks_of_a_commit_run_the_commands_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for hook in read_yaml(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]:
        assert f"$(BIN)/{hook['entry'].replace(' --force-exclude', '')}" in makefile
