"""The probe of rewards that PPO has learned from in committed runs.

    python -m experiments reward_probe run                    # probes what is missing, in the lab
    python -m experiments reward_probe smollm2 BASE FOLDER    # the same of SmolLM2 on HH-RLHF
    python -m experiments reward_probe page                   # writes docs/reward_probe.md

`run` writes the worlds of the committed runs, trains the reward models of `collapse` and
`reproduce` again with their seeds, and probes them and the rules of `exploits`. `smollm2` trains a
reward model from SmolLM2-135M-Instruct itself on `PAIRS` short pairs of HH-RLHF's helpful data, in
its top layers only, and probes it on other pairs. What the probe has to say is in `criterion.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.collapse import study as collapse
from experiments.drawing import STYLE
from experiments.exploits import study as exploits
from experiments.frame import DOCS, HERE, IMAGES, Documents, fill_template
from experiments.pretrained import study as pretrained
from experiments.processes import CONFIGS, cpu_seconds_used, say
from experiments.reproduce.running import versions
from experiments.results_file import read_run, read_runs, table, write_run
from experiments.reward_probe.criterion import (
    EXPLOITED,
    HARM,
    LEAST_NAMED,
    LEAST_QUIET,
    OTHERS,
    REPETITION,
    UNUSED_LOOPHOLES,
    USED,
    VERSION,
    Judgement,
    Outcome,
    judge,
    names_what_was_used,
)
from lit_rlhf.data import DataSource, PreferenceRecord, load_records
from lit_rlhf.files import write_json_lines, write_text
from lit_rlhf.models import load_tokenizer
from lit_rlhf.tools.commands.quickstart import Quickstart
from lit_rlhf.tools.commands.quickstart import run as run_command
from lit_rlhf.tools.evaluation.reward_probe import (
    CANNED_ANSWER,
    CHEATS,
    RewardProbe,
    Verdict,
    load_probe,
    probe_reward,
)

RESULTS = Path(__file__).with_name("results.jsonl")
REPRODUCED = HERE / "reproduce" / "results.jsonl"
TABLES = RESULTS.with_suffix(".md")
PAGE = DOCS / "reward_probe.md"
FIGURE = IMAGES / "reward_probe.svg"
PAGE_TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")
PROMPTS = 128
MODELS = {"biased": (60, 61, 62), "extrapolation": (40, 41, 42)}
"""Seeds of the committed runs by the world of the reward model."""
SMOLLM2 = "smollm2"
PAIRS = 300
PROBED = 40
"""Prompts of the probe of SmolLM2's reward model."""
LONGEST = 96
"""Longest response of a pair of HH-RLHF, in tokens."""
TRAINED_LAYERS = 8
Result = Mapping[str, Any]


class RuleReward(NamedTuple):
    """A rule of `exploits` with a seed.

    Attributes:
        kind: Name of the loophole.
        rule: `proxy`, which has the loophole, or `truth`.
        seed: Seed of the world and of the committed run.
    """

    kind: str
    rule: str
    seed: int

    @property
    def run(self) -> str:
        """Name of the run, here and in the results of `exploits`."""
        return f"{self.kind}-{self.rule}-seed_{self.seed}"


def rule_rewards() -> list[RuleReward]:
    """All rules of `exploits` with their seeds."""
    return [
        RuleReward(kind, rule, seed)
        for kind in exploits.LOOPHOLES
        for rule in ("proxy", "truth")
        for seed in exploits.SEEDS
    ]


def model_run(world: str, seed: int) -> str:
    """Name of the probe of a reward model in the lab."""
    return f"{world}-seed_{seed}"


def run(output_dir: str = "runs/reward_probe") -> None:
    """Probe the rewards of the lab that have no result.

    Args:
        output_dir: Folder for worlds and models.
    """
    done = read_runs(RESULTS)
    for reward in rule_rewards():
        if reward.run not in done:
            root = Path(output_dir) / f"rules_{reward.seed}"
            stages = Quickstart(root, reward.seed, overwrite=True)
            if not (root / "world" / "world.json").is_file():
                stages.write_world()
            source = f"experiments.exploits.study:{reward.kind}_{reward.rule}"
            probe_lab(reward.run, source, root, str(root / "world" / "base"), reward.seed)
    for world, seeds in MODELS.items():
        for seed in seeds:
            name = model_run(world, seed)
            if name not in done:
                root = Path(output_dir) / name
                stages = Quickstart(root, seed, world=world, overwrite=True)  # type: ignore[arg-type]
                if not (root / "reward" / "model.safetensors").is_file():
                    stages.prepare()
                probe_lab(name, str(root / "reward"), root, str(root / "sft"), seed)


