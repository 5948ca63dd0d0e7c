"""What a machine with a CUDA GPU should tell, in calls of at most ten minutes.

    python -m benchmarks.gpu_report --call 1
    python -m benchmarks.gpu_report --call 2 --peer_python "$(which python)"
    python -m benchmarks.gpu_report --only '[decode,varlen]' --output runs/gpu_report.md

The first call times each phase of an iteration and each kind of kernels; the second compares with
TRL and runs the tests.

The parts run one after the other, the most telling first, each in its own process with a time
limit. One that fails or takes too long does not stop the others. The report names the machine and
the versions, has a table of the parts with what each was expected to show and what it measured, and
the end of what each of them printed; all of it is in a file of its own beside the report, and so
are the results of the comparisons with TRL. The report is written again after every part, so that
an interrupted run leaves what it has. Without liger-kernel, fused kernels are left out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jsonargparse import auto_cli

PACKAGES = (
    "torch",
    "triton",
    "lightning",
    "transformers",
    "peft",
    "deepspeed",
    "liger-kernel",
    "pytest-xdist",
    "lit-rlhf",
)
"""Packages that parts of the report need; it has their versions."""
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "DS_ACCELERATOR": "cuda"}
"""Set for all parts unless the caller's environment has other values."""
SHOWN_LINES = 100
"""Lines of each part's output in the report; the last ones, where results and errors are."""


class Part(NamedTuple):
    """A command of the report.

    Attributes:
        name: Its name in the report and for `--only`.
        arguments: Arguments of the Python interpreter.
        limit: Seconds that it may take.
        expected: What it should show, computed or measured before; printed beside it.
        measured: Pattern of what it prints that is compared with `expected`; empty: nothing.
        call: The half of the report that it is part of, 1 or 2.
        gpus: Number of GPUs that it needs.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float
    expected: str = "no error"
    measured: str = ""
    call: int = 1
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

    @property
    def measured(self) -> list[str]:
        """What the part printed that is compared with what was expected."""
        if not self.part.measured:
            return []
        return re.findall(self.part.measured, self.output, re.MULTILINE)


def _tests(
    name: str,
    limit: float,
    arguments: tuple[str, ...],
    *,
    expected: str = "no test fails",
    measured: str = r"\d+ (?:passed|failed|errors?|skipped)\b(?=.* in [\d.]+s)",
    gpus: int = 1,
) -> Part:
    # warnings do not fail tests here, because other plugins of pytest may warn
    options = ("-m", "gpu", "-v", "--tb", "short", "-W", "default", "-p", "no:benchmark")
    return Part(
        name,
        ("-m", "pytest", *options, *arguments),
        limit,
        expected=expected,
        measured=measured,
        call=2,
        gpus=gpus,
    )


KERNELS = "[plain,fused,compiled]" if find_spec("liger_kernel") else "[plain,compiled]"
"""The kinds of kernels that can run here."""


def _decode(name: str, limit: float, expected: str, *options: str) -> Part:
    arguments = ("-m", "benchmarks.gpu.profile_decode", "--kernels", KERNELS, *options)
    return Part(name, arguments, limit, expected, measured=r"^\w+, \d+ rows: \S+ ms a step")


def _iteration(name: str, limit: float, expected: str, *options: str, call: int = 1) -> Part:
    arguments = ("-m", "benchmarks.gpu.profile_iteration", *options)
    return Part(
        name, arguments, limit, expected, measured=r"^\w+: [\d.]+ s an iteration, .*", call=call
    )


PEER_SETTINGS = ("--device", "cuda", "--rounds", "1", "--wait", "0", "--quiet_cores", "99")
"""Settings of the comparisons with TRL."""
BILLION = "billion and stage_2-False"
"""One of the three runs of its test: they differ in what is offloaded."""
COMPARED = ("supervised", "peer")
"""Names of the parts that compare with TRL if its interpreter is given."""
TESTED = (
    "tests/gpu",
    "tests/distributed/test_multi_engine_gpu.py",
    "tests/forward/test_networks.py",
)
"""Where tests that need one GPU are."""
PARTS = (
    Part(
        "engine",
        ("-c", "import torch, deepspeed; print(torch.ones(1).cuda(), deepspeed.__version__)"),
        30,
    ),
    Part("varlen", ("-m", "benchmarks.gpu.varlen_smoke"), 30),
    _iteration(
        "iteration",
        280,
        "update at 48 % of torch.mm plain, 53 % fused, 63 % compiled, idle 10 to 15 % (H200)",
        *("--size", "1b-long", "--iterations", "3", "--kernels", KERNELS),
    ),
    _decode(
        "decode",
        100,
        "at 16 rows 2.9 ms plain (H100), 1.8 fused and compiled (H200)",
        *("--rows", "[16,128]", "--without_graphs", "false"),
    ),
    _decode(
        "decode 7b",
        90,
        "at 16 rows 9.5 ms plain (H100), 6.6 fused, 8.9 compiled (H200)",
        *("--size", "7b", "--rows", "[16,64]", "--steps", "16", "--without_graphs", "false"),
    ),
    _iteration("short iteration", 90, "update 0.98 s before, about 0.5 s now", "--size", "1b"),
    _iteration(
        "zero 1",
        120,
        "update faster than in bf16-mixed, because no weight is cast",
        *("--size", "1b-long", "--precision", "bf16-true", "--iterations", "3"),
        *("--strategy", "multi_deepspeed_stage_1"),
    ),
    _decode(
        "decode 7b LoRA",
        90,
        "at most 8.8 ms; without autocast 13.7 plain, 11.0 fused (H200)",
        *("--size", "7b", "--rows", "[16]", "--steps", "16", "--without_graphs", "false"),
        *("--lora_rank", "16"),
    ),
    # side by side: what they compare does not depend on the time that it takes
    _tests("tests", 150, ("-n", "6", *TESTED, "-k", "not billion and not two_devices")),
    Part(
        "supervised",
        (
            *("-m", "benchmarks.sft_reward", *PEER_SETTINGS, "--size", "1b", "--updates", "4"),
            *("--precisions", "[bf16-mixed]"),
        ),
        200,
        "at least as fast as TRL",
        call=2,
    ),
    Part(
        "peer",
        (
            *("-m", "benchmarks.ppo_iteration", *PEER_SETTINGS, "--size", "1b", "--updates", "3"),
            *("--precisions", "[bf16-mixed]", "--modes", "[ragged]"),
        ),
        200,
        "at least 5 times as fast as TRL",
        call=2,
    ),
    _iteration(
        "iteration 7b LoRA",
        120,
        "fits on one card of 80 GB",
        *("--size", "7b", "--precision", "bf16-true", "--lora_rank", "16"),
        call=2,
    ),
    _tests(
        "billion",
        190,
        ("-s", "-n", "0", "tests/gpu/test_scale_out.py", "-k", BILLION),
        expected="peak within a tenth of the estimate",
        measured=r"[\d.]+ GB, estimate [\d.]+ GB",
    ),
    _tests("two gpus", 120, ("-s", "-n", "0", "tests/gpu/test_two_gpus.py"), gpus=2),
)
"""The parts in order of information. Limits of a call may add up to more than its ten minutes: few
parts reach theirs, and what comes last matters least."""


def run_part(part: Part, n_gpus: int) -> Result:
    """Run a part of the report, and stop it at its limit.

    Args:
        part: The part. It is skipped if it needs more GPUs.
        n_gpus: Number of GPUs of this machine.
    """
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
    """Render the report as Markdown.

    Args:
        machine: Lines about the machine, as from `describe_machine`.
        results: Results of the parts so far.
    """
    now = datetime.now(UTC).isoformat(timespec="minutes")
    lines = [f"# GPU report, {now}", "", *(f"- {line}" for line in machine), ""]
    lines += ["| part | outcome | seconds | limit | expected | measured |", "|---|" + "---|" * 5]
    lines += [
        f"| {r.part.name} | {r.outcome} | {r.seconds:.0f} | {r.part.limit:.0f} "
        f"| {r.part.expected} | {'; '.join(r.measured) or 'see below'} |"
        for r in results
    ]
    for result in results:
        command = " ".join(("python", *result.part.arguments))
        last_lines = result.output.splitlines()[-SHOWN_LINES:]
        lines += ["", f"## {result.part.name}: {result.outcome}", "", f"`{command}`", ""]
        lines += [f"Expected: {result.part.expected}.", ""]
        lines += ["~~~text", *last_lines, "~~~"]
    return "\n".join(lines) + "\n"


def write_report(parts: Sequence[Part], path: Path, n_gpus: int) -> list[Result]:
    """Run parts in turn, and write the report after each of them.

    Args:
        parts: The parts.
        path: The report. The whole output of each part goes into a `.log` file beside it.
        n_gpus: Number of GPUs of this machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    results = list[Result]()
    for part in parts:
        print(f"{part.name}: at most {part.limit:.0f} s; {part.expected}", flush=True)
        results.append(run_part(part, n_gpus))
        log = path.with_name(f"{path.stem}_{part.name.replace(' ', '_')}.log")
        log.write_text(results[-1].output, "utf-8")
        print(f"{part.name}: {results[-1].outcome} after {results[-1].seconds:.0f} s", flush=True)
        for line in results[-1].measured:
            print(f"  {line}", flush=True)
        path.write_text(render_report(machine, results), "utf-8")
    return results


