"""Runs the matrix of faults: `make faults`, or `python -m tests.faults [WORD ...] [--lanes N]`.

Words choose the cells whose names contain all of them, for example `fit save ENOSPC`. Without words
there are fuzzed inputs too. `fuzz` or `soak` as the only word runs that alone.
"""

import argparse
import importlib
import random
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from tests.faults.fuzz import run_fuzz
from tests.faults.matrix import cells, run_matrix
from tests.faults.soak import run_soak


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--cells", nargs="+", help="names of the only cells to run")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, help="of what is random; by default another each time")
    parser.add_argument("--seconds", type=float, default=120, help="of fuzzing")
    parser.add_argument("--cases", nargs="+", default=(), help="names of the only fuzzed cases")
    parser.add_argument("--iterations", type=int, default=300, help="of the soak")
    parser.add_argument("--resumes", type=int, default=60, help="of the soak")
    return parser.parse_args()


def main() -> bool:
    """Run what the command line asks for; return whether all of it is green."""
    arguments = parse_arguments()
    if find_spec("deepspeed"):
        importlib.import_module("deepspeed")  # else every process does so when it saves its model
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="faults_"))
    folder.mkdir(parents=True, exist_ok=True)
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}; runs are in {folder}", flush=True)
    start = time.monotonic()
    if arguments.words == ["soak"]:
        wrong = run_soak(
            folder, seed=seed, iterations=arguments.iterations, resumes=arguments.resumes
        )
        print((folder / "soak.md").read_text(), *wrong, sep="\n")
        print(f"{len(wrong)} red, {time.monotonic() - start:.0f} s")
        return not wrong
    red = 0
    left = ""
    if arguments.words in ([], ["fuzz"]) and not arguments.cells:
        fuzzed = run_fuzz(
            folder / "fuzz", seed=seed, seconds=arguments.seconds, names=arguments.cases
        )
        red = sum(map(bool, fuzzed.values()))
        kinds = Counter(case.kind for case in fuzzed)
        print(f"{len(fuzzed)} fuzzed cases {dict(kinds)}, {red} red")
        if arguments.words:
            return not red
        left = f" besides {red} of the fuzzed cases"
    wanted = [cell for cell in cells(seed) if all(word in cell.name for word in arguments.words)]
    if arguments.cells:
        wanted = [cell for cell in wanted if cell.name in arguments.cells]
    outcomes = run_matrix(folder, wanted, arguments.lanes)
    for cell, text in outcomes.items():
        print(f"{'red  ' if text else 'green'} {cell.name}  {text}")
    red_cells = sum(map(bool, outcomes.values()))
    print(f"{len(outcomes)} cells, {red_cells} red{left}, {time.monotonic() - start:.0f} s")
    return not red + red_cells


if __name__ == "__main__":
    raise SystemExit(not main())
