"""Figure 4 on people's preferences, where the gold reward model is of another family.

    python -m experiments preferences run BASE GOLD_BASE FOLDER
    python -m experiments preferences page

`BASE` is a folder with SmolLM2-135M-Instruct, `GOLD_BASE` one with Gemma 3 270M (read back from 4
bits, as package registries have it), and `FOLDER` holds HH-RLHF's files of
`pretrained.FILES`. SFT learns demonstrations of at most 40 tokens, so that few of its
responses reach the limit of 64 and ending early is no gain. The proxy, a SmolLM2, learns from 1,200
pairs; the gold model, with LoRA, from 2,100 others. Vanilla PPO and PPO-max start from the same SFT
model, at five times the learning rates of configs/smollm2, for 100 iterations. PPO computes in
bf16-mixed, in two thirds of the time on a processor with instructions for it, which was settled
before its first run; the other stages compute in float32.

The rule, fixed before the runs: the criterion of `experiments.known_truth.criterion` with the gold
model's score in place of the truth, for each of three seeds, on 96 drawn test prompts with eight
samples each. The seeds share the SFT, proxy and gold models, so they repeat PPO and not the whole.
Its first part asks that vanilla PPO's gold falls below SFT's; if it does not, that is the result.
A judge, if there is one, is asked about 200 test pairs first and is dropped unless it agrees with
people on 60 % of them; a tie counts as half, and a pair that it cannot judge as none. The mean of
complete responses, which ended before the limit, stands beside the mean of all. Where
only the latter rises, the gain is likely one of ending. Gold at SFT's length, which does not decide
either, was added after the first seed: the mean less what the other length is worth by the least
squares line through SFT's responses. Relevance, which does not decide, was added after all seeds,
since many responses of vanilla PPO were off the question: the cosine of a response's
embedding and its question's, the last message before it, by a sentence encoder.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from experiments.frame import DOCS, IMAGES, Documents, fill_template
from experiments.known_truth.criterion import SAMPLES, judge, paired_difference, read_arms
from experiments.known_truth.page import (
    NAMES,
    draw,
    format_best_of,
    format_flags,
    format_interval,
    format_seeds,
    format_verdict,
)
from experiments.pretrained.study import (
    FILES,
    GOLD_SEED,
    LORA,
    Benchmark,
    Precision,
    Sizes,
    common_opening,
    read_json,
)
from experiments.processes import Step, run_missing_steps
from experiments.reproduce.measuring import measure_perplexity
from experiments.results_file import read_lines, read_run, read_runs, table, write_run
from lit_rlhf.files import write_json_lines, write_text
from lit_rlhf.models import load_tokenizer

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = DOCS / "preferences.md"
TABLES = RESULTS.with_suffix(".md")
PAGE_TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")
SIZES = Sizes(gold_pairs=2100, iterations=100, prompts=96, max_new_tokens=64)
SEEDS = (0, 1, 2)
LONGEST_DEMONSTRATION = 40
"""Tokens."""
FACTOR = 5.0
"""Learning rates as a multiple of configs/smollm2's."""
JUDGED_PAIRS = 200
LEAST_AGREEMENT = 0.6
SHOWN = 20
"""Prompts whose responses are on the page, drawn by the seed."""
ARMS = ("ppo_vanilla", "ppo_max")
MODELS = ("reward", "gold")
WINDOW = 10
"""Iterations whose mean is compared with others' for gold and length."""
CURVES = {
    "rollout/score/reward": "proxy, SFT's deviations above SFT",
    "rollout/score/gold": "gold",
    "rollout/kl": "KL to SFT, nats",
    "rollout/response_length": "tokens per response",
}
"""Title of each panel of the figure by the metric that it shows."""


