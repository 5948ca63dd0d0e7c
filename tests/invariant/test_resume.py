"""N + M iterations equal N, a kill, a resume and M: bit by bit on one process.

A run that resumes with other settings applies them, or is refused.
"""

import math
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from lit_callbacks import AdjustLearningRate, ResumeCheckpoint, Verdict
from lit_rlhf.data import DemonstrationDataModule, PreferenceDataModule, PromptDataModule
from lit_rlhf.models import load_causal_lm, load_scalar_model
from lit_rlhf.modules import ChangedRunError, PPOModule, RewardModule, SFTModule, option_names
from lit_rlhf.modules.resume import (
    CONSEQUENCES,
    REMARKS,
    Consequence,
    check_validation_interval,
    find_consequence,
)
from lit_rlhf.strategies import find_newest_checkpoint
from tests.support.run_results import files_of, logged
from tests.support.saved_runs import STOPPED_AT, SaveOnce
from tests.support.stages import (
    MOVING,
    Rates,
    assert_equal_states,
    copy_state,
    demonstrations,
    fit_module,
    nested,
    ppo_options,
    preferences,
    prompts,
    source,
    write_data,
    write_models,
)
from tests.support.tiny_models import with_dropout

BATCH = 2  # four steps an epoch


@pytest.fixture(scope="module")
def dropout_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with dropout, so that SFT and reward modelling draw random numbers at each step."""
    return write_models(write_data(tmp_path_factory.mktemp("dropout")), with_dropout("gpt2"))


def usual(root: Path, options: dict[str, Any]) -> dict[str, Any]:
    return nested({"model_path": str(root / "policy"), "optimizer.learning_rate": 1e-3}, options)


def sft(root: Path, **options: Any) -> tuple[LightningModule, LightningDataModule]:
    return SFTModule(**usual(root, options)), demonstrations(root, batch_size=BATCH)


def reward(root: Path, **options: Any) -> tuple[LightningModule, LightningDataModule]:
    return RewardModule(**usual(root, options)), preferences(root, batch_size=BATCH)


def ppo(root: Path, **options: Any) -> tuple[LightningModule, LightningDataModule]:
    defaults = ppo_options(
        root,
        minibatches={"minibatch_size": 1},
        policy_optimizer={"lr_scheduler": "cosine_with_min_lr"},
        critic_optimizer={"lr_scheduler": "cosine_with_min_lr"},
        **MOVING,
    )
    data = prompts(root, ptx=True, batch_size=BATCH, samples_per_epoch=10)
    return PPOModule(**nested(defaults, options)), data


def rloo(root: Path) -> tuple[LightningModule, LightningDataModule]:
    return ppo(root, responses_per_prompt=2, advantages={"estimator": "rloo"})


def meta(root: Path) -> tuple[LightningModule, LightningDataModule]:
    sources = source(root, "preferences")
    return reward(root, meta_rate=0.3)[0], preferences(root, meta_sources=sources, batch_size=BATCH)


STAGES = {"sft": sft, "reward": reward, "meta": meta, "ppo": ppo, "rloo": rloo}


class FinishedRun(NamedTuple):
    """A run of two epochs.

    Attributes:
        module: The module at their end.
        states: States of the optimizers and of the schedules.
        checkpoint: The checkpoint that it left after three batches.
    """

    module: Any
    states: dict[str, list[Any]]
    checkpoint: Path


def run(stage: str, root: Path, folder: Path, **arguments: Any) -> FinishedRun:
    module, data = STAGES[stage](root)
    run = fit_module(module, data, folder, max_epochs=2, callbacks=[SaveOnce(folder)], **arguments)
    states = {
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedules": [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
    }
    return FinishedRun(module=module, states=states, checkpoint=folder / "stopped.ckpt")


@pytest.fixture(scope="module")
def whole_runs(
    dropout_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], FinishedRun]:
    """Gives a run of a stage that was not interrupted, which is made once."""

    @cache
    def run_whole(stage: str) -> FinishedRun:
        torch.manual_seed(1)
        return run(stage, dropout_root, tmp_path_factory.mktemp(stage))

    return run_whole


@pytest.mark.parametrize("stage", STAGES)
def test_resumed_run_ends_like_the_whole(
    dropout_root: Path, tmp_path: Path, stage: str, whole_runs: Callable[[str], FinishedRun]
) -> None:
    uninterrupted = whole_runs(stage)
    torch.manual_seed(99)  # a new process stands elsewhere in its random stream
    resumed = run(stage, dropout_root, tmp_path, ckpt_path=uninterrupted.checkpoint)
    assert_equal_states(copy_state(resumed.module), copy_state(uninterrupted.module))
    torch.testing.assert_close(resumed.states, uninterrupted.states, rtol=0, atol=0)
    # the run went on after the checkpoint, and the checkpoint is not the end
    saved = torch.load(uninterrupted.checkpoint, weights_only=True)["state_dict"]
    end = uninterrupted.module.state_dict()
    assert len([name for name in saved if not torch.equal(saved[name], end[name])]) > 10


class Killed(Exception):
    """In place of a kill."""


class Stop(NamedTuple):
    """Where a run is ended.

    Attributes:
        hook: Name of the hook.
        batches: Number of batches that were trained by then.
    """

    hook: str
    batches: int


class StoppedRun(NamedTuple):
    """A run that may have been ended.

    Attributes:
        module: Its module.
        batches: The batches that it trained, from 0.
        checkpoint: The checkpoint that it left where it was ended.
    """

    module: Any
    batches: list[int]
    checkpoint: Path


class SaveAndDie(Callback):
    """Saves a checkpoint at a place in the run, and ends the run there."""

    def __init__(self, stop: Stop, path: Path) -> None:
        self.steps: list[int] = []
        self.batches = stop.batches
        self.path = path
        setattr(self, stop.hook, self.save)

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        self.steps.append(trainer.fit_loop.total_batch_idx)

    def save(self, trainer: Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)
            raise Killed


def run_sft(
    root: Path,
    folder: Path,
    stop: Stop | None,
    ckpt_path: Path | None,
    *,
    val_check_interval: int | timedelta = 2,
) -> StoppedRun:
    """SFT of twelve batches with a validation after every second one, up to `stop`."""
    module, data = sft(root)
    checkpoint = folder / "none.ckpt" if stop is None else folder / f"{stop.batches}.ckpt"
    callback = SaveAndDie(stop or Stop("never", 0), checkpoint)
    with suppress(Killed):
        fit_module(
            module,
            data,
            folder,
            callbacks=[callback],
            ckpt_path=ckpt_path,
            max_epochs=3,
            limit_val_batches=1,
            log_every_n_steps=1,
            val_check_interval=val_check_interval,
        )
    return StoppedRun(module=module, batches=callback.steps, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def whole_sft(root: Path, tmp_path_factory: pytest.TempPathFactory) -> StoppedRun:
    uninterrupted = run_sft(root, tmp_path_factory.mktemp("whole"), stop=None, ckpt_path=None)
    assert uninterrupted.batches == list(range(12))
    return uninterrupted


@pytest.mark.parametrize(
    "stops",
    [
        # before a validation in the middle of an epoch, after the next at its end, and in the next
        [
            Stop("on_train_batch_end", 2),
            Stop("on_validation_end", 4),
            Stop("on_train_batch_end", 6),
        ],
        # behind the last batch of an epoch, then at the end of the next
        [
            Stop("on_train_batch_end", 4),
            Stop("on_train_epoch_end", 8),
            Stop("on_validation_end", 12),
        ],
        [
            Stop("on_train_batch_end", 4),
            Stop("on_train_batch_end", 8),
            Stop("on_validation_end", 10),
            Stop("on_train_epoch_end", 12),
        ],
    ],
    ids=lambda stops: "-".join(f"{stop.hook[3:]}_{stop.batches}" for stop in stops),
)
def test_a_run_resumes_from_any_hook_again_and_again(
    root: Path, tmp_path: Path, whole_sft: StoppedRun, stops: list[Stop]
) -> None:
    batches: list[int] = []
    checkpoint = None
    for stop in [*stops, None]:
        part = run_sft(root, tmp_path, stop, checkpoint)
        batches += part.batches
        checkpoint = part.checkpoint
    assert batches == whole_sft.batches
    assert_equal_states(copy_state(part.module), copy_state(whole_sft.module))


def test_a_run_that_validates_by_time_resumes_to_the_same_model(
    root: Path, tmp_path: Path, whole_sft: StoppedRun
) -> None:
    batches: list[int] = []
    checkpoint = None
    for stop in (Stop("on_train_batch_end", 3), Stop("on_validation_end", 6), None):
        part = run_sft(root, tmp_path, stop, checkpoint, val_check_interval=timedelta(0))
        batches += part.batches
        checkpoint = part.checkpoint
    assert batches == whole_sft.batches
    assert_equal_states(copy_state(part.module), copy_state(whole_sft.module))


def test_validation_by_time_is_refused_on_several_ranks() -> None:
    options = {"enable_validation": True, "val_check_batch": None, "world_size": 2}
    with pytest.raises(
        ValueError, match=r"trainer\.val_check_interval: .* 2 processes, got a time"
    ):
        check_validation_interval(SimpleNamespace(**options))  # type: ignore[arg-type]
    for allowed in ({"world_size": 1}, {"val_check_batch": 2}, {"enable_validation": False}):
        check_validation_interval(SimpleNamespace(**options | allowed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hook", "is_logged"),
    [("on_train_batch_end", False), ("on_validation_end", True), ("on_train_epoch_end", True)],
)
def test_checkpoint_holds_the_metrics_of_its_batch_until_they_are_logged(
    root: Path, tmp_path: Path, hook: str, is_logged: bool
) -> None:
    stopped = run_sft(root, tmp_path, Stop(hook, 4), None)
    saved = torch.load(stopped.checkpoint, weights_only=True)["logged_batch"]
    if is_logged:
        assert saved == {}
    else:
        assert saved["step"] == 3
        assert saved["metrics"]["epoch"] == 0
        assert math.isfinite(saved["metrics"]["sft/loss"])
        assert not [key for key in saved["metrics"] if key.startswith("val/")]


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", pytest.param("on_validation_end", marks=pytest.mark.slow)]
)
def test_a_validation_that_draws_changes_no_training(root: Path, tmp_path: Path, hook: str) -> None:
    def go(batches: int, ckpt_path: Path | None = None) -> Any:
        seed_everything(1 if ckpt_path is None else 2, verbose=False)
        rewards = {"tests.support.reward_functions:noisy": 1.0}
        module, data = ppo(root, rewards=rewards, critic_init="policy")
        callback = SaveAndDie(Stop(hook, batches), tmp_path / "stopped.ckpt")
        options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 1}
        with suppress(Killed):
            fit_module(module, data, tmp_path, callbacks=[callback], ckpt_path=ckpt_path, **options)
        return module

    uninterrupted = go(0)
    go(5)  # the last batch of an epoch, before its validation or after it
    assert_equal_states(copy_state(go(0, tmp_path / "stopped.ckpt")), copy_state(uninterrupted))


class EpochEnds(Callback):
    """Keeps the numbers of batches after which epochs have ended."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, *_: object) -> None:
        self.batches.append(trainer.fit_loop.total_batch_idx + 1)


