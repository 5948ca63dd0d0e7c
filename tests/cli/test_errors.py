"""Errors of `lit_rlhf fit` in one line: which option, in which file, and what to do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_rlhf.cli.main import main
from lit_rlhf.cli.training import run_cli
from lit_rlhf.errors import UserError
from lit_rlhf.files import FolderInUseError
from lit_rlhf.rewards import RewardError
from tests.support.tiny_runs import QUICKSTART

SFT = ["fit", "--config", str(QUICKSTART / "sft.yaml")]
JUDGE = ("--judge.model", "m", "--judge.folder")
RESUME = "lit_callbacks.ResumeCheckpoint"
OF_DATA = (
    "Parser key \"data\": Problem with given class_path 'lit_rlhf.data.DemonstrationDataModule': "
)
OF_CALLBACK = (
    f"mine.yaml: Parser key \"trainer.callbacks\": Problem with given class_path '{RESUME}': "
)


class Mistake(NamedTuple):
    """One of the commonest mistakes, and what the command says.

    Attributes:
        words: The arguments. `mine.yaml` is an overlay.
        expected: The line, or how it begins.
        overlay: Content of the overlay.
        status: Exit status: 2 for a usage error, 1 for another.
        is_prepared: Whether models and data of the quickstart's configurations are there.
    """

    words: list[str]
    expected: str
    overlay: str = ""
    status: int = 2
    is_prepared: bool = True


def in_overlay(overlay: dict[str, object] | str, expected: str) -> Mistake:
    """A mistake in an overlay of the quickstart's first stage."""
    text = overlay if isinstance(overlay, str) else yaml.safe_dump(overlay)
    line = f"lit_rlhf fit: error: {expected}"
    return Mistake([*SFT, "--config", "mine.yaml"], line, overlay=text)