def compare_beside(part: Part, folder: Path, peer_python: str | None) -> Part:
    """A part; if it is a comparison, with its results in `folder`, and with TRL if it is there.

    Args:
        part: The part.
        folder: The report's folder.
        peer_python: Interpreter of an environment with TRL; `None`: without TRL.
    """
    if part.name not in COMPARED:
        return part
    peer = ("--peer", "false") if peer_python is None else ("--peer_python", peer_python)
    results = ("--output", str(folder / part.name))
    return part._replace(arguments=(*part.arguments, *results, *peer))


def gpu_report(
    output: str | None = None,
    only: tuple[str, ...] = (),
    call: Literal[1, 2] | None = None,
    peer_python: str | None = None,
) -> None:
    """Run the parts and write the report.

    Args:
        output: The report's file; none: `report.md`, or `report_<call>.md`, in the folder that the
            environment variable OUT names, or in `runs/gpu_report`.
        only: Names of the parts to run; none: all.
        call: The half to run; none: both.
        peer_python: Interpreter of an environment with TRL 1.12, to compare an iteration with;
            none: without the comparison.

    Raises:
        ValueError: If a name is unknown.
        SystemExit: With status 1 if there is no CUDA GPU, or a part failed.
    """
    names = [part.name for part in PARTS]
    if unknown := set(only) - set(names):
        raise ValueError(f"only: expected some of {names}, got {sorted(unknown)}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: run this on a machine with one")
    parts = [p for p in PARTS if (not only or p.name in only) and call in (None, p.call)]
    name = "report.md" if call is None else f"report_{call}.md"
    path = Path(output or Path(os.environ.get("OUT", "runs/gpu_report")) / name)
    parts = [compare_beside(part, path.parent.resolve(), peer_python) for part in parts]
    results = write_report(parts, path, torch.cuda.device_count())
    print(f"report: {path}")
    if any(not r.outcome.startswith(("ok", "skipped")) for r in results):
        sys.exit(1)


if __name__ == "__main__":
    auto_cli(gpu_report, as_positional=False)
