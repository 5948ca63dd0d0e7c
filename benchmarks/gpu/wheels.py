"""Collect the wheels that a GPU machine without a package index lacks.

    python -m pip freeze >there.txt                                # on the GPU machine
    python -m benchmarks.gpu.wheels there.txt --output runs/wheels  # here
    python -m pip install --no-index --no-deps runs/wheels/*.whl   # there

Run it in an environment with the machine's version of Python in which the report's parts can be
imported, with the extra `liger` for fused kernels: what is installed here and not there is built or
downloaded, in the version of here. Packages that are there are left alone, whatever their version.
The project's own wheels are built from this tree.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from jsonargparse import auto_cli

ROOT = Path(__file__).resolve().parents[2]
OWN = {"lit-rlhf": ROOT, "lit-callbacks": ROOT / "callbacks"}
"""Packages of this tree, and the folders that they are built from."""
NOT_NEEDED = re.compile(r"pip|setuptools|wheel|torch|triton|nvidia-.*|cuda-.*")
"""Packages that are never carried: the machine's torch has to fit its driver."""


def normalized(name: str) -> str:
    """Normalize a package's name as package indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing_packages(installed: dict[str, str], there: str) -> dict[str, str]:
    """Find the packages that another machine lacks.

    Args:
        installed: Versions by name of the packages here.
        there: What `pip freeze` or `pip list` prints on the other machine.
    """
    lines = (line.strip() for line in there.splitlines())
    names = {normalized(re.split(r"[=<>!~ @;\[]", line, maxsplit=1)[0]) for line in lines if line}
    return {
        name: version
        for name, version in sorted(installed.items())
        if name not in names and not NOT_NEEDED.fullmatch(name)
    }


def wheels(there: str, output: str = "runs/wheels") -> None:
    """Put the missing wheels into a folder, and print the bytes of each and of all.

    Args:
        there: A file with a package in each line, as `pip freeze` or `pip list` prints them there.
        output: A folder that does not exist yet.

    Raises:
        FileExistsError: If the folder exists.
        subprocess.CalledProcessError: If pip finds or builds a wheel of none; it says why.
    """
    installed = {normalized(d.name): d.version for d in distributions()}
    missing = missing_packages(installed, Path(there).read_text("utf-8"))
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=False)
    pins = [str(OWN.get(name, f"{name}=={version}")) for name, version in missing.items()]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", output, *pins]
    # DeepSpeed's operators are built at their first use, on the machine
    subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    files = sorted(folder.glob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / 2**20:8.2f} MiB  {file.name}")
    print(f"{sum(f.stat().st_size for f in files) / 2**20:8.2f} MiB  {len(files)} wheels")


if __name__ == "__main__":
    auto_cli(wheels)