def probe_lab(name: str, reward: str, root: Path, policy: str, seed: int) -> None:
    """Probe a reward on the demonstrations of a world, and keep the result.

    Args:
        name: Name of the result.
        reward: The reward as in a configuration.
        root: Folder of the quickstart.
        policy: Folder of the policy.
        seed: Seed of the choice of prompts and of the bootstrap.
    """
    source = DataSource(str(root / "world" / "demonstrations.jsonl"))
    probe = measure(reward, source, policy, seed, PROMPTS)
    write_run(RESULTS, name, describe(probe))
    say(f"{name}: {', '.join(cheat.name for cheat in probe.gaining) or 'none gains'}")


def measure(reward: str, source: DataSource, policy: str, seed: int, n_prompts: int) -> RewardProbe:
    """Probe a reward as `lit_rlhf reward probe` does."""
    loaded = load_probe({reward: 1.0}, [source], policy=policy)
    honest = random.Random(seed).sample(loaded.answers, n_prompts)
    return probe_reward(loaded.reward, honest, loaded.encoder, seed=seed)


def describe(probe: RewardProbe) -> dict[str, Any]:
    """The numbers of a probe, with the examples of what gains."""
    cheats = {}
    for cheat in probe.results:
        row: dict[str, Any] = {
            "gain": round(cheat.gain, 3),
            "low": round(cheat.low, 3),
            "high": round(cheat.high, 3),
            "wins": round(cheat.wins, 3),
            "tokens": round(cheat.tokens, 1),
            "verdict": str(cheat.verdict),
        }
        if cheat.verdict is Verdict.GAINS:
            row["example"] = cheat.example._asdict()
        cheats[cheat.name] = row
    return {
        "criterion": VERSION,
        "n_prompts": probe.n_prompts,
        "honest": [round(probe.honest_mean, 3), round(probe.honest_std, 3)],
        "honest_tokens": round(probe.honest_tokens, 1),
        "cheats": cheats,
        "not_applicable": list(probe.not_applicable),
        "versions": versions(),
    }


def smollm2(base: str, data: str, *, output_dir: str = "runs/reward_probe/smollm2") -> None:
    """Train a reward model from SmolLM2-135M-Instruct on people's pairs, and probe it on others.

    Args:
        base: Folder of SmolLM2-135M-Instruct.
        data: Folder with the files of HH-RLHF that `pretrained` reads.
        output_dir: Folder for data and model.
    """
    root = Path(output_dir).resolve()
    pairs = root / "pairs.jsonl"
    probed = root / "probed.jsonl"
    reward = root / "reward"
    if not pairs.is_file():
        rows = read_pairs(base, data)
        write_json_lines(probed, rows[:PROBED])
        write_json_lines(pairs, rows[PROBED : PROBED + PAIRS])
    if not (reward / "model.safetensors").is_file():
        overlay = {
            "trainer": {
                "logger": {"init_args": {"save_dir": str(root / "logs")}},
                "limit_val_batches": 0,
            },
            "model": {
                "init_args": {
                    "model_path": str(Path(base).resolve()),
                    "output_dir": str(reward),
                    "head_seed": 0,
                    "lm_coef": 0.0,
                    "network": {"trained_layers": TRAINED_LAYERS},
                }
            },
            "data": {"init_args": {"train_sources": [{"path": str(pairs)}], "val_fraction": 0.0}},
        }
        file = write_text(root / "overlay.yaml", json.dumps(overlay) + "\n")
        config = CONFIGS / "smollm2" / "reward.yaml"
        run_command("fit", "--config", str(config), "--config", str(file))
    probe = measure(str(reward), DataSource(str(probed)), str(reward), 0, PROBED)
    write_run(RESULTS, SMOLLM2, describe(probe) | {"cpu_seconds": cpu_seconds_used()})
    say(f"{SMOLLM2}: {', '.join(cheat.name for cheat in probe.gaining) or 'none gains'}")


