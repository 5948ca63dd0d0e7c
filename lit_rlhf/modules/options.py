"""The options of the stages in typed groups, each read as an attribute of the module.

A group is a frozen dataclass that checks its ranges. It is the type of one parameter of a module,
so YAML nests it (`init_args: {sampling: {temperature: 0.7}}`), the command line takes it by dotted
names (`--model.sampling.temperature 0.7`), and Python passes the dataclass or a mapping of some of
its fields. Other groups: `lit_rlhf.models.ModelOptions`, how networks are loaded,
`lit_rlhf.rollout.SamplingOptions`, how responses are sampled, and the groups of `lit_rlhf.ppo`.

Each default is in one place: here, or in the signature of a module where stages differ.
"""

from dataclasses import dataclass

from transformers import SchedulerType

from lit_rlhf.checks import (
    check_choice,
    check_fields,
    check_not_negative,
    check_number,
    check_positive,
    check_unit_interval,
)

# all of transformers but those that need a metric or settings of their own
SCHEDULES = tuple(
    schedule.value
    for schedule in SchedulerType
    if schedule.value not in ("reduce_lr_on_plateau", "greedy", "warmup_stable_decay")
)


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and the learning-rate schedule of one network.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: AdamW's weight decay. It acts on matrices, and neither on norms nor on biases.
        beta1: Decay rate of AdamW's mean of gradients.
        beta2: Decay rate of AdamW's mean of squared gradients.
        eps: Added to the denominator of AdamW's step.
        lr_scheduler: Name of a transformers schedule, for instance `constant`, `linear` or
            `cosine_with_min_lr`. It is stepped once per update.
        warmup_ratio: Share of the network's updates over which the learning rate rises to its peak:
            update `k` (from 0) of `W` has `(k + 1) / W` of it. A critic that is pre-trained has no
            warm-up. `constant` has none either.
        min_lr_ratio: Learning rate at the end over the peak, for schedules with a minimum.
        grad_clip: Largest gradient norm (L2); `None`: no clipping.
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr_scheduler: str = "constant_with_warmup"
    warmup_ratio: float = 0.1
    min_lr_ratio: float = 0.1
    grad_clip: float | None = 1.0

    def __post_init__(self) -> None:
        check_fields(check_positive, self, "learning_rate", "eps", "grad_clip")
        check_fields(check_not_negative, self, "weight_decay")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            check_number(name, beta, "a number in [0, 1)", lambda value: 0 <= value < 1)
        check_fields(check_unit_interval, self, "warmup_ratio", "min_lr_ratio")
        check_choice("lr_scheduler", self.lr_scheduler, SCHEDULES)