class Leavings(NamedTuple):
    """What a run leaves.

    Attributes:
        scalars: Steps and values by key of all that it has logged, without measurements of time.
        files: Files of the finished model, with its card and manifest.
        epoch_ends: Numbers of batches after which epochs have ended.
        best_score: The best value of a metric of its validations.
        best_path: Name of the checkpoint of that value.
    """

    scalars: dict[str, list[tuple[int, str]]]
    files: dict[str, bytes]
    epoch_ends: list[int]
    best_score: float
    best_path: str


VALIDATED_RUNS: dict[str, dict[str, Any]] = {
    # 8 batches, with a validation after every second one
    "sft": {"metric": "val/sft/loss", "max_epochs": 2, "val_check_interval": 2},
    # 8 batches, with a validation after each epoch
    "reward": {"metric": "val/reward/accuracy", "max_epochs": 2},
    # 8 iterations in epochs of 5, with a validation after each epoch
    "ppo": {"metric": "val/rollout/score", "max_epochs": -1},
}


def run_validated(stage: str, root: Path, folder: Path, killed_after: Sequence[int]) -> Leavings:
    """Run a stage that is killed as soon as a checkpoint is saved, and resumed.

    Args:
        stage: A key of `VALIDATED_RUNS`.
        root: Folder of models and data.
        folder: Where the run leaves its files.
        killed_after: Numbers of batches after which it is killed.
    """
    options = dict(VALIDATED_RUNS[stage])
    metric = options.pop("metric")
    checkpoint = None
    epoch_ends: list[int] = []
    for batches in (*killed_after, 0):
        seed_everything(1 if checkpoint is None else 2, verbose=False)
        own = {"max_iterations": 8} if stage == "ppo" else {}
        module, data = STAGES[stage](root, **own, output_dir=str(folder / "model"))
        ends = EpochEnds()
        kill = SaveAndDie(Stop("on_train_batch_end", batches), folder / f"{batches}.ckpt")
        best = ModelCheckpoint(folder / "best", monitor=metric)
        with suppress(Killed):
            fit_module(
                module,
                data,
                folder,
                callbacks=[ends, best, kill],
                ckpt_path=checkpoint,
                limit_val_batches=1,
                enable_checkpointing=True,
                log_every_n_steps=1,
                logger=TensorBoardLogger(folder, name="logs", version="run"),
                **options,
            )
        epoch_ends += ends.batches
        checkpoint = kill.path
    return Leavings(
        scalars=logged(folder / "logs/run")["scalars"],
        files=files_of(folder / "model"),
        epoch_ends=epoch_ends,
        best_score=float(best.best_model_score or 0),
        best_path=Path(best.best_model_path).name,
    )


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # Lightning's, when a run resumes
@pytest.mark.parametrize(
    ("stage", "killed_after"),
    [
        ("sft", [1]),  # no validation is due
        ("sft", [2, 4, 6, 8]),
        ("reward", [4, 8]),
        ("ppo", [5]),
        ("ppo", [8]),
    ],
)
def test_run_that_is_killed_before_a_validation_leaves_what_the_whole_run_leaves(
    root: Path, tmp_path: Path, stage: str, killed_after: list[int]
) -> None:
    uninterrupted = run_validated(stage, root, tmp_path / "whole", [])
    assert VALIDATED_RUNS[stage]["metric"] in uninterrupted.scalars
    resumed = run_validated(stage, root, tmp_path / "resumed", killed_after)
    # the paths of the two runs
    files = {
        name: content.replace(b"/resumed/", b"/whole/") for name, content in resumed.files.items()
    }
    assert resumed._replace(files=files) == uninterrupted


