"""Fuzzed configurations, model folders and logs.

Whatever a file holds, a command that reads it ends well or says what is wrong: no traceback, no
hang, no raw control character, nothing left behind. A case is a kind and a number, which is its
seed, so that it can be repeated.
"""

import csv
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lit_callbacks.report.page
import lit_callbacks.watch  # noqa: F401  # imported before the forks, as is the page of reports
from lit_rlhf.cli.main import main
from lit_rlhf.modules import PPOModule
from tests.faults.matrix import write_root
from tests.faults.processes import fork, last_line, session, wait
from tests.faults.results import contents

PROCESSOR_SECONDS = 30  # a case that takes longer hangs
ADDRESS_SPACE = 12 << 30  # bytes, so that a case cannot take the machine's memory
ITERATIONS = 2  # after which a run of a configuration is ended: "a million epochs" is no error
STATUSES = (0, 1, 2, 3, 143)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.5, 10**6, 2**63, 10**400),
    *(1e308, float("nan"), float("inf"), "", " ", "x", "0", "nan", "null", "~", "~/m", "$HOME"),
    *("s3://a/b", "a\u2028b", "\x1b[2J", "\ud800", "\0", "é" * 300, "../..", "/", "/dev/null"),
    *([], [[]], [None], {}, {"": None}, {"class_path": "os.abort"}, {"a": {"a": {"a": 1}}}),
)
"""What a value of a configuration or of a JSON file is replaced by."""
TOKENS = (
    *(b"", b"\0", b"\n", b"\r", b"\xff", b"\xe2\x80\xa8", b"{", b"}", b"[", b"]", b":", b'"'),
    *(b",", b"- ", b"&a ", b"*a ", b"!!python/object:os.system ", b"<<: ", b"nan", b"-1", b"1e999"),
    *(b"\x1b[2J", b"\t", b"\xef\xbb\xbf", b"%", b"{{", b"9" * 5000, b"[" * 5000),
)
"""What is put into the bytes of a file."""


class Case(NamedTuple):
    """A fuzzed input.

    Attributes:
        kind: A key of `KINDS`.
        number: The seed of what is changed.
    """

    kind: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.number}"


def change_value(value: Any, generator: random.Random) -> Any:
    """A copy of plain nested data in which one value or name has changed, was lost or added."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        name = generator.choice(sorted(value, key=str))
        action = generator.random()
        if action < 0.7:
            return value | {name: change_value(value[name], generator)}
        rest = {key: item for key, item in value.items() if key != name}
        if action < 0.8:
            return rest
        if action < 0.9:
            return rest | {f"{name}x": value[name]}
        return value | {generator.choice(("x", "", "a.b", "class_path")): generator.choice(VALUES)}
    if isinstance(value, list) and value and generator.random() < 0.85:
        index = generator.randrange(len(value))
        if generator.random() < 0.7:
            changed = change_value(value[index], generator)
            return [*value[:index], changed, *value[index + 1 :]]
        return generator.choice((value[:index], value + value[index:], value * 50))
    if isinstance(value, str) and value and generator.random() < 0.2:
        index = generator.randrange(len(value))
        return (
            value[:index] + generator.choice(("", "\x1b[31m", "é", "/", "\u2028")) + value[index:]
        )
    return generator.choice(VALUES)


def change_bytes(content: bytes, generator: random.Random) -> bytes:
    """A copy of a file's content with a part lost, doubled, inserted or flipped."""
    begin = generator.randrange(len(content) + 1)
    end = min(len(content), begin + generator.choice((1, 2, 8, 100, 10**5)))
    action = generator.randrange(5)
    if action == 0:
        return content[:begin]
    if action == 1:
        return content[:begin] + content[end:]
    if action == 2:
        return content[:end] + content[begin:]
    if action == 3 and begin < len(content):
        flipped = content[begin] ^ (1 << generator.randrange(8))
        return content[:begin] + bytes([flipped]) + content[begin + 1 :]
    return content[:begin] + generator.choice(TOKENS) + content[begin:]


