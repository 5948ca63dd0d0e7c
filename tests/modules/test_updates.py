"""A number that is not finite skips one update and nothing else; too many of them end the run."""

import math
import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR

from lit_callbacks import CollapseDetector, Level, ResumeCheckpoint
from lit_rlhf.finite import join_names, require_finite
from lit_rlhf.modules import PPOModule, SFTModule
from lit_rlhf.modules.updates import (
    GuardedStepper,
    TooManySkippedUpdates,
    TrainedNetwork,
    UpdateGuard,
    find_last_saved,
    trained_networks,
)
from tests.support.faulty_stages import KINDS, Course, FaultyEstimates, FaultyPPO, faulty_stage
from tests.support.stages import (
    ADAM_EPS,
    assert_equal_states,
    demonstrations,
    distance,
    fit_module,
    ppo_options,
    prompts,
    trainer,
)

SKIPPED = "skipped at"
NOT_A_NUMBER = "expected finite scores, got nan"


def course(module: Any, data: Any, folder: Path, warning: str | None, **arguments: Any) -> Course:
    """Fit and return what happened; `warning` is what the run has to say."""
    recorder = Course()
    with nullcontext() if warning is None else pytest.warns(UserWarning, match=warning):
        fit_module(module, data, folder, callbacks=[recorder], **arguments)
    return recorder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_fault_skips_one_update(root: Path, tmp_path: Path, stage: str, kind: str) -> None:
    clean = course(*faulty_stage(stage, root, at=()), tmp_path / "clean", None)
    faulty = course(*faulty_stage(stage, root, at=(1,), kind=kind), tmp_path / "faulty", SKIPPED)
    assert_equal_states(faulty.states[0], clean.states[0])
    # weights and moments after the batch are those before it, and the next one goes on
    assert_equal_states(faulty.states[1], faulty.states[0])
    torch.testing.assert_close(faulty.moments[1], faulty.moments[0], rtol=0, atol=0)
    assert distance(faulty.states[2], faulty.states[1]) > 0
    assert distance(faulty.states[1], clean.states[1]) > 0
    assert faulty.rates == clean.rates
    counts = [metrics[f"{stage}/skipped_updates"] for metrics in faulty.metrics]
    assert counts == [0.0, 1.0, 0.0, 0.0]


def test_a_run_with_a_fault_is_the_run_without_that_update(root: Path, tmp_path: Path) -> None:
    """Against a plain loop over the other batches, with the rates of all."""
    batches: list[Any] = []
    keep = LambdaCallback(on_train_batch_start=lambda _, __, batch, ___: batches.append(batch))
    recorder = Course()
    module, data = faulty_stage("sft", root, at=(2,))
    with pytest.warns(UserWarning, match=SKIPPED):
        fit_module(module, data, tmp_path, callbacks=[recorder, keep])
    plain = SFTModule(str(root / "policy"))
    optimizer = torch.optim.AdamW(plain.model.parameters(), weight_decay=0.0, eps=ADAM_EPS)
    rates = [1e-2, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3]  # one batch of warm-up, then linear to 0
    for index, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        if index == 2:
            continue
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        plain(batch, batch.completion_mask[:, 1:].sum().float())["sft/loss"].backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        optimizer.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(recorder.states[-1][name], weight, rtol=1e-5, atol=1e-6)


def ppo(
    root: Path, faulty_updates: tuple[int, ...], network: str, kind: str, **options: Any
) -> FaultyPPO:
    """Two iterations of four updates of each network, with batches of four."""
    options = ppo_options(root, minibatches={"minibatch_size": 2}, **options)
    return FaultyPPO(faulty_updates, network, kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("network", "other"), [("policy", "critic"), ("critic", "policy")])
def test_fault_of_one_network_leaves_the_other_to_its_update(
    root: Path, tmp_path: Path, network: str, other: str, kind: str
) -> None:
    steps: list[dict[str, Any]] = []

    class Watched(UpdateGuard):
        def update(self, module: Any, *arguments: Any, **options: Any) -> Any:
            model = getattr(module, network)
            before = {k: v.clone() for k, v in model.state_dict().items()}
            metrics = super().update(module, *arguments, **options)
            after = {k: v.clone() for k, v in model.state_dict().items()}
            if options["network"] == f"the {network}":
                steps.append({"place": options["place"], "moved": distance(after, before)})
            return metrics

    data = {"batch_size": 4}
    clean = course(ppo(root, (), network, kind), prompts(root, **data), tmp_path / "a", None)
    module = ppo(root, (1,), network, kind)
    module.guard = Watched(5)
    warning = f"update of the {network} skipped at iteration 1, minibatch 2: non-finite:"
    faulty = course(module, prompts(root, **data), tmp_path / "b", warning)
    assert [step["moved"] > 0 for step in steps] == [True, False] + [True] * 6
    assert steps[1]["place"] == "iteration 1, minibatch 2"
    for name, weight in clean.states[0].items():
        if name.startswith(f"{other}."):
            assert torch.equal(faulty.states[0][name], weight)
    assert [metrics["ppo/skipped_updates"] for metrics in faulty.metrics] == [1.0, 0.0]
    assert int(faulty.states[0]["ppo_step"]) == (3 if network == "policy" else 4)
    # what is logged are the three updates that went through
    assert all(torch.isfinite(torch.tensor(list(faulty.metrics[0].values()))))


