"""Train and judge all seeds; finished steps are not repeated, interrupted ones resume."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.frame import DOCS, IMAGES, Documents
from experiments.known_truth.criterion import (
    CHOOSING_SEEDS,
    DECIDING_SEEDS,
    SAMPLES,
    VERSION,
    judge,
    read_arms,
)
from experiments.known_truth.page import draw, format_page, format_tables
from experiments.known_truth.rule import (
    PARTS,
    canned_share,
    count_words,
    is_valid,
    label,
    parts,
    shuffled_prompts,
)
from experiments.processes import (
    CONFIGS,
    Step,
    fit_step,
    read_watched_run,
    run_missing_steps,
    say,
)
from experiments.results_file import read_lines, read_run, read_runs, write_run
from lit_callbacks import read_logged_steps
from lit_rlhf.files import write_json_lines

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = DOCS / "known_truth.md"
POLICIES = ("sft", "ppo_vanilla", "ppo_max")
ANSWERS = 4
"""Samples of a prompt of which a pair is drawn."""
PTX_COEF = 0.1
"""Weight of the language-model loss in configs/ppo."""
RULE = "experiments.known_truth.rule"
CURVES = (
    "rollout/score",
    "rollout/gold",
    "rollout/kl",
    "rollout/response_length",
    "rollout/perplexity",
    "rollout/distinct_2",
    "rollout/truncation_rate",
)
UNPENALIZED = ["--repetition_penalty", "1"]
ON_POLICY = ["--temperature", "1", "--top_p", "1", *UNPENALIZED]
"""Options that sample from the policy itself."""


@dataclass(frozen=True)
class Recipe:
    """What was chosen on seeds 0 and 1, and is the same for all arms.

    Attributes:
        demonstrations: Prompts that the base model answers for a first SFT model, and as many
            again that this one answers; the valid ones that are short are what SFT learns.
        candidates: Samples for each of these prompts.
        candidate_temperature: Temperature of the base model's; at 1, 12 % are valid, here 37 %.
        candidate_top_p: Their nucleus.
        longest_demonstration: Most words of a demonstration.
        pairs: Prompts of the reward model's preferences; deliberately few.
        iterations: Iterations of PPO, of 16 prompts each.
        held_out: Prompts of the evaluation, with eight samples each.
        max_new_tokens: Longest response.
        trained_layers: Layers that are trained, from the top, in all stages.
        learning_rate: Learning rate of policy and critic in PPO.
        kl_coef: Weight of PPO-max's KL penalty; vanilla PPO has none.
        pretraining: Iterations, of `iterations`, in which PPO-max trains only its critic.
    """

    demonstrations: int = 192
    candidates: int = 8
    candidate_temperature: float = 0.7
    candidate_top_p: float = 0.9
    longest_demonstration: int = 16
    pairs: int = 150
    iterations: int = 40
    held_out: int = 64
    max_new_tokens: int = 40
    trained_layers: int = 8
    learning_rate: float = 3e-4
    kl_coef: float = 0.2
    pretraining: int = 3


class Steps:
    """Steps that share a folder."""

    def __init__(self, root: Path, name: str, base: str, seed: int, recipe: Recipe) -> None:
        self.root = root / name
        self.base = base
        self.seed = seed
        self.recipe = recipe
        self.demonstrations = str(root / "demonstrations" / "demonstrations.jsonl")
        self.root.mkdir(parents=True, exist_ok=True)
        prompts = shuffled_prompts()  # the same split for each seed
        sizes = (recipe.held_out, recipe.demonstrations, recipe.demonstrations, recipe.pairs)
        cuts = [0, *np.cumsum(sizes), len(prompts)]
        names = ("held_out", "first", "second", "pairs", "ppo")
        for name, start, end in zip(names, cuts, cuts[1:], strict=False):
            times = SAMPLES if name == "held_out" else 1
            rows = [{"prompt": prompt} for prompt in prompts[start:end] for _ in range(times)]
            self.write(f"{name}.jsonl", rows)

    def path(self, *names: str) -> str:
        """A path in the folder."""
        return str(self.root.joinpath(*names))

    def write(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Write a file of JSON lines."""
        write_json_lines(Path(self.path(name)), rows)

    def generate(
        self,
        *,
        name: str,
        model: str,
        prompts: str,
        samples: int,
        options: Sequence[str],
        collect: Callable[[], dict[str, Any]],
    ) -> Step:
        """A step that samples responses, and makes data of them once they are there.

        Args:
            name: Name of the step and of its file of responses.
            model: Folder of the model that is sampled.
            prompts: Name of the file of prompts.
            samples: Responses to each prompt.
            options: Further options of `lit_rlhf generate`.
            collect: Makes the data and returns the figures.
        """
        output = self.path(f"{name}.jsonl")
        command = ["-m", "lit_rlhf.cli.main", "generate", "--models", model, "--output", output]
        command += ["--prompts", self.path(f"{prompts}.jsonl"), "--seed", str(self.seed)]
        command += ["--responses_per_prompt", str(samples), *options, *self.cap()]
        return Step(name, 1, command, collect)

    def cap(self) -> list[str]:
        """The longest response, as an option."""
        return ["--max_new_tokens", str(self.recipe.max_new_tokens)]

    def read_samples(self, name: str) -> dict[str, list[str]]:
        """Responses by prompt."""
        responses: dict[str, list[str]] = {}
        for row in read_lines(self.path(f"{name}.jsonl")):
            responses.setdefault(row["prompt"][-1]["content"], []).append(row["response"])
        return responses

    def fit(self, name: str, stage: str, start: str, file: str) -> Step:
        """A step that trains an SFT or a reward model on a file, for three epochs."""
        options: dict[str, Any] = {"optimizer": {"learning_rate": 1e-4}}
        if stage == "reward":
            options["head_seed"] = self.seed
        return self.train(
            name=name,
            config=stage,
            start=start,
            options=options,
            data={"train_sources": [{"path": file}], "seed": self.seed},
            trainer={"max_epochs": 3},
        )

    def train(
        self,
        *,
        name: str,
        config: str,
        start: str,
        options: Mapping[str, Any],
        data: Mapping[str, Any],
        trainer: Mapping[str, Any],
    ) -> Step:
        """A step of `lit_rlhf fit`, which resumes from its newest checkpoint.

        Args:
            name: Name of the step and of its folder.
            config: Name of a configuration in `configs/smollm2`.
            start: Folder of the model that it starts from.
            options: Options of the module.
            data: Options of the datamodule.
            trainer: Options of the trainer.
        """
        network = {"trained_layers": self.recipe.trained_layers}
        sizes = {
            "val_fraction": 0.0 if config == "ppo" else 0.05,
            "max_length": 96,
            "max_prompt_length": 64,
        }
        return fit_step(
            name=name,
            folder=self.root,
            config=CONFIGS / "smollm2" / f"{config}.yaml",
            model={"model_path": start, "network": network, **options},
            data={**data, **sizes},
            trainer=trainer,
            collect=lambda: self.read_log(name),
        )

    def read_log(self, name: str) -> dict[str, Any]:
        """Curves and the detector's verdict of a PPO run; the last metrics of another."""
        log = Path(self.path("logs", name))
        if name.startswith("ppo"):
            return read_watched_run(log, CURVES)
        last: dict[str, float] = {}
        for scalars in read_logged_steps(str(log)).values():
            last |= {key: value for key, value in scalars.items() if key.startswith("val/")}
        return {"validation": last}