@dataclass(frozen=True)
class Preferences(Benchmark):
    """The steps in a folder.

    Attributes:
        gold_base: Folder of the model that the gold reward model starts from.
        ppo_precision: The trainer's precision in PPO.
        judge: Name of the judge as its endpoint knows it; empty: none.
        judge_url: Base URL of the OpenAI-compatible endpoint.
        encoder: Folder of a sentence encoder with mean pooling; empty: none.
    """

    gold_base: str = ""
    ppo_precision: Precision = "bf16-mixed"
    judge: str = ""
    judge_url: str = ""
    encoder: str = ""

    def write_data(self) -> None:
        """Write the parts of the data, short demonstrations, prompts, and pairs for the judge."""
        super().write_data()
        tokenizer = load_tokenizer(self.base)

        def is_short(row: dict[str, Any]) -> bool:
            ids = tokenizer(row["chosen"], add_special_tokens=False)["input_ids"]
            return len(ids) <= LONGEST_DEMONSTRATION

        for source in FILES:
            rows = read_lines(self.path("data", "proxy", f"{source}.jsonl"))
            short = [row for row in rows if is_short(row)]
            write_json_lines(self.path("data", "demonstrations", f"{source}.jsonl"), short)
        pairs = [row for s in FILES for row in read_lines(self.path("data", "test", f"{s}.jsonl"))]
        sampled_pairs = random.Random(0).sample(pairs, self.sizes.prompts)
        prompts = [{"prompt": row["prompt"]} for row in sampled_pairs]
        write_json_lines(self.path("data", "test_prompts.jsonl"), prompts)
        sampled_pairs = random.Random(0).sample(pairs, min(JUDGED_PAIRS, len(pairs)))
        for side in ("chosen", "rejected"):
            rows = [{"prompt": row["prompt"], "response": row[side]} for row in sampled_pairs]
            write_json_lines(self.path("judged", "people", f"{side}.jsonl"), rows)

    def part_of(self, name: str) -> str:
        """The part of the data that a model learns from."""
        return "demonstrations" if name == "sft" else super().part_of(name)

    def common_steps(self) -> list[Step]:
        """Steps of all seeds: the three models that PPO needs, and how right they are."""
        gold = self.fit("gold", 1, "reward", self.gold_base, network=LORA, head_seed=GOLD_SEED)
        steps = [self.fit("sft", 1, "sft", self.base), self.fit("reward", 1, "reward", "sft")]
        steps += [self.report("reward", 1), gold, self.report("gold", 1, self.gold_base)]
        sides = ("chosen", "rejected")
        steps += [self.measure_relevance("people", sides)] if self.encoder else []
        return [*steps, self.ask("people", sides)] if self.judge else steps

    def seed_steps(self, seed: int, judged: bool) -> list[Step]:
        """Steps of a seed, with the judge's if it agrees with people."""
        ppo = replace(self, precision=self.ppo_precision)
        steps = [ppo.fit_ppo(f"{arm}_{seed}", 2, seed, FACTOR) for arm in ARMS]
        steps.append(self.evaluate_seed(seed))
        if self.encoder:
            steps.append(self.measure_relevance(f"policies_{seed}", tuple(NAMES)))
        return [*steps, self.ask(f"policies_{seed}", tuple(NAMES))] if judged else steps

    def evaluate_seed(self, seed: int) -> Step:
        """A step that samples the test prompts and scores them by the proxy and the gold model."""
        names = {"sft": "sft", **{f"{arm}_{seed}": arm for arm in ARMS}}
        step = self.evaluate(f"policies_{seed}", 2, tuple(names), seed)
        report = self.path("measures", f"policies_{seed}.json")

        def collect() -> dict[str, Any]:
            rows = read_lines(report.with_suffix(".jsonl"))
            metrics = read_json(report)["policies"]
            prompt_rows = range(0, len(rows) // len(names), SAMPLES)
            prompts_shown = random.Random(seed).sample(prompt_rows, min(SHOWN, len(prompt_rows)))
            result: dict[str, Any] = {}
            for name, key in names.items():
                policy_rows = [row for row in rows if Path(row["policy"]).name == name]
                answers = [
                    {"prompt": row["prompt"], "response": row["response"]} for row in policy_rows
                ]
                firsts = answers[::SAMPLES]
                write_json_lines(self.path("judged", f"policies_{seed}", f"{key}.jsonl"), firsts)
                texts = [row["response"] for row in firsts if row["response"].strip()]
                result[key] = {
                    "proxy": [round(row["scores"]["reward"], 3) for row in policy_rows],
                    "truth": [round(row["scores"]["gold"], 3) for row in policy_rows],
                    "ended": [row["ended"] for row in policy_rows],
                    "lengths": [row["length"] for row in policy_rows],
                    "kl": metrics[name]["kl"],
                    "length": metrics[name]["response_length"],
                    "distinct_2": metrics[name]["distinct_2"],
                    "opening": common_opening(rows, name),
                    "foreign_perplexity": (
                        measure_perplexity(Path(self.gold_base), texts) if texts else None
                    ),
                    "samples": [
                        [
                            policy_rows[place]["prompt"][-1]["content"],
                            policy_rows[place]["response"],
                        ]
                        for place in prompts_shown
                    ],
                }
            return result

        command = [*step.command, "--samples_per_prompt", str(SAMPLES)]
        return step._replace(command=command, collect=collect)

    def measure_relevance(self, name: str, sides: Sequence[str]) -> Step:
        """A step that measures how near responses are to their own questions, and to the next."""
        output = self.path("measures", f"relevance_{name}.json")
        folder = self.path("judged", name)
        command = ["-m", "experiments", "preferences", "relevance", self.encoder, str(folder)]
        command += [str(output), *sides]
        return Step(f"relevance_{name}", 3, command, lambda: read_json(output))

    def ask(self, name: str, sides: Sequence[str]) -> Step:
        """A step that asks the judge which of two files' responses is more helpful."""
        output = self.path("measures", f"judge_{name}.json")
        command = ["-m", "lit_rlhf.cli.main", "evaluate", "--policies"]
        command += [str(self.path("judged", name, f"{side}.jsonl")) for side in sides]
        command += ["--judge.model", self.judge, "--judge.criteria", "[helpful]"]
        command += ["--judge.timeout", "600"]  # seconds: a judge on one core is slow
        command += ["--judge.base_url", self.judge_url] if self.judge_url else []
        command += ["--judge.folder", str(self.path("judge")), "--output", str(output)]

        def collect() -> dict[str, Any]:
            rows = read_json(output)["judge"]["policies"]
            return {row["policy"]: row for row in rows}

        return Step(f"judge_{name}", 3, command, collect)


def agreement(row: dict[str, Any]) -> float:
    """Share of pairs in which the judge agrees with people, from its row of the rejected side."""
    comparison = row["against_baseline"]
    if comparison is None:
        return 0.0
    return float(
        (comparison["lose"] + comparison["tie"] / 2)
        * comparison["n"]
        / (comparison["n"] + row["invalid"])
    )


def relevance(encoder: str, folder: str, output: str, sides: list[str]) -> None:
    """Measure the cosine of each response with its question, and with the next row's.

    Args:
        encoder: Folder of a sentence encoder with mean pooling.
        folder: Folder with files of rows with a prompt and a response.
        output: JSON file for the cosines of each file.
        sides: Names of the files.
    """
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModel.from_pretrained(encoder).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> Tensor:
        vectors = []
        for text in texts:  # one by one, so that there is no padding
            ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            vectors.append(model(**ids).last_hidden_state.mean(1))
        return normalize(torch.cat(vectors), dim=1)

    similarities = {}
    for side in sides:
        rows = read_lines(Path(folder) / f"{side}.jsonl")
        questions = embed([row["prompt"][-1]["content"] for row in rows])
        responses = embed([row["response"] for row in rows])
        pairs = {"own": questions, "next": questions.roll(-1, 0)}
        similarities[side] = {
            name: [round(value, 4) for value in (responses * question_vectors).sum(1).tolist()]
            for name, question_vectors in pairs.items()
        }
    write_text(output, json.dumps(similarities) + "\n")


def run(
    base: str,
    gold_base: str,
    data: str,
    *,
    output_dir: str = "runs/preferences",
    seeds: tuple[int, ...] = SEEDS,
    sizes: Sizes = SIZES,
    threads: int = 2,
    ppo_precision: Precision = "bf16-mixed",
    judge: str = "",
    judge_url: str = "",
    encoder: str = "",
    results: str = str(RESULTS),
) -> None:
    """Do the steps that are missing.

    Args:
        base: Folder of SmolLM2-135M-Instruct.
        gold_base: Folder of Gemma 3 270M.
        data: Folder with the files of HH-RLHF.
        output_dir: Folder for all files.
        seeds: Seeds to train.
        sizes: Data and iterations; other ones than the results have need another file of results.
        threads: Threads of a step.
        ppo_precision: The trainer's precision in PPO; 32-true is for processors without
            instructions for bfloat16.
        judge: Name of the judge as its endpoint knows it; empty: no judge.
        judge_url: Base URL of the OpenAI-compatible endpoint; empty: OpenAI's.
        encoder: Folder of a sentence encoder with mean pooling; empty: relevance is not measured.
        results: File of the results.

    Raises:
        ValueError: If the results are of other sizes, precision or judge.
    """
    file = Path(results)
    runs = Preferences(
        root=Path(output_dir).resolve(),
        base=str(Path(base).resolve()),
        data=str(Path(data).resolve()),
        sizes=sizes,
        gold_base=str(Path(gold_base).resolve()),
        ppo_precision=ppo_precision,
        judge=judge,
        judge_url=judge_url,
        encoder=str(Path(encoder).resolve()) if encoder else "",
    )
    settings: dict[str, Any] = {"sizes": asdict(sizes), "ppo_precision": ppo_precision}
    settings |= {"judge": judge} if judge else {}
    earlier = read_run(file, "settings") or {}
    for name, value in settings.items():
        if earlier.get(name, value) != value:
            raise ValueError(f"{name}: expected {earlier[name]}, as in {results}, got {value}")
    write_run(file, "settings", earlier | settings)
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

    common = run_missing(runs.common_steps(), "common")
    people = common.get("judge_people") if judge else None
    judged = people is not None and agreement(people["result"]["rejected"]) >= LEAST_AGREEMENT
    for seed in seeds:
        run_missing(runs.seed_steps(seed, judged), f"seed_{seed}")


def complete_seeds(results: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Steps and verdict of each complete seed."""
    done = {}
    for name, row in results.items():
        seed = name.removeprefix("seed_")
        if f"policies_{seed}" in row:
            steps = {step.removesuffix(f"_{seed}"): result for step, result in row.items()}
            arms = read_arms({"policies": steps["policies"]["result"]})
            done[int(seed)] = {"steps": steps, "verdict": judge(arms), "arms": arms}
    return done


def format_page(results: Mapping[str, Any]) -> str:
    """Format the page.

    Args:
        results: Results by the name of the run.
    """
    done = complete_seeds(results)
    return fill_template(
        PAGE_TEMPLATE,
        planned=len(SEEDS),
        done=len(done),
        seeds=format_seeds(done, "gold"),
        window=WINDOW,
        vanilla_lengths=format_correlations(done, "ppo_vanilla"),
        max_lengths=format_correlations(done, "ppo_max"),
    )


def format_tables(results: Mapping[str, Any]) -> str:
    """Format all seeds: reward models, judge, relevance, policies and samples.

    Args:
        results: Results by the name of the run.
    """
    common = results["common"]
    done = complete_seeds(results)
    accuracies = {name: common[f"report_{name}"]["result"]["accuracy"] for name in MODELS}
    reward_models = [
        [name, "{accuracy:.1%} [{low:.1%}, {high:.1%}]".format_map(accuracy)]
        for name, accuracy in accuracies.items()
    ]
    agreed = relevant = "Not measured.\n"
    if "judge_people" in common:
        row = common["judge_people"]["result"]["rejected"]
        agreed = format_agreement(results["settings"]["judge"], row)
    if "relevance_people" in common:
        relevant = format_relevance(common["relevance_people"]["result"], done)
    return fill_template(
        TABLES_TEMPLATE,
        seeds=format_seeds(done, "gold"),
        flags=format_flags(done, "gold"),
        reward_models=table(["model", "right on test pairs"], reward_models),
        agreement=agreed,
        relevance=relevant,
        each=[{"seed": seed, **_format_seed(row)} for seed, row in done.items()],
    )


def format_agreement(name: str, row: dict[str, Any]) -> str:
    """Say how far the judge agrees with people, and whether it was asked about policies."""
    share = agreement(row)
    comparison = row["against_baseline"]
    bias = row["position_bias"]
    consequence = "asked" if share >= LEAST_AGREEMENT else "dropped by the rule"
    text = f"The judge, {name}, agrees with people on {share:.0%} of the pairs: {consequence}.\n"
    if comparison is not None:  # else bias is None too
        agreed, opposed, tied = (
            round(comparison[outcome] * comparison["n"]) for outcome in ("lose", "win", "tie")
        )
        text += (
            f"It chose as people in {agreed} pairs and against them in {opposed}, tied in {tied} "
            f"and gave no valid reply in {row['invalid']}. In {bias['first']:.0%}\nof the valid "
            f"pairs it preferred the first response in either order, in {bias['second']:.0%} the "
            "second.\n"
        )
    return f"{text}\n"


def format_correlations(done: Mapping[int, dict[str, Any]], arm: str) -> str:
    """How closely changes of gold follow changes of the length, in each seed.

    Both rise over a run, so that changes between means of `WINDOW` iterations are correlated.

    Args:
        done: What `complete_seeds` says of each seed.
        arm: One of `ARMS`.
    """
    correlations = []
    for row in done.values():
        curves = row["steps"][arm]["result"]["curves"]
        gold, length = (
            np.diff(np.mean(np.reshape(curves[f"rollout/{key}"], (-1, WINDOW)), axis=1))
            for key in ("score/gold", "response_length")
        )
        correlations.append(float(np.corrcoef(gold, length)[0, 1]))
    return ", ".join(f"{correlation:.2f}" for correlation in correlations)


def format_relevance(
    people: dict[str, dict[str, list[float]]], done: dict[int, dict[str, Any]]
) -> str:
    """Format how near responses are to their questions: people's, and each seed's."""
    own, rejected = (np.array(people[side]["own"]) for side in ("chosen", "rejected"))
    head = [f"relevance: {name}" for name in NAMES.values()]
    pairs = (("ppo_vanilla", "sft"), ("ppo_max", "sft"), ("ppo_max", "ppo_vanilla"))
    head += [f"{NAMES[first]} - {NAMES[second]}" for first, second in pairs]
    rows = []
    for seed, row in done.items():
        relevance = row["steps"]["relevance_policies"]["result"]
        near = {name: np.array(relevance[name]["own"]) for name in NAMES}
        differences = (paired_difference(near[first], near[second]) for first, second in pairs)
        means = (f"{near[name].mean():.2f}" for name in NAMES)
        rows.append([seed, *means, *map(format_interval, differences)])
    return (
        f"{table(['seed', *head], rows)}\nThe first of a policy's samples for each "
        f"prompt. Of {len(own)} pairs of people, the chosen response is the more\nrelevant one in "
        f"{np.mean(own > rejected):.0%}; chosen responses have {own.mean():.2f}, rejected ones "
        f"{rejected.mean():.2f}, and chosen ones to the question of another pair\n"
        f"{np.mean(people['chosen']['next']):.2f}.\n"
    )


def _format_seed(row: dict[str, Any]) -> dict[str, str]:
    """The parts of a seed in the template of all numbers."""
    policies = row["steps"]["policies"]["result"]
    judged = row["steps"].get("judge_policies", {}).get("result", {})
    head = ["policy", "proxy", "gold", "gold, complete", "gold at SFT's length"]
    head += ["KL, nats", "tokens", "cut off"]
    head += ["commonest opening", "distinct-2", "perplexity to Gemma"]
    head += ["judge: win, tie, lose"] if judged else []
    sft = policies["sft"]
    per_token = np.polyfit(sft["lengths"], sft["truth"], 1)[0]
    rows = []
    for key, label in NAMES.items():
        policy = policies[key]
        ended = np.array(policies[key]["ended"])
        complete = np.array(policy["truth"])[ended]
        outcome = judged.get(key, {}).get("against_baseline")
        outcomes = "{win:.0%}, {tie:.0%}, {lose:.0%}".format_map(outcome) if outcome else "-"
        foreign = policy["foreign_perplexity"]
        rows.append(
            [
                *(label, f"{np.mean(policy['proxy']):.2f}", f"{np.mean(policy['truth']):.2f}"),
                f"{complete.mean():.2f}" if len(complete) else "-",
                f"{np.mean(policy['truth']) - per_token * (policy['length'] - sft['length']):.2f}",
                *(f"{policy['kl']:.1f}", f"{policy['length']:.1f}", f"{1 - ended.mean():.0%}"),
                f"{policy['opening']['words']} ({policy['opening']['share']:.0%})",
                *(f"{policy['distinct_2']:.2f}", "-" if foreign is None else f"{foreign:.0f}"),
                *([outcomes] if judged else []),
            ]
        )
    samples = [
        [NAMES[key], *(" ".join(text.split()) for text in policies[key]["samples"][place])]
        for place in range(len(policies["sft"]["samples"]))
        for key in NAMES
    ]
    return {
        "policies": table(head, rows),
        "best_of": format_best_of(row["arms"]["sft"], "gold"),
        "verdict": format_verdict(row["verdict"]),
        "samples": table(["policy", "prompt", "response"], samples),
    }


def documents() -> Documents:
    """The page, its figure, and all seeds and samples, from the committed results."""
    results = read_runs(RESULTS)
    return {
        PAGE: format_page(results),
        TABLES: format_tables(results),
        IMAGES / "preferences.svg": lambda: draw(complete_seeds(results).values(), CURVES),
    }


COMMANDS = (run, relevance)