LINEAR = {f"{network}_optimizer.lr_scheduler": "linear" for network in ("policy", "critic")}
MOVING = {"reward_shaping.kl_target": 0.5, "reward_shaping.kl_horizon": 50, **LINEAR}


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("logprobs", "log-probs of the policy"),
        ("ref_logprobs", "log-probs of the reference"),
        ("values", "values of the critic"),
    ],
)
def test_non_finite_estimate_is_skipped(root: Path, tmp_path: Path, field: str, named: str) -> None:
    module = FaultyEstimates((1,), field, **ppo_options(root, **MOVING))
    where = "update of policy and critic skipped at iteration 2: non-finite: " + named
    seen = course(module, prompts(root, batch_size=4), tmp_path, where, max_epochs=2)
    assert_skipped_iteration(seen)


def test_infinite_reward_skips_the_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.reward_functions.calls", 0)
    source = "tests.support.reward_functions:nan_in_the_second_call"
    options = ppo_options(root, rewards={source: 1.0}, critic_init="policy", **MOVING)
    module, data = FaultyEstimates((), "", **options), prompts(root, batch_size=4)
    where = "policy and critic skipped at iteration 2: non-finite: rewards\\."
    with pytest.warns(UserWarning, match=f"{source}': {NOT_A_NUMBER} for prompt '.*Human: "):
        seen = course(module, data, tmp_path, where, max_epochs=2)
    assert_skipped_iteration(seen)


def test_guard_without_a_skipped_update_to_allow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_skipped_in_a_row: expected .* got 0"):
        UpdateGuard(0)


@torch.no_grad()
def spoil(network: Any, value: float = torch.nan) -> None:
    """Set a weight."""
    network.get_parameter("model.norm.weight")[0] = value


class NaNWeight(Callback):
    """Sets a weight of the policy to NaN before the second batch, and back before another."""

    def __init__(self, until: int) -> None:
        self.until, self.kept = until, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == 1:
            self.kept = float(pl_module.policy.get_parameter("model.norm.weight").detach()[0])
            spoil(pl_module.policy)
        elif index == self.until:
            spoil(pl_module.policy, self.kept)


def test_non_finite_weight_skips_the_iteration_and_is_named(root: Path, tmp_path: Path) -> None:
    # transformers samples, and raises an error of NaN
    eager = {"network.attn_implementation": "eager", "minibatches.minibatch_size": 2}
    module = PPOModule(**ppo_options(root, **eager, **LINEAR))
    recorder, data = Course(), prompts(root, batch_size=2)
    validation = {"limit_val_batches": None, "val_check_interval": 1}
    with pytest.warns(UserWarning, match="non-finite: weights of the policy") as shown:
        fit_module(module, data, tmp_path, callbacks=[NaNWeight(until=3), recorder], **validation)
    messages = [str(w.message) for w in shown]
    assert [text.partition(". Weights")[0] for text in messages if SKIPPED in text] == [
        f"update of policy and critic skipped at iteration {iteration}: non-finite: weights of "
        "the policy (model.norm.weight)"
        for iteration in (2, 3)
    ]
    assert "; 2 in a row" in [text for text in messages if SKIPPED in text][1]
    assert [m["ppo/skipped_updates"] for m in recorder.metrics] == [0.0, 1.0, 1.0, 0.0]
    assert [m["step"] for m in recorder.metrics] == [1.0, 2.0, 3.0, 4.0]
    for key in ("rollout/kl", "rollout/score", "rollout/reward", "ppo/explained_variance"):
        finite = [math.isfinite(metrics[key]) for metrics in recorder.metrics]
        assert finite == [True, False, False, True], key
    # neither does a validation sample from it, nor keep the last known numbers
    assert len([text for text in messages if "no responses for evaluation" in text]) == 2
    scores = [metrics.get("val/rollout/score", 0.0) for metrics in recorder.metrics]
    assert [math.isfinite(score) for score in scores] == [True, True, False, False]
    # nothing was trained in between, but the learning rates went on
    critic = [{k: v for k, v in s.items() if k.startswith("critic.")} for s in recorder.states]
    assert_equal_states(critic[2], critic[0])
    assert distance(critic[3], critic[2]) > 0
    assert all(a[0] > b[0] for a, b in zip(recorder.rates, recorder.rates[1:], strict=False))


