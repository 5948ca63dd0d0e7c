"""What is demanded of the detector, on which runs, and how its thresholds are chosen.

**Labels.** A run with a gold reward has *collapsed* if gold lies below `HARM_STDS` standard
deviations of the SFT policy's gold under the mean of the run's first three iterations, for
`HARM_STEPS` iterations in a row; the first of them is the *harm*. Other runs are labelled by how
they were made: synthetic ones, the paper's figures (Figure 4 falls below a win rate of one half,
Figure 9 is stable) and SmolLM2's (at 20 times the learning rate the responses become one).

**Flagged** means that the verdict is `collapsed` at any step. `suspicious` and `data changed` do
not count.

**Choosing.** `GRID` lists the settings that may be chosen. The best on a set of families has the
lowest `false / MAX_FALSE + missed / MAX_MISSED`, the shares being means over families, so that a
large family does not outweigh the others; on a tie the setting that comes first in `GRID`. The
shipped thresholds are the best on all families of `CHOOSING`.

**Judging.** A family of `CHOOSING` is judged by the setting that is best on the others (leave one
family out). Those of `JUDGING` are judged by the shipped thresholds, and choose nothing.

**Exploits.** `exploits` has six pairs of rewards, and runs that learn from three reward models. The
truth of a run labels it, by the rule above: a proxy that is not exploited counts as healthy, and a
truth that falls as collapsed. Nothing is left out; all are in the family `lab: exploits`.

**Early warning.** In the same runs, a signal alone speaks at the first iteration at which the mean
of its last `SMOOTH` values is beyond a threshold, as a multiple of the mean of its first `SMOOTH`.
The threshold is the lowest that at most `MAX_FALSE` of the healthy runs are ever beyond. The lead
is the number of iterations from there to the harm. The disagreement of the reward models warns
early if its median lead is above 0 and larger than the one of KL per token by the same rule; a
collapse that is never reported counts as a lead below all others. The penalty on disagreement
helps if gold over the last five iterations is higher with it on each seed. Two things changed after
the first four runs: KL, which begins at 0, is taken by its value, and a second disagreement is
judged beside the one that is logged: how far the mean scores of the models drift apart, since
scores that are standardized within a batch cannot show what all of its responses have in common.

What the grid contains, and which signals there are, was decided after looking at the lab's curves
and at the measurements that made this benchmark necessary, so leaving a family out does not make it
unseen. Families of `JUDGING` are nearer to that: thresholds were not compared on them.
"""

from __future__ import annotations

from itertools import product

MAX_FALSE = 0.05
"""Largest share of healthy runs that may be flagged, on families left out."""
MAX_MISSED = 0.05
"""Largest share of collapsed runs that may be missed, on families left out."""
HARM_STDS = 0.5
HARM_STEPS = 3
SMOOTH = 3

CHOOSING = (
    "lab: KL weights",  # vanilla PPO with KL weights of 0.001 to 0.6
    "lab: constraints",  # vanilla PPO with one or two of PPO-max's constraints
    "lab: reward models",  # other sizes, fewer pairs, right labels, another language
    "lab: PPO-max arms",  # PPO-max with one part changed
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
)
JUDGING = (
    "paper",  # Figure 9 as it is, halved, and a quarter higher; Figure 4
    "quickstart",  # vanilla PPO and PPO-max
    "SmolLM2",
    "lab: exploits",  # rewards with a loophole, each beside a match without it
    "TRL",
)

GRID = tuple(
    {"kl_per_token": kl, "length_high": high, "length_low": low, "entropy_low": entropy}
    for kl, high, low, entropy in product(
        (0.07, 0.05, 0.1), (1.6, 1.75, 1.5, 2.0), (0.6, 0.5), (0.55, 0.6)
    )
)
"""Nats per token; multiples of the baseline."""

DEMANDS = (
    "Figure 9, as it is, with KL and length halved, and a quarter higher, is never flagged",
    "Figure 4 is flagged before its win rate is below one half",
    "with batches of 4 and 16 responses at most 5 % of the healthy runs are flagged",
    "all of the quickstart's vanilla runs are flagged, and no PPO-max run",
)
