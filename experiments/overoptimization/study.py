"""Over-optimization as Gao et al. and Coste et al. measured it, on SmolLM2-135M.

    python -m experiments overoptimization run BASE GOLD_BASE FOLDER
    python -m experiments overoptimization page

`BASE` is a folder with SmolLM2-135M-Instruct, `GOLD_BASE` one with Gemma 3 270M under the template
`hh`, and `FOLDER` holds HH-RLHF's files of `pretrained.FILES`. SFT and the gold model are trained
as in the experiment on people's preferences. SFT then answers 1,199 prompts of the proxies and 300
test prompts four times each at temperature 1. The gold model's score, less its slope on length,
labels two pairs of each prompt's responses. A proxy learns from 300 or 1,000 of 2,000 such pairs
for three epochs; the gate asks 400 pairs of the test prompts. PPO has the settings of people's
preferences: vanilla PPO and PPO-max, five times the learning rates of configs/smollm2, 100
iterations, responses of at most 64 tokens. A seed draws the pairs, the head and the order of the
proxy's data anew, and PPO's prompts and responses.

All training computes in bf16-mixed, and sampling and scoring for evaluation in bfloat16: a step of
SFT took 8 seconds instead of 29 beside other work, and 64 responses 28 CPU seconds instead of 39.

Gate and criterion are in `criterion`, which was committed before any of the runs. A step that is
finished is not repeated, and one that was interrupted resumes. Without an open gate PPO is not run;
`--pairs '[600,2000]'` then asks for more pairs, whose results are kept beside.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from experiments.frame import DOCS, IMAGES, Documents
from experiments.known_truth.rule import common_phrase_share, split_words
from experiments.overoptimization.criterion import (
    VERSION,
    Gate,
    Scores,
    agreement,
    correlation_within,
)
from experiments.overoptimization.labels import (
    Truth,
    as_matrix,
    draw_pairs,
    fit_truth,
    label_pairs,
    read_gold,
)
from experiments.overoptimization.page import EVERY, draw, format_page, format_tables
from experiments.preferences.study import FACTOR, SIZES, Preferences
from experiments.pretrained.study import FILES, GOLD_SEED, LORA, Precision, read_json
from experiments.processes import Step, run_missing_steps, say
from experiments.results_file import read_lines, read_run, read_runs, write_run
from lit_rlhf.data import DialogueEncoder, Message, PromptExample, pad_sequences
from lit_rlhf.files import write_json_lines, write_text
from lit_rlhf.functional import best_of_n, best_of_n_kl
from lit_rlhf.models import DType, ModelOptions, load_tokenizer
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import RolloutBatch
from lit_rlhf.tools.evaluation.outcomes import score_summary

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = DOCS / "overoptimization.md"
TABLES = RESULTS.with_suffix(".md")
FIGURE = IMAGES / "overoptimization.svg"
SEEDS = (0, 1, 2)
PAIRS = (300, 1000)
"""Pairs of the proxies."""
POOL = 2000
"""Labelled pairs that proxies' pairs are drawn from."""
TEST_PAIRS = 400
TEST_PROMPTS = 300
ANSWERS = 4
"""Responses of SFT to each prompt whose pairs are labelled."""
EPOCHS = 3
BEST_OF = (1, 2, 4, 8, 16, 32, 64)
END_SAMPLES = 8
LONGEST_PROMPT = 128
"""Tokens of a prompt that PPO reads, by configs/smollm2; longer ones lose their oldest turns."""
SHOWN = 8
"""Prompts whose responses are kept in the results, drawn by the seed."""
ARMS = ("ppo_vanilla", "ppo_max")
PRECISION: Precision = "bf16-mixed"
EVALUATION_DTYPE: DType = "bfloat16"


@dataclass(frozen=True)
class Proxy:
    """A reward model that learns the truth from labelled pairs.

    Attributes:
        pairs: Number of pairs.
        seed: Seed of the repetition.
    """

    pairs: int
    seed: int

    @property
    def tag(self) -> str:
        """The end of all names that belong to it."""
        return f"{self.pairs}_{self.seed}"

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"proxy_{self.tag}"


