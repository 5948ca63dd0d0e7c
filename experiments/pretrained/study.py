"""SmolLM2-135M through all stages on HH-RLHF: what each stage does to a pretrained model.

    python -m experiments pretrained run runs/smollm2/base FOLDER
    python -m experiments pretrained page

`FOLDER` holds the files of `FILES`. `run` does the steps of five parts, each a process: SFT; reward
models with and without LM imitation, and a gold reward model with other and more data; PPO-max
beside vanilla PPO, judged by the gold model, which neither is trained on (the method of Gao et al.,
arXiv 2210.10760); the collapse detector on these runs; and LoRA. A step that is finished is not
repeated, and one that was interrupted resumes from its newest checkpoint. `page` writes
`docs/pretrained.md`, its figure, and all tables from the results.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import yaml
from torchmetrics.functional import spearman_corrcoef

from experiments.device import device_name
from experiments.frame import DOCS, IMAGES, Documents
from experiments.pretrained.page import draw, format_page, format_tables
from experiments.processes import (
    CONFIGS,
    Step,
    fit_step,
    read_watched_run,
    run_missing_steps,
)
from experiments.results_file import read_lines, read_run, read_runs, write_run
from lit_callbacks import read_logged_steps
from lit_rlhf.data import (
    DataSource,
    DemonstrationDataModule,
    PreferenceRecord,
    collate_tokens,
    load_records,
    split_records,
)
from lit_rlhf.files import write_json_lines, write_text
from lit_rlhf.forward import target_logprobs
from lit_rlhf.models import load_causal_lm, load_tokenizer

RESULTS = Path(__file__).with_name("results.jsonl")
TABLES = RESULTS.with_suffix(".md")
PAGE = DOCS / "pretrained.md"
FIGURE = IMAGES / "pretrained.svg"
FILES = {
    "helpful": "helpful_base_test.jsonl.gz",
    "sampled": "helpful_rejection_sampled_test.jsonl.gz",
}
"""Files of HH-RLHF by the name of the source; `sampled` is helpful-rejection-sampled."""
ON_POLICY = ["--temperature", "1", "--top_p", "1", "--repetition_penalty", "1"]
"""Options that sample from the policy itself."""
SPLIT_SEED = 0
GOLD_SEED = 1000
"""Seed of the gold reward model's head and of the order of its data."""
LORA = {"lora_rank": 16, "lora_alpha": 32}
LORA_RATE = 10.0
"""Learning rate of adapters over full fine-tuning's."""
FASTER_RUNS = {"ppo_fast": 5.0, "ppo_faster": 20.0}
"""Learning rates of the runs of part 4 that are to leave SFT farther, over vanilla PPO's."""
CURVES = (
    "rollout/score/reward",
    "rollout/score/gold",
    "rollout/kl",
    "rollout/response_length",
    "rollout/perplexity",
    "rollout/entropy",
    "rollout/distinct_2",
    "rollout/truncation_rate",
)

JUDGED_PROXY = {"reward": 1.0, "gold": 0.0}
"""Weights of PPO's rewards: the gold model judges, and is never trained on."""

Precision = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True)
class Sizes:
    """How much data and how many iterations there are.

    Attributes:
        gold_pairs: Pairs of the gold reward model.
        proxy_pairs: Pairs of the other reward models. SFT trains on their chosen responses, and
            PPO on their prompts.
        val_pairs: Pairs for validation during training.
        test_pairs: Pairs for the figures of parts 1, 2 and 5; part 3 uses their prompts.
        max_response: Longest response of a pair, in tokens; longer ones are left out.
        iterations: Iterations of PPO.
        prompts: Prompts of each evaluation of policies.
        max_new_tokens: Longest response of a policy.
    """

    gold_pairs: int = 2000
    proxy_pairs: int = 1200
    val_pairs: int = 96
    test_pairs: int = 500
    max_response: int = 128
    iterations: int = 32
    prompts: int = 128
    max_new_tokens: int = 48


