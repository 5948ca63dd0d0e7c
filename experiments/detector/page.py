"""All tables on families of runs, and what docs/collapse.md says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.detector.criterion import (
    CHOOSING,
    GRID,
    GROUPS,
    HEALTHY_RUNS,
    MAX_FALSE,
    MAX_FALSE_REAL,
    MAX_LOST,
    MIN_RIGHT,
    MIN_SEEN,
    REPLAYED,
)
from experiments.detector.distance import format_distances
from experiments.detector.early import SIGNALS, format_penalty, format_warnings, label_runs, warn
from experiments.detector.families import figure
from experiments.detector.foreign import LOGS
from experiments.detector.judging import (
    DETECTORS,
    Count,
    Row,
    Score,
    choose,
    choose_settings,
    count,
    family_of,
    first_flag,
    score,
    score_families,
    total,
)
from experiments.drawing import COLORS, STYLE, finish_axis
from experiments.frame import fill_template
from experiments.results_file import table
from lit_callbacks import Level, RewardDistributionMonitor

RESULT = Path(__file__).with_name("results.jsonl")
BEFORE_RESULT = Path(__file__).with_name("before.jsonl")
TEMPLATE = Path(__file__).with_name("results.md.j2")
FOREIGN = "logs of other people"


class Comparison(NamedTuple):
    """The detector and the one before it on the same runs.

    Attributes:
        before: Scores of the detector of commit `criterion.BEFORE`.
        now: Scores of the detector that is judged.
    """

    before: Score
    now: Score


def group_of(family: str) -> str:
    """The group of a family."""
    return next(group for group, starts in GROUPS.items() if any(map(family.startswith, starts)))


def compare_groups(before: Sequence[Row], now: Sequence[Row]) -> dict[str, Comparison]:
    """Scores of each group of families that were left out, before and now.

    Args:
        before: What the detector of commit `criterion.BEFORE` says of each run.
        now: What the detector says of each run.
    """
    return pair_groups(score_families(before, "ours"), score_families(now, "ours"))


def compare_shipped(before: Sequence[Row], now: Sequence[Row]) -> dict[str, Comparison]:
    """Scores of each group with the thresholds that ship, the first setting of each.

    Args:
        before: What the detector of commit `criterion.BEFORE` says of each run.
        now: What the detector says of each run.
    """
    old = score_groups(before, 0)
    new = score_groups(now, 0)
    return {group: Comparison(before=old[group], now=new[group]) for group in GROUPS}


def score_groups(rows: Sequence[Row], place: int) -> dict[str, Score]:
    """Scores of each group with one setting.

    Args:
        rows: What the detector says of each run.
        place: Place of the setting in `GRID`; the first ships.
    """
    families = dict.fromkeys(row["family"] for row in rows)
    scores = {family: score(family_of(rows, family), "ours", place) for family in families}
    return sum_groups(scores)


def compare_calibrated(rows: Sequence[Row]) -> dict[str, Comparison]:
    """Scores of each group with the thresholds that ship and with calibrated ones.

    Args:
        rows: What `calibrating` says of each run; the ones that calibrated judge nothing.
    """
    judged = [row for row in rows if not row["drawn"]]
    families = dict.fromkeys(row["family"] for row in judged)
    shipped = {family: score(family_of(judged, family), "shipped", 0) for family in families}
    calibrated = {family: score(family_of(judged, family), "calibrated", 0) for family in families}
    return pair_groups(shipped, calibrated)


def is_helped(group: Comparison) -> bool:
    """Whether calibration helps a group, by `criterion`."""
    lost = group.before.troubled.flagged - group.now.troubled.flagged
    is_quieter = group.now.untroubled.flagged < group.before.untroubled.flagged
    return is_quieter and lost <= MAX_LOST * group.before.troubled.runs


def format_calibration(groups: Mapping[str, Comparison]) -> str:
    """Format flags under shipped and calibrated thresholds.

    Args:
        groups: What `compare_calibrated` says of each group.
    """
    head = ["runs", "untroubled: flagged as shipped", "calibrated"]
    head += ["troubled: seen as shipped", "calibrated", "kind right as shipped", "calibrated"]
    lines = []
    for group, compared in groups.items():
        pairs = zip(compared.before[:3], compared.now[:3], strict=True)
        cells = [str(cell) for pair in pairs for cell in pair]
        lines.append([group, *cells, "yes" if is_helped(compared) else "no"])
    return table([*head, "helps"], lines)


def count_refused(rows: Sequence[Row]) -> Count:
    """The runs that were drawn as healthy, and how many of them calibration refused."""
    return count(row["drawn"] == "refused" for row in rows if row["drawn"])


def describe_changes(rows: Sequence[Row]) -> str:
    """How often the level changes in a run on average, in words.

    Args:
        rows: What the detector says of each run.
    """
    held = fmean(row["changes"] for row in rows)
    at_once = fmean(row["changes_at_once"] for row in rows)
    return f"{held:.1f} times in a run instead of {at_once:.1f}"


def count_chosen(rows: Sequence[Row], shipped: int) -> Count:
    """The sets of other families, and on how many of them a setting is the best.

    Args:
        rows: What the detector says of each run.
        shipped: Place of the setting.
    """
    return count(place == shipped for place in choose_settings(rows, "ours").values())


def pair_groups(old: Mapping[str, Score], new: Mapping[str, Score]) -> dict[str, Comparison]:
    """Sums over the families of each group.

    Args:
        old: Scores of the families before.
        new: Their scores now.
    """
    before = sum_groups(old)
    now = sum_groups(new)
    return {group: Comparison(before=before[group], now=now[group]) for group in GROUPS}


def sum_groups(scores: Mapping[str, Score]) -> dict[str, Score]:
    """Sums over the families of each group.

    Args:
        scores: Scores of the families.
    """
    return {
        group: total(
            [family_score for family, family_score in scores.items() if group_of(family) == group]
        )
        for group in GROUPS
    }


def format_groups(groups: Mapping[str, Comparison]) -> str:
    """Format false flags, seen troubles and right kinds, before and now."""
    head = ["runs", "untroubled: flagged before", "now", "troubled: seen before", "now"]
    head += ["kind right before", "now"]
    rows = []
    for group, (before, now) in groups.items():
        pairs = zip(before[:3], now[:3], strict=True)
        rows.append([group, *(str(cell) for pair in pairs for cell in pair)])
    return table(head, rows)


def format_questions(groups: Mapping[str, Comparison]) -> str:
    """Format harm and variety apart, before and now."""
    head = ["runs", "no harm: called broken or exploiting before", "now", "harm: called so before"]
    head += ["now", "variety kept: called monotonous before", "now"]
    head += ["variety lost: called so before", "now"]
    rows = []
    for group, (before, now) in groups.items():
        pairs = zip(before[3:7], now[3:7], strict=True)
        rows.append([group, *(str(cell) for pair in pairs for cell in pair)])
    return table(head, rows)


def format_families(rows: Sequence[Row]) -> str:
    """Format how each detector does on each family that was left out."""
    scores = {detector: score_families(rows, detector) for detector in DETECTORS}
    head = ["family", "untroubled: flagged by ours", "KL", "rules"]
    head += ["troubled: seen by ours", "KL", "rules", "kind right", "median lead"]
    lines = []
    for family, ours in scores["ours"].items():
        each = [scores[detector][family] for detector in DETECTORS]
        lead = f"{median(ours.leads):g}" if ours.leads else "-"
        lines.append(
            [
                family,
                *(family_score.untroubled for family_score in each),
                *(family_score.troubled for family_score in each),
                ours.right,
                lead,
            ]
        )
    return table(head, lines)


def format_foreign(rows: Sequence[Row]) -> str:
    """Format the verdicts on other people's logs."""
    by_name = {row["name"]: row for row in family_of(rows, FOREIGN)}
    place = choose_settings(rows, "ours").get(FOREIGN, 0)
    lines = []
    for log in LOGS:
        if (row := by_name.get(log.file)) is None:
            continue
        flags = row["ours"][place]
        kind = min(flags, key=flags.__getitem__, default="-")
        step = flags.get(kind, row["suspicious"])
        doubt = Level.HEALTHY if row["suspicious"] is None else Level.SUSPICIOUS
        level = Level.COLLAPSED if flags else doubt
        lines.append(
            [
                log.file,
                log.source,
                log.run,
                log.trouble or "untroubled",
                log.says,
                level,
                kind,
                "-" if step is None else f"{step + 1} of {row['steps']}",
            ]
        )
    head = ["file", "repository", "run", "label", "who says so", "verdict", "kind", "at line"]
    return table(head, lines)


