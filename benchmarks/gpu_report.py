"""Ten minutes on a machine with a CUDA GPU: what its first run should tell, in one report file.

    python -m benchmarks.gpu_report
    python -m benchmarks.gpu_report --only '[decode,varlen]' --output runs/gpu_report.md

The parts run one after the other, the most telling first, each in its own process with a time
limit. One that fails or takes too long does not stop the others. The report names the machine and
the versions, has a table of the parts, and the end of what each of them printed. It is written
again after every part, so that an interrupted run leaves what it has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from jsonargparse import auto_cli

PACKAGES = ("torch", "triton", "lightning", "transformers", "peft", "deepspeed", "lit-rlhf")
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "DS_ACCELERATOR": "cuda"}
"""Set for all parts unless the caller's environment has other values."""
SHOWN_LINES = 80
"""Lines of each part's output in the report; the last ones, where results and errors are."""


class Part(NamedTuple):
    """A command of the report.

    Attributes:
        name: Its name in the report and for `--only`.
        arguments: Arguments of the Python interpreter.
        limit: Seconds that it may take.
        gpus: Number of GPUs that it needs.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float
    gpus: int = 1


class Result(NamedTuple):
    """The outcome of a part.

    Attributes:
        part: The part.
        outcome: `ok`, `failed (N)`, `over its limit` or why it was skipped.
        seconds: Wall time.
        output: All that it printed, errors included.
    """

    part: Part
    outcome: str
    seconds: float
    output: str


def _tests(
    name: str, files: tuple[str, ...], limit: float, selected: str | None = None, gpus: int = 1
) -> Part:
    selection = () if selected is None else ("-k", selected)
    arguments = ("-m", "pytest", "-m", "gpu", "-q", "-s", "-n", "0", *files, *selection)
    return Part(name, arguments, limit, gpus)


PARTS = (
    Part(
        "engine",
        ("-c", "import torch, deepspeed; print(torch.ones(1).cuda(), deepspeed.__version__)"),
        20,
    ),
    _tests("fast paths", ("tests/gpu/test_fast_paths.py", "tests/gpu/test_rollouts.py"), 80),
    Part("decode", ("-m", "benchmarks.gpu.profile_decode"), 60),
    Part("varlen", ("-m", "benchmarks.gpu.varlen_smoke"), 60),
    _tests("zero2", ("tests/distributed/test_multi_engine_gpu.py",), 60, "stage_2 and bf16"),
    _tests("billion", ("tests/gpu/test_scale_out.py",), 150, "billion"),
    Part(
        "iteration",
        (
            "-m", "benchmarks.ppo_iteration", "--device", "cuda", "--size", "1b",
            "--precisions", "[bf16-mixed]", "--modes", "[full]", "--rounds", "1", "--updates", "2",
            "--wait", "0", "--quiet_cores", "99", "--peer", "false",
            "--output", "runs/gpu_report/ppo_iteration",
        ),
        110,
    ),
    _tests("stages", ("tests/gpu/test_stages.py",), 60, "lab_stages"),
    _tests("two gpus", ("tests/gpu/test_two_gpus.py",), 180, gpus=2),
)  # fmt: skip
"""The parts in order of information; with one GPU they have ten minutes together."""


def run_part(part: Part, n_gpus: int) -> Result:
    """Run a part to its end or its limit; a part that needs more GPUs is skipped."""
    if part.gpus > n_gpus:
        return Result(part, f"skipped: needs {part.gpus} GPUs, there are {n_gpus}", 0.0, "")
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-u", *part.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**ENVIRONMENT, **os.environ},
        start_new_session=True,  # so that what it starts ends with it
    )
    try:
        output, _ = process.communicate(timeout=part.limit)
        outcome = "ok" if process.returncode == 0 else f"failed ({process.returncode})"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        outcome = "over its limit"
    return Result(part, outcome, time.monotonic() - start, output)


def describe_machine() -> list[str]:
    """The GPUs, the driver's CUDA version and the packages, one line each."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    lines = [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB" for gpu in gpus] or ["no CUDA GPU"]
    lines.append(f"Python {sys.version.split()[0]}, CUDA {torch.version.cuda}")
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return lines


def render_report(machine: Sequence[str], results: Sequence[Result]) -> str:
    """The report as Markdown."""
    now = datetime.now(UTC).isoformat(timespec="minutes")
    lines = [f"# GPU report, {now}", "", *(f"- {line}" for line in machine), ""]
    lines += ["| part | outcome | seconds | limit |", "|---|---|---|---|"]
    lines += [
        f"| {r.part.name} | {r.outcome} | {r.seconds:.0f} | {r.part.limit:.0f} |" for r in results
    ]
    for result in results:
        command = " ".join(("python", *result.part.arguments))
        shown = result.output.splitlines()[-SHOWN_LINES:]
        lines += ["", f"## {result.part.name}: {result.outcome}", "", f"`{command}`", ""]
        lines += ["~~~text", *shown, "~~~"]
    return "\n".join(lines) + "\n"


def write_report(parts: Sequence[Part], path: Path, n_gpus: int) -> list[Result]:
    """Run parts in turn, and write the report after each of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    machine, results = describe_machine(), list[Result]()
    for part in parts:
        print(f"{part.name}: at most {part.limit:.0f} s", flush=True)
        results.append(run_part(part, n_gpus))
        print(f"{part.name}: {results[-1].outcome} after {results[-1].seconds:.0f} s", flush=True)
        path.write_text(render_report(machine, results), "utf-8")
    return results


def gpu_report(output: str = "runs/gpu_report/report.md", only: tuple[str, ...] = ()) -> None:
    """Run the parts and write the report.

    Args:
        output: The report's file.
        only: Names of the parts to run; none: all.

    Raises:
        ValueError: If a name is unknown.
        SystemExit: With status 1 if there is no CUDA GPU, or a part failed.
    """
    names = [part.name for part in PARTS]
    if unknown := set(only) - set(names):
        raise ValueError(f"only: expected some of {names}, got {sorted(unknown)}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: run this on a machine with one")
    parts = [part for part in PARTS if not only or part.name in only]
    results = write_report(parts, Path(output), torch.cuda.device_count())
    print(f"report: {output}")
    if any(not r.outcome.startswith(("ok", "skipped")) for r in results):
        sys.exit(1)


if __name__ == "__main__":
    auto_cli(gpu_report, as_positional=False)