@dataclass(frozen=True)
class Benchmark:
    """The steps of the benchmark in a folder.

    Attributes:
        root: Folder for all files.
        base: Folder of the pretrained model.
        data: Folder with the files of `FILES`.
        sizes: Data and iterations.
        precision: The trainer's precision.
    """

    curves: ClassVar[tuple[str, ...]] = CURVES
    """Metrics of rollouts that are kept of a PPO run."""

    root: Path
    base: str
    data: str
    sizes: Sizes
    precision: Precision = "32-true"

    def write_data(self) -> None:
        """Write the parts of the data, split by prompt, unless they are there."""
        if (self.root / "data" / "split.json").is_file():
            return
        sources = [DataSource(f"{self.data}/{file}", name=name) for name, file in FILES.items()]
        records = load_records("preference", sources, on_bad_record="skip")
        tokenizer = load_tokenizer(self.base)
        sizes = self.sizes

        def is_short(record: PreferenceRecord) -> bool:
            texts = [record.chosen, record.rejected]
            tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return max(map(len, tokens)) <= sizes.max_response

        short = [record for record in records if is_short(record)]
        # one prompt after the other, each set by the share of what is left
        left = short
        parts = {}
        for name in ("test", "val", "proxy", "gold"):
            n_wanted = getattr(sizes, f"{name}_pairs")
            if n_wanted > len(left):
                raise ValueError(
                    f"sizes.{name}_pairs: expected at most the {len(left)} pairs that the parts "
                    f"before it leave of {len(short)}, got {n_wanted}"
                )
            test_fraction = n_wanted / (len(left) + 1)
            splits = split_records(
                left, val_fraction=0.0, test_fraction=test_fraction, seed=SPLIT_SEED
            )
            left = splits.train
            parts[name] = splits.test
        for name, part in parts.items():
            for source in FILES:
                rows = (
                    {
                        "prompt": [{"role": m.role, "content": m.content} for m in record.prompt],
                        "chosen": record.chosen,
                        "rejected": record.rejected,
                    }
                    for record in part
                    if record.source == source
                )
                write_json_lines(self.path("data", name, f"{source}.jsonl"), rows)
        prompts = [
            {"prompt": [{"role": m.role, "content": m.content} for m in record.prompt]}
            for record in parts["test"]
        ]
        write_json_lines(self.path("data", "test_prompts.jsonl"), prompts[: sizes.prompts])
        counts = {
            name: {source: sum(r.source == source for r in part) for source in FILES}
            for name, part in parts.items()
        }
        counts["all"] = {source: sum(r.source == source for r in records) for source in FILES}
        write_text(self.path("data", "split.json"), json.dumps(counts, indent=1) + "\n")

    def path(self, *parts: str) -> Path:
        """A path in the folder."""
        return self.root.joinpath(*parts)

    def steps(self, seeds: Sequence[int]) -> list[Step]:
        """All steps, in an order in which each has what it needs.

        Args:
            seeds: Seeds of part 3.
        """
        steps = [
            self.measure("base", 1, self.base),
            self.fit("sft", 1, "sft", self.base),
            self.measure("sft", 1, str(self.path("sft"))),
        ]
        for name, options in (("reward", {}), ("reward_no_lm", {"lm_coef": 0.0})):
            steps += [self.fit(name, 2, "reward", "sft", **options), self.report(name, 2)]
        steps += [self.fit("gold", 2, "reward", "sft", head_seed=GOLD_SEED), self.report("gold", 2)]
        steps += [
            self.fit("sft_lora", 5, "sft", self.base, network=LORA),
            self.measure("sft_lora", 5, str(self.path("sft_lora"))),
            self.fit("reward_lora", 5, "reward", "sft", network=LORA),
            self.report("reward_lora", 5),
        ]
        for seed in seeds:
            runs = (f"ppo_max_{seed}", f"ppo_vanilla_{seed}")
            steps += [self.fit_ppo(name, 3, seed) for name in runs]
            steps.append(self.evaluate(f"policies_{seed}", 3, ("sft", *runs), seed))
        first = seeds[0]
        second = seeds[1:2]
        faster_runs = [f"{name}_{first}" for name in FASTER_RUNS]
        steps += [
            self.fit_ppo(f"{name}_{first}", 4, first, factor)
            for name, factor in FASTER_RUNS.items()
        ]
        faster = FASTER_RUNS["ppo_faster"]
        steps += [self.fit_ppo(f"ppo_faster_{seed}", 4, seed, faster) for seed in second]
        return [*steps, self.evaluate(f"faster_policies_{first}", 4, ("sft", *faster_runs), first)]

    def measure(self, name: str, part: int, model: str) -> Step:
        """A step that measures the perplexity of the chosen responses of the test pairs."""
        output = self.path("measures", f"{name}.json")
        test = str(self.path("data", "test"))
        command = ["-m", "experiments", "pretrained", "perplexity", model, test, str(output)]
        return Step(f"perplexity_{name}", part, command, lambda: read_json(output))

    def fit(self, name: str, part: int, stage: str, start: str, **options: Any) -> Step:
        """A step that trains an SFT or reward model.

        Args:
            name: Name of the run.
            part: Number of its part.
            stage: `sft` or `reward`: the configuration in `configs/smollm2`.
            start: Folder of the model that it starts from, or the name of a run.
            **options: Further options of the module.
        """
        data: dict[str, Any] = {"train_sources": self.sources(self.part_of(name))}
        if name == "gold":
            data["seed"] = GOLD_SEED
        if "network" in options:
            rate = read_config(stage)["model"]["init_args"]["optimizer"]["learning_rate"]
            options["optimizer"] = {"learning_rate": LORA_RATE * rate}
        options["model_path"] = str(self.path(start)) if start == "sft" else start
        return self.train(name=name, part=part, stage=stage, options=options, data=data, trainer={})

    def part_of(self, name: str) -> str:
        """The part of the data that a model learns from."""
        return "gold" if name == "gold" else "proxy"

    def fit_ppo(
        self,
        name: str,
        part: int,
        seed: int,
        factor: float = 1.0,
        *,
        rewards: Mapping[str, float] = JUDGED_PROXY,
        options: Mapping[str, Any] | None = None,
        callbacks: Sequence[Mapping[str, Any]] = (),
    ) -> Step:
        """A step that trains a policy: PPO-max, or vanilla PPO with all tricks off.

        Args:
            name: Name of the step; one that begins with `ppo_max` is PPO-max.
            part: Number of its part.
            seed: Seed of the run and of the order of its prompts.
            factor: Both learning rates over the configuration's.
            rewards: Weights of reward models by the names of their runs. One of weight 0 is logged
                and never trained on.
            options: Further options of the module.
            callbacks: Further callbacks of the trainer.
        """
        options = {
            "model_path": str(self.path("sft")),
            "rewards": {str(self.path(run)): weight for run, weight in rewards.items()},
            "sampling": {"max_new_tokens": self.sizes.max_new_tokens},
            "seed": seed,
            **(options or {}),
        }
        settings = read_config("ppo")
        if not name.startswith("ppo_max"):
            vanilla = read_config("ppo_vanilla", "quickstart")["model"]["init_args"]
            options |= {key: value for key, value in vanilla.items() if key != "output_dir"}
        for network in ("policy_optimizer", "critic_optimizer"):
            rate = factor * settings["model"]["init_args"][network]["learning_rate"]
            options[network] = {**options.get(network, {}), "learning_rate": rate}
        batch = settings["data"]["init_args"]["batch_size"]
        data = {
            "train_sources": self.sources("proxy"),
            "samples_per_epoch": self.sizes.iterations * batch,
            "seed": seed,
        }
        metrics = [*(f"rollout/score/{run}" for run in rewards), "rollout/kl"]
        bar = {
            "class_path": "lit_callbacks.StageProgressBar",
            "init_args": {"stage": "PPO", "metrics": metrics},
        }
        # The detector only watches: the whole run is to be seen.
        trainer = {
            "callbacks": [bar, {"class_path": "lit_callbacks.CollapseDetector"}, *callbacks],
            "val_check_interval": self.sizes.iterations,
        }
        return self.train(
            name=name, part=part, stage="ppo", options=options, data=data, trainer=trainer
        )

    def train(
        self,
        *,
        name: str,
        part: int,
        stage: str,
        options: Mapping[str, Any],
        data: Mapping[str, Any],
        trainer: Mapping[str, Any],
    ) -> Step:
        """A step of `lit_rlhf fit`, which resumes from its newest checkpoint.

        Args:
            name: Name of the step and of its folder.
            part: Number of its part.
            stage: Name of a configuration in `configs/smollm2`.
            options: Options of the module.
            data: Options of the datamodule.
            trainer: Options of the trainer.
        """
        return fit_step(
            name=name,
            part=part,
            folder=self.root,
            config=CONFIGS / "smollm2" / f"{stage}.yaml",
            model=options,
            data={"val_fraction": 0.0, "val_sources": self.sources("val"), **data},
            trainer={"precision": self.precision, **trainer},
            collect=lambda: self.read_run(name),
        )

    def report(self, model: str, part: int, language_model: str = "") -> Step:
        """A step that measures a reward model on the test pairs, beside a language model."""
        output = self.path("measures", f"report_{model}")
        command = ["-m", "lit_rlhf.cli.main", "report", "reward", "--model", str(self.path(model))]
        command += ["--language_model", language_model or str(self.path("sft")), "--preferences"]
        command += [f"{s}={self.path('data', 'test', f'{s}.jsonl')}" for s in FILES]
        command += ["--output", str(output), "--max_length", str(self.max_length())]

        def collect() -> dict[str, Any]:
            report = read_json(output / "report.json")
            keys = (
                "accuracy",
                "by_source",
                "gain",
                "length_baseline",
                "calibration_error",
                "difference_by_length",
                "perplexity",
                "pairwise_loss",
            )
            return {key: report[key] for key in keys}

        return Step(f"report_{model}", part, command, collect)

    def evaluate(self, name: str, part: int, policies: Sequence[str], seed: int) -> Step:
        """A step that compares policies by the proxy and the gold model, at temperature 1."""
        output = self.path("measures", f"{name}.json")
        responses = self.path("measures", f"{name}.jsonl")
        command = self.evaluate_command(name, policies, seed)

        def collect() -> dict[str, Any]:
            report = read_json(output)
            rows = read_lines(responses)
            return {
                "n_prompts": report["n_prompts"],
                "agreement": correlate_scores(rows, policies[0]),
                "policies": {
                    Path(path).name: {key: value for key, value in row.items() if key != "path"}
                    for path, row in report["policies"].items()
                },
                "openings": {policy: common_opening(rows, policy) for policy in policies},
                "responses": first_responses(rows),
            }

        return Step(name, part, command, collect)

    def evaluate_command(
        self,
        name: str,
        policies: Sequence[str],
        seed: int,
        *,
        rewards: Sequence[str] = tuple(JUDGED_PROXY),
        prompts: str = "test_prompts",
        batch_size: int = 16,
    ) -> list[str]:
        """The words of `lit_rlhf evaluate`, which writes `NAME.json` and all responses.

        Args:
            name: Name of the files in `measures`.
            policies: Names of the policies' runs.
            seed: Seed of the samples.
            rewards: Names of the reward models' runs.
            prompts: Name of the file of prompts in `data`.
            batch_size: Prompts per batch.
        """
        sources = {str(self.path(run)): 1.0 for run in rewards}
        command = ["-m", "lit_rlhf.cli.main", "evaluate", "--policies"]
        command += [str(self.path(policy)) for policy in policies]
        command += ["--prompts", str(self.path("data", f"{prompts}.jsonl"))]
        command += ["--rewards", json.dumps(sources), "--seed", str(seed)]
        command += ["--batch_size", str(batch_size)]
        command += ["--max_new_tokens", str(self.sizes.max_new_tokens)]
        command += ON_POLICY
        command += ["--output", str(self.path("measures", f"{name}.json"))]
        return [*command, "--responses", str(self.path("measures", f"{name}.jsonl"))]

    def sources(self, part: str) -> list[dict[str, str]]:
        """The files of a part of the data, as a configuration names them."""
        return [
            {"path": str(self.path("data", part, f"{source}.jsonl")), "name": source}
            for source in FILES
        ]

    def max_length(self) -> int:
        """Longest pair that reward models are trained on, in tokens."""
        return int(read_config("reward")["data"]["init_args"]["max_length"])

    def read_run(self, name: str) -> dict[str, Any]:
        """The peak memory of a training run, and for PPO the curves and the detector's verdict."""
        log = self.path("logs", name)
        steps = read_logged_steps(str(log)).values()
        keys = sorted({key for step in steps for key in step if key.startswith("val/")})
        last = {key: [step[key] for step in steps if key in step][-1] for key in keys}
        memory = [v for step in steps for key, v in step.items() if key.startswith("memory/")]
        result = {"validation": last, "peak_gib": max(memory, default=0.0)}
        return result | read_watched_run(log, self.curves) if name.startswith("ppo") else result


