"""Trains the runs that are missing, and keeps the result of each with the key of its settings.

A run is cached by content: its key is a hash of its configurations and of the versions of the
libraries, and a run whose key has changed is trained anew. A result also has hashes of the source
of the world and the formulas, and of the rules that stood when it was made. Each run is a process,
which an interruption ends; the next one resumes from its checkpoint.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import lit_rlhf
from experiments.processes import cpu_seconds_used
from experiments.reproduce.claims import RULES
from experiments.reproduce.measuring import measure_foundation, measure_run
from experiments.reproduce.table import Arm, Foundation, arms_by_name, foundations_by_name
from experiments.results_file import read_run, write_run
from lit_rlhf.cli.configs import find_config
from lit_rlhf.files import write_text
from lit_rlhf.tools.commands.quickstart import DEFAULT_DIR, Quickstart
from lit_rlhf.tools.lab import read_world, render_prompt

RESULTS = Path(__file__).with_name("results.jsonl")
REVISION = 1
"""To be raised with a change outside of `HASHED` that changes results."""
HASHED = ("functional", "tools/lab")
"""Packages whose source a result has the hash of; other packages change too often."""
PRETRAINING = {"documents": 4000, "block": 128, "batch": 16, "epochs": 6}
"""The policy that is not fine-tuned: a language model of the world's text in blocks of tokens."""
LIBRARIES = ("torch", "lightning", "transformers")
SAMPLED_PROMPTS = 256
SAMPLES = 7
"""Times that a run is sampled from after its start."""
TRIAL_PAIRS = 64
TRIAL_ITERATIONS = 4
TRIAL_BATCH = 16
TRIAL_PROMPTS = 8
TRIAL_STAGE = {"trainer": {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 1}}
"""Overlay of a trial's SFT and reward modelling."""


@cache
def read_yaml(name: str) -> dict[str, Any]:
    """Read a configuration by its name."""
    content: dict[str, Any] = yaml.safe_load(find_config(name).read_text("utf-8"))
    return content