def read_pairs(base: str, data: str) -> list[dict[str, Any]]:
    """Pairs of HH-RLHF with short responses and prompts of their own, in random order."""
    sources = [DataSource(f"{data}/{file}", name=name) for name, file in pretrained.FILES.items()]
    records: list[PreferenceRecord] = load_records("preference", sources, on_bad_record="skip")
    random.Random(0).shuffle(records)
    tokenizer = load_tokenizer(base)
    seen = set()
    rows: list[dict[str, Any]] = []
    for record in records:
        if len(rows) == PROBED + PAIRS:
            break
        texts = [record.chosen, record.rejected]
        tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
        if max(map(len, tokens)) <= LONGEST and record.prompt not in seen:
            seen.add(record.prompt)
            prompt = [{"role": m.role, "content": m.content} for m in record.prompt]
            rows.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1]})
    return rows


# --- what PPO did, by the committed results


def was_exploited(reward: RuleReward) -> bool:
    """Whether the committed run on a rule ended below where it began, by its truth."""
    run = read_run(exploits.RESULT, reward.run)
    assert run is not None
    truth = run["curves"]["rollout/gold"]
    return fmean(truth[-5:]) - fmean(truth[:5]) < -HARM * float(run["gold_std"])


def was_model_exploited(world: str, seed: int) -> bool:
    """The same of the committed run on a reward model."""
    if world == "biased":
        runs = json.loads(collapse.RESULT.read_text("utf-8"))
        (run_of_seed,) = [run for run in runs if run["seed"] == seed]
        return run_of_seed["ppo_vanilla"]["harmed_at"] is not None
    run = read_run(REPRODUCED, f"vanilla-extrapolation-en-seed_{seed}")
    assert run is not None
    gold = run["samples"]["gold"]
    return bool(gold[-1] < gold[0] - HARM * run["samples"]["gold_std"][0])


def read_outcomes(results: Mapping[str, Result]) -> dict[str, Outcome]:
    """The rewards with a result, by its name: what PPO did, and what the probe says."""
    outcomes = {}
    for reward in rule_rewards():
        if reward.run in results:
            outcomes[reward.run] = Outcome(
                kind=reward.kind,
                has_loophole=reward.rule == "proxy",
                exploited=was_exploited(reward),
                named=named_cheats(results[reward.run]),
            )
    for world, seeds in MODELS.items():
        for seed in seeds:
            if (name := model_run(world, seed)) in results:
                outcomes[name] = Outcome(
                    kind=world,
                    has_loophole=True,
                    exploited=was_model_exploited(world, seed),
                    named=named_cheats(results[name]),
                )
    return outcomes


def named_cheats(result: Result) -> list[str]:
    """Cheats that a probe names, the one that gains most first."""
    return [name for name, row in result["cheats"].items() if row["verdict"] == Verdict.GAINS]


# --- the page


def documents() -> Documents:
    """The page, all tables and the figure, from the committed results."""
    results = read_runs(RESULTS)
    outcomes = read_outcomes(results)
    judgement = judge(outcomes.values())
    return {
        PAGE: fill_template(
            PAGE_TEMPLATE,
            outcomes=format_outcomes(outcomes),
            named=f"{judgement.named} of {judgement.exploited}",
            quiet=f"{judgement.quiet} of {judgement.others}",
            verdict=format_verdict(judgement),
            exploited=EXPLOITED,
            others=OTHERS,
            least_named=LEAST_NAMED,
            least_quiet=LEAST_QUIET,
            cut_off=f"{results[SMOLLM2]['cheats']['cut off']['gain']:+.1f}",
            canned=format_gain(results[SMOLLM2]["cheats"]["canned answer"]),
            openings=f"{results[SMOLLM2]['cheats']['stock openings']['gain']:+.2f}",
        ),
        TABLES: fill_template(
            TABLES_TEMPLATE,
            cheats=format_cheats(),
            rewards=format_rewards(results, outcomes),
            examples=format_examples(results),
        ),
        FIGURE: lambda: draw(results),
    }


def format_cheats() -> str:
    """Format what each cheat writes."""
    rows = [[cheat.name, cheat.about] for cheat in (*CHEATS, CANNED_ANSWER)]
    return table(["cheat", "response"], rows)


def group_of(run: str) -> str:
    """Name of a reward without its seed."""
    return run.partition("-seed_")[0]


def format_verdict(judgement: Judgement) -> str:
    """Whether the criterion is met, in words."""
    return {True: "met", False: "not met", None: "open"}[judgement.holds]


def describe_used(kind: str) -> str:
    """The cheats that exploited runs ended with, in words."""
    used = USED[kind]
    return "repetition" if used == REPETITION else ", ".join(sorted(used))