def test_detector_sees_skipped_updates_and_can_roll_back(root: Path, tmp_path: Path) -> None:
    """Also if the first iteration of a run is skipped, when no metric has been measured yet."""
    module = PPOModule(**ppo_options(root, minibatches={"minibatch_size": 2}))
    detector = CollapseDetector()
    nan = LambdaCallback(on_train_start=lambda *_: spoil(module.policy))
    ends = pytest.raises(TooManySkippedUpdates, match="skipped updates of policy and critic")
    with pytest.warns(UserWarning, match=SKIPPED), ends:
        fit_module(module, prompts(root, batch_size=2), tmp_path, callbacks=[detector, nan])
    assert detector.verdict.level is Level.COLLAPSED
    assert "rollout/kl" in detector.verdict.sentence


@pytest.mark.parametrize("faulty_batches", [(0, 1), (1,)])
def test_skipped_last_update_saves_nothing(
    root: Path, tmp_path: Path, faulty_batches: tuple[int, ...]
) -> None:
    module, data = faulty_stage("sft", root, at=faulty_batches)
    with (
        pytest.warns(UserWarning, match="update of the model skipped"),
        pytest.raises(TooManySkippedUpdates, match="the run ends with skipped updates of the mod"),
    ):
        fit_module(module, data, tmp_path, limit_train_batches=2)
    assert not (tmp_path / "model").exists()


def test_weights_that_are_not_finite_are_refused_at_the_start(root: Path, tmp_path: Path) -> None:
    module = SFTModule(str(root / "policy"))
    spoil(module.model, torch.inf)
    message = r"model_path, rewards, ckpt_path: .*weights of sft \(model\.model\.norm\.weight\)"
    with pytest.raises(ValueError, match=message):
        fit_module(module, demonstrations(root), tmp_path)


def test_weights_of_checkpoint_that_are_not_finite_are_refused(root: Path, tmp_path: Path) -> None:
    keep = ResumeCheckpoint(every_n_batches=2, dirpath=str(tmp_path))
    module = SFTModule(str(root / "policy"))
    fit_module(module, demonstrations(root), tmp_path, callbacks=[keep], enable_checkpointing=True)
    content = torch.load(tmp_path / "batch=2.ckpt", weights_only=True)
    content["state_dict"]["model.model.norm.weight"][0] = torch.nan
    torch.save(content, tmp_path / "nan.ckpt")
    module = SFTModule(str(root / "policy"), output_dir=str(tmp_path / "again"))
    nan = {"ckpt_path": tmp_path / "nan.ckpt", "callbacks": [ResumeCheckpoint()]}
    with pytest.raises(ValueError, match="expected finite numbers, got NaN or infinity"):
        fit_module(module, demonstrations(root), tmp_path, enable_checkpointing=True, **nan)
    assert not (tmp_path / "again").exists()


def test_weights_that_are_not_finite_are_not_saved(root: Path, tmp_path: Path) -> None:
    module, data = SFTModule(str(root / "policy")), demonstrations(root)
    nan = LambdaCallback(on_train_end=lambda *_: spoil(module.model))
    with pytest.raises(ValueError, match=f"{tmp_path}/model: expected finite numbers"):
        fit_module(module, data, tmp_path, callbacks=[nan])
    assert not (tmp_path / "model").exists()