def subtract(tree: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the leaves of `tree` that `other` has too, whatever their values."""
    difference: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            if rest := subtract(value, base[key]):
                difference[key] = rest
        elif key not in base:
            difference[key] = value
    return difference


@dataclass(frozen=True)
class Plan:
    """A foundation or an arm with a seed: what it is trained from, and where it is kept.

    Attributes:
        part: The foundation or arm.
        seed: Seed of the world, the weights, the order of the data and the rollouts.
        output_dir: Folder of all runs.
        results: File of the results.
        trial: Whether all stages are cut to a few batches.
    """

    part: Foundation | Arm
    seed: int
    output_dir: Path
    results: Path = RESULTS
    trial: bool = False

    @property
    def foundation(self) -> Foundation:
        """The foundation that PPO starts from."""
        return self.part.foundation if isinstance(self.part, Arm) else self.part

    def of(self, part: Foundation | Arm) -> Plan:
        """The same plan for another foundation or arm."""
        return replace(self, part=part)

    @property
    def root(self) -> Path:
        """Folder of the models, logs and data of the foundation and the arms on it."""
        key = self.of(self.foundation).key()
        return self.output_dir / f"{self.foundation.name}-seed_{self.seed}-{key[:8]}"

    @property
    def name(self) -> str:
        """Name of the run in the file of the results."""
        return f"{self.part.name}-seed_{self.seed}"

    @property
    def log(self) -> Path:
        """File with the output of the commands."""
        return self.root / f"{self.part.name}.log"

    def is_finished(self) -> bool:
        """Whether there is a result of these settings."""
        result = read_run(self.results, self.name)
        return result is not None and bool(result["key"] == self.key())

    def is_ready(self) -> bool:
        """Whether it is finished and, for a foundation, its models are still there."""
        models = [self.root / name / "model.safetensors" for name in ("sft", "reward")]
        is_arm = isinstance(self.part, Arm)
        return self.is_finished() and (is_arm or all(model.is_file() for model in models))

    def chain(self) -> list[Plan]:
        """The plans that have to be ready first, in order, and this one."""
        foundation = self.foundation
        return list(map(self.of, dict.fromkeys((foundation.base, foundation, self.part))))

    def configs(self) -> list[dict[str, Any]]:
        """The configurations of PPO, the last of which wins; without an arm the stages'."""
        if isinstance(self.part, Foundation):
            overlays = [read_yaml(f"ablations/{name}") for name in self.part.overlays]
            stages = [read_yaml("quickstart/sft"), read_yaml("quickstart/reward"), *overlays]
            return [*stages, TRIAL_STAGE] if self.trial else stages
        base = read_yaml("quickstart/ppo_max")
        chosen = [base]
        if self.part.vanilla:
            switched_off = read_yaml("quickstart/ppo_vanilla")
            for name in self.part.restored:
                switched_off = subtract(switched_off, read_yaml(f"ablations/{name}"))
            chosen.append(switched_off)
        chosen += [read_yaml(f"ablations/{name}") for name in self.part.overlays]
        if self.part.pretrained:
            chosen.append({"model": {"init_args": {"model_path": f"{DEFAULT_DIR}/pretrained"}}})
        return [*chosen, self._measured(chosen)]

    def _measured(self, configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The overlay that makes a run measurable and resumable."""
        data: dict[str, Any] = {}
        for config in configs:
            data |= config.get("data", {}).get("init_args", {})
        batch_size = TRIAL_BATCH if self.trial else data["batch_size"]
        samples = TRIAL_ITERATIONS * batch_size if self.trial else data["samples_per_epoch"]
        iterations = samples // batch_size
        timeline = {
            "prompts": f"{DEFAULT_DIR}/world/prompts_heldout.jsonl",
            "n_prompts": TRIAL_PROMPTS if self.trial else SAMPLED_PROMPTS,
            "every_n_batches": max(1, iterations // SAMPLES),
        }
        shown = ["rollout/score", "rollout/gold", "rollout/kl", "rollout/response_length"]
        measured: dict[str, Any] = {
            "trainer": {
                "enable_checkpointing": True,
                "limit_val_batches": 0,  # the samples are of the held-out prompts
                "callbacks": [
                    {
                        "class_path": "lit_callbacks.StageProgressBar",
                        "init_args": {"stage": self.part.name, "metrics": shown},
                    },
                    {"class_path": "lit_callbacks.CollapseDetector"},
                    {"class_path": "lit_callbacks.SampleTimeline", "init_args": timeline},
                    {
                        "class_path": "lit_callbacks.ResumeCheckpoint",
                        "init_args": {"every_n_batches": 2 if self.trial else 10},
                    },
                ],
            },
            "data": {"init_args": {"batch_size": batch_size, "samples_per_epoch": samples}},
        }
        if self.trial:
            small = {"minibatch_size": TRIAL_BATCH // 2}
            options: dict[str, Any] = {"minibatches": small, "sampling": {"max_new_tokens": 8}}
            measured["model"] = {"init_args": options}
            if not (isinstance(self.part, Arm) and self.part.vanilla):
                options["critic_pretraining"] = {"iterations": 1}
        return measured

    def key(self) -> str:
        """Hash of everything that the result depends on."""
        part = asdict(self.part)
        for name in ("label", "iterations", "size"):  # these change no number
            part.pop(name, None)
        content: dict[str, Any] = {
            "part": part,
            "seed": self.seed,
            "configs": self.configs(),
            "revision": REVISION,
            "versions": versions(),
        }
        if isinstance(self.part, Arm):
            content["pretraining"] = PRETRAINING if self.part.pretrained else None
            content["foundation"] = self.of(self.part.foundation).key()
        elif self.part != self.part.base:
            content["base"] = self.of(self.part.base).key()
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def versions() -> dict[str, str]:
    """Versions of the libraries that results depend on."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


@cache
def code_hash() -> str:
    """Hash of the source that results depend on, without comments and docstrings."""
    package = Path(lit_rlhf.__file__).parent
    files = [path for name in HASHED for path in sorted((package / name).rglob("*.py"))]
    text = "".join(ast.unparse(strip_docstrings(path.read_text("utf-8"))) for path in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def strip_docstrings(source: str) -> ast.Module:
    """Parse source without its docstrings; comments are not parsed at all."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]  # as the line above says
                line
                for line in body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
    return tree


# --- one run, in its own process


def train(plan: Plan) -> None:
    """Train a foundation or an arm from where an earlier process has stopped, and write its result.

    Args:
        plan: What to train. The foundation of an arm is finished.
    """
    stages = _stages(plan)
    key = plan.key()  # hashes the files as they are now
    if isinstance(plan.part, Foundation):
        if plan.part == plan.part.base:
            train_base(stages, plan)
        else:
            train_variant(stages, plan)
        measured = measure_foundation(stages.root, plan.part, plan.seed, plan.trial)
    else:
        train_arm(stages, plan, plan.part)
        measured = measure_run(stages.root, plan.part, plan.seed)
    result = {
        "name": plan.part.name,
        "seed": plan.seed,
        "key": key,
        "code": code_hash(),
        "rules": RULES,
        "trial": plan.trial,
        # only the last process, if there was an interruption
        "cpu_seconds": cpu_seconds_used(),
        "versions": versions(),
        **measured,
    }
    write_run(plan.results, plan.name, result)
    if isinstance(plan.part, Arm):
        shutil.rmtree(stages.root / "logs" / plan.part.name / "checkpoints", ignore_errors=True)


def _stages(plan: Plan) -> Quickstart:
    foundation = plan.foundation
    stages = Quickstart(
        plan.root,
        plan.seed,
        world=foundation.world,
        language=foundation.language,
        overwrite=isinstance(plan.part, Foundation),
    )
    if plan.trial:
        stages.pairs = TRIAL_PAIRS
    return stages


def _stage_overlays(stages: Quickstart, plan: Plan, *names: str) -> list[str | Path]:
    overlays: list[str | Path] = [find_config(f"ablations/{name}") for name in names]
    if plan.trial:
        overlays.append(write_config(stages.root, "trial", TRIAL_STAGE))
    return overlays


def train_base(stages: Quickstart, plan: Plan) -> None:
    """Write the world, and train the SFT model and the reward model on its responses."""
    root = stages.root
    if not (root / "world" / "world.json").is_file():
        stages.write_world()
        if plan.foundation.hidden is not None:
            resize_base(root / "world" / "base", plan.foundation.hidden, plan.seed)
    if not (root / "sft" / "model.safetensors").is_file():
        stages.fit_sft("sft.yaml", *_stage_overlays(stages, plan))
    if not (root / "world" / "preferences.jsonl").is_file():
        stages.label_preferences()
    if not (root / "reward" / "model.safetensors").is_file():
        stages.fit_reward("reward.yaml", *_stage_overlays(stages, plan))


def train_variant(stages: Quickstart, plan: Plan) -> None:
    """Train another reward model on the world and the SFT model of the base."""
    foundation = plan.foundation
    root = stages.root
    base = plan.of(plan.foundation.base).root
    for name in ("world", "sft"):
        shutil.copytree(base / name, root / name, dirs_exist_ok=True)
    preferences = root / "world" / "preferences.jsonl"
    lines = preferences.read_text("utf-8").splitlines(keepends=True)
    write_text(preferences, "".join(lines[: foundation.pairs]))
    if not (root / "reward" / "model.safetensors").is_file():
        overlays = _stage_overlays(stages, plan, *foundation.overlays)
        # the arms' configurations name the folder
        unnamed = write_config(root, "unnamed", {"suffix": []})
        stages.fit_reward("reward.yaml", *overlays, unnamed)


def train_arm(stages: Quickstart, plan: Plan, arm: Arm) -> None:
    """Train with PPO, from the newest checkpoint if there is one, and evaluate the policy."""
    folder = stages.root / arm.name
    if arm.pretrained and not (stages.root / "pretrained" / "model.safetensors").is_file():
        pretrain(stages.root, plan.seed, trial=plan.trial)
    if not (folder / "model.safetensors").is_file():
        configs = [
            write_config(stages.root, f"{arm.name}_{number}", config)
            for number, config in enumerate(plan.configs())
        ]
        stages.fit_ppo(configs, "--name", arm.name, "--ckpt_path", "last")
    if "preferences" in arm.evaluations:
        evaluate_preferences(stages, folder)


def evaluate_preferences(stages: Quickstart, policy: Path) -> None:
    """Sample from SFT and a policy as the paper does for its evaluation, and keep the responses."""
    from lit_rlhf.tools.commands.evaluate import EvaluateOptions, evaluate

    options = EvaluateOptions(
        policies=[str(stages.root / "sft"), str(policy)],
        prompts=str(stages.root / "world" / "prompts_heldout.jsonl"),
        rewards={"lit_rlhf.tools.lab.gold:gold_reward": 1.0},
        responses=str(policy / "responses.jsonl"),
        output=str(policy / "evaluation.json"),
        max_new_tokens=48,
        seed=stages.seed,
    )
    evaluate(options)


def pretrain(root: Path, seed: int, trial: bool = False) -> None:
    """Train the world's untrained model as a language model of text that no other stage has.

    One dialogue follows another without an end, and each token counts, so the model knows the
    language and goes on after an answer. It is written to the folder `pretrained`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    world = read_world(root / "world")
    rng = random.Random(f"pretraining {seed}")
    tokenizer = AutoTokenizer.from_pretrained(root / "world" / "base")
    model = AutoModelForCausalLM.from_pretrained(root / "world" / "base")
    text = "".join(
        f"{render_prompt(prompt)} {world.sample_demonstration(prompt, rng)}"
        for prompt in world.sample_prompts(
            100 if trial else PRETRAINING["documents"], seed=seed + 2
        )
    )
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    blocks = ids[: len(ids) // PRETRAINING["block"] * PRETRAINING["block"]]
    blocks = blocks.view(-1, PRETRAINING["block"])
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)  # SFT's learning rate
    epochs = 1 if trial else PRETRAINING["epochs"]
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in blocks[torch.randperm(len(blocks))].split(PRETRAINING["batch"]):
            optimizer.zero_grad()
            model(batch, labels=batch).loss.backward()
            optimizer.step()
        rates.step()
    model.save_pretrained(root / "pretrained")
    tokenizer.save_pretrained(root / "pretrained")


def resize_base(folder: Path, hidden: int, seed: int) -> None:
    """Replace the world's untrained model by one of another hidden size."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": hidden, "intermediate_size": 4 * hidden})
    config.head_dim = hidden // config.num_attention_heads
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def write_config(root: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write a configuration into the folder of a foundation; JSON is YAML too."""
    return write_text(root / "configs" / f"{name}.yaml", json.dumps(content) + "\n")


# --- the processes


def start(plan: Plan) -> subprocess.Popen[bytes]:
    """Start the process of a run, with one thread; its output goes to the plan's log."""
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    with plan.log.open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "experiments", "reproduce", "train", plan.part.name),
                *(str(plan.output_dir.resolve()), str(plan.results.resolve())),
                *("--seed", str(plan.seed)),
                *(("--trial", "true") if plan.trial else ()),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def find_plan(name: str, seed: int, output_dir: str, results: str, trial: bool) -> Plan:
    """The plan that `start` hands to its process."""
    parts: dict[str, Foundation | Arm] = {**arms_by_name(), **foundations_by_name()}
    return Plan(parts[name], seed, Path(output_dir), Path(results), trial)