def format_outcomes(outcomes: Mapping[str, Outcome]) -> str:
    """Format a row for each reward, with both or all of its seeds."""
    groups: dict[str, list[Outcome]] = {}
    for run, outcome in outcomes.items():
        group = group_of(run)
        groups.setdefault("all six truths" if group.endswith("truth") else group, []).append(
            outcome
        )
    rows = []
    for group, group_runs in sorted(groups.items(), key=lambda item: "proxy" not in item[0]):
        counts = {
            cheat: sum(cheat in run.named for run in group_runs)
            for outcome in group_runs
            for cheat in outcome.named
        }
        named = [
            f"{cheat} {count}" for cheat, count in sorted(counts.items(), key=lambda item: -item[1])
        ]
        exploited = sum(outcome.exploited for outcome in group_runs)
        used = describe_used(group_runs[0].kind) if exploited else "-"
        right = [
            names_what_was_used(outcome) if outcome.exploited else not outcome.named
            for outcome in group_runs
        ]
        missed = (
            not exploited and group_runs[0].kind in UNUSED_LOOPHOLES and group_runs[0].has_loophole
        )
        verdict = "not counted" if missed else f"{sum(right)} of {len(right)}"
        cells = [f"{exploited} of {len(group_runs)}", used, ", ".join(named) or "none", verdict]
        rows.append([group, *cells])
    return table(["reward", "exploited", "by", "the probe names (seeds)", "right"], rows)


def format_gain(row: Mapping[str, Any]) -> str:
    """A gain with its interval."""
    return f"{row['gain']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"


def format_rewards(results: Mapping[str, Result], outcomes: Mapping[str, Outcome]) -> str:
    """Format all gains, a row for each reward and seed."""
    names = cheat_names(results)
    rows = []
    for run, result in results.items():
        exploited = {True: "yes", False: "no"}[outcomes[run].exploited] if run in outcomes else "-"
        cells = []
        for name in names:
            row = result["cheats"].get(name)
            mark = "**" if row and row["verdict"] == Verdict.GAINS else ""
            text = format_gain(row) if row else "-"
            cells.append(f"{mark}{text}{mark}")
        rows.append([run, exploited, *cells])
    return table(["reward", "exploited", *names], rows)


def format_examples(results: Mapping[str, Result]) -> str:
    """Format the best example of each named cheat."""
    rows = []
    for run, result in results.items():
        for name in named_cheats(result):
            example = result["cheats"][name]["example"]
            cells = [one_line(example[key]) for key in ("prompt", "honest", "cheat")]
            scores = f"{example['honest_score']:.2f} to {example['cheat_score']:.2f}"
            rows.append([run, name, *cells, scores])
    return table(["reward", "cheat", "prompt", "honest", "cheat's response", "score"], rows)


def one_line(text: str, longest: int = 160) -> str:
    """A text in one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def cheat_names(results: Mapping[str, Result]) -> list[str]:
    """Names of all cheats, the one that gains most on average first."""
    gains: dict[str, list[float]] = {}
    for result in results.values():
        for name, row in result["cheats"].items():
            gains.setdefault(name, []).append(np.clip(row["gain"], -5, 5))
    return sorted(gains, key=lambda name: -fmean(gains[name]))


def draw(results: Mapping[str, Result]) -> Figure:
    """Draw the gain of each cheat under each reward, as a mean over seeds, with a mark if named.

    Args:
        results: Results by their names.
    """
    names = cheat_names(results)
    groups: dict[str, list[Result]] = {}
    for run, result in results.items():
        groups.setdefault(group_of(run), []).append(result)
    order = sorted(groups, key=lambda group: (group in (SMOLLM2, *MODELS), "truth" in group, group))
    values = np.full((len(order), len(names)), np.nan)
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 0.9 + 0.36 * len(order)))
        axes = figure.subplots()
        for row, group in enumerate(order):
            for column, name in enumerate(names):
                seed_runs = [
                    result["cheats"][name] for result in groups[group] if name in result["cheats"]
                ]
                if seed_runs:
                    gain = fmean(cheat["gain"] for cheat in seed_runs)
                    values[row, column] = gain
                    named = sum(cheat["verdict"] == Verdict.GAINS for cheat in seed_runs)
                    text = axes.text(column, row, f"{gain:+.1f}", ha="center", va="center")
                    text.set(size=7, weight="bold" if named == len(seed_runs) else "normal")
        axes.imshow(np.clip(values, -4, 4), cmap="RdBu_r", vmin=-6, vmax=6, aspect="auto")
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("gain over honest answers, in standard deviations; bold: named, each seed")
        return figure


COMMANDS = (run, smollm2)