def format_mistakes(rows: Sequence[Row]) -> str:
    """Format which runs are flagged falsely, missed, or given the wrong kind, by name."""
    places = choose_settings(rows, "ours")
    false: list[str] = []
    missed: list[str] = []
    wrong: list[str] = []
    for row in rows:
        if not row["tells"]:
            continue
        flag = first_flag(row, "ours", places[row["family"]])
        name = f"{row['family'].rpartition(': ')[2]}: {kind_name(row['name'])}"
        if flag is None:
            missed += [name] * bool(row["troubles"])
        elif not row["troubles"]:
            false.append(f"{name} as {flag.kind}")
        elif flag.kind not in row["troubles"]:
            wrong.append(f"{name}, {' and '.join(row['troubles'])}, as {flag.kind}")
    parts = {"Flagged falsely": false, "Missed": missed, "Seen, with another kind": wrong}
    return "\n".join(
        f"**{title}** ({len(names)}): {tally(names)}.\n" for title, names in parts.items()
    )


def kind_name(name: str) -> str:
    """Name of a run without its seed."""
    return name.replace("-seed_", ", seed ").rpartition(", seed ")[0] or name


def tally(names: Sequence[str]) -> str:
    """Names with their number."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return "; ".join(f"{name} ({number})" for name, number in counts.items()) or "none"


def count_doubted(rows: Sequence[Row]) -> Count:
    """Untroubled runs, and how many of them are suspicious at some step."""
    return count(
        row["suspicious"] is not None for row in rows if row["tells"] and not row["troubles"]
    )


def demands_met(groups: Mapping[str, Comparison]) -> dict[str, dict[str, bool]]:
    """Whether the detector meets each demand of `criterion`, by group."""
    return {
        group: {
            "false": now.untroubled.share
            <= (MAX_FALSE_REAL if group == "real models" else MAX_FALSE),
            "seen": now.troubled.share >= MIN_SEEN,
            "right": now.right.share >= MIN_RIGHT,
        }
        for group, (_, now) in groups.items()
    }


def format_tables(
    before: Sequence[Row],
    rows: Sequence[Row],
    calibrated: Sequence[Row],
    exploits: dict[str, dict[str, Any]],
) -> str:
    """Format all families, the demands, the exploits and the disagreement of reward models.

    Args:
        before: What the detector of commit `criterion.BEFORE` says of each run.
        rows: What the detector says of each run.
        calibrated: What `calibrating` says of each run.
        exploits: Results of `experiments.exploits` by name.
    """
    groups = compare_groups(before, rows)
    shipped = choose(rows, "ours", CHOOSING)
    return fill_template(
        TEMPLATE,
        groups=format_groups(groups),
        replayed=REPLAYED,
        questions=format_questions(groups),
        shipped=format_groups(compare_shipped(before, rows)),
        families=format_families(rows),
        foreign=format_foreign(rows),
        mistakes=format_mistakes(rows),
        doubted=count_doubted(rows),
        calibration=format_calibration(compare_calibrated(calibrated)),
        healthy=HEALTHY_RUNS,
        refused=count_refused(calibrated),
        changes=describe_changes(rows),
        chosen=count_chosen(rows, shipped),
        distances=format_distances(),
        early_warning=format_warnings(exploits),
        penalty=format_penalty(exploits),
        pairs=_pairs(rows, exploits, shipped),
        exploited=_exploited(rows, shipped),
        calm=sum(run.harm is None for run in label_runs(exploits)),
        lead=_lead(exploits),
        calm_kl=_final_kl(exploits, "-truth-"),
        harmed_kl=_final_kl(exploits, None),
        helped=_helped(exploits),
        demands=_demands(rows, shipped),
        setting=", ".join(f"`{key}` {value:g}" for key, value in GRID[shipped].items()),
        unlabelled=_unlabelled(rows, shipped),
    )


def draw_groups(groups: Mapping[str, Comparison]) -> Figure:
    """Draw false flags, seen troubles and right kinds as shares, before and now."""
    titles = {
        "untroubled": "untroubled runs flagged",
        "troubled": "troubled runs seen",
        "right": "kind named right, of those seen",
    }
    shown = list(GROUPS)[:4]
    with rc_context(STYLE):
        drawing = Figure(figsize=(10.5, 2.9))
        axes = drawing.subplots(1, len(titles), sharey=True)
        for axis, (field, title) in zip(axes, titles.items(), strict=True):
            for place, group in enumerate(shown):
                for shift, scores, color, label in (
                    (-0.19, groups[group].before, COLORS[0], "before"),
                    (0.19, groups[group].now, COLORS[1], "now"),
                ):
                    counted: Count = getattr(scores, field)
                    axis.barh(
                        place + shift,
                        counted.share,
                        height=0.34,
                        color=color,
                        label=label if place == 0 else None,
                    )
                    axis.text(1.03, place + shift, str(counted), va="center", fontsize=7)
                allowed = MAX_FALSE_REAL if group == "real models" else MAX_FALSE
                bound = {"untroubled": allowed, "troubled": MIN_SEEN, "right": MIN_RIGHT}[field]
                axis.plot(
                    [bound, bound], [place - 0.4, place + 0.4], color="#333333", linewidth=1.2
                )
            axis.set_title(title)
            axis.set_xlim(0, 1.3)
            axis.set_xticks([0, 0.5, 1])
            axis.set_yticks(range(len(shown)), shown)
            finish_axis(axis)
        axes[0].invert_yaxis()
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
        return drawing


def _unlabelled(rows: Sequence[Row], shipped: int) -> str:
    """The runs without a label that are flagged, with the update."""
    flagged = []
    for row in rows:
        places = [place for kind, place in row["ours"][shipped].items() if kind != "data changed"]
        if not row["tells"] and places:
            flagged.append(f"{row['name'].replace('_', ' ')} (update {min(places) * row['every']})")
    return "; ".join(flagged) or "none"


def _pairs(rows: Sequence[Row], exploits: dict[str, dict[str, Any]], shipped: int) -> str:
    """A line for each pair and seed."""
    flags = {
        row["name"]: first_flag(row, "ours", shipped) for row in family_of(rows, "lab: exploits")
    }
    harms = dict(zip(exploits, (run.harm for run in label_runs(exploits)), strict=True))

    def cells(name: str) -> list[str]:
        gold = exploits[name]["curves"]["rollout/gold"]
        kl = fmean(exploits[name]["curves"]["rollout/kl"][-5:])
        harm = harms[name]
        flag = flags[name]
        return [
            f"{fmean(gold[:5]):.1f} to {fmean(gold[-5:]):.1f}",
            f"{kl:.1f}",
            "-" if harm is None else str(harm + 1),
            "-" if flag is None else f"{flag.place + 1}, {flag.kind}",
        ]

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
    """How the detector does on the exploits, in sentences."""
    runs = family_of(rows, "lab: exploits")
    summary = score(runs, "ours", shipped)
    learners = [row for row in runs if "-truth-" in row["name"]]
    flagged = score(learners, "ours", shipped).harmless
    return (
        f"The detector calls {summary.harmed} harmed runs broken or exploiting, and "
        f"{summary.harmless} runs whose truth does not fall so far, {flagged} of those that learn "
        f"the truth. It sees {summary.troubled} troubled runs, monotonous ones among them."
    )


def _final_kl(exploits: dict[str, dict[str, Any]], kind: str | None) -> str:
    """Range of the final KL of the runs of a kind, or of those that collapse."""
    final_kls = [
        fmean(run.curves["rollout/kl"][-5:])
        for name, run in zip(exploits, label_runs(exploits), strict=True)
        if (run.harm is not None if kind is None else kind in name)
    ]
    return f"{min(final_kls):.1f} to {max(final_kls):.1f}"


def _lead(exploits: dict[str, dict[str, Any]]) -> str:
    """Whether disagreement warns early, in a sentence."""
    runs = label_runs(exploits)
    leads = [median(warn(runs, signal).leads) for signal in SIGNALS.values()]
    early = [lead > 0 and lead > leads[2] for lead in leads[:2]]
    return (
        "It does." if any(early) else "It does not, by either measure: there is no lead."
    ) + " Of these signals, the length of the responses speaks first." * (leads[3] == max(leads))


def _helped(exploits: dict[str, dict[str, Any]]) -> str:
    """Whether the penalty helped, in a sentence."""
    final_golds = {
        name: fmean(row["curves"]["rollout/gold"][-5:]) for name, row in exploits.items()
    }
    seeds = [name.rpartition("_")[2] for name in exploits if name.startswith("ensemble-seed_")]
    better = [
        final_golds[f"ensemble-penalized-seed_{s}"] > final_golds[f"ensemble-seed_{s}"]
        for s in seeds
    ]
    outcome = "helps by the criterion" if all(better) else "does not help by the criterion"
    return f"Gold ends higher with it on {sum(better)} of {len(seeds)} seeds, so that it {outcome}."


def _demands(rows: Sequence[Row], shipped: int) -> str:
    def share(start: str, family: str, has_trouble: bool) -> str:
        runs = [
            row
            for row in family_of(rows, family)
            if bool(row["troubles"]) is has_trouble and row["name"].startswith(start)
        ]
        flags = [first_flag(row, "ours", shipped) for row in runs if row["tells"]]
        return f"{sum(flag is not None for flag in flags)} of {len(flags)} flagged"

    (figure_4,) = [row for row in rows if row["name"] == "figure4"]
    flag = first_flag(figure_4, "ours", shipped)
    small = "synthetic: small batches"
    spread_monitor = RewardDistributionMonitor()
    widths = figure("figure13")
    levels = [spread_monitor.observe(width) for width in widths["std"]]
    first = next(i for i, level in enumerate(levels) if level > Level.HEALTHY)
    lines = [
        ["Figure 9, as it is, halved, a quarter higher", share("Fig", "paper", False)],
        [
            "Figure 4, whose win rate is below one half from update "
            f"{figure_4['harm'] * figure_4['every']} on",
            "not flagged"
            if flag is None
            else f"flagged at update {flag.place * figure_4['every']}",
        ],
        [
            f"Figure 13, whose scores are {widths['std'][-1] / widths['std'][0]:.0f} times as wide "
            "from update 800 on",
            f"the monitor of their spread is collapsed at update {widths['update'][first]:.0f}",
        ],
        ["healthy, batches of 4 and 16", share("", small, False)],
        ["the quickstart's vanilla runs", share("", "lab: quickstart", True)],
        ["its PPO-max runs", share("", "lab: quickstart", False)],
    ]
    return table(["demand of the first criterion", "best setting"], lines)