def test_checkpoint_holds_state_and_no_frozen_weights(
    tmp_path: Path, whole_runs: Callable[[str], FinishedRun]
) -> None:
    module, _, path = whole_runs("ppo")
    saved = torch.load(path, weights_only=True)
    state = saved["state_dict"]
    assert not [name for name in state if name.startswith(("reference", "reward"))]
    assert int(state["iteration"]) == 3
    assert int(state["ppo_step"]) == 2 * 2 * 2  # two iterations, epochs and minibatches
    assert bool(state["pretraining_done"])
    assert float(state["kl_coef"]) != 0.05
    assert float(state["score_moments.count"]) == 3 * BATCH
    assert state["score_moments.mean"].dtype == torch.float64
    assert len(saved["optimizer_states"]) == 2
    # what is left out is loaded from the folders again, and nothing else may be missing
    again = PPOModule.load_from_checkpoint(path, weights_only=True)
    for name, weight in again.reference.state_dict().items():
        assert torch.equal(weight, module.reference.state_dict()[name])
    weight = next(name for name in saved["state_dict"] if name.startswith("policy."))
    del saved["state_dict"][weight]
    torch.save(saved, tmp_path / "damaged.ckpt")
    with pytest.raises(RuntimeError, match=rf"Missing key.*{weight}"):
        PPOModule.load_from_checkpoint(tmp_path / "damaged.ckpt", weights_only=True)


