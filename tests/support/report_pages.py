"""Small runs on disk, and a report's page read back as a tree of elements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import TypeAlias

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lit_callbacks.report import write_report

VOID = {"meta", "br"}
_clock = itertools.count(1_000_000)

Series: TypeAlias = Mapping[str, Sequence[float]]


def write_run(
    folder: Path, series: Series, texts: Mapping[int, str] | None = None, first: int = 1
) -> str:
    """Write the log of a run step by step; every event comes one second after the one before."""
    with SummaryWriter(str(folder)) as writer:
        for place in range(max(map(len, series.values()))):
            step = first + place
            if texts and step in texts:
                writer.add_text("monitor/verdict", texts[step], step, walltime=next(_clock))
            for key, values in series.items():
                if place < len(values):
                    writer.add_scalar(key, values[place], step, walltime=next(_clock))
    return str(folder)


def read_events(folder: Path) -> EventAccumulator:
    """All that a run has written for TensorBoard."""
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    events.Reload()
    return events


def read_texts(folder: Path, key: str = "monitor/verdict") -> list[tuple[int, str]]:
    """Texts of a run with their steps, in order."""
    events = read_events(folder).Tensors(f"{key}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]


class Element:
    def __init__(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        self.tag = tag
        self.attributes = {name: value or "" for name, value in attributes.items()}
        self.children: list[Element] = []
        self.texts: list[str] = []

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    @property
    def text(self) -> str:
        """All text inside, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str = "", css: str = "") -> list[Element]:
        nodes = [self] if tag in ("", self.tag) and set(css.split()) <= self.classes else []
        return nodes + [inner for child in self.children for inner in child.all(tag, css)]

    def one(self, tag: str = "", css: str = "") -> Element:
        (node,) = self.all(tag, css)
        return node


class Page(HTMLParser):
    """A tree of elements; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text("utf-8")
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(self.source)
        self.close()
        assert self.open == [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.texts.append(data)

    @property
    def title(self) -> str:
        return self.root.one("head").one("title").text

    def panel(self, key: str) -> Element:
        (node,) = (p for p in self.root.all(css="panel") if p.one("code").text == key)
        return node


def report(tmp_path: Path, *runs: str, keys: Sequence[str] | None = None) -> Page:
    return Page(write_report(list(runs), tmp_path / "report.html", keys))