@dataclass(frozen=True)
class Overoptimization(Preferences):
    """The steps in a folder."""

    curves: ClassVar[tuple[str, ...]] = (
        "rollout/score",
        "rollout/kl",
        "rollout/response_length",
        "rollout/distinct_2",
    )

    def write_data(self) -> None:
        """Write the parts of the data, and the prompts whose responses are labelled."""
        super().write_data()
        held_out = {json.dumps(row["prompt"]) for row in self.read("data", "test_prompts")}
        test = [p for p in self.prompts_of("test") if json.dumps(p) not in held_out]
        parts = {"train": self.prompts_of("proxy"), "test": test[:TEST_PROMPTS]}
        for part, prompts in parts.items():
            rows = [{"prompt": prompt} for prompt in prompts]
            write_json_lines(self.path("data", f"labelled_{part}_prompts.jsonl"), rows)

    def read(self, *names: str) -> list[dict[str, Any]]:
        """Read a file of JSON lines in the folder, whose suffix is left out."""
        return read_lines(self.path(*names).with_suffix(".jsonl"))

    def prompts_of(self, part: str) -> list[Any]:
        """The different prompts of a part of the data, in a fixed random order."""
        texts = {json.dumps(row["prompt"]) for s in FILES for row in self.read("data", part, s)}
        ordered_texts = sorted(texts)
        random.Random(0).shuffle(ordered_texts)
        return [json.loads(text) for text in ordered_texts]

    # --- what all seeds share

    def common_steps(self) -> list[Step]:
        """The models of all seeds, the labels, and SFT's many samples."""
        gold = self.fit("gold", 1, "reward", self.gold_base, network=LORA, head_seed=GOLD_SEED)
        return [
            self.fit("sft", 1, "sft", self.base),
            gold,
            self.sample("labelled_test", samples=ANSWERS, collect=lambda: {}),
            self.sample("labelled_train", samples=ANSWERS, collect=self.write_labels),
            self.sample("best_of", samples=BEST_OF[-1], collect=self.describe_sft),
        ]

    def sample(self, name: str, *, samples: int, collect: Callable[[], dict[str, Any]]) -> Step:
        """A step that samples SFT and scores the responses by the gold model.

        Args:
            name: Name of the step and of its files.
            samples: Responses to each prompt.
            collect: Reads the figures once the process has ended.
        """
        prompts = "test_prompts" if name == "best_of" else f"{name}_prompts"
        command = self._compare_command(
            name, ["sft"], 0, rewards=["gold"], prompts=prompts, samples=samples
        )
        return Step(name, 1, command, collect)

    def _compare_command(
        self,
        name: str,
        policies: Sequence[str],
        seed: int,
        *,
        rewards: Sequence[str],
        samples: int,
        prompts: str = "test_prompts",
    ) -> list[str]:
        """Words as from `evaluate_command`, with prompts that are cut as in PPO.

        `samples` responses are sampled for each prompt, at most 64.
        """
        # 64 sequences in a batch, whatever the number of samples
        command = self.evaluate_command(
            name, policies, seed, rewards=rewards, prompts=prompts, batch_size=64 // samples
        )
        command += ["--samples_per_prompt", str(samples), "--dtype", EVALUATION_DTYPE]
        return [*command, "--max_prompt_length", str(LONGEST_PROMPT)]

    def write_labels(self) -> dict[str, Any]:
        """Fit the slope on length, and label the pairs for training and for the gate."""
        train = self.read("measures", "labelled_train")
        graded = read_gold(train, samples=ANSWERS)
        truth = fit_truth(gold=graded.gold, lengths=graded.lengths)
        write_text(self.path("data", "truth.json"), json.dumps(asdict(truth)) + "\n")
        counts = {}
        for part, most in (("train", POOL), ("test", TEST_PAIRS)):
            rows = self.read("measures", f"labelled_{part}")
            truths = truth.of_rows(rows, samples=ANSWERS).ravel().tolist()
            pairs = label_pairs(rows, truths)
            random.Random(0).shuffle(pairs)
            counts[part] = {"possible": len(pairs), "used": min(most, len(pairs))}
            write_json_lines(self.path("data", f"{part}_pairs.jsonl"), pairs[:most])
        taken_out = truth.of(gold=graded.gold, lengths=graded.lengths)
        return {
            "truth": asdict(truth),
            "pairs": counts,
            "spread within prompts": round(float(taken_out.std(1).mean()), 4),
            "gold with length": round(correlation_within(graded.gold, graded.lengths), 4),
            "truth with gold": round(correlation_within(taken_out, graded.gold), 4),
        }

    def describe_sft(self) -> dict[str, Any]:
        """The truth, variety and some samples of SFT on the held-out prompts."""
        rows = self.read("measures", "best_of")
        truth = self.truth().of_rows(rows, samples=BEST_OF[-1])
        firsts = rows[:: BEST_OF[-1]]
        metrics = read_json(self.path("measures", "best_of.json"))["policies"]["sft"]
        return {
            "truth": summarize(truth.mean(1)),
            "spread within prompts": round(float(truth.std(1).mean()), 4),
            "length": metrics["response_length"],
            "cut off": metrics["truncation_rate"],
            "distinct_2": metrics["distinct_2"],
            "canned": canned_share(firsts),
            "samples": [
                [firsts[place]["prompt"][-1]["content"], firsts[place]["response"]]
                for place in random.Random(0).sample(range(len(firsts)), SHOWN)
            ],
        }

    def truth(self) -> Truth:
        """The truth by definition, once the labels are written."""
        return Truth(**read_json(self.path("data", "truth.json")))

    # --- what each proxy has

    def proxy_steps(self, proxy: Proxy) -> list[Step]:
        """The proxy, its gate, and the best of n by it."""
        return [
            self.fit_proxy(proxy),
            self.score(
                f"gate_{proxy.tag}", proxy.name, "labelled_test", lambda: self.read_gate(proxy)
            ),
            self.score(
                f"best_of_{proxy.tag}", proxy.name, "best_of", lambda: self.read_best_of(proxy)
            ),
        ]

    def fit_proxy(self, proxy: Proxy) -> Step:
        """A step that trains a proxy on pairs of its own."""
        file = self.path("data", f"{proxy.name}.jsonl")
        pool = self.path("data", "train_pairs.jsonl")
        if pool.exists() and not file.exists():
            pairs = draw_pairs(read_lines(pool), proxy.pairs, proxy.seed)
            keys = ("prompt", "chosen", "rejected")
            write_json_lines(file, [{key: pair[key] for key in keys} for pair in pairs])
        return self.train(
            name=proxy.name,
            part=2,
            stage="reward",
            options={"model_path": str(self.path("sft")), "head_seed": proxy.seed},
            data={
                "train_sources": [{"path": str(file), "name": "labelled"}],
                "val_sources": [],
                "seed": proxy.seed,
            },
            trainer={"max_epochs": EPOCHS},
        )

    def score(
        self, name: str, model: str, responses: str, collect: Callable[[], dict[str, Any]]
    ) -> Step:
        """A step that scores a file of responses by a reward model.

        Args:
            name: Name of the step and of its file of scores.
            model: Name of the reward model's run.
            responses: Name of the file of responses in `measures`.
            collect: Reads the figures once the process has ended.
        """
        files = (self.path("measures", f"{responses}.jsonl"), self.scores_of(name))
        command = ["-m", "experiments", "overoptimization", "score"]
        command += [str(self.path(model)), str(self.path("sft")), *map(str, files)]
        return Step(name, 2, [*command, "--dtype", EVALUATION_DTYPE], collect)

    def scores_of(self, name: str) -> Path:
        """File of the scores of a step."""
        return self.path("measures", f"{name}.scores.json")

    def read_gate(self, proxy: Proxy) -> dict[str, Any]:
        """How well the proxy knows the truth on the test prompts."""
        scores = np.array(read_json(self.scores_of(f"gate_{proxy.tag}")))
        rows = self.read("measures", "labelled_test")
        truth = self.truth().of_rows(rows, samples=ANSWERS)
        places = np.array([pair["places"] for pair in self.read("data", "test_pairs")])
        gate = Gate(
            agreement=agreement(scores[places[:, 0]], scores[places[:, 1]]),
            correlation=correlation_within(as_matrix(scores.tolist(), ANSWERS), truth),
        )
        return {**asdict(gate), "pairs": len(places), "open": gate.is_open}

    def read_best_of(self, proxy: Proxy) -> dict[str, Any]:
        """Proxy and truth of the best of n of SFT by the proxy, against the KL."""
        n_samples = BEST_OF[-1]
        scores = as_matrix(read_json(self.scores_of(f"best_of_{proxy.tag}")), n_samples)
        rows = self.read("measures", "best_of")
        truth = self.truth().of_rows(rows, samples=n_samples)
        return {
            "proxy_of_sft": {"mean": float(scores.mean()), "spread": float(scores.std())},
            "spread within prompts": round(float(scores.std(1).mean()), 4),
            "correlation": round(correlation_within(scores, truth), 4),
            "course": best_of_course(scores, truth),
        }

    # --- what PPO adds

    def ppo_steps(self, proxy: Proxy) -> list[Step]:
        """Both arms with a proxy, their courses, and the comparison at the end."""
        steps = []
        for arm in ARMS:
            steps += [self.fit_arm(proxy, arm), self.score_course(proxy, arm)]
        return [*steps, self.compare(proxy)]

    def fit_arm(self, proxy: Proxy, arm: str) -> Step:
        """A step that trains a policy, and keeps its responses to the held-out prompts."""
        name = f"{arm}_{proxy.tag}"
        timeline = {
            "class_path": "lit_callbacks.SampleTimeline",
            "init_args": {
                "prompts": str(self.path("data", "test_prompts.jsonl")),
                "n_prompts": self.sizes.prompts,
                "every_n_batches": EVERY,
            },
        }
        step = self.fit_ppo(
            name,
            3,
            proxy.seed,
            FACTOR,
            rewards={proxy.name: 1.0},
            # less memory; the gradient does not depend on it
            options={
                "memory": {"rollout_batch_size": 32},
                "minibatches": {"micro_batch_size": 2},
            },
            callbacks=[timeline],
        )

        def collect() -> dict[str, Any]:
            rows = read_timeline(self.path("logs", name, "samples.jsonl"))
            prompts = [row["prompt"] for row in self.read("data", "test_prompts")]
            for row in rows:
                row["prompt"] = prompts[row.pop("prompt_index")]
            write_json_lines(self.path("measures", f"course_{name}.jsonl"), rows)
            return step.collect()

        return step._replace(collect=collect)

    def score_course(self, proxy: Proxy, arm: str) -> Step:
        """A step that scores the course of a policy by the gold model."""
        name = f"course_{arm}_{proxy.tag}"

        def collect() -> dict[str, Any]:
            rows = self.read("measures", name)
            gold = np.array(read_json(self.scores_of(name)))
            lengths = np.array([row["length"] for row in rows], float)
            truths = self.truth().of(gold=gold, lengths=lengths)
            points = []
            for iteration in sorted({row["iteration"] for row in rows}):
                places = [n for n, row in enumerate(rows) if row["iteration"] == iteration]
                pool_rows = [rows[n] for n in places]
                points.append(
                    {
                        "iteration": iteration,
                        "proxy": [round(row["score"], 3) for row in pool_rows],
                        "truth": [round(float(truths[n]), 3) for n in places],
                        "kl": float(np.mean([row["kl"] for row in pool_rows])),
                        "length": float(np.mean([row["length"] for row in pool_rows])),
                        "canned": canned_share(pool_rows),
                    }
                )
            return {"points": points}

        return self.score(name, "gold", name, collect)

    def compare(self, proxy: Proxy) -> Step:
        """A step that compares SFT and both arms on the held-out prompts."""
        name = f"end_{proxy.tag}"
        policies = {"sft": "sft", **{f"{arm}_{proxy.tag}": arm for arm in ARMS}}
        command = self._compare_command(
            name, tuple(policies), proxy.seed, rewards=[proxy.name, "gold"], samples=END_SAMPLES
        )

        def collect() -> dict[str, Any]:
            rows = self.read("measures", name)
            metrics = read_json(self.path("measures", f"{name}.json"))["policies"]
            by_arm = {}
            for policy, arm in policies.items():
                policy_rows = [row for row in rows if Path(row["policy"]).name == policy]
                truth = self.truth().of_rows(policy_rows, samples=END_SAMPLES)
                firsts = policy_rows[::END_SAMPLES]
                shown = random.Random(proxy.seed).sample(range(len(firsts)), SHOWN)
                by_arm[arm] = {
                    "proxy": [round(row["scores"][proxy.name], 3) for row in policy_rows],
                    "truth": [round(value, 3) for value in truth.ravel().tolist()],
                    "gold": float(np.mean([row["scores"]["gold"] for row in policy_rows])),
                    "kl": metrics[policy]["kl"],
                    "length": metrics[policy]["response_length"],
                    "cut off": metrics[policy]["truncation_rate"],
                    "distinct_2": metrics[policy]["distinct_2"],
                    "canned": canned_share(firsts),
                    "samples": [
                        [firsts[place]["prompt"][-1]["content"], firsts[place]["response"]]
                        for place in shown
                    ],
                }
            return by_arm

        return Step(name, 3, command, collect)