@pytest.mark.parametrize("schedule", ["constant", "cosine_with_min_lr"])
def test_configured_optimizer_beats_the_saved(root: Path, tmp_path: Path, schedule: str) -> None:
    def rates(options: dict[str, Any], **arguments: Any) -> dict[int, list[tuple[float, float]]]:
        optimizer = {"learning_rate": 1e-3, "lr_scheduler": schedule, **options}
        module = SFTModule(str(root / "policy"), optimizer=optimizer)
        data = demonstrations(root, batch_size=BATCH)
        recorder = Rates()
        callbacks = [SaveOnce(tmp_path), recorder]
        fit_module(module, data, tmp_path, max_epochs=2, callbacks=callbacks, **arguments)
        return recorder.seen

    changed_options = {"learning_rate": 4e-4, "weight_decay": 0.3}
    expected = rates(changed_options)
    rates({})  # leaves the checkpoint
    resumed = rates(changed_options, ckpt_path=tmp_path / "stopped.ckpt")
    assert resumed == {batch: expected[batch] for batch in range(STOPPED_AT, 8)}
    assert resumed[7][0][1] == 0.3


def test_lowered_learning_rate_stays_until_another_is_set(root: Path, tmp_path: Path) -> None:
    def halve(trainer: Trainer, module: LightningModule, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx == 1:
            AdjustLearningRate().act(trainer, module, Verdict())

    def last_rate(rate: float, decay: float, *callbacks: Callback, **arguments: Any) -> float:
        options = {"learning_rate": rate, "weight_decay": decay, "lr_scheduler": "constant"}
        module = SFTModule(str(root / "policy"), optimizer=options)
        data = demonstrations(root, batch_size=BATCH)
        recorder = Rates()
        fit_module(module, data, tmp_path, callbacks=[*callbacks, recorder], **arguments)
        return recorder.seen[3][0][0]

    halving = LambdaCallback(on_train_batch_end=halve)
    assert last_rate(1e-3, 0.0, halving, SaveOnce(tmp_path)) == 5e-4
    stopped = tmp_path / "stopped.ckpt"
    assert last_rate(1e-3, 0.1, ckpt_path=stopped) == 5e-4
    assert last_rate(2e-3, 0.1, ckpt_path=stopped) == 2e-3


def test_configured_kl_coefficient_beats_the_saved(
    dropout_root: Path, tmp_path: Path, whole_runs: Callable[[str], FinishedRun]
) -> None:
    checkpoint = whole_runs("ppo").checkpoint
    saved = float(torch.load(checkpoint, weights_only=True)["state_dict"]["kl_coef"])
    assert saved != 0.05
    kl_coefs: list[float] = []
    start = LambdaCallback(
        on_train_batch_start=lambda _, m, *__: kl_coefs.append(float(m.ppo.kl_coef))
    )
    for kl_coef, expected in ((0.05, saved), (0.2, 0.2)):
        module, data = ppo(dropout_root, **{"reward_shaping.kl_coef": kl_coef})
        kl_coefs.clear()
        fit_module(module, data, tmp_path, max_epochs=1, callbacks=[start], ckpt_path=checkpoint)
        assert kl_coefs[0] == expected


# stage, options of its module, attributes of its data, arguments of the Trainer, what is listed
OTHER_RUNS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ("ppo", {"critic_init": "policy"}, {}, {}, "critic_init: 'reward' -> 'policy'"),
    ("ppo", {"seed": 5}, {}, {}, "seed: 0 -> 5"),
    ("ppo", {}, {"samples_per_epoch": 8}, {}, "data.samples_per_epoch: 10 -> 8"),
    ("sft", {}, {"seed": 3}, {}, "data.seed: 0 -> 3"),
    ("sft", {}, {"batch_size": 4}, {}, "batch size on all ranks: 2 -> 4"),
    ("sft", {}, {"max_length": 32}, {}, "data.max_length: 64 -> 32"),
    ("sft", {}, {}, {"precision": "bf16-true"}, "trainer.precision: '32-true' -> 'bf16-true'"),
    ("sft", {"network.dtype": "bfloat16"}, {}, {}, "network.dtype: 'float32' -> 'bfloat16'"),
    ("sft", {"network.lora_rank": 2}, {}, {}, "network.lora_rank: 0 -> 2"),
    ("reward", {"lm_coef": 0.5}, {}, {}, "lm_coef: 1.0 -> 0.5"),
]


