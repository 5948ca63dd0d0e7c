"""lit_callbacks with its declared requirements only."""

import doctest
import importlib
import importlib.metadata
import pkgutil
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lit_callbacks
from lit_callbacks import Level
from tests.support.distributions import build, core_requirements, reachable

CALLBACKS = Path(__file__).resolve().parents[2] / "callbacks"
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
    command, options = [sys.executable, "-I", "-S", "-c", start + program], {"cwd": folder}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_every_module_can_be_imported(site: Path, tmp_path: Path) -> None:
    program = f"""
import importlib, importlib.util, pkgutil, lit_callbacks
print([name for name in {ABSENT!r} if importlib.util.find_spec(name)])
print(lit_callbacks.__file__)
for module in pkgutil.walk_packages(lit_callbacks.__path__, "lit_callbacks."):
    if not module.name.endswith("__main__"):
        print(importlib.import_module(module.name).__name__)
"""
    present, origin, *imported = run(site, program, tmp_path).splitlines()
    assert present == "[]"
    assert Path(origin) == site / "lit_callbacks" / "__init__.py"
    assert {"lit_callbacks.detector", "lit_callbacks.rollback"} <= set(imported)


FIT = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_callbacks import CollapseEarlyStopping, Monitor
class Module(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0 if batch_idx < 30 else 9.0)
        return super().training_step(batch, batch_idx)
quiet = {f"enable_{x}": False for x in ("checkpointing", "progress_bar", "model_summary")}
detector = CollapseEarlyStopping([Monitor("loss", high_ratio=2.0)])
Trainer(max_epochs=1, callbacks=[detector], logger=False, **quiet).fit(Module())
print(detector.verdict.step, detector.verdict.sentence)
"""


@pytest.mark.slow
def test_a_fit_is_stopped(site: Path, tmp_path: Path) -> None:
    assert run(site, FIT, tmp_path) == "32 loss 9 is 9x its baseline\n"
    assert list(tmp_path.iterdir()) == []


def test_the_core_imports_neither_lightning_nor_torch() -> None:
    program = (
        "import sys\n"
        "from lit_callbacks import Level, Watch, WatchCallback, default_monitors, replay_run\n"
        "watch = Watch()\n"
        "for _ in range(9): watch.step({'rollout/kl_per_token': 0.01})\n"
        "assert watch.verdict.level is Level.HEALTHY\n"
        "heavy = {'torch', 'lightning', 'transformers', 'matplotlib', 'numpy'}\n"
        "print(heavy & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.slow
def test_the_example_of_cartpole_trains_under_a_detector() -> None:
    pytest.importorskip("gymnasium", reason="the example's own requirement")
    example = runpy.run_path(str(CALLBACKS / "examples" / "lightning_cartpole.py"))
    verdict = example["train"](1.0, iterations=3).verdict
    assert (verdict.level, verdict.step) == (Level.HEALTHY, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # TRL's own
def test_the_example_of_trl_trains_under_a_watch(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl", reason="the example's own requirement")
    runpy.run_path(str(CALLBACKS / "examples" / "trl_grpo.py"))["main"](steps=2)
    assert "ended at step 2: healthy" in capsys.readouterr().out
    assert Path("letters_grpo/trainer_state.json").is_file()  # which `lit_rlhf watch` reads


def test_the_examples_in_docstrings_run() -> None:
    names = [m.name for m in pkgutil.walk_packages(lit_callbacks.__path__, "lit_callbacks.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 3
