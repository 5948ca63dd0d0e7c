"""The paper's statements as comparisons between the runs of a seed, judged by `judging`.

Claims and rules stand before the runs that they judge: each new result carries their hash.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.reproduce import table
from experiments.reproduce.judging import At, Check, Claim, Value, hash_rules
from experiments.reproduce.table import Arm, Foundation


def _of(measure: str) -> Callable[..., Value]:
    def value(part: Arm | Foundation, at: At = "end") -> Value:
        return Value(part, measure, at)

    return value


gold = _of("gold")
gain = _of("gain")
score = _of("score")
kl = _of("kl")
length, perplexity, win, lose = map(_of, ("response_length", "perplexity", "win", "lose"))
accuracy, value_loss, explained = map(_of, ("accuracy", "value_loss", "explained_variance"))
width, skewness, rollout_gold = map(_of, ("score_width", "score_skewness", "rollout.gold"))
text_policy, text_sft, text_start = (
    _of(f"text_perplexity.{name}") for name in ("policy", "sft", "start")
)
T = table
COLLAPSES = Check(gain(T.VANILLA), "<", -0.5)
"""Vanilla PPO ends well below SFT, from which its gain is counted."""
HARM = -0.3
"""A collapse: gold that far below SFT."""
NEAR = 0.2
"""Difference of gold that is none."""
NO_ENDS = (
    "The end of gold cannot be compared: with some seed both arms have collapsed, and how far a "
    "run has fallen says nothing"
)


def optimized(better: Arm, worse: Arm) -> tuple[Check, ...]:
    """The peak of the better arm's gold is higher, in rollouts and held out."""
    return tuple(
        Check(Value(better, measure, "peak"), ">", Value(worse, measure, "peak"))
        for measure in ("rollout.gold", "gold")
    )


