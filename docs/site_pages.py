"""Pages and links of the documentation site that no file in `docs/` holds (hooks of MkDocs).

- `callbacks/README.md`, `CONTRIBUTING.md` and `CHANGELOG.md` become pages.
- The reference is generated: a page of docstrings for each package, the keys of every stage's
  configuration with type, default and description, and all messages.
- A link that leaves `docs/`, which works in a checkout, leads to the page of that file, or to a
  copy of the file.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from docstring_parser import parse
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere, the reference, and the files that pages link."""
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None:  # index.md is a file of docs/
            text = (ROOT / source).read_text("utf-8")
            files.append(File.generated(config, page, content=text))
    for package in reference_packages(config.nav or []):
        text = f"# {package}\n\n::: {package}\n"
        path = f"reference/{package.rpartition('.')[2]}.md"
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, CONFIGURATION, content=configuration_page()))
    files.append(File.generated(config, MESSAGES, content=messages_page()))
    pages = list(files.documentation_pages())
    for page_file in pages:  # grows: a linked Markdown file is shown as a page
        for target in _linked_outside(page_file):
            path = f"{COPIES}/{target}"
            if files.get_file_from_path(path) is None:
                kind = InclusionLevel.NOT_IN_NAV
                source = str(ROOT / target)
                copy = File.generated(config, path, abs_src_path=source, inclusion=kind)
                files.append(copy)
                if copy.is_documentation_page():
                    pages.append(copy)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their page or copy."""
    source = _source(page.file)
    here = os.path.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        target = _resolve(source, match["path"])
        uri = _site_path(target)
        if not (ROOT / target).exists():
            return match[0]  # MkDocs warns of it
        return os.path.relpath(uri, here or ".") + (match["anchor"] or "")

    return markdown if page.file.src_uri.startswith("reference/") else _LINK.sub(lead, markdown)


def _source(file: File) -> str:
    """Path in the repository of the file that a page shows."""
    if file.src_uri.startswith(f"{COPIES}/"):
        return file.src_uri.removeprefix(f"{COPIES}/")
    pages = {page: source for source, page in PAGES.items() if source != "README.md"}
    return pages.get(file.src_uri, f"docs/{file.src_uri}")


def _resolve(source: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(source), link))


def _site_path(target: str) -> str:
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return PAGES.get(target, f"{COPIES}/{target}")


def _linked_outside(file: File) -> Iterator[str]:
    if file.src_uri.startswith("reference/"):
        return
    for match in _LINK.finditer(file.content_string):
        target = _resolve(_source(file), match["path"])
        if _site_path(target).startswith(COPIES) and (ROOT / target).is_file():
            yield target


def reference_packages(nav: list[dict[str, Any]]) -> Iterator[str]:
    """The packages whose reference pages the navigation names."""
    for group in nav:
        for entry in group.get("Reference", []):
            ((title, path),) = entry.items()
            if path.startswith("reference/") and path not in (CONFIGURATION, MESSAGES):
                yield title


# --- configuration keys


def configuration_page() -> str:
    """A table of the keys of each stage's module and datamodule, as a YAML file nests them."""
    sys.path[:0] = [str(ROOT), str(ROOT / "callbacks")]
    # imported here, since `mkdocs --help` and the tests of links need no torch
    from lit_rlhf import data, modules

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
    found = sorted({*messages()})
    for title, kinds in {
        "Warnings": {"warning"},
        "Errors of a run": {kind for _, kind, _ in found} - {"warning", "ValueError"},
        "Errors of arguments and inputs": {"ValueError"},
    }.items():
        rows = "\n".join(
            f"| {_cell(text)} | `{kind}` | `{place}` |"
            for place, kind, text in found
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
                    if kind == "AssertionError":  # of a place that is never reached
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
