"""Runs the matrix of faults: `make faults`, or `python -m tests.faults [WORD ...] [--lanes N]`.

Words choose the cells whose names contain all of them, for example `fit save ENOSPC`.
"""

import argparse
import importlib
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tests.faults.matrix import cells, run_matrix

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--cells", nargs="+", help="names of the only cells to run")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if find_spec("deepspeed"):
        importlib.import_module("deepspeed")  # else every process does so when it saves its model
    wanted = [cell for cell in cells() if all(word in cell.name for word in arguments.words)]
    if arguments.cells:
        wanted = [cell for cell in wanted if cell.name in arguments.cells]
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="faults_"))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    wrong = {cell: text for cell, text in run_matrix(folder, wanted, arguments.lanes).items()}
    for cell, text in wrong.items():
        print(f"{'red  ' if text else 'green'} {cell.name}  {text}")
    red = sum(map(bool, wrong.values()))
    print(f"{len(wrong)} cells, {red} red, {time.monotonic() - start:.0f} s; runs are in {folder}")
    raise SystemExit(bool(red))
