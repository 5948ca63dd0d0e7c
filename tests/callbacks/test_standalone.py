"""lit_callbacks with its declared requirements only."""

import doctest
import importlib
import importlib.metadata
import pkgutil
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lit_callbacks
from lit_callbacks import Level
from tests.packaging.test_distributions import build
from tests.packaging.test_requirements import core_requirements, reachable

CALLBACKS = Path(__file__).resolve().parents[2] / "callbacks"
EXAMPLE = CALLBACKS / "examples" / "train_classifier.py"
ABSENT = (
    *("lit_rlhf", "transformers", "deepspeed", "datasets", "peft"),
    *("tensorboard", "matplotlib", "pytest"),  # nor what only extras and tests need
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder with the wheel, and links to what its requirements bring in."""
    folder = tmp_path_factory.mktemp("site")
    for name in set(reachable(core_requirements("callbacks"))):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {".."}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
    wheel = build(CALLBACKS, "wheel", tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(site: Path, program: str, folder: Path) -> str:
    """What a program prints that finds the standard library and `site`, and nothing else.

    -I keeps the environment, the working folder and the user's packages out, -S site-packages.
    """
    start = f"import sys; sys.path.append({str(site)!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_packages_of_lit_rlhf_are_truly_absent(site: Path, tmp_path: Path) -> None:
    program = f"""
import importlib
for name in {ABSENT!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        print(name)
"""
    assert run(site, program, tmp_path).split() == list(ABSENT)


@pytest.mark.slow
def test_every_module_can_be_imported(site: Path, tmp_path: Path) -> None:
    program = """
import importlib, pkgutil, lit_callbacks
print(lit_callbacks.__file__)
for module in pkgutil.walk_packages(lit_callbacks.__path__, "lit_callbacks."):
    if not module.name.endswith("__main__"):
        print(importlib.import_module(module.name).__name__)
"""
    origin, *imported = run(site, program, tmp_path).split()
    assert Path(origin) == site / "lit_callbacks" / "__init__.py"
    assert {"lit_callbacks.detector", "lit_callbacks.rollback"} <= set(imported)


def test_the_example_stops_a_classifier_that_goes_wrong() -> None:
    verdict = runpy.run_path(str(EXAMPLE))["train"](growth=1.05).verdict
    assert verdict.level is Level.COLLAPSED
    assert 40 < verdict.step < 300


@pytest.mark.slow
def test_the_example_says_why_it_stops(site: Path, tmp_path: Path) -> None:
    program = f"import runpy; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    (line,) = run(site, program, tmp_path).splitlines()
    told = re.fullmatch(r"collapsed at batch (\d+): (.+)", line)
    assert told is not None, line
    assert 40 < int(told[1]) < 300
    assert "loss" in told[2]
    assert "accuracy" in told[2]
    assert list(tmp_path.iterdir()) == []


def test_the_example_without_its_fault_stays_healthy() -> None:
    detector = runpy.run_path(str(EXAMPLE))["train"](growth=1.0)
    assert (detector.verdict.level, detector.verdict.step) == (Level.HEALTHY, 300)


def test_the_examples_in_docstrings_run() -> None:
    names = [m.name for m in pkgutil.walk_packages(lit_callbacks.__path__, "lit_callbacks.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) > 10


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 80