def correlate_scores(rows: Sequence[dict[str, Any]], policy: str) -> float:
    """Rank correlation of the proxy's and the gold model's scores of a policy's responses."""
    scores = [row["scores"] for row in rows if Path(row["policy"]).name == policy]
    proxy, gold = (torch.tensor([row[name] for row in scores]) for name in ("reward", "gold"))
    return float(spearman_corrcoef(proxy, gold))


def common_opening(rows: Sequence[dict[str, Any]], policy: str) -> dict[str, Any]:
    """The two words that most responses of a policy begin with, and the share of them."""
    responses = [row["response"] for row in rows if Path(row["policy"]).name == policy]
    openings = Counter(" ".join(response.split()[:2]) for response in responses)
    words, count = openings.most_common(1)[0]
    return {"words": words, "share": count / len(responses)}


def first_responses(rows: list[dict[str, Any]], prompts: int = 4) -> list[dict[str, Any]]:
    """The responses of all policies to the first prompts, unedited."""
    shown_responses: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = {"prompt": row["prompt"], "responses": {}}
        entry = shown_responses.setdefault(row["prompt_text"], entry)
        entry["responses"][Path(row["policy"]).name] = row["response"]
    return list(shown_responses.values())[:prompts]


def read_json(path: Path) -> Any:  # noqa: ANN401  # whatever the file holds
    """Read a JSON file."""
    return json.loads(path.read_text("utf-8"))