MISTAKES = {
    "a mistyped command": Mistake(
        ["fti", "--config", "a.yaml"],
        "lit_rlhf: no command 'fti'; did you mean fit? (lit_rlhf --help lists all)\n",
    ),
    "a command of other tools": Mistake(
        ["train"], "lit_rlhf: no command 'train'; lit_rlhf fit --config NAME trains a stage\n"
    ),
    "a mistyped command of a group": Mistake(
        ["lab", "wrold"],
        "lit_rlhf lab: no command 'wrold'; did you mean world? (lit_rlhf lab --help lists all)\n",
        status=1,
    ),
    "a configuration without its flag": Mistake(
        ["fit", "quickstart/sft"],
        "lit_rlhf: error: quickstart/sft: a configuration follows its flag: "
        "lit_rlhf fit --config quickstart/sft\n",
    ),
    "a mistyped option behind a configuration with =": Mistake(
        ["fit", f"--config={QUICKSTART / 'sft.yaml'}", "--tr", "1"],
        "lit_rlhf fit: error: tr: no such option",
    ),
    "a mistyped configuration": Mistake(
        ["fit", "--config", "quickstart/stf"],
        "lit_rlhf: error: --config: no file or configuration 'quickstart/stf'; did you mean "
        "quickstart/sft? (lit_rlhf configs list names those that come with lit_rlhf)\n",
    ),
    "no configuration": Mistake(
        ["fit", "--trainer.max_epochs", "1"],
        "lit_rlhf: error: the following arguments are required: fit.data, fit.model; name a "
        "configuration: --config quickstart/sft\n",
    ),
    "a flag that there is not": Mistake(
        [*SFT, "--data.bacth_size", "3"],
        "lit_rlhf fit: error: data.bacth_size: no such option; did you mean data.batch_size?\n",
    ),
    "a value of another type": Mistake(
        [*SFT, "--trainer.max_epochs", "many"],
        'lit_rlhf fit: error: Parser key "trainer.max_epochs": '
        "Expected a <class 'int'>. Got value: many\n",
    ),
    "a value out of its range": Mistake(
        [*SFT, "--model.optimizer.grad_clip", "-1"],
        "lit_rlhf: error: model.optimizer.grad_clip: expected a finite number > 0, got -1.0\n",
    ),
    "a file that is no YAML": in_overlay(
        "model: [\n a: 3", "mine.yaml: while parsing a flow sequence"
    ),
    "a key that there is not": in_overlay(
        {"trainer": {"max_epoch": 3}},
        "mine.yaml: trainer.max_epoch: no such option; did you mean trainer.max_epochs?\n",
    ),
    "a section that there is not": in_overlay(
        {"trainr": {"max_epochs": 3}},
        "mine.yaml: trainr.max_epochs: no such option; did you mean trainer.max_epochs?\n",
    ),
    "a value of another type in a file": in_overlay(
        {"data": {"init_args": {"batch_size": "many"}}},
        f'mine.yaml: {OF_DATA}Parser key "batch_size": '
        "Expected a <class 'int'>. Got value: many\n",
    ),
    "a key that is given twice": in_overlay(
        "trainer: {max_epochs: 1}\ntrainer: {max_epochs: 2}",
        "mine.yaml: line 2, column 1: expected each key once, got 'trainer' twice",
    ),
    "an option in two spellings": in_overlay(
        "trainer: {max_epochs: 1}\ntrainer.max_epochs: 2",
        "mine.yaml: expected each option once, got trainer.max_epochs by two spellings of its name",
    ),
    "a number to the base 60": in_overlay(
        "trainer: {max_epochs: 1:30}",
        "mine.yaml: line 1, column 23: expected a number or text in quotes, got 1:30, which YAML "
        "reads to the base 60",
    ),
    "an empty file": in_overlay(
        "# nothing yet", "mine.yaml: expected options, NAME: VALUE, got None\n"
    ),
    "a list as a file": in_overlay("- a", "mine.yaml: expected options, NAME: VALUE, got ['a']\n"),
    "a group that is empty": in_overlay(
        "trainer:", "mine.yaml: trainer: expected options, NAME: VALUE, got None\n"
    ),
    "a group that is a switch": in_overlay(
        "trainer: yes", "mine.yaml: trainer: expected options, NAME: VALUE, got True\n"
    ),
    "a module's group that is empty": Mistake(
        ["fit", "--config", str(QUICKSTART / "ppo_max.yaml"), "--config", "mine.yaml"],
        "lit_rlhf: error: model.advantages: expected AdvantageOptions or a mapping of its fields, "
        "got None\n",
        overlay="model: {init_args: {advantages: null}}",
    ),
    "a module's group that is a list": Mistake(
        ["fit", "--config", str(QUICKSTART / "ppo_max.yaml"), "--config", "mine.yaml"],
        "lit_rlhf: error: model.loss: expected PPOLossOptions or a mapping of its fields, got "
        "[1]\n",
        overlay="model: {init_args: {loss: [1]}}",
    ),
    "a password in the URL of a tracker": Mistake(
        [*SFT, "--config", "mine.yaml"],
        "lit_rlhf: error: trainer.logger.tracking_uri: expected a URL without a password, which "
        "the configuration and logs would show, got 'https://***@host'; give it in an environment "
        "variable\n",
        overlay="trainer: {logger: {class_path: MLFlowLogger, init_args: "
        "{tracking_uri: 'https://me:secret@host'}}}",
    ),
    "a password in the URL of a database": Mistake(
        [*SFT, "--config", "mine.yaml"],
        "lit_rlhf: error: trainer.logger.tracking_uri: expected a URL without a password, which "
        "the configuration and logs would show, got '***@host/runs'; give it in an environment "
        "variable\n",
        overlay="trainer: {logger: {class_path: MLFlowLogger, init_args: "
        "{tracking_uri: 'postgresql+psycopg2://me:secret@host/runs'}}}",
    ),
    "a password in a URL inside a text": Mistake(
        [*SFT, "--config", "mine.yaml"],
        "lit_rlhf: error: trainer.logger.run_name: expected a URL without a password, which ",
        overlay="trainer: {logger: {class_path: MLFlowLogger, init_args: "
        "{run_name: 'as https://me:secret@host/runs'}}}",
    ),
    "a password in a URL that is a key": Mistake(
        [*SFT, "--config", "mine.yaml"],
        "lit_rlhf: error: trainer.logger.tags.https://***@host: expected a URL without a password, "
        "which ",
        overlay="trainer: {logger: {class_path: MLFlowLogger, init_args: "
        "{tags: {'https://me:secret@host': 1}}}}",
    ),
    "a URL with a password as a model": Mistake(
        [*SFT, "--model.model_path", "https://me:secret@host/model"],
        "lit_rlhf: error: model.model_path: expected a URL without a password, which the "
        "configuration and logs would show, got 'https://***@host/model'; give it in an "
        "environment variable\n",
    ),
    "a URL with a password as data of another command": Mistake(
        ["generate", "--models", "a", "--prompts", "https://me:secret@host/p.jsonl"],
        "lit_rlhf generate: https://***@host/p.jsonl: no such file\n",
        status=1,
    ),
    "a token in the URL of a sampler": Mistake(
        ["fit", "--config", str(QUICKSTART / "ppo_max.yaml"), "--config", "mine.yaml"],
        "lit_rlhf fit: error: url: expected the name of an environment variable as value of "
        "'token', as in https://host?token=$VARIABLE, got 'http://host?token=***'",
        overlay="trainer: {callbacks: null}\nmodel: {init_args: {sampler: {"
        "class_path: lit_rlhf.rollout.VLLMServerSampler, "
        "init_args: {url: 'http://host?token=secret', weights_dir: w}}}}",
        status=1,
    ),
    "a token in the URL of a judge": Mistake(
        [
            "evaluate",
            "--policies",
            "a",
            "--prompts",
            "b",
            "--judge.base_url",
            "http://h/key/secret",
        ],
        "lit_rlhf evaluate: judge.base_url: expected the name of an environment variable in place "
        "of what looks like a token",
        status=1,
    ),
    "an escape sequence in a name": in_overlay(
        '{"tr\\e[2Jainer": {a: 1}}', "mine.yaml: tr\\x1b[2Jainer.a: no such option"
    ),
    "a name of many letters": in_overlay(f"? {'x' * 10**5}\n: 1", f"mine.yaml: {'x' * 100}"),
    "a class that there is not": in_overlay(
        {"trainer": {"callbacks": [{"class_path": f"{RESUME}s"}]}},
        'mine.yaml: Parser key "trainer.callbacks": Problem with given class_path '
        f"'{RESUME}s': module 'lit_callbacks' has no attribute 'ResumeCheckpoints'\n",
    ),
    "an option that a callback has not": in_overlay(
        {"trainer": {"callbacks": [{"class_path": RESUME, "init_args": {"evry": 1}}]}},
        f"{OF_CALLBACK}evry: no such option\n",
    ),
    "an option that a sampler has not": Mistake(
        ["fit", "--config", str(QUICKSTART / "ppo_max.yaml"), "--config", "mine.yaml"],
        "lit_rlhf fit: error: mine.yaml: model.sampler.ulr: no such option; did you mean "
        "model.sampler.url?\n",
        overlay=yaml.safe_dump(
            {
                "model": {
                    "init_args": {
                        "sampler": {
                            "class_path": "lit_rlhf.rollout.VLLMServerSampler",
                            "init_args": {"ulr": "http://127.0.0.1:8000", "weights_dir": "w"},
                        }
                    }
                }
            }
        ),
    ),
    "a stage that has not run": Mistake(
        SFT,
        "lit_rlhf fit: error: model.model_path: expected a folder with a model or a hub id (name "
        "or owner/name), got 'runs/quickstart/world/base', which is not a folder here and not of "
        "the form of a hub id; if another stage writes the folder, run that one first; this "
        "prepares it: lit_rlhf lab world --output_dir runs/quickstart/world\n",
        status=1,
        is_prepared=False,
    ),
    "a checkpoint that is not there": Mistake(
        [*SFT, "--ckpt_path", "runs/lost.ckpt"],
        "lit_rlhf fit: error: --ckpt_path: expected a checkpoint, or last for the newest, got "
        "runs/lost.ckpt, which does not exist\n",
        status=1,
    ),
    "an average of weights": Mistake(
        [*SFT, "--trainer.callbacks+=EMAWeightAveraging"],
        "lit_rlhf fit: error: trainer.callbacks: expected no EMAWeightAveraging, which copies the "
        "module and cannot; average models that were saved with lit_rlhf export\n",
        status=1,
    ),
    "a GPU that there is not": Mistake(
        [*SFT, "--trainer.accelerator", "gpu"],
        f"lit_rlhf fit: error: trainer.accelerator: got gpu, but torch {torch.__version__} finds "
        "no GPU here; --trainer.accelerator cpu runs on the CPU\n",
        status=1,
    ),
    "a checkpoint that is none": Mistake(
        [*SFT, "--ckpt_path", "/dev/zero"],
        "lit_rlhf: error: --ckpt_path: expected a checkpoint, got the device or pipe /dev/zero\n",
    ),
    "an option of a tool that there is not": Mistake(
        ["evaluate", "--polices", "a"],
        "lit_rlhf evaluate: error: polices: no such option; did you mean policies?\n",
    ),
    "a required option that is missing": Mistake(
        ["evaluate", "--prompts", "a.jsonl"],
        "lit_rlhf evaluate: error: the following arguments are required: policies\n",
    ),
    "a probe without answers": Mistake(
        ["reward", "probe", "--rewards", "{runs/quickstart/reward: 1.0}"],
        "lit_rlhf reward probe: error: the following arguments are required: data\n",
    ),
    "a group of options with a value": Mistake(
        ["evaluate", "--policies", "a", "--prompts", "b", "--judge", "gpt"],
        'lit_rlhf evaluate: error: Parser key "judge": Unable to load config "gpt"; a group has '
        "flags, --GROUP.FIELD\n",
    ),
    "no prompts": Mistake(
        ["generate", "--models", "a"],
        "lit_rlhf generate: prompts, prompt, chat: expected exactly one of them",
        status=1,
    ),
    "samples that are none": Mistake(
        ["evaluate", "--policies", "a/b", "--prompts", "b/c", "--samples_per_prompt", "0"],
        "lit_rlhf evaluate: samples_per_prompt: expected an integer >= 1, got 0\n",
        status=1,
    ),
    "questions below 0": Mistake(
        ["evaluate", "--policies", "a/b", "--choices", "b.jsonl", "--max_questions", "-1"],
        "lit_rlhf evaluate: max_questions: expected an integer >= 1, got -1\n",
        status=1,
    ),
    "a margin below 0": Mistake(
        ["evaluate", "--policies", "a/b", "--prompts", "b/c", "--tie_margin", "-1"],
        "lit_rlhf evaluate: tie_margin: expected a finite number >= 0, got -1.0\n",
        status=1,
    ),
    "mistakes below 0": Mistake(
        ["report", "reward", "--model", "a/b", "--preferences", "b/c", "--mistakes", "-1"],
        "lit_rlhf report reward: mistakes: expected an integer >= 0, got -1\n",
        status=1,
    ),
    "a file where a report's folder goes": Mistake(
        ["report", "reward", "--model", "a/b", "--preferences", "b/c", "--output", "mine.yaml"],
        "lit_rlhf report reward: output: expected a folder, got mine.yaml: mine.yaml is a file\n",
        status=1,
    ),
    "a file where a probe's folder goes": Mistake(
        ["reward", "probe", "--rewards", "{a/b: 1.0}", "--data", "c/d", "--output", "mine.yaml/x"],
        "lit_rlhf reward probe: output: expected a folder, got mine.yaml/x: mine.yaml is a file\n",
    ),
    "a file where a judge's folder goes": Mistake(
        ["evaluate", "--policies", "a/b", "--prompts", "b/c", *JUDGE, "mine.yaml"],
        "lit_rlhf evaluate: judge.folder: expected a folder, got mine.yaml: mine.yaml is a file\n",
        status=1,
    ),
    "a judge's folder that is no path": Mistake(
        ["evaluate", "--policies", "a/b", "--prompts", "b/c", *JUDGE, "s3://a/b"],
        "lit_rlhf evaluate: judge.folder: expected a path on this machine, got the address s3://a/b\n",
        status=1,
    ),
    "a data file that is not there": Mistake(
        ["start", "lost.csv"], "lit_rlhf start: lost.csv: no such file\n", status=1
    ),
    "a folder that is not free": Mistake(
        ["start", "lost.csv", "--output_dir", "."],
        "lit_rlhf start: output_dir: expected a free name, got ., which exists\n",
        status=1,
    ),
}