class Demonstrations(Steps):
    """What SFT learns, made once for all seeds by sampling twice and keeping what is valid."""

    def steps(self) -> list[Step]:
        """All steps in order."""
        cooler = ["--temperature", str(self.recipe.candidate_temperature)]
        cooler += ["--top_p", str(self.recipe.candidate_top_p), *UNPENALIZED]
        first = self.path("base_kept.jsonl")
        second = self.path("sft")
        return [
            self.sample("base", self.base, "first", cooler),
            self.fit("sft", "sft", self.base, first),
            self.sample("own", second, "second", ON_POLICY),
        ]

    def sample(self, name: str, model: str, prompts: str, options: Sequence[str]) -> Step:
        """A step that samples a model and keeps what is valid."""
        return self.generate(
            name=name,
            model=model,
            prompts=prompts,
            samples=self.recipe.candidates,
            options=options,
            collect=lambda: self.keep(name),
        )

    def keep(self, name: str) -> dict[str, Any]:
        """Keep what is valid and short; demonstrations are all that was kept so far."""
        rows = []
        samples = self.read_samples(name)
        for prompt, responses in samples.items():
            for response in sorted({text.strip() for text in responses}):
                if count_words(response) <= self.recipe.longest_demonstration and is_valid(
                    prompt, response
                ):
                    rows.append({"prompt": prompt, "response": response})
        self.write(f"{name}_kept.jsonl", rows)
        files = [self.path(f"{part}_kept.jsonl") for part in ("base", "own")]
        demonstrations = [row for path in files if Path(path).exists() for row in read_lines(path)]
        write_json_lines(Path(self.demonstrations), demonstrations)
        return {"prompts": len(samples), "kept": len(rows), "demonstrations": len(demonstrations)}


