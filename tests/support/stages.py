"""Tiny runs of the three stages: model folders, data files, datamodules, a Trainer.

A folder of stages holds `policy/` and `reward/`, made from one tiny Llama, and four data files with
rows of uneven length. EOS is likely enough that some responses end and others are cut off.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from lit_rlhf.data import DataSource, DialogueEncoder, PromptDataModule, RecordDataModule
from lit_rlhf.data.datamodules import DemonstrationDataModule, PreferenceDataModule
from lit_rlhf.models import load_scalar_model, load_tokenizer, save_model_folder
from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from lit_rlhf.ppo import PPO
from lit_rlhf.strategies import full_tensor
from tests.support import scripted
from tests.support.tiny_models import EOS_ID, tiny_config, tiny_tokenizer

QUESTIONS = ("hi", "how are you today", "why", "name it", "me?", "go on and on", "so", "what now")
ANSWERS = ("no", "I can", "well, that is long", "a", "yes it is", "ok", "never", "two words")
MAX_LENGTH = 64
ADAM_EPS = 1e-5
"""Added to the denominator of AdamW's step, far above the rounding of a gradient in float32.

With the default of 1e-8, a coordinate whose gradient is nothing but rounding moves by a whole
learning rate, in a direction that depends on the processor.
"""
MOVING: dict[str, Any] = {
    "critic_pretraining": {"iterations": 1},
    "loss": {"ptx_coef": 0.3},
    "reward_shaping": {"kl_target": 0.5, "kl_horizon": 50},
}
"""Options with which all state of a PPO run changes, for tests that compare a resumed run."""


def with_likely_eos(model: PreTrainedModel) -> PreTrainedModel:
    """Make EOS win at about every sixth token."""
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS_ID] *= 8.0  # type: ignore[no-untyped-call]
    return model


def causal_lm(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A seeded random language model of `config`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return with_likely_eos(model)


def encoder_of(tokenizer: Tokenizer, template: str = "hh") -> DialogueEncoder:
    return DialogueEncoder(tokenizer, template, MAX_LENGTH)


def write_models(root: Path, config: Any = None, pad_is_eos: bool = False) -> Path:
    """Write `policy/` and `reward/` under `root`."""
    tokenizer = tiny_tokenizer("</s>", special_pad=False) if pad_is_eos else tiny_tokenizer()
    contract = encoder_of(tokenizer).contract
    policy = causal_lm(config or tiny_config("llama"))
    save_model_folder(policy, tokenizer, root / "policy", contract=contract)
    reward = load_scalar_model(root / "policy", head_seed=1)
    save_model_folder(reward, tokenizer, root / "reward", contract=contract)
    return root


def write_data(root: Path) -> Path:
    """Write `demonstrations`, `preferences`, `prompts` and `texts`, eight rows each."""

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    users = [{"role": "user", "content": question} for question in QUESTIONS]
    answers = [{"role": "assistant", "content": answer} for answer in ANSWERS]
    write("demonstrations", [{"messages": [u, a]} for u, a in zip(users, answers, strict=True)])
    write("prompts", [{"prompt": [user]} for user in users])
    write("texts", [{"text": f"{q} {a} {q}"} for q, a in zip(QUESTIONS, ANSWERS, strict=True)])
    rows = zip(users, answers, [*answers[3:], *answers[:3]], strict=True)
    write("preferences", [{"prompt": [u], "chosen": [c], "rejected": [r]} for u, c, r in rows])
    return root


def source(root: Path, name: str) -> list[DataSource]:
    return [DataSource(str(root / f"{name}.jsonl"))]


def demonstrations(root: Path, **arguments: Any) -> DemonstrationDataModule:
    return _datamodule(DemonstrationDataModule, root, "demonstrations", arguments)


def preferences(root: Path, **arguments: Any) -> PreferenceDataModule:
    return _datamodule(PreferenceDataModule, root, "preferences", arguments)


def prompts(root: Path, ptx: bool = False, **arguments: Any) -> PromptDataModule:
    usual = {"ptx_sources": source(root, "texts") if ptx else None, "batch_size": 8}
    return _datamodule(PromptDataModule, root, "prompts", usual | arguments)


def _datamodule(kind: type[Any], root: Path, name: str, arguments: dict[str, Any]) -> Any:
    sources = {"train_sources": source(root, name), "val_sources": source(root, name)}
    usual = {**sources, "chat_template": "hh", "max_length": MAX_LENGTH, "batch_size": 4}
    return kind(**usual | arguments)


def stage(name: str, root: Path, batch_size: int = 4, **options: Any) -> tuple[Any, Any]:
    """A module of a stage, and its data."""
    if name == "ppo":
        return PPOModule(**ppo_options(root, **options)), prompts(root, batch_size=batch_size)
    kind, data = {"sft": (SFTModule, demonstrations), "reward": (RewardModule, preferences)}[name]
    arguments = nested({"optimizer.eps": ADAM_EPS}, options)
    return kind(str(root / "policy"), **arguments), data(root, batch_size=batch_size)


def with_algorithm(ppo_class: type[PPO]) -> type[PPOModule]:
    """The class of a `PPOModule` with another algorithm."""
    # Not "PPOModule" for PPO itself: configurations find a class by its name alone.
    return type(f"ModuleWith{ppo_class.__name__}", (PPOModule,), {"ppo_class": ppo_class})


def first_batch(data: RecordDataModule, root: Path) -> Any:
    """The training rows of a datamodule as one batch, in the order of the file."""
    data.tokenizer = load_tokenizer(str(root / "policy"))
    data.setup("fit")
    return next(iter(data.make_loader("train", shuffle=False)))


def nested(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a module from layers of options, the last winning, also by dotted names."""
    arguments: dict[str, Any] = {}
    for name, value in (item for layer in layers for item in layer.items()):
        group, _, field = name.partition(".")
        if field:
            arguments.setdefault(group, {})[field] = value
        elif isinstance(value, Mapping) and name != "rewards":
            arguments.setdefault(name, {}).update(value)
        else:
            arguments[name] = value
    return arguments


