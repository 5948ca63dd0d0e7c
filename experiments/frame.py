"""What every experiment has in common: how it is listed, driven and written down.

An experiment is a folder with

- `__init__.py`: `ABOUT`, what it asks, what it costs and what came out;
- `study.py`: `COMMANDS`, functions that `python -m experiments NAME` runs, and `documents`, which
  makes all generated files from the results;
- `results.jsonl`: a line for each run, which `results_file` reads and writes;
- templates of its pages, and `results.md` with all tables.

This module imports no study before it is asked for, since some need packages of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template
from matplotlib.figure import Figure

from experiments.drawing import save
from experiments.results_file import table
from lit_rlhf.command import Command
from lit_rlhf.files import write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
README = HERE / "README.md"

Documents = Mapping[Path, str | Callable[[], Figure]]
"""Generated files by their paths: a text, or what draws a figure, which is written as SVG."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What an experiment is, in the list of all experiments.

    Attributes:
        question: What it asks, in one sentence.
        answer: What came out, in one sentence.
        cost: CPU hours and the machine, in words.
        page: File of the page that tells it, below the root of the repository.
    """

    question: str
    answer: str
    cost: str
    page: str


def experiment_names() -> list[str]:
    """Names of all experiments: the folders beside this file that have a study."""
    return sorted(study.parent.name for study in HERE.glob("*/study.py"))


def read_about(name: str) -> About:
    """What an experiment says of itself; its study is not imported."""
    about: About = importlib.import_module(f"experiments.{name}").ABOUT
    return about


def read_commands(name: str) -> dict[str, Command]:
    """The commands of an experiment, and `page`, which writes its documents."""
    study = importlib.import_module(f"experiments.{name}.study")

    def page() -> None:
        """Write the page, the tables and the figures again from the results."""
        for path in write_documents(study.documents()):
            print(path.relative_to(ROOT))

    functions: list[Callable[..., Any]] = [*study.COMMANDS, page]
    return {function.__name__: make_command(function) for function in functions}


def make_command(function: Callable[..., Any]) -> Command:
    """A function as a command: required parameters of texts are words, all others flags."""
    words = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.default is Parameter.empty and parameter.annotation in ("str", "list[str]")
    ]
    return Command(function, words=words)


def write_documents(documents: Documents) -> Iterable[Path]:
    """Write generated files.

    Args:
        documents: Texts and figures by their paths.

    Yields:
        Each path once it is written.
    """
    for path, document in documents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(document, str):
            write_text(path, document)
        else:
            save(document(), path)
        yield path


def fill_template(path: Path, **values: object) -> str:
    """Fill a Markdown template.

    Args:
        path: File in the language of Jinja.
        **values: What the template calls by name; a name that is missing is an error.
    """
    template = Template(
        path.read_text("utf-8"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    text: str = template.render(**values)
    return text


def format_readme() -> str:
    """The list of all experiments, as `experiments/README.md` has it."""
    rows = []
    for name in experiment_names():
        about = read_about(name)
        title = f"[{name}](../{about.page})"
        rows.append([title, about.question, about.answer, about.cost])
    listed = table(["experiment", "question", "result", "cost"], rows)
    return fill_template(HERE / "README.md.j2", experiments=listed)
