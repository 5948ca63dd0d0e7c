"""The runs and figures of the reproduction: configurations, overlays, seeds and panels, as data.

An arm is a curve: PPO-max or vanilla PPO of the quickstart, with overlays of `configs/ablations`.
Figures share arms, so that each is trained once per seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from lit_rlhf.tools.lab import WorldName

START_SECONDS = 20.0
"""CPU seconds of a PPO run besides its iterations, with one thread: imports, samples, measures."""
ITERATION_SECONDS = {"ppo_max": 1.0, "vanilla": 1.3}
"""CPU seconds of an iteration, on a busy machine."""
ITERATIONS = 70
"""Iterations of the quickstart's runs."""
CORES = 2
"""Cores that the budget is for."""
FOUNDATION_SECONDS = 150.0
"""CPU seconds until PPO starts: world, SFT model, preferences and reward model."""
LONG_RUN = 2500
"""Iterations of a run with the overlay `long_run`."""
SEEDS = (40, 41, 42)
"""Seeds of a figure. World and recipe were chosen on seeds 0 to 2, which are not among them."""
MAIN_SEEDS = (*SEEDS, 43, 44)
"""Seeds that were planned first for Figures 4, 6 and 7."""
MORE_SEEDS = (*MAIN_SEEDS, 45, 46, 47, 48, 49)
"""Seeds of the twelve claims that matter most, by their figures."""


LANGUAGES = {"en": "English", "zh": "Chinese"}


@dataclass(frozen=True)
class Foundation:
    """World, SFT model and reward model that PPO starts from.

    Attributes:
        world: Name of the world, which says how labellers err.
        language: Language of the world.
        pairs: Preferences that the reward model learns from, the first of the quickstart's; `None`:
            all of them.
        overlays: Ablations of the reward model.
        hidden: Hidden size of all models; `None`: the world's.
    """

    world: WorldName = "biased"
    language: Literal["en", "zh"] = "en"
    pairs: int | None = None
    overlays: tuple[str, ...] = ()
    hidden: int | None = None

    @property
    def seconds(self) -> float:
        """CPU seconds until PPO starts."""
        return FOUNDATION_SECONDS

    @property
    def base(self) -> Foundation:
        """The foundation whose world and SFT model this one shares."""
        return Foundation(self.world, self.language, hidden=self.hidden)

    @property
    def name(self) -> str:
        """Name of its folder and of its result."""
        parts = [
            self.world,
            self.language,
            *([f"pairs_{self.pairs}"] if self.pairs else []),
            *([f"hidden_{self.hidden}"] if self.hidden else []),
            *self.overlays,
        ]
        return "-".join(["foundation", *parts])

    @property
    def label(self) -> str:
        """Its reward model in words."""
        kinds = (overlay.removesuffix("_reward_model") for overlay in self.overlays)
        words = [*kinds, LANGUAGES[self.language], "reward model"]
        words += [f"of {self.pairs} pairs"] if self.pairs else []
        words += [f"of hidden size {self.hidden}"] if self.hidden else []
        return " ".join(words)


ENGLISH = Foundation()
CHINESE = Foundation(language="zh")
EXTRAPOLATION = Foundation("extrapolation")
EARLIER = Foundation(overlays=("earlier_reward_model",))
FEW_PAIRS = Foundation(pairs=1500)
NARROW = Foundation(hidden=64)
WIDE = Foundation(hidden=256)


@dataclass(frozen=True)
class Arm:
    """A curve of the figures.

    Attributes:
        label: Its name in legends and tables.
        vanilla: Whether it is vanilla PPO that the overlays change, instead of PPO-max.
        overlays: Names in `configs/ablations`, the last of which wins.
        restored: Names of ablations that turn a trick of PPO-max off. Vanilla PPO gets these tricks
            back, with PPO-max's values.
        foundation: What PPO starts from.
        pretrained: Whether the policy is not the SFT model, but pre-trained on the world's text.
        evaluations: Measurements besides the usual ones: `preferences`, wins against SFT with
            the paper's sampling, and `language`, the perplexity of unseen text of the world.
        iterations: Length of the run, for the budget.
        size: Cost of an iteration as a multiple of one with the world's models, for the budget.
    """

    label: str
    vanilla: bool = False
    overlays: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    foundation: Foundation = ENGLISH
    pretrained: bool = False
    evaluations: tuple[Literal["preferences", "language"], ...] = ()
    iterations: int = ITERATIONS
    size: float = 1.0

    @property
    def name(self) -> str:
        """Name of its folder and of its result: two arms of the same settings have the same."""
        parts = ["vanilla" if self.vanilla else "ppo_max", *self.overlays]
        parts += ["pretrained"] if self.pretrained else []
        parts += [f"with_{name.removeprefix('no_')}" for name in self.restored]
        if self.foundation != ENGLISH:
            parts.append(self.foundation.name.removeprefix("foundation-"))
        return "-".join(parts)

    @property
    def seconds(self) -> float:
        """CPU seconds of a run without its foundation."""
        one = ITERATION_SECONDS["vanilla" if self.vanilla else "ppo_max"]
        return START_SECONDS + self.iterations * one * self.size