def ppo_options(root: Path, **options: Any) -> dict[str, Any]:
    """Arguments of a small `PPOModule`: one iteration takes four steps of each network."""
    optimizer = {"learning_rate": 1e-3, "lr_scheduler": "constant", "eps": ADAM_EPS}
    usual = {
        "model_path": str(root / "policy"),
        "rewards": {str(root / "reward"): 1.0},
        "sampling.max_new_tokens": 6,
        "policy_optimizer": optimizer,
        "critic_optimizer": optimizer,
        "minibatches": {"minibatch_size": 4, "ppo_epochs": 2},
        "advantages": {"lam": 0.95, "normalization": True},
        "critic_pretraining": {"iterations": 0},
        "loss.ptx_coef": 0.0,
    }
    return nested(usual, options)


def short_run(root: Path) -> dict[str, Any]:
    """A configuration of PPO: 6 iterations of one step, a checkpoint after each."""
    small = {
        "minibatches": {"minibatch_size": 1, "ppo_epochs": 1},
        "sampling": {"max_new_tokens": 3},
    }
    options = ppo_options(root, output_dir="model", **nested(small, MOVING))
    keep = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 1}}
    prompts, texts = ([{"path": str(root / f"{name}.jsonl")}] for name in ("prompts", "texts"))
    data = {"train_sources": prompts, "ptx_sources": texts, "chat_template": "hh"}
    data |= {"max_length": MAX_LENGTH, "batch_size": 2, "samples_per_epoch": 6}
    trainer = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "callbacks": [keep]}
    trainer |= {"enable_model_summary": False, "log_every_n_steps": 1, "default_root_dir": "."}
    return {
        "seed_everything": 1,
        "trainer": trainer,
        "model": {"class_path": "PPOModule", "init_args": options},
        "data": {"class_path": "PromptDataModule", "init_args": data},
    }


def trainer(folder: Path, **arguments: Any) -> Trainer:
    """A quiet Trainer on the CPU, with one epoch and no validation unless told."""
    callbacks = arguments.pop("callbacks", None) or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    usual = {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    return scripted.trainer(folder, *callbacks, **(usual | arguments))


def fit_module(module: LightningModule, data: Any, folder: Path, **arguments: Any) -> Trainer:
    """Fit and return the Trainer; the finished model goes to `folder/model`."""
    ckpt_path, run = arguments.pop("ckpt_path", None), trainer(folder, **arguments)
    with warnings.catch_warnings():
        # reference and reward model are frozen in evaluation mode, which Lightning warns about
        warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
        run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return run


class StepRecorder(Callback):
    """Records the clipped gradients of each step, by network and parameter name."""

    def __init__(self) -> None:
        self.steps: dict[str, list[dict[str, Tensor]]] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = {
            name: full_tensor(parameter.grad).clone()
            for name, parameter in pl_module.named_parameters()
            if id(parameter) in trained and parameter.grad is not None
        }
        self.steps.setdefault(next(iter(gradients)).partition(".")[0], []).append(gradients)

    def norms(self, network: str) -> list[float]:
        """L2 norm of each step's gradients."""
        return [
            float(sum(g.double().square().sum() for g in step.values()) ** 0.5)
            for step in self.steps[network]
        ]


class Rates(Callback):
    """Records learning rate and weight decay of each optimizer, by batch."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[float, float]]] = {}

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        groups = [optimizer.param_groups[0] for optimizer in trainer.optimizers]
        settings = [(group["lr"], group["weight_decay"]) for group in groups]
        self.seen[trainer.fit_loop.total_batch_idx] = settings


def content(folder: Path) -> dict[str, bytes]:
    """Contents of the files in a folder, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def copy_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's parameters and buffers as they are now."""
    return {name: full_tensor(t.detach()).clone() for name, t in module.state_dict().items()}


def assert_equal_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that two states are equal to the bit, name by name."""
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@torch.no_grad()
def token_nll(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Negative log-likelihood of each token but the first of one unpadded row, float64."""
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1].double()
    return -torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of any number in two states."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
