"""Puts small defects into the formulas and the update, one at a time, and runs their tests.

`make mutate`, or `python -m tests.mutation [MODULE ...] [--changed BASE] [--jobs N]`. With a base,
only lines that differ from that commit get defects, in any module that has tests of its name.

The tests of a module are collected and run once without a defect. Each defect is then made in a
fork of that process, by replacing the code of the functions, and the tests that call the function
run until one fails. No file is changed. The exit status is 1 if no test notices a defect that is
not in `equivalents.txt`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Value
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from tests.mutation.mutants import Mutant, make_mutants

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lit_rlhf", "callbacks/lit_callbacks", "benchmarks", "experiments")
FUNCTIONAL = ("tests/functional",)
PPO = (
    "tests/ppo/test_algorithm.py",
    "tests/modules/test_ppo_experience.py",
    "tests/modules/test_ppo_update.py",
    "tests/modules/test_ppo_rewards.py",
    "tests/modules/test_ppo_switches.py",
    "tests/modules/test_updates.py",
    "tests/modules/test_schedules.py",
    "tests/modules/test_phase_timer.py",
    "tests/invariant/test_reference_iteration.py",
    "tests/invariant/test_micro_batches.py",
)
ON_CUDA = "tests/modules/test_device_audit.py::test_what_cuda_refuses_is_refused"
STATS = ("tests/stats", "tests/functional/test_examples.py", ON_CUDA)
SUITES: dict[str, tuple[str, ...]] = {
    "lit_rlhf/checks.py": (*FUNCTIONAL, "tests/modules/test_options.py"),
    "lit_rlhf/tensor_checks.py": FUNCTIONAL,
    **{
        f"lit_rlhf/functional/{name}.py": FUNCTIONAL
        for name in ("advantages", "kl", "logprobs", "losses", "masking", "metrics", "rewards")
    },
    "lit_rlhf/stats.py": STATS,
    "lit_rlhf/rollout/sampling.py": ("tests/rollout/test_sampling.py",),
    "lit_rlhf/ppo/algorithm.py": PPO,
    "lit_rlhf/modules/ppo.py": PPO,
}
"""Tests by module. `find_tests` finds other modules' tests by their names."""
FUNCTIONS = {
    "lit_rlhf/ppo/algorithm.py": (
        *("PPO.shape_rewards", "PPO.reparameterize", "PPO.experience", "PPO.adapt_kl_coef"),
        *("PPO.reparameterize_advantages", "PPO.critic_loss", "PPO.policy_loss", "PPO.ptx_loss"),
        *("PPO.policy_objective", "PPO.learn_from", "PPO.update", "PPO.train_critic"),
        *("PPO.train_policy", "PPO.split_experience", "PPO.watch_critic_pretraining"),
        "PPO.generalized_advantages",
    ),
    "lit_rlhf/modules/ppo.py": (
        *("PPOModule.training_step", "PPOModule.run_iteration", "PPOModule.make_stepper"),
    ),
}
"""The functions that are changed, where these are not all of a module."""
LEAVE = os._exit  # by a name of its own: it is refused while a reward runs
SHORTEST_LIMIT = 60.0  # seconds that the tests may take with a defect, at least


class TestRun(NamedTuple):
    """Seconds and functions of a test without a defect, and how often it failed in forks since."""

    seconds: float
    functions: frozenset[str]
    n_failures: Synchronized[int]


