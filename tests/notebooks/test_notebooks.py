"""The notebooks: the committed file of each, and (slow) that each runs by itself."""

import ast
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="the notebooks run with the `test` extra only")
nbformat = pytest.importorskip("nbformat", reason="the notebooks run with the `test` extra only")
pytest.importorskip("ipykernel", reason="the notebooks run with the `test` extra only")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGE = (ROOT / "docs/notebooks.md").read_text("utf-8")
ALONE = "05_monitors_in_another_project"  # needs only lit_callbacks
MAX_FIGURE = 60_000  # bytes of a PNG
MAX_NOTEBOOK = 150_000
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|work|opt|content|Users|var|mnt)/\w")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def images(notebook: Any) -> list[Any]:
    return [output for output in outputs(notebook) if "image/png" in output.get("data", {})]


def parse(cell: Any) -> ast.Module:
    """The syntax tree of a cell, without magics."""
    return ast.parse(re.sub(r"^(\s*)[%!].*", r"\1pass", cell.source, flags=re.MULTILINE))


@each_notebook
def test_notebook_begins_with_its_title_and_a_cell_of_parameters(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {path.stem[:2]} ")
    assert "**Open in Colab:**" in first.source
    parameters, install = code_cells(notebook)[:2]
    assert parameters.metadata["tags"] == ["parameters"]
    assert all(isinstance(node, ast.Assign) for node in parse(parameters).body)
    package = "lit_callbacks" if path.stem == ALONE else "lit_rlhf"
    assert f'if importlib.util.find_spec("{package}") is None:\n    %pip install' in install.source
    folders = "../callbacks" if path.stem == ALONE else "../callbacks .."
    assert f'PACKAGES = "{folders}"' in parameters.source  # and no name of an index


@each_notebook
def test_code_compiles_and_imports_names_that_there_are(path: Path) -> None:
    nodes = [node for cell in code_cells(read(path)) for node in ast.walk(parse(cell))]
    own_imports = [
        n for n in nodes if isinstance(n, ast.ImportFrom) and str(n.module).startswith("lit_")
    ]
    others = {
        str(n.module) for n in nodes if isinstance(n, ast.ImportFrom) and n not in own_imports
    }
    others |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    assert own_imports
    for node in own_imports:
        module = importlib.import_module(str(node.module))
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
    assert [name for name in others if not importlib.util.find_spec(name.split(".")[0])] == []


def test_monitors_do_not_need_lit_rlhf() -> None:
    sources = [cell.source for cell in code_cells(read(ROOT / f"notebooks/{ALONE}.ipynb"))]
    assert "lit_rlhf" not in "".join(sources)


@each_notebook
def test_outputs_are_there_small_and_without_an_error(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = {output.output_type for output in outputs(notebook)}
    assert kinds <= {"stream", "display_data", "execute_result"}
    figures = [output.data["image/png"] for output in images(notebook)]
    assert figures
    assert max(len(figure) * 3 // 4 for figure in figures) < MAX_FIGURE
    assert path.stat().st_size < MAX_NOTEBOOK


@each_notebook
def test_outputs_show_no_path_of_a_machine_and_no_warning(path: Path) -> None:
    shown = [
        *(output.get("text", "") for output in outputs(read(path))),
        *(str(output.get("data", {}).get("text/plain", "")) for output in outputs(read(path))),
    ]
    assert [text for text in shown if MACHINE_PATH.search(text) or "Warning" in text] == []


@each_notebook
def test_page_of_notebooks_has_each(path: Path) -> None:
    title = read(path).cells[0].source.splitlines()[0].removeprefix("# ")
    assert f"[{title}](../notebooks/{path.name})" in PAGE


@pytest.mark.slow
@each_notebook
def test_notebook_runs_alone_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "callbacks")]),
        "IPYTHONDIR": str(tmp_path / "ipython"),  # nobody's own start-up files
    }
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(read(path), timeout=600, resources=place)
    done = client.execute(env=environment)
    assert len(images(done)) == len(images(read(path)))
    texts = [output.text for output in outputs(done) if output.get("name") == "stderr"]
    assert [text for text in texts if "Warning" in text] == []