def prepare_quickstart() -> None:
    """Put empty folders and files where the quickstart's configurations read theirs."""
    for folder in ("world/base", "sft", "reward"):
        Path("runs/quickstart", folder).mkdir(parents=True)
    for name in ("demonstrations", "prompts_train", "prompts_heldout"):
        Path("runs/quickstart/world", f"{name}.jsonl").touch()


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_common_mistake_is_answered_with_one_line(
    capsys: pytest.CaptureFixture[str], mistake: Mistake
) -> None:
    Path("mine.yaml").write_text(mistake.overlay, "utf-8")
    if mistake.is_prepared:
        prepare_quickstart()
    with patch("torch.cuda.device_count", lambda: 0), pytest.raises(SystemExit) as ended:
        main(mistake.words)
    output = capsys.readouterr().err
    if isinstance(ended.value.code, str):  # Python prints it, and ends with 1
        assert mistake.status == 1
        output += f"{ended.value.code}\n"
    else:
        assert ended.value.code == mistake.status
    assert output.startswith(mistake.expected)
    assert output.count("\n") == 1
    assert "secret" not in output
    assert len(output) < 5000


def errors_of(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Exit status and what stands on standard error; a message as status goes there too."""
    with pytest.raises(SystemExit) as ended:
        main([*SFT, *map(str, arguments)])
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"), [("fit", "--config"), ("evaluate", "--config"), ("evaluate", "--judge")]
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_configuration_that_is_no_small_file_is_refused(
    command: str, option: str, make: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    make("mine.yaml")
    with pytest.raises(SystemExit, match="2"):
        main([command, option, "mine.yaml"])
    assert capsys.readouterr().err.count("\n") == 1


def test_configuration_in_another_encoding_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_quickstart()
    Path("mine.yaml").write_bytes(b"a: \xe9")
    code, said = errors_of("--config", "mine.yaml", capsys=capsys)
    assert code == 2
    assert said.startswith("lit_rlhf fit: error: mine.yaml: expected text in UTF-8")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["fit", "evaluate"])
def test_configuration_behind_a_url_is_refused_without_a_request(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "--config", "https://me:s3cr3t@no.such.host/c.yaml"])
    said = capsys.readouterr().err
    assert "File does not exist: 'https://***@no.such.host/c.yaml'" in said
    assert said.count("\n") == 1


def test_file_of_a_group_in_another_encoding_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("judge.yaml").write_bytes(b"model: \xe9")
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "--policies", "a.jsonl", "--judge", "judge.yaml"])
    said = capsys.readouterr().err
    assert said.startswith("lit_rlhf evaluate: error: judge.yaml: expected text in UTF-8")
    assert said.count("\n") == 1


def test_debug_shows_where_an_error_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="model_path: expected a folder with a model"):
        errors_of("--model.model_path", "runs/no/such_model", "--debug", capsys=capsys)


@pytest.fixture
def _inputs() -> None:
    """What the SFT configuration reads, so far as a command looks at it before it parses."""
    Path("runs/quickstart/world/base").mkdir(parents=True)
    Path("runs/quickstart/world/demonstrations.jsonl").touch()


@pytest.mark.usefixtures("_inputs")
def test_debug_shows_where_a_library_raised_it() -> None:
    refusal = MisconfigurationException("not like that")
    with (
        patch.object(run_cli, "__defaults__", (None, Mock(side_effect=refusal))),
        pytest.raises(UserError, match="not like that") as raised,
    ):
        main(["fit", "--config", str(QUICKSTART / "sft.yaml"), "--debug"])
    assert raised.value.__cause__ is refusal


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--seed_everything", "-1"], "seed_everything: expected a seed from 0 to 4294967295"),
        (["--seed_everything", str(2**32)], "seed_everything: expected a seed from 0 to 42949"),
        (["--data.seed", "-1"], "data.seed: expected a seed from 0 to 4294967295, got -1"),
        (["--data.split_seed", "-1"], "data.split_seed: expected a seed from 0"),
        (["--seed", str(2**32)], "seed: expected a seed from 0"),
        (["--data.batch_size", "1:30"], "Got value: 1:30"),
        (["--model.output_dir", "$HOME/m"], "model.output_dir: expected a path without $HOME, "),
        (["--trainer.default_root_dir", "~/m"], "trainer.default_root_dir: expected a path witho"),
        (["--trainer.logger.save_dir", "~/l"], "trainer.logger.save_dir: expected a path without"),
        (["--trainer.logger.save_dir", "s3://b/l"], "save_dir: expected a path on this machine"),
    ],
)
@pytest.mark.usefixtures("_inputs")
def test_values_that_would_silently_mean_something_else_are_refused(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = errors_of(*flags, capsys=capsys)
    assert code == 2
    assert problem in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("package", "logger"), [("wandb", "Wandb"), ("mlflow", "MLFlow")])
def test_missing_tracker_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], package: str, logger: str
) -> None:
    prepare_quickstart()
    with patch("lit_rlhf.cli.training.find_spec", return_value=None):
        code, _ = errors_of("--config", f"overlays/{package}", capsys=capsys)
    assert code == (
        f"lit_rlhf fit: error: {logger}Logger needs a package that is not installed: "
        f"pip install 'lit-rlhf[{package}]'"
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "runs/log.csv"),
        ImportError("no module x"),
        FolderInUseError("runs/sft: another run or command writes to it: process 7"),
        RewardError("reward function a:b raised\nKeyError"),
    ],
)
def test_an_error_that_a_user_can_mend_is_one_line(error: Exception, capsys: Any) -> None:
    prepare_quickstart()
    with patch("lit_rlhf.cli.training.run_cli", side_effect=error):
        code, _ = errors_of(capsys=capsys)
    assert code == f"lit_rlhf fit: error: {' '.join(str(error).split())}"


def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_quickstart()
    fails = patch("lit_rlhf.cli.training.run_cli", side_effect=KeyError("a defect"))
    with fails, pytest.raises(KeyError, match="a defect"):
        errors_of(capsys=capsys)