class Mutation:
    """A pytest plugin that runs a module's tests with each mutant, after they passed without."""

    def __init__(self, module: str, source: str, mutants: list[Mutant], jobs: int) -> None:
        self.file = str(ROOT / module)
        self.name = module.removeprefix("callbacks/").removesuffix(".py").replace("/", ".")
        self.source, self.mutants, self.jobs = source, mutants, jobs
        self.survivors: list[Mutant] = []
        self.ran = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests without a defect, then with each."""
        runs = {}
        for item, following in zip(session.items, [*session.items[1:], session], strict=True):
            runs[item] = self.run_traced(item, following)
        clean = Mutant(
            module=self.file, function="", line=0, text="", was="", now="", source=self.source
        )
        # once more as with a defect, since a test may fail only because of the fork
        if session.testsfailed:
            return True
        if os.waitpid(fork(lambda: self.try_mutant(session, runs, clean)), 0)[1]:
            return True
        self.ran = True
        limit = max(SHORTEST_LIMIT, 5 * sum(run.seconds for run in runs.values()))
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        waiting = list(reversed(self.mutants))
        running: dict[int, tuple[Mutant, float]] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop()
                pid = fork(lambda mutant=mutant: self.try_mutant(session, runs, mutant))
                running[pid] = mutant, time.monotonic() + limit
            for pid, (mutant, end) in list(running.items()):
                if time.monotonic() > end:
                    os.killpg(pid, signal.SIGKILL)  # a test that never ends has noticed it
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    if status == 0:
                        self.survivors.append(mutant)
                        reporter.write_line(f"not noticed: {mutant}", flush=True)
                    n_tried = len(self.mutants) - len(waiting) - len(running)
                    if n_tried % 10 == 0 or not waiting:
                        reporter.write_line(f"{n_tried} of {len(self.mutants)} tried", flush=True)
            time.sleep(0.002)
        return True

    def run_traced(self, item: pytest.Item, following: pytest.Item | pytest.Session) -> TestRun:
        """Run a test, and note which functions of the module it calls."""
        functions: set[str] = set()

        def trace(frame: Any, event: str, argument: object) -> None:
            if frame.f_code.co_filename == self.file:
                functions.add(frame.f_code.co_qualname.partition(".<locals>")[0])

        start = time.perf_counter()
        sys.settrace(trace)
        try:
            # with the session as the next item, the fixtures of the session stay
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        finally:
            sys.settrace(None)
        return TestRun(time.perf_counter() - start, frozenset(functions), Value("i"))

    def try_mutant(self, session: pytest.Session, runs: dict[Any, TestRun], mutant: Mutant) -> int:
        """Run the tests with a defect, in a process for it; 1 if one fails."""
        session.config.pluginmanager.unregister(name="terminalreporter")
        use_forked_ranks()
        replace_code(sys.modules[self.name], mutant.source)
        items = choose_tests(runs, mutant.function)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                with runs[item].n_failures.get_lock():
                    runs[item].n_failures.value += 1
                return 1
        return 0


def choose_tests(runs: dict[pytest.Item, TestRun], function: str) -> list[pytest.Item]:
    """The tests in the order in which they are tried.

    Those that call the function come first, the quickest and those that have noticed most defects
    before the others. Then come the other tests of their files, which may see what a fixture of
    the module computed, and then all others, which may call it in another process.
    """
    function = function.partition(".read")[0]  # a function inside another
    calls = {item for item, run in runs.items() if function in run.functions}
    files = {item.path for item in calls}
    return sorted(
        runs,
        key=lambda item: (
            item not in calls,
            item.path not in files,
            runs[item].seconds / (1 + runs[item].n_failures.value),
        ),
    )


def replace_code(module: ModuleType, source: str) -> None:
    """Give the functions, classes and constants of a module the code and values of `source`."""
    changed = ModuleType(module.__name__)
    changed.__file__ = module.__file__
    exec(compile(source, str(module.__file__), "exec"), vars(changed))
    _replace_names(module, vars(changed), module.__name__)


def _replace_names(owner: ModuleType | type, values: dict[str, Any], module: str) -> None:
    for name, value in values.items():
        old, new = (inspect.unwrap(_inside(x)) for x in (vars(owner).get(name), value))
        if isinstance(new, FunctionType) and isinstance(old, FunctionType):
            if new.__module__ == module:
                old.__code__ = new.__code__
                old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
        elif isinstance(new, type) and isinstance(old, type):
            if new.__module__ == module:
                _replace_names(old, dict(vars(new)), module)
        # members of an enumeration are plain, too, and cannot be set
        elif _is_plain(new) and new != old and not name.startswith("__"):
            setattr(owner, name, new)


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or a table of these."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    return value is None or isinstance(value, bool | int | float | str)


def _inside(member: Any) -> Any:
    """The function in a property or a method of a class."""
    for attribute in ("fget", "__func__"):
        member = getattr(member, attribute, member)
    return member


def use_forked_ranks() -> None:
    """Fork the processes of tests with ranks: a spawned one imports the module without a defect."""
    from tests.support import ranks

    start = ranks.start_processes

    def start_forked(*arguments: Any, **options: Any) -> None:
        start(*arguments, **{**options, "start_method": "fork"})

    ranks.start_processes = start_forked
    ranks.ensure_running = lambda: None  # the server is no child of this fork, and not used


def fork(work: Callable[[], int]) -> int:
    """Fork a process, in a new group, that exits with the result of `work`."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 2
    try:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        status = work()
    except BaseException:  # SystemExit too: the fork must not continue as its parent
        traceback.print_exc()
    finally:
        LEAVE(status)