def _vanilla(label: str, *overlays: str, **others: object) -> Arm:
    return Arm(label, True, overlays, **others)  # type: ignore[arg-type]


VANILLA = Arm("vanilla PPO", vanilla=True)
PPO_MAX = Arm("PPO-max", evaluations=("preferences", "language"))
KL = Arm("KL penalty 0.6", vanilla=True, restored=("no_kl_penalty",))  # PPO-max's weight
CRITIC_PRETRAINED = Arm("critic pre-trained", vanilla=True, restored=("no_critic_pretraining",))
EARLY_MAX = Arm("PPO-max, earlier reward model", foundation=EARLIER)
CHINESE_MAX = Arm("PPO-max, Chinese", foundation=CHINESE, evaluations=("preferences", "language"))
PTX = Arm("PPO-ptx", overlays=("ptx",), evaluations=("language",))
LONG = Arm("PPO-max, 10,000 updates", overlays=("long_run",), iterations=LONG_RUN, size=0.5)
REWARD_03 = _vanilla("reward normalized, clip 0.3", "reward_clip_0.3")
REWARD_08 = _vanilla("reward normalized, clip 0.8", "reward_clip_0.8")
SCALING = _vanilla("reward scaling", "reward_scaling")
ADVANTAGE_05 = _vanilla("advantage normalized, clip 0.5", "advantage_clip")
ADVANTAGE_012 = _vanilla("advantage normalized, clip 0.12", "advantage_clip_0.12")
KL_005 = _vanilla("KL penalty 0.05", "kl_coef_0.05")  # the paper's weight
ENTROPY = _vanilla("entropy bonus", "entropy_bonus")
REFERENCE = _vanilla("importance sampling", "reference_ratio")
KL_REFERENCE = replace(
    KL, label="KL penalty and importance sampling", overlays=("reference_ratio",)
)
NO_SFT = Arm("policy untrained", overlays=("policy_without_sft",))
PRETRAINED = Arm("policy pre-trained, no SFT", pretrained=True, evaluations=("language",))
CRITIC_SFT = Arm("critic from SFT", overlays=("critic_from_sft",))
VALUE = ("no_value_clip",)
B1 = (
    _vanilla("reward 0.8, advantage 0.8", "reward_clip_0.8", "advantage_clip_0.8"),
    _vanilla(
        "reward 0.8, advantage 0.8, value",
        *("reward_clip_0.8", "advantage_clip_0.8"),
        restored=VALUE,
    ),
    _vanilla(
        "reward 0.8, advantage normalized, value",
        *("reward_clip_0.8", "advantage_normalization"),
        restored=VALUE,
    ),
    _vanilla("reward 0.8, value", "reward_clip_0.8", restored=VALUE),
    _vanilla(
        "reward scaling, advantage 0.8, value",
        *("reward_scaling", "advantage_clip_0.8"),
        restored=VALUE,
    ),
)
KL_WEIGHTS = (
    *(
        _vanilla(f"KL penalty {weight}", f"kl_coef_{weight}")
        for weight in ("0.001", "0.01", "0.05", "0.1", "0.2")
    ),
    KL,
)
"""The paper's weights, and the one that fits the scores of this world."""
ENTROPY_BOUND = Arm("entropy bonus, bounded", overlays=("entropy_bonus",))
ENTROPY_FREE = Arm("entropy bonus, no bound", overlays=("entropy_bonus_unbounded",))
RATIO_05 = _vanilla("ratio clip 0.5", "ratio_clip_0.5")
GRADIENT_05 = _vanilla("gradient clip 0.5", "gradient_clip_0.5")
GRADIENT_1 = Arm("gradient clip 1.0", vanilla=True, restored=("no_gradient_clip",))
LAMBDAS = (
    _vanilla("lambda 0", "gae_lambda_0"),
    _vanilla("lambda 0.5", "gae_lambda_0.5"),
    replace(VANILLA, label="lambda 0.9"),  # the quickstart's
    _vanilla("lambda 0.95", "gae_lambda_0.95"),
    _vanilla("lambda 1", "gae_lambda_1"),
)
LEFT_OUT = tuple(
    Arm(f"without {label}", overlays=(name,))
    for label, name in (
        ("KL penalty", "no_kl_penalty"),
        ("reward normalization", "no_reward_normalization"),
        ("value clip", "no_value_clip"),
        ("critic pre-training", "no_critic_pretraining"),
        ("ratio clip", "unclipped_policy"),
        ("gradient clip", "no_gradient_clip"),
    )
)
ADDED = tuple(
    Arm(f"with {arm.label.removeprefix('without ')}", vanilla=True, restored=arm.overlays)
    for arm in LEFT_OUT
)
RIGHT_LABELS = tuple(
    replace(arm, label=f"{arm.label}, right labels", foundation=EXTRAPOLATION, evaluations=())
    for arm in (VANILLA, PPO_MAX)
)
FEW_VANILLA = _vanilla("vanilla PPO, 1,500 pairs", foundation=FEW_PAIRS)
NARROW_VANILLA = _vanilla("vanilla PPO, hidden size 64", foundation=NARROW)
WIDE_VANILLA = _vanilla("vanilla PPO, hidden size 256", foundation=WIDE, size=3.0)