def read_config(name: str, folder: str = "smollm2") -> Any:  # noqa: ANN401  # a tree of settings
    """Read a configuration of the project."""
    return yaml.safe_load((CONFIGS / folder / f"{name}.yaml").read_text("utf-8"))


def perplexity(model: str, pairs: str, output: str, draws: int = 1000) -> None:
    """Measure the perplexity of the chosen responses of pairs, with its 95 % interval.

    Args:
        model: Folder of a language model.
        pairs: Folder with files of pairs.
        output: JSON file for the figures.
        draws: Draws of the bootstrap over dialogues.
    """
    settings = read_config("sft")["data"]["init_args"]
    data = DemonstrationDataModule(
        [DataSource(path) for path in sorted(Path(pairs).glob("*.jsonl"))],
        tokenizer=load_tokenizer(model),
        max_length=settings["max_length"],
        max_prompt_length=settings["max_prompt_length"],
        on_bad_record="skip",
    )
    data.setup("fit")
    examples = data.examples["train"]
    network = load_causal_lm(model).eval()
    losses = []
    counts = []
    with torch.inference_mode():
        for start in range(0, len(examples), 16):
            batch = collate_tokens(
                examples[start : start + 16], data.require_encoder().pad_token_id
            )
            mask = batch.completion_mask
            logprobs = target_logprobs(network, batch.input_ids, batch.attention_mask, mask)
            losses.append(-logprobs.sum(1).double().numpy())
            counts.append(mask.sum(1).numpy())
    loss = np.concatenate(losses)
    count = np.concatenate(counts)
    rows = np.random.default_rng(0).integers(len(loss), size=(draws, len(loss)))
    low, high = np.exp(np.quantile(loss[rows].sum(1) / count[rows].sum(1), [0.025, 0.975]))
    figures = {
        "perplexity": float(np.exp(loss.sum() / count.sum())),
        "low": float(low),
        "high": float(high),
        "dialogues": len(loss),
        "tokens": int(count.sum()),
    }
    write_text(output, json.dumps(figures, indent=1) + "\n")


