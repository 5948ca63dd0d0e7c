"""The documentation site: its navigation, its generated pages, and a build without a warning."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import site_pages
from tests.support.config_parsing import cli_parser
from tests.support.docs_blocks import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))


def pages(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Title and file of each page of the navigation."""
    for entry in entries:
        for title, value in entry.items() if isinstance(entry, dict) else [("", entry)]:
            if isinstance(value, str):
                yield title, value
            else:
                yield from pages(value)


def test_navigation_has_every_page_with_its_title() -> None:
    written = {file.name for file in (ROOT / "docs").glob("*.md")} | {*site_pages.PAGES.values()}
    named = {page: title for title, page in pages(SITE["nav"]) if not page.startswith("reference/")}
    assert sorted(named) == sorted(written)
    titles = {page: (ROOT / "docs" / page) for page in named.keys() - site_pages.PAGES.values()}
    shown = {page: file.read_text("utf-8").split("\n", 1)[0] for page, file in titles.items()}
    assert shown == {page: f"# {named[page]}" for page in titles}


def test_every_page_is_two_clicks_from_the_index() -> None:
    reached, latest = {"docs/index.md"}, {"docs/index.md"}
    for _ in range(2):
        linked = {
            os.path.normpath(Path(page).parent / link)
            for page in latest
            for link in re.findall(
                r"\]\((?![a-z]+:|#)([^)#\s]+\.md)", (ROOT / page).read_text("utf-8")
            )
        }
        latest = {page for page in linked - reached if (ROOT / page).is_file()}
        reached |= latest
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} <= reached
    assert "callbacks/README.md" in reached


def test_reference_has_a_page_for_every_package() -> None:
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for pattern in ("*/__init__.py", "tools/*/__init__.py")
        for file in (ROOT / "lit_rlhf").glob(pattern)
        if "\nfrom " in file.read_text("utf-8")
    } - {"lit_rlhf.files"}  # not for users
    others = {"lit_rlhf.stats", "lit_callbacks"}
    assert {*site_pages.reference_packages(SITE["nav"])} == packages | others


@pytest.mark.parametrize(
    ("stage", "config"), [("SFT", "sft"), ("Reward model", "reward"), ("PPO", "ppo_max")]
)
def test_configuration_page_has_the_keys_of_the_command_line(stage: str, config: str) -> None:
    page = site_pages.configuration_page()
    section = page.partition(f"## {stage}\n")[2].partition("\n## ")[0]
    arguments = ["fit", "--config", str(ROOT / f"configs/quickstart/{config}.yaml")]
    parsed = cli_parser().parse_args(arguments).fit
    for group in ("model", "data"):
        for key in keys(parsed[group].init_args.as_dict()):
            assert f"| `{group}.{key}` |" in section


def test_configuration_page_describes_every_key() -> None:
    rows = [row for row in site_pages.configuration_page().splitlines() if row.startswith("| `")]
    assert [row for row in rows if not row.split(" | ", 3)[3].strip(" |")] == []
    assert len(rows) > 150


def keys(options: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict) and name != "rewards":
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_pages_are_written_with_names_and_links_that_lead_to_copies(tmp_path: Path) -> None:
    site_pages.write_pages(tmp_path / "pages")
    for page, name in {"lit_callbacks": "'RollBack'", "forward": "'hidden_states'"}.items():
        assert name in (tmp_path / f"pages/reference/{page}.md").read_text("utf-8")
    assert (tmp_path / "pages/files/callbacks/examples/trl_grpo.py").is_file()
    text = "[a](../callbacks/README.md#b) [c](data.md) [d](../Makefile) [e](https://e.e) [f](no.md)"
    led = "[a](callbacks.md#b) [c](data.md) [d](files/Makefile) [e](https://e.e) [f](no.md)"
    assert site_pages.lead_links(text, "docs/index.md") == (led, ["Makefile"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mkdocs", "zensical"])
def test_site_builds_without_a_warning(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine, reason=f"pip install {engine}")
    site_pages.write_pages(tmp_path / SITE["docs_dir"])
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    config = config.replace("[., callbacks]", f"[{ROOT}, {ROOT}/callbacks]")
    config = config.replace("[docs/griffe", f"[{ROOT}/docs/griffe")
    (tmp_path / "mkdocs.yml").write_text(config)
    command, env = [sys.executable, "-m", engine, "build", "--strict"], {"NO_MKDOCS_2_WARNING": "1"}
    options = {"cwd": tmp_path, "env": os.environ | env, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    site = tmp_path / "site"
    for name in ("lit_rlhf.functional.gae", "lit_callbacks.RollBack"):
        page = site / f"reference/{name.split('.')[-2]}/index.html"
        assert f'id="{name}"' in page.read_text("utf-8")
    callbacks = (site / "callbacks/index.html").read_text("utf-8")
    assert 'href="../files/callbacks/examples/lightning_cartpole.py"' in callbacks
    assert (site / "files/callbacks/examples/lightning_cartpole.py").is_file()
    assert 'href="../quickstart_seeds/"' in callbacks