def find_tests(module: str) -> tuple[str, ...]:
    """Tests of a module: those listed, or the nearest file of its name or of its folder's."""
    if module in SUITES:
        return SUITES[module]
    path = Path(module.removeprefix("lit_rlhf/").replace("/lit_callbacks/", "/"))
    while path.name:
        file = Path("tests") / path.parent / f"test_{path.stem}.py"
        if (ROOT / file).exists():
            return (str(file),)
        path = path.parent
    return ()


def changed_lines(base: str) -> dict[str, set[int]]:
    """Lines of each module that differ from the last common commit with `base`."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    start = git("merge-base", base, "HEAD").strip()
    changed: dict[str, set[int]] = {}
    for line in git("diff", "--unified=0", start, "--", *PACKAGES).splitlines():
        if line.startswith("+++ "):
            lines = changed.setdefault(line.removeprefix("+++ b/"), set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first = int(hunk[1])
            lines.update(range(first, first + int(hunk[2] or 1)))
    return {name: lines for name, lines in changed.items() if name.endswith(".py") and lines}


def try_mutants(
    module: str, jobs: int, folder: Path, lines: set[int] | None = None
) -> tuple[int, list[Mutant]]:
    """Number of a module's mutants, and those that no test notices; all have to pass without."""
    source = (ROOT / module).read_text()
    mutants = make_mutants(module, source, FUNCTIONS.get(module, ("",)) if lines is None else ("",))
    if lines is not None:
        mutants = [mutant for mutant in mutants if mutant.line in lines]
    if not mutants:
        return 0, []
    plugin = Mutation(module, source, mutants, jobs)
    options = ["-q", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    options += ["-p", "no:faulthandler"]  # a mutant may crash
    # the first module's tests have imported libraries of plugins
    options += ["-W", "ignore:Module already imported so cannot be rewritten"]
    options += ["-o", "timeout=0", f"--basetemp={folder / module.replace('/', '_')}"]
    pytest.main([*options, *find_tests(module)], plugins=[plugin])
    if not plugin.ran:
        raise RuntimeError(f"{module}: its tests fail without a defect")
    return len(mutants), plugin.survivors


def read_equivalents(text: str) -> set[tuple[str, str, str, str]]:
    """Module, line, what stands there and what the mutant has there, of each entry."""
    equivalents: set[tuple[str, str, str, str]] = set()
    module = line = ""
    for row in text.splitlines():
        if row.startswith("    "):
            was, _, now = row.strip().partition(" # ")[0].partition(" -> ")
            equivalents.add((module, line, was, now))
        elif not row.startswith("#"):
            module, _, line = row.partition(": ")
    return equivalents


def main() -> int:
    """Try the mutants of all modules, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(SUITES))
    parser.add_argument("--changed", metavar="BASE", help="only lines that differ from a commit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    lines: dict[str, set[int]] = changed_lines(arguments.changed) if arguments.changed else {}
    modules = arguments.modules or list(lines if arguments.changed else SUITES)
    without = [module for module in modules if not find_tests(module)]
    if without and not arguments.changed:
        parser.error(f"expected modules with tests of their names, got {', '.join(without)}")
    for module in without:
        print(f"{module}: no tests of its name")
    modules = [module for module in modules if module not in without]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd cannot be forked once it has used a GPU
    importlib.import_module("torch").set_num_threads(1)
    explained = read_equivalents((Path(__file__).parent / "equivalents.txt").read_text("utf-8"))
    unused = {key for key in explained if key[0] in modules and not arguments.changed}
    count, unexplained = 0, []
    with TemporaryDirectory(prefix="mutation_") as folder:
        for module in modules:
            began = time.monotonic()
            n_mutants, survivors = try_mutants(
                module, arguments.jobs, Path(folder), lines.get(module)
            )
            keys = {m: (m.module, m.text, m.was, m.now) for m in survivors}
            new = [m for m in survivors if keys[m] not in explained]
            unused -= set(keys.values())
            print(
                f"{module}: {n_mutants} mutants, {n_mutants - len(survivors)} noticed, "
                f"{len(survivors) - len(new)} equivalent, {len(new)} not noticed, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            for mutant in sorted(new, key=lambda m: m.line):
                print(f"  {mutant}", flush=True)
            count, unexplained = count + n_mutants, [*unexplained, *new]
    for module, text, was, now in sorted(unused):
        print(f"equivalents.txt: no survivor is {module}, `{text}`: `{was}` -> `{now}`")
    print(f"{count} mutants; not noticed and not listed as equivalent: {len(unexplained)}")
    return int(bool(unexplained or unused))


if __name__ == "__main__":
    sys.exit(main())