def change_json(content: bytes, generator: random.Random) -> bytes:
    """A JSON file, or a line of a file of JSON lines, with one to three values changed."""
    lines = content.split(b"\n")
    index = generator.randrange(max(1, len(lines) - 1)) if len(lines) > 2 else 0
    whole = content
    try:
        document = json.loads(content)
    except ValueError:
        document, whole = json.loads(lines[index]), b""
    for _ in range(generator.randrange(1, 4)):
        document = change_value(document, generator)
    changed = json.dumps(document).encode()
    return changed if whole else b"\n".join([*lines[:index], changed, *lines[index + 1 :]])


def change_file(path: Path, generator: random.Random) -> None:
    """Change a file's values or bytes, or put something else in its place."""
    content = path.read_bytes()
    action = generator.random()
    if action < 0.05:
        path.unlink()
    elif action < 0.08:
        path.unlink()
        path.mkdir()
    elif action < 0.11:
        path.unlink()
        path.symlink_to(generator.choice(("nowhere", path.name, "/dev/null")))
    elif action < 0.6 and path.suffix in (".json", ".jsonl"):
        path.write_bytes(change_json(content, generator))
    else:
        path.write_bytes(change_bytes(content, generator))


def fuzz_configuration(root: Path, folder: Path, generator: random.Random) -> tuple[str, ...]:
    """Write a changed configuration; return the command that reads it."""
    config = json.loads((root.parent / "ppo.yaml").read_text())
    if generator.random() < 0.7:
        for _ in range(generator.randrange(1, 4)):
            config = change_value(config, generator)
        text = json.dumps(config).encode()
    else:
        text = change_bytes(json.dumps(config, indent=1).encode(), generator)
    (folder / "input").mkdir()
    (folder / "input/fuzz.yaml").write_bytes(text)
    return ("fit", "--config", "input/fuzz.yaml")


def fuzz_model(root: Path, folder: Path, generator: random.Random) -> tuple[str, ...]:
    """Write a model's folder with one file changed; return a command that reads it."""
    kind = generator.choice(("policy", "policy", "reward"))
    shutil.copytree(root / kind, folder / "input")
    files = sorted(path for path in (folder / "input").rglob("*") if path.is_file())
    change_file(generator.choice(files), generator)
    prompts = ("--prompts", str(root / "prompts.jsonl"), "--output", "out.jsonl")
    sampling = ("--max_new_tokens", "2", "--batch_size", "8")
    if kind == "reward":
        rewards = ("--rewards", json.dumps({"input": 1.0}), "--policies", str(root / "policy"))
        return ("evaluate", *rewards, *prompts, *sampling)
    show = ("show", "input")
    return generator.choice((("generate", "--models", "input", *prompts, *sampling), show))


def fuzz_log(root: Path, folder: Path, generator: random.Random) -> tuple[str, ...]:
    """Write a run's log with one file changed; return a command that reads it."""
    kind = generator.choice(sorted(path.name for path in (root / "logs").iterdir()))
    shutil.copytree(root / "logs" / kind, folder / "input")
    files = sorted(path for path in (folder / "input").rglob("*") if path.is_file())
    changed = generator.choice(files)
    change_file(changed, generator)
    report = ("report", "input", "--output", "report.html")
    if changed.name == "samples.jsonl":
        return generator.choice((report, ("report", "gain", "input/samples.jsonl")))
    return generator.choice((report, ("watch", "input")))


KINDS: dict[str, Callable[[Path, Path, random.Random], tuple[str, ...]]] = {
    "config": fuzz_configuration,
    "model": fuzz_model,
    "log": fuzz_log,
}
"""What writes a case's input, by kind."""