def canned_share(rows: Sequence[dict[str, Any]]) -> float:
    """Share of responses with a phrase that fits more than a tenth of the other prompts."""
    prompts = [json.dumps(row["prompt"]) for row in rows]
    return common_phrase_share(prompts, [split_words(row["response"]) for row in rows])


def summarize(values: Scores) -> list[float]:
    """Mean of values by prompt, `[N]`, with the ends of its 95 % interval."""
    summary = score_summary(torch.from_numpy(values))
    return [round(value, 4) for value in (summary.mean, summary.low, summary.high)]


def best_of_course(proxies: Scores, truths: Scores) -> list[dict[str, Any]]:
    """Proxy and truth of the best of n by the proxy.

    Args:
        proxies: The proxy's scores of SFT's responses, `[N, S]`.
        truths: Their truth, `[N, S]`.
    """
    course = []
    for size in BEST_OF:
        chosen = {
            name: best_of_n(
                proxies=torch.from_numpy(proxies), values=torch.from_numpy(values), n=size
            ).numpy()
            for name, values in {"proxy": proxies, "truth": truths}.items()
        }
        means = {name: summarize(values) for name, values in chosen.items()}
        course.append({"n": size, "kl": best_of_n_kl(size), **means})
    return course


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The responses of a run's `SampleTimeline` as rows that `score` reads."""
    return [
        {
            "iteration": int(row["step"]),
            "prompt_index": row["prompt_index"],
            "response": row["response"],
            "ended": not row["truncated"],
            **{key: row[key] for key in ("score", "kl", "length")},
        }
        for row in read_lines(path)
    ]


