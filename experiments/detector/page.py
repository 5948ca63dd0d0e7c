"""The section on families of runs of docs/collapse.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from typing import Any

from experiments.detector.criterion import CHOOSING, GRID
from experiments.detector.early import (
    SIGNALS,
    format_penalty,
    format_warnings,
    labelled,
    warn,
)
from experiments.detector.families import figure
from experiments.detector.judging import (
    DETECTORS,
    Row,
    Score,
    choose,
    choose_and_score,
    score,
    total,
)
from experiments.results_file import table
from lit_callbacks import Level, RewardDistributionMonitor

RESULT = Path(__file__).with_name("results.jsonl")

SECTION = """## Families of runs

The quickstart's runs differ so much in KL that any threshold tells them apart. Thresholds are
therefore chosen and judged on families of runs. On families that were left out, at most 5 % of the
healthy runs may be flagged as collapsed and at least 95 % of the collapsed ones must be. The
PPO-max run of the paper's Figure 9 is never to be flagged, also with KL and length halved or a
quarter higher, and the vanilla run of Figure 4 before its win rate is below one half. The
quickstart's runs choose nothing. `experiments/detector/criterion.py` has the families, the settings
to choose from and the rules; it was committed before the first results.

```bash
python -m experiments detector run      # replays all runs
python -m experiments detector report   # writes this section
```

Each family is judged by the setting that is best on the others. *KL* is the best threshold on KL,
per response or per token, chosen in the same way; *rules* are those of
[rewardspy](https://github.com/AvAdiii/rewardspy) that a log of PPO can answer (variance collapse,
slope of the reward, length drift), written anew; a warning counts. A lead is
the number of updates from the flag to the harm, over the flagged runs whose harm is known; a
negative one is late.

{families}
{demands}
### What it means

- **It is no reliable early warning.** In the runs of the lab, the median flag is {late} iteration
  after the harm; under TRL it is {trl} updates before it. A threshold on KL per token speaks
  {kl_lead} iterations before the harm, because KL rises before the length does, and pays for it
  with {kl_false} of {healthy} false alarms
  and {kl_missed} of {collapsed} missed. The first `suspicious` verdict comes {early} iterations
  before the harm in the lab and {early_trl} updates before it under TRL, but {doubted} of {healthy}
  healthy runs are suspicious at some step too: it says where to look, not when to stop.
- **Of trained runs alone**, 8 of 107 healthy ones are flagged, which is more than 5 %: four
  lie between PPO-max and a collapse by a weak constraint, and four learn a wrong reward, by which
  the truth rises in two and falls in two by less than what counts as harm.
- **By single families** the demands are not all met: more than 5 % of the healthy runs are flagged
  among those with KL weights, constraints and exploits, and fewer than 95 % of the collapses among
  padding and exploits in a share. All runs of the lab are from one small world with answers of
  about eight tokens, and more than half of all are made up.
- **What is missed**: {missed}. In these runs KL per token is the only signal that moves, or the
  length changes by less than in healthy runs of the lab.
- **False alarms**: {false}. The four called vanilla have a weak constraint: they end at 2.8 to 6.6
  nats, against 0.2 to 0.3 of PPO-max, and pad their answers by 60 to 74 %. Two end above SFT's
  gold, and two below it, by less than what counts as harm. The others are proxies of the exploits
  below.
- **Limits**: of SmolLM2 there are nine runs. The lab's older runs have KL, length, perplexity,
  entropy and explained variance, the paper's figures KL and length only. The families were known
  when the signals and the settings to choose from were decided, but for the exploits below.

After the first results, four rules changed, because of made-up trajectories outside of these
families: KL per response has no vote beside KL per token (healthy responses of 1,000 tokens reach
30 nats); a policy that starts far from its reference is judged from there; where KL is not logged,
longer responses of lower entropy are one signal; and a metric that was never finite, and is not
watched, breaks nothing. By the rules before, the counts of the table are the same.

