"""What the GPUs of a run send each other in an iteration of PPO, counted in bytes.

An engine of ZeRO-2 sums the whole gradient in every backward, where a reduction to each GPU's share
would do, and gathers the weights after a step (read in DeepSpeed 0.19.8). FSDP2 gathers a network
for every forward and again for its backward, which reduces the gradient to shares. Counts, norms
and metrics are left out.
"""

from typing import NamedTuple

from lit_rlhf.tools.doctor.memory import WEIGHT_BYTES, NetworkShape, PPOSizes

FLOAT32_BYTES = 4


class PhaseTraffic(NamedTuple):
    """Bytes of the whole tensors in the collectives of a phase.

    Attributes:
        summed: Reduced to their sum on every GPU.
        scattered: Reduced to a share on each GPU.
        gathered: Gathered from the GPUs' shares.
    """

    summed: int = 0
    scattered: int = 0
    gathered: int = 0

    def sent(self, gpus: int) -> float:
        """Bytes that each of the GPUs sends, in a ring: a sum goes around it twice."""
        return (gpus - 1) / gpus * (2 * self.summed + self.scattered + self.gathered)


def ppo_traffic(
    shape: NetworkShape, sizes: PPOSizes, *, updates: int, micro_batches: int
) -> dict[str, PhaseTraffic]:
    """Count what the GPUs send in an iteration with a policy and a critic.

    Args:
        shape: Shape of all four networks.
        sizes: Sizes of the run, whose frozen networks are in bfloat16.
        updates: Updates of each network in an iteration.
        micro_batches: Micro-batches of an update.

    Returns:
        Traffic by the name of the phase, in the order of an iteration.
    """
    weights = WEIGHT_BYTES * shape.parameters
    backwards = 2 * updates * micro_batches  # policy and critic
    if sizes.sharded:
        return {
            "rollout": PhaseTraffic(gathered=weights),
            "score": PhaseTraffic(gathered=weights),
            # the policy, the reference and the critic
            "estimate": PhaseTraffic(gathered=3 * weights),
            "update": PhaseTraffic(
                scattered=backwards * FLOAT32_BYTES * shape.parameters,
                gathered=2 * backwards * weights,
            ),
        }
    visits = weights if sizes.shard_frozen else 0
    return {
        "rollout": PhaseTraffic(),
        "score": PhaseTraffic(gathered=visits),
        "estimate": PhaseTraffic(gathered=visits),
        "update": PhaseTraffic(summed=backwards * weights, gathered=2 * updates * weights),
    }