class Seed(Steps):
    """All steps of a seed: models, policies and their judgement."""

    def steps(self) -> list[Step]:
        """All steps in order."""
        sft = self.path("sft")
        return [
            self.fit("sft", "sft", self.base, self.demonstrations),
            self.generate(
                name="answers",
                model=sft,
                prompts="pairs",
                samples=ANSWERS,
                options=ON_POLICY,
                collect=self.write_pairs,
            ),
            self.fit("reward", "reward", sft, self.path("preferences.jsonl")),
            self.fit_ppo("ppo_vanilla"),
            self.fit_ppo("ppo_max"),
            self.evaluate(),
        ]

    def write_pairs(self) -> dict[str, Any]:
        """Label a random pair of valid responses for each prompt that has two, of other scores."""
        rows = []
        rng = random.Random(self.seed)
        for prompt, responses in self.read_samples("answers").items():
            rng.shuffle(responses)
            responses = [text for text in responses if is_valid(prompt, text)]
            scores = label([prompt] * len(responses), responses)
            second = next((i for i, s in enumerate(scores) if s != scores[0]), None)
            if second is not None:
                better, worse = (0, second) if scores[0] > scores[second] else (second, 0)
                rows.append(
                    {
                        "prompt": prompt,
                        "chosen": responses[better].strip(),
                        "rejected": responses[worse].strip(),
                    }
                )
        self.write("preferences.jsonl", rows)
        return {"pairs": len(rows)}

    def fit_ppo(self, name: str, ptx: str = "", **more: Any) -> Step:
        """A step that trains a policy: PPO-max, or vanilla PPO with all tricks off.

        `ptx` is a file of text for the language-model loss (Eq. 17), `more` options of the module.
        """
        recipe = self.recipe
        rate = {"learning_rate": recipe.learning_rate}
        options: dict[str, Any] = {
            "rewards": {self.path("reward"): 1.0},
            "gold_reward": f"{RULE}:truth",
            "sampling": {"max_new_tokens": recipe.max_new_tokens},
            "policy_optimizer": rate,
            "critic_optimizer": rate,
            "seed": self.seed,
            **more,
        }
        if name.startswith("ppo_max"):
            options["reward_shaping"] = {"kl_coef": recipe.kl_coef, "clip": 3.0}
            options["critic_pretraining"] = {"iterations": recipe.pretraining}
        else:
            vanilla = yaml.safe_load((CONFIGS / "quickstart" / "ppo_vanilla.yaml").read_text())
            for key, value in vanilla["model"]["init_args"].items():
                if key != "output_dir":
                    options[key] = {**options.get(key, {}), **value}
        data = {
            "train_sources": [{"path": self.path("ppo.jsonl")}],
            "samples_per_epoch": 16 * recipe.iterations,
            "seed": self.seed,
        }
        if ptx:
            options.setdefault("loss", {})["ptx_coef"] = PTX_COEF
            data["ptx_sources"] = [{"path": ptx}]
        # The detector only watches: the whole run is to be seen.
        trainer = {
            "callbacks": [{"class_path": "lit_callbacks.CollapseDetector"}],
            "val_check_interval": recipe.iterations,
        }
        return self.train(
            name=name,
            config="ppo",
            start=self.path("sft"),
            options=options,
            data=data,
            trainer=trainer,
        )

    def evaluate(self) -> Step:
        """A step that samples the held-out prompts and scores them by proxy and truth."""
        output = self.path("policies.jsonl")
        rewards = {self.path("reward"): 1.0, f"{RULE}:truth": 1.0}
        command = ["-m", "lit_rlhf.cli.main", "evaluate", "--policies"]
        command += [self.path(policy) for policy in POLICIES]
        command += ["--prompts", self.path("held_out.jsonl"), "--rewards", json.dumps(rewards)]
        command += ["--seed", str(self.seed), "--batch_size", "32", *ON_POLICY, *self.cap()]
        command += ["--output", self.path("policies.json"), "--responses", output]
        return Step("policies", 1, command, lambda: self.summarize(output))

    def summarize(self, output: str) -> dict[str, Any]:
        """Scores, parts of the rule and samples of each policy."""
        rows = read_lines(output)
        by_policy: dict[str, Any] = {}
        for policy in POLICIES:
            policy_rows = [row for row in rows if Path(row["policy"]).name == policy]
            prompts = [row["prompt"][-1]["content"] for row in policy_rows]
            parts_of_truth = [
                parts(p, row["response"]) for p, row in zip(prompts, policy_rows, strict=True)
            ]
            shown = random.Random(self.seed).sample(range(len(policy_rows)), 8)
            by_policy[policy] = {
                "proxy": [round(row["scores"]["reward"], 3) for row in policy_rows],
                "truth": [round(row["scores"]["truth"], 3) for row in policy_rows],
                "kl": float(np.mean([row["kl"] for row in policy_rows])),
                "length": float(np.mean([row["length"] for row in policy_rows])),
                "cut_off": float(np.mean([not row["ended"] for row in policy_rows])),
                "canned": canned_share(prompts, [row["response"] for row in policy_rows]),
                "parts": {key: float(np.mean([k[key] for k in parts_of_truth])) for key in PARTS},
                "samples": [[prompts[n], policy_rows[n]["response"]] for n in shown],
            }
        return by_policy