Made-up trajectories of 40 other kinds, which chose nothing (drifts, steps, plateaus, oscillations,
recoveries, warm-ups, batches of 4, changing and growing prompts, missing signals and gaps, a log
every ten steps, collapses in the first three iterations; five seeds each): flagged were 90 of 90
collapses and 3 of 110 healthy runs, all three of a log in which many metrics are NaN in two
successive steps, which counts as a broken computation.

The runs of TRL are GRPO with 16-letter responses of a tiny model
(`experiments/trl_grpo/study.py`): a reward that counts one letter, where the truth is the number
of different ones, and the same runs with the truth as reward. Under `WatchCallback` the first is
stopped at update 19, before its truth falls, and `lit_rlhf watch` gives its log the same verdict.

The shipped thresholds are the best on all families that choose: {shipped}. Of the paper's other
runs, which have no label, they flag {told}, and no other.

### Exploits beside matched runs

The people of a pair wish for something. One run learns a proxy that wants it without measure and
overlooks form, the other the truth, which is gold plus the bounded wish; both are vanilla PPO from
the same SFT model without a KL penalty (`experiments/exploits/study.py`; the criterion was
committed before the runs). What the truth of a run does labels it, not its name. Iterations are
counted from 1, and truths are means of the first and the last five.

{pairs}
{exploited} KL is matched only to the proxies that are not exploited: the runs that learn the truth
end at {calm_kl} nats, those that collapse at {harmed_kl}.

### Does the disagreement of reward models warn earlier?

{early_warning}
Each signal alone gets the lowest threshold that at most 5 % of the {calm} healthy runs above are
ever beyond, on means of three iterations. The reward models are three of 1,500 own pairs each; they
score all runs, and two runs a seed learn from their mean. The first disagreement is what
`rollout/score_spread` logs, as a multiple of its start; the second is how far the mean scores of
the models drift apart. By the criterion, disagreement warns early if its median lead is above 0 and
larger than the one of KL per token. {lead}