def score(
    model: str, policy: str, responses: str, output: str, *, dtype: DType = "float32"
) -> None:
    """Score a file of responses as PPO would.

    Args:
        model: Folder of a reward model.
        policy: Folder of the policy that sampled, for its tokenizer and template.
        responses: File of rows with `prompt`, `response` and `ended`.
        output: JSON file for the list of scores.
        dtype: Type of the weights: float32 or bfloat16.
    """
    tokenizer = load_tokenizer(policy)
    encoder = DialogueEncoder(
        tokenizer,
        max_length=LONGEST_PROMPT + SIZES.max_new_tokens,
        max_prompt_length=LONGEST_PROMPT,
    )
    reward = WeightedReward({model: 1.0}, ModelOptions(dtype=dtype), tokenizer).eval()
    reward.set_longest_sequence(encoder.max_length)
    rows = read_lines(responses)
    scores: list[float] = []
    with torch.inference_mode():
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64]
            prompts = [
                encoder.encode_prompt([Message(**turn) for turn in row["prompt"]]) for row in part
            ]
            scored = reward(
                encode_responses(part, prompts, encoder),
                [prompt.text for prompt in prompts],
                turns=[prompt.turns for prompt in prompts],
            )
            scores += scored.total.tolist()
    write_text(output, json.dumps([round(value, 4) for value in scores]) + "\n")