@pytest.mark.parametrize("case", OTHER_RUNS, ids=lambda case: case[-1].partition(":")[0])
def test_other_runs_are_refused(
    dropout_root: Path,
    tmp_path: Path,
    whole_runs: Callable[[str], FinishedRun],
    case: tuple[Any, ...],
) -> None:
    stage, options, attributes, arguments, listed = case
    checkpoint = whole_runs(stage).checkpoint
    module, data = STAGES[stage](dropout_root, **options)
    for name, value in attributes.items():
        setattr(data, name, value)
    with pytest.raises(ChangedRunError) as error:
        fit_module(module, data, tmp_path, ckpt_path=checkpoint, max_epochs=2, **arguments)
    changes = str(error.value).splitlines()[1:-1] or [str(error.value)]
    assert listed in changes[0]
    assert len(changes) == 1


def fit_ppo(
    root: Path, folder: Path, rewards: Any, allow_changes: bool = False, **arguments: Any
) -> PPOModule:
    """PPO with these rewards after an epoch, a checkpoint of which is left in the folder."""
    module, data = ppo(root, rewards=rewards)
    module.allow_changes = allow_changes
    fit_module(module, data, folder, max_epochs=1, callbacks=[SaveOnce(folder)], **arguments)
    return module


def test_other_content_of_the_same_files_is_refused(
    dropout_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reward model and function, reference and prompts, each written anew where it was."""
    monkeypatch.syspath_prepend(tmp_path)
    function = tmp_path / "resumed_reward.py"
    function.write_text("def score(prompts, responses):\n    return [1.0] * len(responses)\n")
    rewards = {str(tmp_path / "reward"): 1.0, "resumed_reward:score": 0.1}
    for name in ("policy", "reward"):
        shutil.copytree(dropout_root / name, tmp_path / name)
    write_data(tmp_path)

    fit_ppo(tmp_path, tmp_path, rewards)
    function.write_text(function.read_text().replace("1.0", "2.0"))
    prompts_file = tmp_path / "prompts.jsonl"
    prompts_file.write_text(prompts_file.read_text().replace("how are you", "how is she"))
    for name, load in (("policy", load_causal_lm), ("reward", load_scalar_model)):
        model = load(tmp_path / name)
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "lit_rlhf.json").unlink()  # it lists other weights
    path = tmp_path / "stopped.ckpt"
    with pytest.raises(ChangedRunError) as error:
        fit_ppo(tmp_path, tmp_path, rewards, ckpt_path=path)
    changed = [line.strip().partition(":")[0] for line in str(error.value).splitlines()[1:-1]]
    weights = ["weights of the reward models", "sources of the reward functions"]
    assert changed == [*weights, "weights of the reference", "training examples"]
    resumed = fit_ppo(tmp_path, tmp_path, rewards, allow_changes=True, ckpt_path=path)
    assert int(resumed.ppo.iteration) == 5


def test_allowed_reward_changes_start_moments_anew(dropout_root: Path, tmp_path: Path) -> None:
    rewards: dict[str, Any] = {str(dropout_root / "reward"): {"weight": 1.0, "normalize": True}}
    fit_ppo(dropout_root, tmp_path, rewards, allow_changes=True)
    rewards["brevity"] = {"rule": "length", "longest": 0, "normalize": True}
    path = tmp_path / "stopped.ckpt"
    module = fit_ppo(dropout_root, tmp_path, rewards, allow_changes=True, ckpt_path=path)
    assert [float(moments.count) for moments in module.reward.moments.values()] == [2 * BATCH] * 2


def test_buffer_that_an_older_checkpoint_lacks_starts_anew(
    dropout_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trick with state leaves the checkpoints of the version before it usable."""
    module, data = ppo(dropout_root)
    fit_module(module, data, tmp_path, max_epochs=1, callbacks=[SaveOnce(tmp_path)])
    path = tmp_path / "stopped.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert int(checkpoint["state_dict"].pop("ppo_step")) > 0
    torch.save(checkpoint, path)
    resumed, data = ppo(dropout_root)
    with caplog.at_level("INFO"):
        fit_module(resumed, data, tmp_path, max_epochs=1, ckpt_path=path)
    assert "written without ppo_step: starting from 0" in caplog.text
    assert 0 < int(resumed.ppo.ppo_step) < int(module.ppo.ppo_step)


def test_settings_without_a_batch_to_act_on_are_told(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rate in (1e-3, 9e-7):
        module, data = sft(root, optimizer={"learning_rate": rate})
        last = find_newest_checkpoint(tmp_path)
        caplog.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            keep = ResumeCheckpoint(every_n_batches=1, dirpath=str(tmp_path))
            options: dict[str, Any] = {"enable_checkpointing": True, "ckpt_path": last}
            fit_module(module, data, tmp_path, callbacks=[keep], **options)
        card = (tmp_path / "model/README.md").read_text("utf-8")
        assert "| `optimizer.learning_rate` | 0.001 |" in card
    message = "no batch was left to train, so that optimizer.learning_rate had no effect"
    assert message in caplog.text
    assert "resumed with another value" not in caplog.text


@pytest.mark.parametrize(
    "key", ["optimizer_states", "loops", "resume_settings", "hyper_parameters"]
)
def test_checkpoint_without_a_part_is_not_resumed(root: Path, tmp_path: Path, key: str) -> None:
    module, data = sft(root)
    keep = ResumeCheckpoint(every_n_batches=1, dirpath=str(tmp_path))
    fit_module(module, data, tmp_path, callbacks=[keep], enable_checkpointing=True)
    content = torch.load(tmp_path / "batch=3.ckpt", weights_only=True)
    content |= {"optimizer_states": []} if key == "optimizer_states" else {}
    content.pop(key if key != "optimizer_states" else "", None)
    torch.save(content, tmp_path / "less.ckpt")
    module, data = sft(root)
    message = {
        "optimizer_states": pytest.raises(ValueError, match="got one without optimizer_states"),
        "loops": pytest.raises(ValueError, match="got one without loops"),
        "resume_settings": pytest.warns(UserWarning, match="has no resume_settings"),
        "hyper_parameters": pytest.warns(UserWarning, match="has no hyper_parameters"),
    }
    with message[key]:
        options: Any = {"enable_checkpointing": True, "ckpt_path": tmp_path / "less.ckpt"}
        fit_module(module, data, tmp_path / "again", callbacks=[ResumeCheckpoint()], **options)


def test_every_setting_has_a_rule_and_the_documentation_shows_it() -> None:
    stages: list[type[LightningModule]] = [SFTModule, RewardModule, PPOModule]
    options = {name for stage in stages for name in option_names(stage)}
    datamodules = [DemonstrationDataModule, PreferenceDataModule, PromptDataModule]
    options |= {f"data.{name}" for data in datamodules for name in option_names(data)}
    assert [name for name in sorted(options) if find_consequence(name) is None] == []
    known = options | {name.partition(".")[0] for name in options}
    known |= {"trainer.precision", "training examples", "batch size on all ranks"}
    known |= {"weights of the reference", "weights of the reward models", "number of ranks"}
    known |= {"max_iterations", "sources of the reward functions"}
    assert CONSEQUENCES.keys() - known == set()

    table = ["| setting | when it differs from the checkpoint's | |", "|---|---|---|"]
    for change, remarks in REMARKS.items():
        for listed, remark in remarks.items():
            names = [f"`{name}`" if " " not in name else name for name in listed.split(", ")]
            table.append(f"| {', '.join(names)} | {Consequence[change.upper()].value} | {remark} |")
    page = Path(__file__).parents[2] / "docs" / "resume.md"
    assert "\n".join(table) in page.read_text("utf-8"), "\n".join(table)