{penalty}
`ensemble-penalized` subtracts the disagreement once (`reward_shaping.spread_coef` 1) from the mean.
{helped} The models share their SFT model and most of what they overlook, so they err together.
"""


def format_section(rows: Sequence[Row], exploits: dict[str, dict[str, Any]]) -> str:
    """The section, from what each detector says of each run."""
    chosen = {detector: choose_and_score(rows, detector) for detector in DETECTORS}
    scores = {name: [s for _, s in pairs] for name, pairs in chosen.items()}
    shipped = choose(rows, "ours", CHOOSING)
    ours, kl = total(scores["ours"]), total(scores["KL"])
    lab = [s for s in scores["ours"] if s.family.startswith("lab")]
    rank = [score(rows, "suspicious", 0, s.family) for s in scores["ours"]]
    early = total([s for s in rank if s.family.startswith("lab")]).leads
    lab_kl = [s for s in scores["KL"] if s.family.startswith("lab")]
    setting = ", ".join(f"`{key}` {value:g}" for key, value in GRID[shipped].items())
    told = [row["name"] for row in rows if row["collapsed"] is None]
    flagged = [row for row in rows if row["collapsed"] is None and row["ours"][shipped] is not None]
    place = {s.family: i for i, s in chosen["ours"]}
    assert told
    text = SECTION.format(
        early_warning=format_warnings(exploits),
        penalty=format_penalty(exploits),
        pairs=_pairs(rows, exploits, shipped),
        exploited=_exploited(rows, shipped),
        calm=sum(harm is None for _, harm in labelled(exploits)),
        lead=_lead(exploits),
        calm_kl=_final_kl(exploits, "-truth-"),
        harmed_kl=_final_kl(exploits, None),
        helped=_helped(exploits),
        families=_families(scores),
        demands=_demands(rows, shipped),
        late=-round(median(total(lab).leads)),
        trl=round(median(total([s for s in scores["ours"] if s.family == "TRL"]).leads)),
        kl_lead=round(median(total(lab_kl).leads)),
        early=round(median(early)),
        early_trl=round(median(next(s.leads for s in rank if s.family == "TRL"))),
        doubted=total(rank).false,
        kl_false=kl.false,
        kl_missed=kl.collapsed - kl.found,
        healthy=ours.healthy,
        collapsed=ours.collapsed,
        missed=_names(
            [row for row in rows if row["collapsed"] and row["ours"][place[row["family"]]] is None]
        ),
        false=_names(
            [
                row
                for row in rows
                if row["collapsed"] is False and row["ours"][place[row["family"]]] is not None
            ]
        ),
        shipped=setting,
        told="; ".join(
            f"{row['name'].replace('_', ' ')} (update {row['ours'][shipped] * row['every']})"
            for row in flagged
        ),
    )
    return "\n\n".join(map(_wrap, text.split("\n\n")))


def _pairs(rows: Sequence[Row], exploits: dict[str, dict[str, Any]], shipped: int) -> str:
    """A line for each pair and seed."""
    flags = {row["name"]: row["ours"][shipped] for row in rows if row["family"] == "lab: exploits"}
    harms = dict(zip(exploits, (harm for _, harm in labelled(exploits)), strict=True))

    def cells(name: str) -> list[str]:
        gold = exploits[name]["curves"]["rollout/gold"]
        kl = fmean(exploits[name]["curves"]["rollout/kl"][-5:])
        places = (harms[name], flags[name])
        found = ["-" if place is None else str(place + 1) for place in places]
        return [f"{fmean(gold[:5]):.1f} to {fmean(gold[-5:]):.1f}", f"{kl:.1f}", *found]

    columns = ["truth", "KL", "harm", "flag"]
    head = ["pair", "seed", *(f"{kind}: {name}" for kind in ("proxy", "truth") for name in columns)]
    names = [name.split("-proxy-seed_") for name in exploits if "-proxy-" in name]
    return table(
        head,
        [
            [pair, seed, *cells(f"{pair}-proxy-seed_{seed}"), *cells(f"{pair}-truth-seed_{seed}")]
            for pair, seed in names
        ],
    )


def _exploited(rows: Sequence[Row], shipped: int) -> str:
    """How the detector does on the exploits, in a sentence."""
    s = score(rows, "ours", shipped, "lab: exploits")
    false = [
        row["name"]
        for row in rows
        if row["family"] == s.family and not row["collapsed"] and row["ours"][shipped] is not None
    ]
    matched = sum("-truth-" in name for name in false)
    total_matched = sum("-truth-" in row["name"] for row in rows if row["family"] == s.family)
    return (
        f"The detector flags {s.found} of {s.collapsed} collapses (median lead "
        f"{median(s.leads):g}) and {s.false} of {s.healthy} runs whose truth does not fall so far "
        f"({', '.join(false) or 'none'}), {matched} of {total_matched} runs that learn the truth."
    )


def _final_kl(exploits: dict[str, dict[str, Any]], kind: str | None) -> str:
    """Range of the final KL of the runs of a kind, or of those that collapse."""
    runs = zip(exploits, labelled(exploits), strict=True)
    last = [
        fmean(curves["rollout/kl"][-5:])
        for name, (curves, harm) in runs
        if (harm is not None if kind is None else kind in name)
    ]
    return f"{min(last):.1f} to {max(last):.1f}"


def _lead(exploits: dict[str, dict[str, Any]]) -> str:
    """Whether disagreement warns early, in a sentence."""
    runs = labelled(exploits)
    leads = [median(warn(runs, signal).leads) for signal in SIGNALS.values()]
    early = [lead > 0 and lead > leads[2] for lead in leads[:2]]
    return (
        "It does." if any(early) else "It does not, by either measure: there is no lead."
    ) + " Of these signals, the length of the responses speaks first." * (leads[3] == max(leads))


def _helped(exploits: dict[str, dict[str, Any]]) -> str:
    """Whether the penalty helped, in a sentence."""
    last = {name: fmean(row["curves"]["rollout/gold"][-5:]) for name, row in exploits.items()}
    seeds = [name.rpartition("_")[2] for name in exploits if name.startswith("ensemble-seed_")]
    better = [last[f"ensemble-penalized-seed_{s}"] > last[f"ensemble-seed_{s}"] for s in seeds]
    says = "helps by the criterion" if all(better) else "does not help by the criterion"
    return f"Gold ends higher with it on {sum(better)} of {len(seeds)} seeds, so that it {says}."


def _wrap(block: str) -> str:
    """A paragraph or list in lines of 100 characters; tables, headings and code as they are."""
    if block.lstrip().startswith(("|", "#", "```")):
        return block
    items = block.strip("\n").replace("\n- ", "\n\n- ").split("\n\n")
    options: dict[str, Any] = {"width": 100, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(
        fill(" ".join(item.split()), subsequent_indent="  " * item.startswith("- "), **options)
        for item in items
    ) + "\n" * block.endswith("\n")


def _families(scores: dict[str, list[Score]]) -> str:
    head = ["family", "healthy: flagged by ours", "KL", "rules"]
    head += ["collapsed: flagged by ours", "KL", "rules", "median lead: ours", "KL"]
    names = [s.family for s in scores["ours"]]
    lines = []
    groups = [(name, [name]) for name in names]
    groups.append(("**runs**", [name for name in names if not name.startswith("synthetic")]))
    groups.append(("**synthetic**", [name for name in names if name.startswith("synthetic")]))
    for name, members in [*groups, ("**all**", names)]:
        row = [total([s for s in scores[d] if s.family in members]) for d in DETECTORS]
        lines.append(
            [
                name,
                *(f"{s.false} of {s.healthy}" if s.healthy else "-" for s in row),
                *(f"{s.found} of {s.collapsed}" if s.collapsed else "-" for s in row),
                *(f"{median(s.leads):g}" if s.leads else "-" for s in row[:2]),
            ]
        )
    return table(head, lines)


def _demands(rows: Sequence[Row], shipped: int) -> str:
    def flags(start: str, family: str, collapsed: bool) -> list[int | None]:
        return [
            row["ours"][shipped]
            for row in rows
            if row["family"] == family
            and row["collapsed"] is collapsed
            and row["name"].startswith(start)
        ]

    def share(found: Sequence[int | None]) -> str:
        return f"{sum(flag is not None for flag in found)} of {len(found)} flagged"

    (four,) = [row for row in rows if row["name"] == "figure4"]
    small = "synthetic: small batches"
    wide = RewardDistributionMonitor()
    widths = figure("figure13")
    levels = [wide.observe(width) for width in widths["std"]]
    first = next(i for i, level in enumerate(levels) if level > Level.HEALTHY)
    lines = [
        ["Figure 9, as it is, halved, a quarter higher", share(flags("Fig", "paper", False))],
        [
            "Figure 4, whose win rate is below one half from update "
            f"{four['harm'] * four['every']} on",
            f"flagged at update {four['ours'][shipped] * four['every']}",
        ],
        [
            f"Figure 13, whose scores are {widths['std'][-1] / widths['std'][0]:.0f} times as wide "
            "from update 800 on",
            f"the monitor of their spread is collapsed at update {widths['update'][first]:.0f}",
        ],
        ["healthy, batches of 4 and 16", share(flags("", small, False))],
        ["the quickstart's vanilla runs", share(flags("", "quickstart", True))],
        ["its PPO-max runs", share(flags("", "quickstart", False))],
    ]
    return table(["demand", "shipped thresholds"], lines)


def _names(rows: Sequence[Row]) -> str:
    """Names of runs without their seeds, with their number."""
    kinds: dict[str, int] = {}
    for row in rows:
        name = row["name"].replace("-seed_", ", seed ").rpartition(", seed ")[0] or row["name"]
        kinds[name] = kinds.get(name, 0) + 1
    return "; ".join(f"{name} ({count})" for name, count in kinds.items()) or "none"


def read_rows() -> list[Row]:
    """The committed results."""
    return [json.loads(line) for line in RESULT.read_text("utf-8").splitlines()]