def test_many_names_are_counted() -> None:
    assert join_names(["a", "b", "c", "d"]) == "a, b, c, d"
    assert join_names(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"


def assert_skipped_iteration(seen: Course) -> None:
    """The second of four iterations changed nothing but counters and rates."""
    before, after = dict(seen.states[0]), dict(seen.states[1])
    assert (int(before.pop("iteration")), int(after.pop("iteration"))) == (1, 2)
    assert float(after["score_moments.count"]) == 4
    assert_equal_states(after, before)
    torch.testing.assert_close(seen.moments[1], seen.moments[0], rtol=0, atol=0)
    assert float(seen.states[2]["score_moments.count"]) == 8
    assert distance(seen.states[2], seen.states[1]) > 0
    # the linear schedules fall by as many updates in the skipped iteration as in the others
    skipped, learned, _ = (a[0] - b[0] for a, b in pairwise(seen.rates))
    assert skipped == pytest.approx(learned, rel=1e-6)
    assert learned > 0
    assert [m["ppo/skipped_updates"] for m in seen.metrics] == [0.0, 1.0, 0.0, 0.0]
    assert [m["step"] for m in seen.metrics] == [1.0, 2.0, 3.0, 4.0]


def test_training_stops_after_the_set_number(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    saving = ModelCheckpoint(folder, "{epoch}")
    module, data = faulty_stage("sft", root, at=(4, 5, 6), max_skipped_in_a_row=3)
    warning = pytest.warns(UserWarning, match="in a row, and training stops after 3")
    with warning, pytest.raises(TooManySkippedUpdates) as error:
        fit_module(
            module, data, tmp_path, max_epochs=2, callbacks=[saving], enable_checkpointing=True
        )
    message = str(error.value)
    assert "update of the model skipped at epoch 1, batch 2: non-finite: sft/loss" in message
    assert "It was number 3 in a row (max_skipped_in_a_row)" in message
    assert f"The last checkpoint is {folder / 'epoch=0.ckpt'}: resume" in message
    assert not (tmp_path / "model").exists()
    # its weights come from the last update that went through
    saved = torch.load(folder / "epoch=0.ckpt", weights_only=True)["state_dict"]
    for name, weight in module.model.state_dict().items():
        assert torch.equal(saved[f"model.{name}"], weight)


def test_without_a_checkpoint_the_end_says_so(root: Path, tmp_path: Path) -> None:
    module, data = faulty_stage("reward", root, at=(0,), max_skipped_in_a_row=1)
    with pytest.raises(TooManySkippedUpdates, match="There is no checkpoint"):
        fit_module(module, data, tmp_path)


def test_an_update_that_goes_through_ends_the_row_of_its_network_alone(tmp_path: Path) -> None:
    guard, run = UpdateGuard(3), trainer(tmp_path)
    nan, number = {"loss": torch.tensor(torch.nan)}, {"loss": torch.tensor(1.0)}

    def update(network: str, quantities: dict[str, torch.Tensor]) -> bool:
        with guard.iteration(run, network, "here"):
            require_finite(quantities)
        return not guard.skipped

    def skip(network: str) -> None:
        with pytest.warns(UserWarning, match=f"update of {network} skipped"):
            assert not update(network, nan)

    skip("the critic")
    skip("the critic")
    assert update("the policy", number)
    skip("the policy")
    skip("the policy")
    assert update("the policy", number)
    skip("the policy")
    assert (float(guard.pop_count()), float(guard.pop_count())) == (5.0, 0.0)
    with pytest.raises(TooManySkippedUpdates):
        update("the critic", nan)


def test_the_newest_checkpoint_that_is_still_there_is_named(tmp_path: Path) -> None:
    resume = ResumeCheckpoint(dirpath=str(tmp_path))
    callbacks: list[Any] = [ModelCheckpoint(dirpath=tmp_path) for _ in range(3)]
    assert find_last_saved([*callbacks, resume]) is None
    resume.load_state_dict({"names": ["batch=1.ckpt", "batch=2.ckpt"]})
    for name, time in (("batch=2", 1), ("new", 3), ("older", 2)):
        (tmp_path / f"{name}.ckpt").touch()
        os.utime(tmp_path / f"{name}.ckpt", (time, time))
    assert find_last_saved([*callbacks, resume]) == str(tmp_path / "batch=2.ckpt")
    for callback, name in zip(callbacks, ("older", "new", "deleted"), strict=True):
        callback.best_model_path = str(tmp_path / f"{name}.ckpt")
    assert find_last_saved([resume, *callbacks]) == str(tmp_path / "new.ckpt")


def trained_network() -> Any:
    """A network's optimizer with a schedule that counts its steps in `last_epoch`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return TrainedNetwork(optimizer, LambdaLR(optimizer, lambda n: 1.0))  # type: ignore[arg-type]


def test_networks_are_named_in_the_order_of_their_optimizers() -> None:
    first, second = trained_network(), trained_network()
    module: Any = SimpleNamespace(
        optimizers=lambda: [first.optimizer, second.optimizer],
        lr_schedulers=lambda: [first.schedule, second.schedule],
    )
    assert trained_networks(module, ("policy", "critic")) == {"policy": first, "critic": second}
    # an estimator without a critic leaves the last name without a network
    assert list(trained_networks(module, ("policy", "critic", "other"))) == ["policy", "critic"]
    single: Any = SimpleNamespace(
        optimizers=lambda: first.optimizer, lr_schedulers=lambda: first.schedule
    )
    assert trained_networks(single, ("policy", "critic")) == {"policy": first}


def test_policy_keeps_its_learning_rate_where_it_is_not_trained() -> None:
    networks = {"policy": trained_network(), "critic": trained_network()}
    guard = UpdateGuard(max_in_a_row=3)
    assert not guard.skipped
    module: Any = None
    stepper = GuardedStepper(networks, module=module, guard=guard, grad_clips={}, place="here")
    stepper.end_minibatch(trains_policy=False)
    assert [network.schedule.last_epoch for network in networks.values()] == [0, 1]
    stepper.end_minibatch(trains_policy=True)
    assert [network.schedule.last_epoch for network in networks.values()] == [1, 2]
    assert stepper.n_minibatches == 2