CURVES = ("score", "response_length", "kl", "perplexity")
"""The panels of Figures 6, 7 and 14 to 16."""
CRITIC_CURVES = ("score", "perplexity", "value_loss", "explained_variance")
"""The panels of Figures 17 to 19, with the critic's measures that are logged."""
Kind = Literal[
    "curves",
    "differences",
    "accuracy",
    "outcomes",
    "language",
    "distribution",
    "frontier",
    "monitors",
    "tricks",
]


@dataclass(frozen=True)
class Experiment:
    """A figure.

    Attributes:
        name: Its name on the command line and of its file.
        title: Title on the page.
        arms: Its curves.
        seeds: Seeds of every curve.
        kind: How it is drawn.
        panels: Measures of the panels, for curves.
        foundations: Foundations that it shows, besides its arms'.
    """

    name: str
    title: str
    arms: tuple[Arm, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    kind: Kind = "curves"
    panels: tuple[str, ...] = CURVES
    foundations: tuple[Foundation, ...] = field(default=())

    def needed_foundations(self) -> tuple[Foundation, ...]:
        """All foundations, each behind the one that it shares a world with."""
        direct = [*self.foundations, *(arm.foundation for arm in self.arms)]
        return tuple(
            dict.fromkeys(part for foundation in direct for part in (foundation.base, foundation))
        )

    def wall_seconds(self) -> float:
        """Time of all runs of the figure on `CORES` quiet cores, a run on each."""
        busy = [0.0] * CORES
        parts: list[Foundation | Arm] = [*self.needed_foundations(), *self.arms]
        for part in parts:
            for _ in self.seeds:
                first = busy.index(min(busy))
                busy[first] += part.seconds
        return max(busy)


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "fig4",
            "Figure 4: vanilla PPO collapses",
            (VANILLA, PPO_MAX),
            MORE_SEEDS,
            panels=(
                "score",
                "win",
                "gold",
                "policy_loss",
                "value_loss",
                "perplexity",
                "kl",
                "response_length",
            ),
        ),
        Experiment(
            "fig7",
            "Figure 7: constraints on the policy",
            (VANILLA, KL, KL_005, ENTROPY, REFERENCE, KL_REFERENCE),
            MORE_SEEDS,
            panels=(*CURVES, "gold"),
        ),
        Experiment(
            "fig6",
            "Figure 6: rewards and advantages, scaled, normalized and clipped",
            (VANILLA, SCALING, REWARD_03, REWARD_08, ADVANTAGE_05, ADVANTAGE_012),
            MORE_SEEDS,
            panels=(*CURVES, "gold"),
        ),
        Experiment(
            "fig2",
            "Figure 2: difference of a pair's scores",
            kind="differences",
            foundations=(ENGLISH, CHINESE),
        ),
        Experiment(
            "fig3",
            "Figure 3: accuracy of the reward model over its training",
            (PPO_MAX, EARLY_MAX),
            kind="accuracy",
            panels=("score", "gold"),
            foundations=(ENGLISH, CHINESE, EARLIER),
        ),
        Experiment(
            "fig8",
            "Figure 8: initialization of policy and critic",
            (PPO_MAX, NO_SFT, PRETRAINED, CRITIC_SFT, CRITIC_PRETRAINED, VANILLA),
            panels=(*CURVES, "gold", "policy_loss", "value_loss", "explained_variance"),
        ),
        Experiment(
            "fig9",
            "Figure 9: 10,000 updates of PPO-max",
            (LONG,),
            MORE_SEEDS,
            panels=(*CURVES, "gold", "value_loss"),
        ),
        Experiment(
            "fig10",
            "Figure 10: PPO-max against SFT, with the paper's sampling",
            (PPO_MAX, CHINESE_MAX),
            MORE_SEEDS,
            kind="outcomes",
        ),
        Experiment(
            "fig12",
            "Figure 12: alignment tax",
            (PPO_MAX, PTX),
            kind="language",
        ),
        Experiment(
            "fig13",
            "Figure 13: distribution of scores over training",
            (VANILLA,),
            MORE_SEEDS,
            kind="distribution",
        ),
        Experiment(
            "fig14",
            "Figure 14 (Appendix B.1): reward, advantage and value clipping together",
            (VANILLA, *B1),
            panels=(*CURVES, "gold"),
        ),
        Experiment(
            "fig15",
            "Figure 15 (Appendix B.2): weights of the KL penalty",
            (VANILLA, *KL_WEIGHTS),
            panels=(*CURVES, "gold"),
        ),
        Experiment(
            "fig16",
            "Figure 16 (Appendix B.3): bound on the entropy bonus",
            (PPO_MAX, ENTROPY_BOUND, ENTROPY_FREE),
            panels=(*CURVES, "gold"),
        ),
        Experiment(
            "fig17",
            "Figure 17 (Appendix C.1): clipped surrogate objective",
            (VANILLA, KL, RATIO_05),
            panels=(*CRITIC_CURVES, "gold"),
        ),
        Experiment(
            "fig18",
            "Figure 18 (Appendix C.2): global gradient clipping",
            (VANILLA, GRADIENT_05, GRADIENT_1),
            panels=(*CRITIC_CURVES, "gold"),
        ),
        Experiment(
            "fig19",
            "Figure 19 (Appendix C.3): lambda of GAE",
            LAMBDAS,
            panels=(*CRITIC_CURVES, "gold"),
        ),
        Experiment(
            "size",
            "Gold over root KL, by size of the models and of the preference data",
            (VANILLA, FEW_VANILLA, NARROW_VANILLA, WIDE_VANILLA),
            kind="frontier",
        ),
        Experiment(
            "worlds",
            "Vanilla PPO and PPO-max where the labels follow gold",
            RIGHT_LABELS,
            panels=(*CURVES, "gold"),
        ),
        Experiment(
            "monitors",
            "Which monitor warns first",
            (VANILLA, PPO_MAX),
            MORE_SEEDS,
            kind="monitors",
        ),
        Experiment(
            "tricks",
            "PPO-max with one trick left out, vanilla PPO with one trick added",
            (PPO_MAX, VANILLA, *LEFT_OUT, *ADDED),
            MORE_SEEDS,
            kind="tricks",
        ),
    )
}
"""All figures, in the order in which they are run."""


def arms_by_name() -> dict[str, Arm]:
    """Every arm once, by its name."""
    return {arm.name: arm for figure in EXPERIMENTS.values() for arm in figure.arms}


def planned_seeds(part: Arm | Foundation) -> tuple[int, ...]:
    """The seeds of an arm or foundation in the figures that show it."""
    figures = EXPERIMENTS.values()
    of_part = [f.seeds for f in figures if part in (*f.arms, *f.needed_foundations())]
    return max(of_part, key=len)


def foundations_by_name() -> dict[str, Foundation]:
    """Every foundation once, by its name."""
    needed = [
        foundation for figure in EXPERIMENTS.values() for foundation in figure.needed_foundations()
    ]
    return {foundation.name: foundation for foundation in needed}


def total_seconds() -> float:
    """CPU seconds of all runs, each counted once."""
    arms: dict[tuple[str, int], float] = {}
    for figure in EXPERIMENTS.values():
        for seed in figure.seeds:
            arms |= {(arm.name, seed): arm.seconds for arm in figure.arms}
            arms |= {(f.name, seed): f.seconds for f in figure.needed_foundations()}
    return sum(arms.values())