CLAIMS = (
    Claim(
        "Figure 2, Section 4.3",
        "The reward models prefer the response that labellers prefer for most unseen pairs, in "
        "English and in Chinese.",
        "fig2",
        (
            Check(accuracy(T.ENGLISH), ">", 0.6),
            Check(accuracy(T.CHINESE), ">", 0.6),
        ),
    ),
    Claim(
        "Figure 3, Section 4.4",
        "After a fifth of its steps a reward model is almost as accurate as at the end.",
        "fig3",
        (Check(accuracy(T.EARLIER), ">", accuracy(T.ENGLISH), margin=-0.03),),
    ),
    Claim(
        "Section 4.4",
        "PPO on the earlier reward model is worse all the same: accuracy is not enough to judge "
        "a reward model.",
        "fig3",
        (Check(gold(T.EARLY_MAX), "<", gold(T.PPO_MAX), margin=-0.1),),
        premise=(Check(accuracy(T.EARLIER), ">", accuracy(T.ENGLISH), margin=-0.03),),
    ),
    Claim(
        "Figure 4, Section 5.2",
        "Vanilla PPO is over-optimized: the score rises while the win rate against SFT falls from "
        "its peak, and in the end it loses more than it wins.",
        "fig4",
        (
            Check(win(T.VANILLA), "<", win(T.VANILLA, "peak"), margin=-0.05),
            Check(win(T.VANILLA), "<", lose(T.VANILLA)),
        ),
        premise=(Check(score(T.VANILLA), ">", score(T.VANILLA, "start")),),
    ),
    Claim(
        "Figure 4, Section 5.2",
        "KL, length and perplexity show it: a collapsed policy is far from SFT, its responses are "
        "long and their perplexity is low.",
        "fig4",
        (
            Check(kl(T.VANILLA), ">", kl(T.PPO_MAX), factor=3.0),
            Check(length(T.VANILLA), ">", length(T.VANILLA, "start"), factor=1.5),
            Check(perplexity(T.VANILLA), "<", perplexity(T.VANILLA, "start"), factor=0.8),
        ),
        premise=(COLLAPSES,),
    ),
    Claim(
        "Figure 4, Section 5.2",
        "The training losses do not show it: the critic's loss is no higher at the end than in the "
        "first quarter.",
        "fig4",
        (Check(value_loss(T.VANILLA), "<", value_loss(T.VANILLA, "early")),),
        premise=(COLLAPSES,),
    ),
    Claim(
        "Section 5.2",
        "A collapsed policy writes fixed patterns: few of its responses are well-formed.",
        "fig4",
        (
            Check(
                Value(T.VANILLA, "well_formed"),
                "<",
                Value(T.VANILLA, "well_formed", "start"),
                factor=0.5,
            ),
        ),
        premise=(COLLAPSES,),
    ),
    Claim(
        "Section 5.2",
        "Responses out of the reward model's distribution are over-rated. It happens also where "
        "the labels are right: the score rises and gold ends below SFT.",
        "worlds",
        (Check(gain(T.RIGHT_LABELS[0]), "<", 0.0),),
        premise=(Check(score(T.RIGHT_LABELS[0]), ">", score(T.RIGHT_LABELS[0], "start")),),
        note="Gold ends well above SFT: where the labels are right vanilla PPO does not collapse",
    ),
    Claim(
        "Figure 6, Section 5.3.1",
        "Reward scaling does not prevent the collapse.",
        "fig6",
        (Check(gain(T.SCALING), "<", HARM),),
        premise=(COLLAPSES,),
    ),
    Claim(
        "Figure 6, Section 5.3.1",
        "A tight bound on normalized rewards (0.3) keeps the policy near SFT; a wider one (0.8) "
        "lets it go further, to higher scores.",
        "fig6",
        (
            Check(kl(T.REWARD_03), "<", kl(T.VANILLA), factor=0.5),
            Check(kl(T.REWARD_03), "<", kl(T.REWARD_08)),
            Check(score(T.REWARD_03), "<", score(T.REWARD_08)),
        ),
    ),
    Claim(
        "Figure 6, Section 5.3.1",
        "A tight bound on normalized advantages (0.12) acts like one on rewards, and more than a "
        "wider one (0.5).",
        "fig6",
        (
            Check(kl(T.ADVANTAGE_012), "<", kl(T.VANILLA), factor=0.5),
            Check(kl(T.ADVANTAGE_012), "<", kl(T.ADVANTAGE_05)),
        ),
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "A token-level KL penalty keeps training stable, near SFT and better than it: with the "
        "paper's weight of 0.05, and with this world's of 0.6.",
        "fig7",
        tuple(
            check
            for arm in (T.KL_005, T.KL)
            for check in (
                Check(kl(arm), "<", kl(T.VANILLA), factor=0.25),
                Check(gain(arm), ">", 0.0),
            )
        ),
        note="Scores have another unit here, so a weight of 0.05 is a weaker penalty",
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "An entropy bonus keeps training stable, too, but has no advantage over the KL penalty.",
        "fig7",
        (
            Check(kl(T.ENTROPY), "<", kl(T.VANILLA), factor=0.5),
            Check(gain(T.ENTROPY), ">", HARM),
        ),
        premise=(COLLAPSES,),
        then=(Check(gain(T.ENTROPY), "<", gain(T.KL), margin=NEAR),),
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "Importance sampling against the reference alone does less harm than expected: it ends no "
        "worse than vanilla PPO.",
        "fig7",
        (Check(gold(T.REFERENCE), ">", gold(T.VANILLA), margin=-NEAR),),
        note="Both have collapsed; how far differs more between seeds",
    ),
    Claim(
        "Figure 7, Section 5.3.2",
        "Together with the KL penalty it stabilizes training further, at the cost of the final "
        "reward.",
        "fig7",
        (
            Check(kl(T.KL_REFERENCE), "<", kl(T.KL)),
            Check(score(T.KL_REFERENCE), "<", score(T.KL)),
        ),
    ),
    Claim(
        "Figure 7",
        "Length and perplexity move alike under all constraints early in training: longer, and "
        "more certain; in the first quarter responses are 5 % longer than at the start (Figure 7 "
        "read off: 6 to 10 %, and none with both constraints).",
        "fig7",
        tuple(
            check
            for arm in (T.VANILLA, T.KL, T.ENTROPY, T.REFERENCE)
            for check in (
                Check(length(arm, "early"), ">", length(arm, "start")),
                Check(length(arm, "early"), ">", length(arm, "start"), factor=1.05),
                Check(perplexity(arm, "early"), "<", perplexity(arm, "start")),
            )
        ),
    ),
    Claim(
        "Figure 8, Section 5.3.3",
        "PPO from a policy that is pre-trained, on the world's text, and not fine-tuned fails: it "
        "ends below SFT, scores lower than after SFT, and loses in language modeling.",
        "fig8",
        (
            Check(gold(T.PRETRAINED), "<", gold(T.PPO_MAX, "start"), margin=HARM),
            Check(score(T.PRETRAINED), "<", score(T.PPO_MAX)),
            Check(text_policy(T.PRETRAINED), ">", text_start(T.PRETRAINED), factor=1.1),
        ),
        premise=(Check(text_start(T.PRETRAINED), "<", 30.0),),
    ),
    Claim(
        "Figure 8, Section 5.3.3",
        "A critic from the SFT model converges to the same result as one from the reward model.",
        "fig8",
        (Check(gold(T.CRITIC_SFT), "~", gold(T.PPO_MAX), margin=NEAR),),
    ),
    Claim(
        "Figure 8, Section 5.3.3",
        "Pre-training the critic gives better advantage estimates early in training.",
        "fig8",
        (Check(explained(T.CRITIC_PRETRAINED, "early"), ">", explained(T.VANILLA, "early")),),
    ),
    Claim(
        "Figure 9, Section 5.4",
        "PPO-max stays stable for 10,000 updates: it ends above SFT, and KL does not run away.",
        "fig9",
        (
            Check(gold(T.LONG), ">", gold(T.LONG, "start")),
            Check(gold(T.LONG), ">", gold(T.LONG, "peak"), margin=HARM),
            Check(kl(T.LONG), "<", kl(T.LONG, "early"), factor=3.0),
        ),
    ),
    Claim(
        "Section 5.4",
        "PPO-max improves the policy where vanilla PPO collapses.",
        "fig4",
        (
            Check(gain(T.PPO_MAX), ">", 0.3),
            Check(gain(T.PPO_MAX), ">", gain(T.VANILLA)),
        ),
        premise=(COLLAPSES,),
    ),
    Claim(
        "Figure 10, Section 6.2",
        "PPO-max wins more prompts against SFT than it loses: helpful and harmless, English and "
        "Chinese.",
        "fig10",
        tuple(
            Check(
                Value(arm, f"preferences.{kind}.win"), ">", Value(arm, f"preferences.{kind}.lose")
            )
            for arm in (T.PPO_MAX, T.CHINESE_MAX)
            for kind in ("helpful", "harmless")
        ),
    ),
    Claim(
        "Figure 12, Section 6.4",
        "PPO costs language understanding (here: perplexity of unseen text of the world), and "
        "PPO-ptx mitigates it.",
        "fig12",
        (Check(text_policy(T.PTX), "<", text_policy(T.PPO_MAX)),),
        premise=(Check(text_policy(T.PPO_MAX), ">", text_sft(T.PPO_MAX), factor=1.01),),
    ),
    Claim(
        "Figure 13, Appendix A",
        "The distribution of scores keeps its shape while training is stable, and when it "
        "collapses widens, to twice the standard deviation (Figure 13: three times) and with a "
        "long tail.",
        "fig13",
        (
            Check(width(T.VANILLA), ">", width(T.VANILLA, "start"), factor=2.0),
            Check(skewness(T.VANILLA), ">", skewness(T.VANILLA, "start"), margin=0.5),
        ),
        premise=(COLLAPSES,),
    ),
    Claim(
        "Figure 14, Appendix B.1",
        "Clipping advantages and values together is worse than clipping rewards and advantages "
        "alone.",
        "fig14",
        (
            Check(gold(T.B1[1]), "<", gold(T.B1[0]), margin=-NEAR),
            Check(gold(T.B1[2]), "<", gold(T.B1[0]), margin=-NEAR),
        ),
        premise=(Check(gain(T.B1[0]), ">", HARM),),
        note="The arm to compare with has itself collapsed",
    ),
    Claim(
        "Figure 14, Appendix B.1",
        "Reward scaling with a value clip, and normalized and clipped rewards and advantages, are "
        "stable.",
        "fig14",
        (
            Check(gain(T.B1[0]), ">", HARM),
            Check(gain(T.B1[4]), ">", HARM),
        ),
        premise=(Check(gain(T.REWARD_08), ">", HARM),),
        note="Nothing without a KL penalty is stable here, at 140 times the paper's learning rate, "
        "not even the bound on rewards that the paper's arms share",
    ),
    Claim(
        "Figure 15, Appendix B.2",
        "A smaller weight of the KL penalty gives higher scores and a larger distance from SFT, in "
        "order.",
        "fig15",
        tuple(
            check
            for looser, tighter in zip(T.KL_WEIGHTS, T.KL_WEIGHTS[1:], strict=False)
            for check in (
                Check(score(looser), ">", score(tighter)),
                Check(kl(looser), ">", kl(tighter)),
            )
        ),
    ),
    Claim(
        "Figure 16, Appendix B.3",
        "Without a bound the entropy bonus makes training fail; with one it does not.",
        "fig16",
        (Check(gain(T.ENTROPY_BOUND), ">", gain(T.PPO_MAX), margin=HARM),),
        premise=(Check(gain(T.ENTROPY_FREE), "<", gain(T.PPO_MAX), margin=HARM),),
        note="With PPO-max's KL penalty nothing fails, with or without the bound",
    ),
    Claim(
        "Figure 17, Appendix C.1",
        "Clipping the ratio changes little and does not make training stable, as the KL penalty "
        "does.",
        "fig17",
        (
            Check(gain(T.RATIO_05), "<", HARM),
            Check(gain(T.KL), ">", HARM),
        ),
        premise=(COLLAPSES,),
    ),
    Claim(
        "Figure 18, Appendix C.2",
        "With global gradient clipping, at 0.5, at 1 or not at all, the curves are hard to tell "
        "apart, early in training and at the end.",
        "fig18",
        tuple(
            check
            for arm in (T.GRADIENT_05, T.GRADIENT_1)
            for check in (
                Check(
                    rollout_gold(arm, "early"), "~", rollout_gold(T.VANILLA, "early"), margin=NEAR
                ),
                Check(gold(arm), "~", gold(T.VANILLA), margin=0.5),
            )
        ),
        note="Alike until they collapse; then vanilla PPO falls 9 further than both with seed 42",
    ),
    Claim(
        "Figure 19, Appendix C.3",
        "With lambda 0 the estimates are unstable: the critic explains less of the returns late in "
        "training than with 0.9.",
        "fig19",
        (Check(explained(T.LAMBDAS[0]), "<", explained(T.LAMBDAS[2])),),
        note="The targets differ with lambda too, so explained variance is a weak measure",
    ),
    Claim(
        "Figure 19, Appendix C.3",
        "With lambda 1 the variance is larger: the critic's loss is higher than with 0.9.",
        "fig19",
        (Check(value_loss(T.LAMBDAS[4]), ">", value_loss(T.LAMBDAS[2])),),
    ),
    Claim(
        "beyond the paper (limits, Section 7; arXiv 2210.10760)",
        "A reward model with more preference data is over-optimized less: gold has a higher peak.",
        "size",
        optimized(T.VANILLA, T.FEW_VANILLA),
        note=NO_ENDS,
    ),
    Claim(
        "beyond the paper (limits, Section 7; arXiv 2210.10760)",
        "Larger models are over-optimized less: gold has a higher peak.",
        "size",
        optimized(T.VANILLA, T.NARROW_VANILLA) + optimized(T.WIDE_VANILLA, T.VANILLA),
        note=NO_ENDS,
    ),
    Claim(
        "beyond the paper",
        "KL and length warn earlier than the distribution of the rewards.",
        "monitors",
        tuple(
            Check(
                Value(T.VANILLA, f"first_warning.{signal}"),
                "<",
                Value(T.VANILLA, "first_warning.reward"),
            )
            for signal in ("kl", "length")
        ),
        premise=(Check(Value(T.VANILLA, "first_warning.reward"), "<", float(T.ITERATIONS)),),
        note="The monitor of the rewards never warns in these runs, so there is nothing to beat",
    ),
    Claim(
        "beyond the paper",
        "Of PPO-max's tricks the KL penalty acts most: without it the most gold is lost.",
        "tricks",
        tuple(
            Check(gain(T.LEFT_OUT[0]), "<", gain(other), margin=-NEAR) for other in T.LEFT_OUT[1:]
        ),
    ),
    Claim(
        "beyond the paper",
        "The KL penalty alone, added to vanilla PPO, brings most of PPO-max's gain: it ends within "
        "0.2 gold of PPO-max, and no other trick alone does.",
        "tricks",
        (
            Check(gain(T.ADDED[0]), "~", gain(T.PPO_MAX), margin=NEAR),
            *(Check(gain(other), "<", gain(T.PPO_MAX), margin=-NEAR) for other in T.ADDED[1:]),
        ),
    ),
)
"""One per statement, in the order of the paper."""

RULES = hash_rules(CLAIMS)
"""Hash of the rules."""