def write_inputs(folder: Path) -> None:
    """Models, data, a configuration, and logs of several kinds, all of them sound."""
    write_root(folder)
    os.chdir(folder / "root")
    main(["fit", "--config", str(folder / "ppo.yaml")])
    logs = folder / "root/logs"
    for name in ("table", "lines", "trainer"):
        (logs / name).mkdir()
    rows = [{"step": n, "reward": 0.1 * n, "kl": 0.01 * n, "note": "a"} for n in range(1, 20)]
    (logs / "lines/log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = {"log_history": rows, "global_step": 19}
    (logs / "trainer/trainer_state.json").write_text(json.dumps(state))
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    (logs / "table/metrics.csv").write_text(text.getvalue())


class Fuzzer:
    """Runs cases below a folder.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if wait(fork(folder, "root.log", lambda: write_inputs(folder))):
            raise RuntimeError((folder / "root.log").read_text())
        shutil.rmtree(folder / "root/checkpoints")
        shutil.rmtree(folder / "root/model")
        self.before = contents(folder / "root")

    def check(self, case: Case) -> str:
        """What is wrong in a case; empty if it is green. Only a red one leaves its folder."""
        folder = self.folder / case.name
        for name in ("", "temporary"):
            (folder / name).mkdir()
        write = KINDS[case.kind]
        command = write(self.folder / "root", folder, random.Random(case.number))
        (folder / "command").write_text(" ".join(command))
        before = contents(folder)
        child = fork(folder, "log", lambda: run_limited(command, folder / "temporary"))
        try:
            status = wait(child)
            wrong = self.find_wrong(folder, before, status)
            time.sleep(0.0 if not session(child) else 1.0)
            if not wrong and (left := session(child)):
                wrong = f"left processes: {left}"
        except TimeoutError:
            wrong = f"hangs: {last_line(folder / 'log')}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if not wrong:
            shutil.rmtree(folder)
        return wrong

    def find_wrong(self, folder: Path, before: dict[str, int], status: int) -> str:
        """What a case's process has left or said that it should not.

        Args:
            folder: Folder of the case.
            before: Times of the files that it was given.
            status: Its exit status.
        """
        log = (folder / "log").read_bytes()
        message = last_line(folder / "log")
        if b"Traceback" in log:
            return f"a traceback: {message}"
        if status == -signal.SIGXCPU:
            return f"hangs: {message}"
        if status not in STATUSES:
            return f"status {status}: {message}"
        if status and not log.strip():
            return f"status {status} without a word"
        if b"\x1b" in log:
            return "a raw control character"
        after = contents(folder)
        if changed := [name for name in before if after.get(name) != before[name]]:
            return f"changed {changed}"
        if left := [path.name for path in folder.rglob("*.partial")]:
            return f"left behind: {left}"
        if left := [path.name for path in (folder / "temporary").iterdir()]:
            return f"left in the folder for temporary files: {left}"
        if contents(self.folder / "root") != self.before:
            return "changed root/"
        return ""


def run_limited(command: Sequence[str], temporary: Path) -> None:
    """Run a command with limits on time, memory and iterations.

    Args:
        command: Words after `lit_rlhf`.
        temporary: The folder for temporary files.
    """
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    train = PPOModule.training_step

    def limited(module: PPOModule, *arguments: Any) -> None:
        train(module, *arguments)
        if module.trainer.fit_loop.total_batch_idx + 1 >= ITERATIONS:
            os.kill(os.getpid(), signal.SIGTERM)

    owner: Any = PPOModule
    owner.training_step = limited
    main(command)


def run_fuzz(
    folder: Path, *, seed: int, seconds: float, names: Sequence[str] = ()
) -> dict[Case, str]:
    """Run cases of all kinds in turn, and return what is wrong in each.

    Args:
        folder: An empty folder.
        seed: Gives the same cases each time, as far as the time allows.
        seconds: Time after which no further case begins.
        names: Names of the only cases to run, however long they take.
    """
    fuzzer = Fuzzer(folder)
    if names:
        parts = (name.split("_") for name in names)
        return {case: fuzzer.check(case) for case in (Case(k, int(n)) for k, n in parts)}
    generator = random.Random(seed)
    end = time.monotonic() + seconds
    wrong: dict[Case, str] = {}
    while time.monotonic() < end:
        for kind in KINDS:
            case = Case(kind, generator.randrange(10**9))
            wrong[case] = fuzzer.check(case)
            if wrong[case]:
                print(f"red   {case.name}  {wrong[case]}", flush=True)
    return wrong
