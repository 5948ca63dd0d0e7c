"""Write the pages of the documentation site, which MkDocs or Zensical then builds.

`python docs/site_pages.py` fills the folder `docs_dir` of `mkdocs.yml`:

- The files in `docs/`, and `callbacks/README.md`, `CONTRIBUTING.md` and `CHANGELOG.md` as pages.
- The reference: a page of docstrings for each package, the keys of every stage's configuration with
  type, default and description, and all messages.
- Copies of other files that pages link. Links lead to the page or the copy of a file.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from docstring_parser import parse

ROOT = Path(__file__).resolve().parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
PAGES = {
    "callbacks/README.md": "callbacks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "README.zh.md": "zh.md",
}
"""Page of the site by file of the repository, for files outside of `docs/`."""
COPIES = "files"
"""Folder of the site for other files of the repository that pages link."""
CONFIGURATION, MESSAGES = "reference/configuration.md", "reference/messages.md"
_LINK = re.compile(r"(?<=\]\()(?![a-z+]+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def write_pages(folder: Path) -> None:
    """Write all pages into a folder, in place of what it held."""
    shutil.rmtree(folder, ignore_errors=True)
    sources = [
        *(
            str(path.relative_to(ROOT))
            for path in sorted((ROOT / "docs").rglob("*.*"))
            if path.suffix not in (".py", ".pyc")
        ),
        *(source for source in PAGES if source != "README.md"),  # index.md is a file of docs/
    ]
    for source in sources:  # grows by the files that pages link
        page = folder / _site_path(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix != ".md":
            shutil.copyfile(ROOT / source, page)
            continue
        text, linked = lead_links((ROOT / source).read_text("utf-8"), source)
        page.write_text(text, "utf-8")
        sources += [target for target in linked if target not in sources]
    reference = {
        f"reference/{package.rpartition('.')[2]}.md": (
            f"# {package}\n\n::: {package}\n    options: {{members: {public_names(package)}}}\n"
        )
        for package in reference_packages(SITE["nav"])
    } | {CONFIGURATION: configuration_page(), MESSAGES: messages_page()}
    (folder / "reference").mkdir()
    for name, text in reference.items():
        (folder / name).write_text(text, "utf-8")


def lead_links(text: str, source: str) -> tuple[str, list[str]]:
    """Text whose links lead to pages or copies of files, and the files to copy.

    Args:
        text: Markdown.
        source: Path of its file in the repository.
    """
    copied = []
    here = os.path.dirname(_site_path(source)) or "."

    def lead(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), match["path"]))
        if not (ROOT / target).is_file():
            return match[0]  # the build warns of it
        if _site_path(target).startswith(f"{COPIES}/"):
            copied.append(target)
        return os.path.relpath(_site_path(target), here) + (match["anchor"] or "")

    return _LINK.sub(lead, text), copied


def _site_path(source: str) -> str:
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return PAGES.get(source, f"{COPIES}/{source}")


def reference_packages(nav: list[dict[str, Any]]) -> Iterator[str]:
    """The packages whose reference pages the navigation names."""
    for group in nav:
        for entry in group.get("Reference", []):
            ((title, path),) = entry.items()
            if path.startswith("reference/") and path not in (CONFIGURATION, MESSAGES):
                yield title


def public_names(package: str) -> list[str]:
    """The names that a package exports, which may be imported or found when they are used."""
    module = importlib.import_module(package)
    names: list[str] = getattr(module, "__all__", None) or [
        name
        for name in module.__dir__()  # in the order of the module, unlike `dir`
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    ]
    return names


# --- configuration keys


def configuration_page() -> str:
    """A table of the keys of each stage's module and datamodule, as a YAML file nests them."""
    from lit_rlhf import data, modules  # the tests of links need no torch

    stages = {
        "SFT": (modules.SFTModule, data.DemonstrationDataModule),
        "Reward model": (modules.RewardModule, data.PreferenceDataModule),
        "PPO": (modules.PPOModule, data.PromptDataModule),
    }
    sections = [
        # without the table of contents the last column has room
        "---\nhide: [toc]\n---\n\n# Configuration keys\n\n"
        "Generated from the signatures and docstrings of the classes that a configuration names.\n"
        "A key with a point is nested in YAML (`model: {init_args: {sampling: {top_p: 1.0}}}`),\n"
        "and the command line takes it as it stands (`--model.sampling.top_p 1.0`). Keys of the\n"
        "trainer belong to Lightning's `Trainer`, and keys of callbacks are in\n"
        "[their reference](lit_callbacks.md).\n"
    ]
    for stage, classes in stages.items():
        sections.append(f"## {stage}\n")
        for group, cls in zip(("model", "data"), classes, strict=True):
            rows = "\n".join(
                f"| `{group}.{key}` | {_cell(kind)} | {_cell(default)} | {text} |"
                for key, kind, default, text in configuration_keys(cls)
            )
            sections.append(
                f"### `{group}`: {cls.__name__}\n\n"
                f"| key | type | default | |\n|---|---|---|---|\n{rows}\n"
            )
    return "\n".join(sections)


