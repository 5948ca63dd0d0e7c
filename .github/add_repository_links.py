"""Gives the distributions and notebooks the address of their repository: the one place to set it.

    python .github/add_repository_links.py https://github.com/OWNER/NAME v0.1.0

The front pages on the package index are the README files, whose relative links lead nowhere there.
The release workflow knows the address of the repository that it runs in, so no file names it: this
makes their links absolute, at the tag of the release, and adds `[project.urls]`. The notebooks then
install from that tag, in Colab too. A repository may also run it once, for its main branch.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECTS = (".", "callbacks")
CALLBACKS = "subdirectory=callbacks"
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?![a-z]+:|#)(?P<path>[^)\s]+)\)")


def link_absolutely(text: str, folder: str, url: str, tag: str) -> str:
    """A Markdown file with absolute links.

    Args:
        text: The file.
        folder: Its folder in the repository, from which its links start.
        url: Address of the repository.
        tag: Tag of the release.
    """

    def lead(match: re.Match[str]) -> str:
        path, mark, anchor = match["path"].partition("#")
        target = (Path("/") / folder / path).resolve().relative_to("/").as_posix()
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}{match['text']}({url}/{kind}/{tag}/{target}{mark}{anchor})"

    return LINK.sub(lead, text)


def main(root: Path, url: str, tag: str) -> None:
    """Change README and pyproject.toml of both distributions, and the notebooks' installation."""
    source = f"git+{url}@{tag}"  # as pip takes it
    urls = {"Source": url, "Changelog": f"{url}/blob/{tag}/CHANGELOG.md", "Issues": f"{url}/issues"}
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    for folder in PROJECTS:
        readme = root / folder / "README.md"
        readme.write_text(link_absolutely(readme.read_text("utf-8"), folder, url, tag), "utf-8")
        project = root / folder / "pyproject.toml"
        text = project.read_text("utf-8")
        project.write_text(f"{text.rstrip()}\n\n[project.urls]\n{table}", "utf-8")
    for notebook in root.glob("notebooks/*.ipynb"):
        text = notebook.read_text("utf-8").replace('\\"../callbacks', f'\\"{source}#{CALLBACKS}')
        notebook.write_text(text.replace(f'{CALLBACKS} ..\\"', f'{CALLBACKS} {source}\\"'), "utf-8")


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1], *sys.argv[1:])