def run(
    base: str,
    *,
    output_dir: str = "runs/known_truth",
    seeds: tuple[int, ...] = (*CHOOSING_SEEDS, *DECIDING_SEEDS),
    recipe: Recipe = Recipe(),
    threads: int = 2,
    results: str = str(RESULTS),
) -> None:
    """Do the steps that are missing, and judge each seed that is complete.

    Args:
        base: Folder of SmolLM2-135M-Instruct.
        output_dir: Folder for all files of the runs.
        seeds: Seeds to train.
        recipe: Sizes and rates; other ones than the results have need another file of results.
        threads: Threads of a step.
        results: File of the results.
    """
    root, base = Path(output_dir).resolve(), str(Path(base).resolve())
    demonstrations = Demonstrations(root, "demonstrations", base, 0, recipe)
    of_seeds = [Seed(root, f"seed_{seed}", base, seed, recipe) for seed in seeds]
    all_runs: list[Demonstrations | Seed] = [demonstrations, *of_seeds]
    for runs in all_runs:
        name = runs.root.name
        record = read_run(Path(results), name) or {
            "criterion": VERSION,
            "recipe": asdict(recipe),
            "steps": {},
        }
        if record["recipe"] != asdict(recipe):
            raise ValueError(f"recipe: expected {record['recipe']}, as in {results}, got {recipe}")
        done = record["steps"]
        missing = run_missing_steps(runs.steps(), done, folder=runs.root, threads=threads)
        for step, row in missing:
            done[step.name] = row
            write_run(Path(results), name, record)
        if isinstance(runs, Seed):
            step_results = {name: step["result"] for name, step in record["steps"].items()}
            record["verdict"] = judge(read_arms(step_results))
            write_run(Path(results), name, record)
            say(f"{name}: {json.dumps(record['verdict']['holds'])}")


def documents() -> Documents:
    """The page, its figure, and all numbers and samples, from the committed results."""
    results = read_runs(RESULTS)
    return {
        PAGE: format_page(results),
        RESULTS.with_suffix(".md"): format_tables(results),
        IMAGES / "known_truth.svg": lambda: draw(results.values()),
    }


COMMANDS = (run,)
