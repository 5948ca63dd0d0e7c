"""What is demanded of the detector, on which runs, and how its thresholds are chosen.

This is the second criterion. The first one had one label, *collapsed*, and judged the detector
against harm alone; runs that had lost their variety while their truth rose counted as healthy.

**Troubles.** A run has a set of troubles, and none is the label of an untroubled run.

- *exploiting*: the truth (a gold reward, a known rule, tests that are held out) lies below
  `HARM_STDS` standard deviations of single responses under the mean of its first three readings,
  for `HARM_STEPS` readings in a row. The first of them is the *harm*. A run that recovers later
  keeps its label.
- *broken*: the truth fell as above, and the mean of the last `ENDS` rewards that the run optimizes
  is below the mean of its first three; or KL to the reference ends below `-BROKEN_NATS`.
- *monotonous*: variety is lost. At the end distinct bigrams are below `VARIETY_KEPT` of the
  start's, or the commonest opening, or the share of responses with a canned phrase, has risen by
  more than `VARIETY_SHARE`; or, where none of these is known, entropy is below `ENTROPY_KEPT` of
  the start's.
- *data changed*: the prompts are others from some step on.

The truth of a run comes from its own measures of held-out prompts where they are committed (known
truth, preferences, pretrained). Elsewhere variety comes from the training metrics, which the
detector reads too: in the exploits, the alignment tax and TRL. Where a run has no measure of
variety, or no truth, that question is not judged on it: `tells` names the questions with an answer.
Made-up runs and other people's logs are labelled by how they were made and by what their authors
say.

**Flagged** means that a verdict is `collapsed` at any step, of a kind on which the run is judged:
`broken` and `exploiting` where harm is known, `monotonous` where variety is. `suspicious` does not
count. A run whose prompts changed is *seen* if a verdict says so. A flag of an untroubled run is
false. A troubled run is seen if it is flagged with any kind, and the *kind is right* if the first
flag's is one of its troubles. Detectors that name no kind are judged by the first two.

**Demands**, on families left out: at most `MAX_FALSE` of the untroubled runs are flagged
(`MAX_FALSE_REAL` on real models), at least `MIN_SEEN` of the troubled ones are seen, and of the
seen ones the kind is right for at least `MIN_RIGHT`.

**Choosing.** `GRID` lists the settings that may be chosen. The best on a set of families has the
lowest `false / MAX_FALSE + missed / (1 - MIN_SEEN)`, the shares being means over families, so that
a large family does not outweigh the others; on a tie the setting that comes first in `GRID`, which
is the one that ships.

**Judging.** A family of `CHOOSING` is judged by the setting that is best on the others (leave one
family out). Those of `JUDGING` are judged by the best on all families of `CHOOSING`, and choose
nothing.

**Before** is the detector of commit `BEFORE`, which names no kind: its kind is read from its
sentence, and a flag that concludes nothing has none.

**Early warning.** In the runs of `exploits`, a signal alone speaks at the first iteration at which
the mean of its last `SMOOTH` values is beyond a threshold, as a multiple of the mean of its first
`SMOOTH`. The threshold is the lowest that at most `MAX_FALSE` of the healthy runs are ever beyond.
The lead is the number of iterations from there to the harm. The disagreement of the reward models
warns early if its median lead is above 0 and larger than the one of KL per token by the same rule;
a collapse that is never reported counts as a lead below all others. The penalty on disagreement
helps if gold over the last five iterations is higher with it on each seed. Two things changed after
the first four runs: KL, which begins at 0, is taken by its value, and a second disagreement is
judged beside the one that is logged: how far the mean scores of the models drift apart, since
scores that are standardized within a batch cannot show what all of its responses have in common.

**Changed after the first results.** Runs whose reward can be checked (`Trajectory.task`) are
watched with the preset of that name, as their users would; before, all had the thresholds of
`chat`.
The rules of the detector itself changed on these families, too, so that its numbers now are those
of runs that it was made for, and not of unseen ones.

**Third replay, committed before it.** Three things changed, and nothing else.

- *The length threshold* that ships is the one that the choice above gives: 2.0 is best on all
  families and on all but one of the sets of others. It comes first in `GRID` now.
- *A level is left* once all steps of a window (`2 * patience - 1`) are below it, so that a signal
  at the edge of a threshold does not change the level at every step. It stays only if no group has
  more flags of untroubled runs, fewer troubled runs seen, or fewer kinds right than with the same
  thresholds before. What it is good for is the number of changes of level in a run.
- *Calibration* (`Watch.calibrate`) is judged on every family with more than `HEALTHY_RUNS`
  untroubled runs that are judged. For each of `CALIBRATION_SEEDS`, `HEALTHY_RUNS` of them are drawn
  and calibrate the monitors of the family; the other runs of the family are judged with shipped and
  with calibrated thresholds. A drawn run that calibration refuses is counted, judges nothing, and
  the next one in the drawn order takes its place. Counts are sums over the draws. Calibration
  *helps* a group if fewer untroubled runs are flagged and at most `MAX_LOST` of the troubled ones
  are lost.

The families, the kinds of made-up runs and the signals were known when this was written, so leaving
a family out does not make it unseen. Of the real models, known truth, preferences and the alignment
tax had been replayed with the detector `BEFORE`, which was wrong on most of them.
"""

