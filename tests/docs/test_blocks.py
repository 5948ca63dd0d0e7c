"""Every Python block of the documentation runs, every command parses, every link resolves."""

import argparse
import importlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonargparse
import pytest
import yaml

from lit_rlhf.cli.main import main
from lit_rlhf.cli.registry import COMMANDS as TOOLS
from lit_rlhf.cli.registry import STAGES
from lit_rlhf.modules import PPOModule, RewardModule, SFTModule, option_names
from tests.support.config_parsing import cli_parser
from tests.support.docs_blocks import (
    DOCUMENTS,
    ROOT,
    Block,
    Command,
    all_blocks,
    blocks,
    commands,
    place,
)
from tests.support.tiny_runs import CONFIGS

PYTHON: dict[Path, list[Block]] = defaultdict(list)
for _block in all_blocks():
    if _block.language == "python" and not _block.title:
        PYTHON[_block.document].append(_block)
COMMANDS = [command for block in all_blocks() for command in commands(block)]


def starting_with(*heads: str) -> list[Command]:
    """The commands of these programs. Of CONTRIBUTING's, `lit_rlhf` needs what its examples add."""
    return [
        command
        for command in COMMANDS
        if command.words[0] in heads
        and (command.words[0], command.block.document.name) != ("lit_rlhf", "CONTRIBUTING.md")
    ]


def command_id(command: Command) -> str:
    return f"{place(command.block)} {' '.join(command.words[:2])}"


class _ParsedError(Exception):
    """Raised instead of running a command whose arguments are valid."""


OTHER_PROJECTS = {"convert_hf_to_gguf.py"}
"""Scripts of other projects' repositories; the one of llama.cpp."""


def parse(words: list[str]) -> None:
    """Parse the arguments of `lit_rlhf` without running it; SystemExit if they are refused."""
    assert words[0] in (*STAGES, *TOOLS), f"lit_rlhf has no command {words[0]!r}"
    if words[0] in STAGES:
        cli_parser().parse_args(words)
        return

    def stopping(original: Callable[..., object]) -> Callable[..., None]:
        def stop(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            raise _ParsedError

        return stop

    with ExitStack() as patches:
        # the page about training runs is a command of lit_callbacks, which only has argparse
        for parser in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
            patches.enter_context(patch.object(parser, "parse_args", stopping(parser.parse_args)))
        # earlier commands of the page write the models
        patches.enter_context(patch("lit_rlhf.cli.configured_paths.check_configured_paths"))
        with pytest.raises(_ParsedError):
            main(words)


@pytest.mark.parametrize("document", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run_one_after_the_other(
    document: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if document.name == "benchmarks.md":
        # lm-evaluation-harness asks pip for all packages after every run, which takes seconds
        monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    namespace: dict[str, Any] = {"__name__": "docs"}
    with warnings.catch_warnings():
        # Lightning warns of a run without validation data
        warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
        # nor does it know that frozen networks are meant to be in eval mode
        warnings.filterwarnings("ignore", "Found .* module.s. in eval mode")
        for block in PYTHON[document]:
            code = compile("\n" * block.line + block.text, str(document), "exec")
            exec(code, namespace)


@pytest.mark.parametrize("command", starting_with("lit_rlhf"), ids=command_id)
def test_command_parses(command: Command, workspace: Path) -> None:
    parse(command.words[1:])


@pytest.mark.parametrize("config", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_command_in_a_configurations_comment_parses(config: Path, workspace: Path) -> None:
    lines = re.findall(r"^#\s+(lit_rlhf .*)$", config.read_text("utf-8"), re.MULTILINE)
    for line in lines:
        parse(line.split()[1:])


@pytest.mark.parametrize("command", starting_with("make"), ids=command_id)
def test_make_has_the_target(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = [word for word in command.words[1:] if "=" not in word]
    variables = [word.partition("=")[0] for word in command.words[1:] if "=" in word]
    assert [t for t in targets if not re.search(rf"^{t}:.*##", makefile, re.MULTILINE)] == []
    assert [v for v in variables if not re.search(rf"^{v} \?=", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("command", starting_with("python", "python3", "pip"), ids=command_id)
def test_files_of_a_python_command_are_there(command: Command) -> None:
    files = [word for word in command.words[1:] if word.startswith("./") or word.endswith(".py")]
    of_page = [block.title for block in blocks(command.block.document)]
    known = {*of_page, *OTHER_PROJECTS}
    assert [file for file in files if file not in known and not (ROOT / file).exists()] == []


def test_the_chinese_readme_has_the_numbers_of_the_english_one() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.zh.md", "README.md")]
    chinese, english = (set(re.findall(r"\d+(?:[.,]\d+)*", text)) for text in texts)
    assert chinese - english <= {"7"}  # the size of the paper's Chinese models


@pytest.mark.parametrize("block", [b for b in all_blocks() if b.language == "yaml"], ids=place)
def test_yaml_blocks_are_yaml(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize(
    "block",
    [b for b in all_blocks() if b.language == "yaml" and "callbacks" in b.document.parts],
    ids=place,
)
def test_callbacks_in_yaml_are_parsed(block: Block, workspace: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "callbacks.yaml"
    overlay.write_text(block.text, "utf-8")
    parse(["fit", "--config", str(CONFIGS / "quickstart/ppo_max.yaml"), "--config", str(overlay)])


@pytest.mark.parametrize("command", starting_with("python"), ids=command_id)
def test_python_module_runs(command: Command, workspace: Path) -> None:
    if command.words[1:2] != ["-m"] or not command.words[2].startswith("lit_callbacks"):
        return
    importlib.import_module(f"{command.words[2]}.__main__").main(command.words[3:])
    page = Path(command.words[command.words.index("--output") + 1]).read_text("utf-8")
    assert "rollout/kl" in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_project_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8"))
    lost = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        # a folder has no page on the documentation site
        exists = file.is_file() and (not anchor or anchor in anchors(file))
        if "://" not in target and not exists:
            lost.append(target)
    assert lost == []


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


OPTIONS = {name for module in (SFTModule, RewardModule, PPOModule) for name in option_names(module)}
GROUPS = {name.partition(".")[0] for name in OPTIONS if "." in name}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_dotted_options_exist(document: Path) -> None:
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", document.read_text("utf-8"))
    named = {match for span in spans for match in re.findall(r"(?<![\w./])\w+\.\w+", span)}
    of_groups = {name for name in named if name.partition(".")[0] in GROUPS}
    assert of_groups - OPTIONS == set()
