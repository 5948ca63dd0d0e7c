"""The notebooks run from top to bottom, and are kept without their outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="the notebooks run with the `test` extra only")
nbformat = pytest.importorskip("nbformat", reason="the notebooks run with the `test` extra only")
pytest.importorskip("ipykernel", reason="the notebooks run with the `test` extra only")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each notebook with the outputs of a run in an empty folder."""
    folder = tmp_path_factory.mktemp("notebooks")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "callbacks")]),
        "IPYTHONDIR": str(folder / "ipython"),  # nobody's own start-up files
        "OMP_NUM_THREADS": "1",
    }
    notebooks = {}
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        client = nbclient.NotebookClient(
            notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
        )
        notebooks[path.stem] = client.execute(env=environment)
    return notebooks


def text(notebook: Any) -> str:
    """All that the cells printed or showed as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = (out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs)
    return "".join(texts)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)

    cells = code_cells(notebook)
    assert [cell.outputs for cell in cells] == [[]] * len(cells)
    assert {cell.execution_count for cell in cells} == {None}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_fast_unless_told_otherwise(path: Path) -> None:
    first = code_cells(nbformat.read(path, as_version=4))[0]

    assert first.source.splitlines()[0] == "FAST = True"


@pytest.mark.slow
def test_the_lab_notebook_compares_the_three_policies(done: dict[str, Any]) -> None:
    printed = text(done["ppo_max_on_the_lab"])

    assert "against sft, % of prompts" in printed
    for name in ("sft", "vanilla", "ppo_max"):
        assert f"    {name}, gold " in printed


@pytest.mark.slow
def test_the_lab_notebook_draws_the_signals_of_a_collapse(done: dict[str, Any]) -> None:
    cells = code_cells(done["ppo_max_on_the_lab"])
    images = [out for cell in cells for out in cell.outputs if "image/png" in out.get("data", {})]

    assert len(images) == 1


@pytest.mark.slow
def test_the_lab_notebook_reads_the_timeline_of_both_runs(done: dict[str, Any]) -> None:
    (printed,) = (
        cell.outputs[0].text
        for cell in code_cells(done["ppo_max_on_the_lab"])
        if "samples.jsonl" in cell.source
    )

    # six iterations, sampled before the first, after every second and at the end
    steps = [line.split()[0] for line in printed.splitlines() if "score" in line]
    assert steps == ["0", "2", "4", "6"] * 2


@pytest.mark.slow
def test_nothing_but_progress_goes_to_standard_error(done: dict[str, Any]) -> None:
    errors = [
        output.text
        for notebook in done.values()
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.get("name") == "stderr"
    ]

    lines = [line for line in "".join(errors).splitlines() if line.strip()]
    # "sft 4/16 25% 00:00 elapsed ...", and that the detector cannot judge six iterations
    expected = ("elapsed", "too few for a baseline")
    assert [line for line in lines if not any(words in line for words in expected)] == []
