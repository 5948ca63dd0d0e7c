"""The worked examples of CONTRIBUTING.md, applied to a copy of the tree."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.docs_blocks import ROOT, Block, blocks, commands
from tests.support.docs_running import run_process
from tests.support.docs_workspace import make_workspace
from tests.support.tiny_runs import SMALL, logged, overlay

PAGE = ROOT / "CONTRIBUTING.md"
COPIED = ("lit_rlhf", "callbacks", "configs", "tests", "docs", "pyproject.toml", "README.md")
# tests that would fail if a new function, option or monitor had to be listed by hand
LISTS = ["tests/functional/test_arguments.py", "tests/functional/test_examples.py"]
LISTS += ["tests/callbacks/test_signals.py", "tests/callbacks/test_arguments.py"]
LISTS += ["tests/callbacks/test_detector_yaml.py", "tests/modules/test_ppo_switches.py"]


def examples() -> dict[str, list[Block]]:
    """Blocks of each worked example by its heading."""
    text = PAGE.read_text("utf-8").splitlines()
    by_title: dict[str, list[Block]] = {}
    for block in blocks(PAGE):
        above = [line for line in text[: block.line] if line.startswith("##")]
        if above[-1].startswith("### "):
            by_title.setdefault(above[-1].removeprefix("### "), []).append(block)
    return by_title


EXAMPLES = examples()
PATCHED = {name: [b for b in EXAMPLES[name] if "/" in b.title] for name in EXAMPLES}


def apply(block: Block, tree: Path) -> None:
    """Write a new file, or replace the places that a diff names in a file of the tree."""
    file = tree / block.title
    text = file.read_text("utf-8") if block.language == "diff" else block.text
    if block.language == "diff":
        for hunk in block.text.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            assert text.count(before) == 1, f"{block.title}: expected once:\n{before}"
            text = text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
    file.write_text(text, "utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with all examples."""
    tree = tmp_path_factory.mktemp("contributing") / "tree"
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    for blocks_of_example in PATCHED.values():
        for block in blocks_of_example:
            apply(block, tree)
    return tree


def python(tree: Path, folder: Path, *arguments: str) -> str:
    """Output of Python with the packages of a tree."""
    ended = run_process([sys.executable, *arguments], folder, tree)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_examples_touch_as_few_files_as_the_page_says() -> None:
    counts = {}
    for name, patched in PATCHED.items():
        titles = [block.title for block in patched]
        of_tests = [title for title in titles if title.startswith("tests/")]
        counts[name] = (len(titles) - len(of_tests), len(of_tests))
    assert counts == {
        "A trick": (3, 1),
        "A monitor": (1, 1),
        "A reward": (0, 0),
        "An estimator": (3, 1),
    }


def test_examples_fit_the_tree(tree: Path) -> None:
    for patched in PATCHED.values():
        for block in patched:
            compile((tree / block.title).read_text("utf-8"), block.title, "exec")


@pytest.mark.slow  # other processes, which import everything anew
def test_examples_pass_their_tests_and_those_of_lists(tree: Path) -> None:
    own = [b.title for patched in PATCHED.values() for b in patched if "tests/" in b.title]
    pytest_words = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    output = python(tree, tree, *pytest_words, *own, *LISTS)
    assert "failed" not in output


@pytest.mark.slow  # the same
def test_commands_of_the_examples_train(tree: Path, quickstart: Path, tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "workspace", quickstart)
    small = ["--config", str(overlay(folder, "small", SMALL["ppo"]))]
    words = [c.words[1:] for name in EXAMPLES for b in EXAMPLES[name] for c in commands(b)]
    program = (
        "import json, sys; from tests.support.tiny_runs import run\n"
        "for words in json.loads(sys.argv[1]): run(*words)"
    )
    python(tree, folder, "-c", program, json.dumps([[*w, *small] for w in words]))
    logs = folder / "runs" / "quickstart" / "logs"
    names = ("ppo_max", "ppo_squash", "ppo_watched", "ppo_questions", "ppo_mean")
    before, squashed, watched, asked, mean = (logged(logs / name) for name in names)
    # the same first responses
    assert squashed["rollout/score"][0] == before["rollout/score"][0]
    assert squashed["rollout/reward"][0] != before["rollout/reward"][0]
    assert "monitor/2/level" in watched  # beside the detector of the configuration
    assert "ClipFractionMonitor" in (logs / "ppo_watched" / "config.yaml").read_text("utf-8")
    assert "rollout/score/questions" in asked
    # without a critic the first iteration trains the policy, too
    assert len(mean["ppo/policy_loss"]) == 2
    assert "ppo/value_loss" not in mean