from __future__ import annotations

from itertools import product

MAX_FALSE = 0.05
"""Largest share of untroubled runs that may be flagged, on families left out."""
MAX_FALSE_REAL = 0.1
"""The same on real models."""
MIN_SEEN = 0.9
"""Least share of troubled runs that have to be seen, on families left out."""
MIN_RIGHT = 0.9
"""Least share of the troubled runs that are seen whose kind has to be right."""
HARM_STDS = 0.5
HARM_STEPS = 3
ENDS = 5
"""Number of last readings that make the end of a run; its start is the first three."""
BROKEN_NATS = 1.0
"""KL per response cannot be below 0 by more than noise."""
VARIETY_KEPT = 0.8
VARIETY_SHARE = 0.2
ENTROPY_KEPT = 0.2
SMOOTH = 3
HEALTHY_RUNS = 2
"""Number of untroubled runs of a family that calibrate its thresholds."""
CALIBRATION_SEEDS = (0, 1, 2)
MAX_LOST = 0.05
"""Largest share of the troubled runs that calibration may lose where it helps."""
BEFORE = "6bfaf398"
REPLAYED = "ca7bd103"
"""Commit of the detector that `results.jsonl` was replayed with."""

CHOOSING = (
    "lab: KL weights",  # vanilla PPO with KL weights of 0.001 to 0.6
    "lab: constraints",  # vanilla PPO with one or two of PPO-max's constraints
    "lab: reward models",  # other sizes, fewer pairs, right labels, another language
    "lab: PPO-max arms",  # PPO-max with one part changed
    "lab: exploits",  # rewards with a loophole, each beside a match without it
    "lab: TRL",  # GRPO of TRL with a tiny model
    "SmolLM2: HH-RLHF",
    "SmolLM2: known truth",
    "SmolLM2: preferences",
    "SmolLM2: alignment tax",
    "SmolLM2: sums",
    "synthetic: long responses",  # 250 to 512 tokens, growing to 1,200
    "synthetic: sharpening",
    "synthetic: curricula",  # other prompts from one step to the next
    "synthetic: small batches",  # 4 and 16 responses, healthy and not
    "synthetic: shortening and refusals",
    "synthetic: one answer",
    "synthetic: padding",
    "synthetic: exploits in a share",  # some of the responses, another language, a ceiling
    "synthetic: early collapse",  # within the iterations of the baseline
    "synthetic: slow collapse",
    "synthetic: checkable rewards",  # mathematics, solved tasks, loops without KL
    "synthetic: short answers",  # few tokens, so that nats per token are many
    "synthetic: broken",  # negative KL, falling rewards, numbers that are not finite
    "synthetic: one signal",  # all others stay where they were
    "synthetic: unsteady",  # thresholds passed in every second step, alternating prompts
    "synthetic: from the start",  # troubled in the first step
)
JUDGING = (
    "paper",  # Figure 9 as it is, halved, and a quarter higher; Figure 4
    "lab: quickstart",  # vanilla PPO and PPO-max
    "logs of other people",
)
GROUPS = {
    "lab": ("lab:",),
    "real models": ("SmolLM2:",),
    "synthetic": ("synthetic:",),
    "other people's logs": ("logs of other people",),
    "the paper's figures": ("paper",),
}
"""Beginnings of the names of families, by the name of a group."""

GRID = tuple(
    {"kl_per_token": kl, "length_high": high}
    for kl, high in product((0.07, 0.05, 0.1), (2.0, 1.75))
)
"""Nats per token; a multiple of the baseline. In `before.jsonl` 1.75 comes before 2.0."""
NARROW = {"kl_per_token": 0.07, "length_high": 1.75}
"""The setting that shipped before."""

DEMANDS = (
    "Figure 9, as it is, with KL and length halved, and a quarter higher, is never flagged",
    "Figure 4 is flagged before its win rate is below one half",
    "with batches of 4 and 16 responses at most 5 % of the healthy runs are flagged",
    "all of the quickstart's vanilla runs are flagged, and no PPO-max run",
)