def configuration_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and description of each option of a class, groups of options resolved."""
    described = {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for base in reversed(cls.__mro__)
        for parameter in parse(base.__doc__ or "").params
    }
    for name, parameter in _parameters(cls):
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            for key, *row in configuration_keys(kind, f"{prefix}{name}."):
                yield key, *_with_default(key, parameter.default, row)
        else:
            text = described.get(name, "")
            yield f"{prefix}{name}", _type(kind), _default(parameter.default), text


def _parameters(cls: type) -> Iterator[tuple[str, inspect.Parameter]]:
    """Parameters of a class with resolved types, and those that it hands on to its bases."""
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        types = get_type_hints(base.__init__)
        parameters = inspect.signature(base.__init__).parameters
        for name, parameter in list(parameters.items())[1:]:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                yield name, parameter.replace(annotation=types[name])
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
            return


def _with_default(key: str, group: object, row: list[str]) -> tuple[str, str, str]:
    """The row of a field with the default of its group at this place."""
    kind, default, text = row
    name = key.rpartition(".")[2]
    return kind, _default(getattr(group, name)) if hasattr(group, name) else default, text


def _type(kind: object) -> str:
    """A type as a reader would write it, without the modules of its parts."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(kind))


def _default(value: object) -> str:
    return "required" if value is inspect.Parameter.empty else repr(value)


def _cell(text: str) -> str:
    # backquotes would show the backslash of an escaped bar
    code = html.escape(text, quote=False).replace("|", "&#124;")
    return text if text == "required" else f"<code>{code}</code>"


# --- messages

WARNINGS = {"rank_zero_warn", "warn", "warning"}
"""Names of the functions that show a warning; the first argument is its text."""


def messages_page() -> str:
    """All warnings, errors of a run and errors of arguments, by the file that they come from."""
    sections = [
        "---\nhide: [toc]\n---\n\n# Messages\n\n"
        "Generated from the source. Three points stand for what a message fills in. An error of\n"
        "an argument names it, what was expected and what came. What helps is in\n"
        "[errors](../errors.md) and [diagnosis](../diagnosis.md).\n"
    ]
    unique_messages = sorted({*messages()})
    for title, kinds in {
        "Warnings": {"warning"},
        "Errors of a run": {kind for _, kind, _ in unique_messages} - {"warning", "ValueError"},
        "Errors of arguments and inputs": {"ValueError"},
    }.items():
        rows = "\n".join(
            f"| {_cell(text)} | `{kind}` | `{place}` |"
            for place, kind, text in unique_messages
            if kind in kinds
        )
        sections.append(f"## {title}\n\n| message | kind | in |\n|---|---|---|\n{rows}\n")
    return "\n".join(sections)


def messages() -> Iterator[tuple[str, str, str]]:
    """File, kind and text of each message that the source holds whole."""
    for folder in (ROOT / "lit_rlhf", ROOT / "callbacks" / "lit_callbacks"):
        for path in sorted(folder.rglob("*.py")):
            place = str(path.relative_to(folder.parent))
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    kind, call = _called(node.exc), node.exc
                    if kind == "AssertionError":  # marks a place that is never reached
                        continue
                elif isinstance(node, ast.Call) and _called(node) in WARNINGS:
                    kind, call = "warning", node
                else:
                    continue
                text = _literal(call.args[0]) if call.args else ""
                if len(re.findall(r"[^\W\d_]{2,}", text)) > 2:  # or another function writes it
                    yield place, kind, text


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def _literal(node: ast.expr) -> str:
    """The text of an expression, with points for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"\s+", " ", text)
        case ast.JoinedStr(values=parts):
            return "".join(map(_literal, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _literal(left) + _literal(right)
        case _:
            return "..."


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "callbacks")]  # the clone, not an installation
    write_pages(ROOT / SITE["docs_dir"])