def run(
    base: str,
    data: str,
    *,
    output_dir: str = "runs/pretrained",
    sizes: Sizes = Sizes(),
    parts: tuple[int, ...] = (1, 2, 5, 3, 4),
    seeds: tuple[int, ...] = (0, 1, 2),
    threads: int = 2,
    precision: Precision = "32-true",
    results: str = str(RESULTS),
) -> None:
    """Do the steps that are missing, in the order of the parts.

    Args:
        base: Folder of the pretrained model.
        data: Folder with the files of HH-RLHF.
        output_dir: Folder for all files.
        sizes: Data and iterations.
        parts: Numbers of the parts, 1 to 5. Parts 2 to 5 need those before them: 1 for all, 2 for 3
            and 4.
        seeds: Seeds of part 3.
        threads: Threads of a step.
        precision: The trainer's precision. With bf16-mixed a step takes 0.6 to 0.7 of the time,
            on a processor with instructions for it (`avx512_bf16` or `amx_bf16`).
        results: File of the results.

    Raises:
        ValueError: If the results are of other sizes or another precision.
    """
    root = Path(output_dir).resolve()
    file = Path(results)
    benchmark = Benchmark(
        root, str(Path(base).resolve()), str(Path(data).resolve()), sizes, precision
    )
    benchmark.write_data()
    settings = {
        "sizes": asdict(sizes),
        "precision": precision,
        "split": read_json(root / "data" / "split.json"),
        "machine": {"cores": os.cpu_count(), "processor": device_name("cpu")},
        "versions": {
            "torch": torch.__version__.partition("+")[0],
            "python": platform.python_version(),
        },
    }
    earlier = read_run(file, "settings")
    if earlier is None:
        write_run(file, "settings", settings)
        earlier = settings
    for name in ("sizes", "precision"):
        if earlier[name] != settings[name]:
            raise ValueError(
                f"{name}: expected {earlier[name]}, as in {file}, or another file of results; "
                f"got {settings[name]}"
            )
    steps = benchmark.steps(seeds)
    chosen = [step for part in parts for step in steps if step.part == part]
    for step, row in run_missing_steps(chosen, read_runs(file), folder=root, threads=threads):
        write_run(file, step.name, row)
        # Gigabytes, which only an interrupted step needs. Its model is elsewhere.
        shutil.rmtree(root / "logs" / step.name / "checkpoints", ignore_errors=True)


def documents() -> Documents:
    """The page, its figure and all tables, from the committed results."""
    results = read_runs(RESULTS)
    return {
        PAGE: format_page(results),
        TABLES: format_tables(results),
        FIGURE: lambda: draw(results),
    }


COMMANDS = (run, perplexity)