def encode_responses(
    rows: Sequence[dict[str, Any]], prompts: Sequence[PromptExample], encoder: DialogueEncoder
) -> RolloutBatch:
    """Responses that were read from a file as rollouts, with EOS where they ended.

    Args:
        rows: `B` rows with `response` and `ended`.
        prompts: The prompt of each row.
        encoder: Encodes the responses.
    """
    responses = []
    for row in rows:
        # what looks like a special token was sampled as ordinary text
        ids = encoder.tokenizer.encode(
            row["response"], add_special_tokens=False, split_special_tokens=True
        )
        if row["ended"] or not ids:
            ids.append(encoder.eos_token_id)
        responses.append(torch.tensor(ids))
    prompt = pad_sequences(
        [example.input_ids for example in prompts], encoder.pad_token_id, left=True
    )
    response = pad_sequences(responses, encoder.pad_token_id)
    return RolloutBatch(
        prompt_ids=prompt.values,
        prompt_mask=prompt.mask,
        response_ids=response.values,
        response_mask=response.mask,
        terminated=torch.tensor([row["ended"] for row in rows]),
    )


def run(
    base: str,
    gold_base: str,
    data: str,
    *,
    output_dir: str = "runs/overoptimization",
    seeds: tuple[int, ...] = SEEDS,
    pairs: tuple[int, ...] = PAIRS,
    threads: int = 1,
    results: str = str(RESULTS),
) -> None:
    """Do the steps that are missing: what is common, then all proxies, then PPO seed by seed.

    Args:
        base: Folder of SmolLM2-135M-Instruct.
        gold_base: Folder of Gemma 3 270M.
        data: Folder with the files of HH-RLHF.
        output_dir: Folder for all files.
        seeds: Seeds to train.
        pairs: Pairs of the proxies.
        threads: Threads of a step.
        results: File of the results.

    Raises:
        ValueError: If the results are of other settings, or of models in another folder.
    """
    file = Path(results)
    runs = Overoptimization(
        root=Path(output_dir).resolve(),
        base=str(Path(base).resolve()),
        data=str(Path(data).resolve()),
        sizes=SIZES,
        precision=PRECISION,
        gold_base=str(Path(gold_base).resolve()),
    )
    settings = {
        "criterion": VERSION,
        "sizes": asdict(SIZES),
        "precision": PRECISION,
        "evaluation_dtype": EVALUATION_DTYPE,
        "epochs": EPOCHS,
    }
    earlier = read_run(file, "settings") or settings
    if earlier != settings:
        raise ValueError(f"settings: expected {earlier}, as in {results}, got {settings}")
    if "sft" in (read_run(file, "common") or {}) and not runs.path("sft").exists():
        raise ValueError(
            f"output_dir: {runs.root} does not have the models of {results}: give the folder where "
            f"they are, or a new file as results"
        )
    write_run(file, "settings", settings)
    runs.write_data()

    def run_missing(steps: Sequence[Step], name: str) -> dict[str, Any]:
        """The results of steps, which are kept together under a name."""
        done = read_run(file, name) or {}
        for step, row in run_missing_steps(steps, done, folder=runs.root, threads=threads):
            done[step.name] = row
            write_run(file, name, done)
            # gigabytes, which only an interrupted step needs
            shutil.rmtree(runs.path("logs", step.name, "checkpoints"), ignore_errors=True)
        return done

    run_missing(runs.common_steps(), "common")
    proxies = [Proxy(size, seed) for seed in seeds for size in pairs]
    gates = {}
    for proxy in proxies:
        done = run_missing(runs.proxy_steps(proxy), proxy.tag)
        gates[proxy] = done[f"gate_{proxy.tag}"]["result"]
    for proxy, gate in gates.items():
        if gate["open"]:
            run_missing(runs.ppo_steps(proxy), proxy.tag)
        else:
            say(f"{proxy.name}: the gate is shut, {gate}; PPO is not run with it")


def documents() -> Documents:
    """The page, its figure, and all numbers and samples, from the committed results."""
    results: Mapping[str, Any] = read_runs(RESULTS)
    return {
        PAGE: format_page(results),
        TABLES: format_tables(results),
        FIGURE: lambda: draw(results),
    }


COMMANDS = (run, score)
