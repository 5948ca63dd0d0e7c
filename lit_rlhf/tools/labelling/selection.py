"""The order of comparisons: random, or where reward models disagree most, with a random share."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from lit_rlhf.tools.evaluation.labels import Comparison


def seeded_rank(seed: int, *parts: str) -> int:
    """Draw a number of 256 bits that depends on the seed and the parts alone.

    Args:
        seed: The seed.
        *parts: What the number is for.
    """
    return int(hashlib.sha256("\n".join([str(seed), *parts]).encode()).hexdigest(), 16)


def order_comparisons(
    comparisons: Sequence[Comparison],
    *,
    seed: int,
    spreads: Sequence[float] | None = None,
    random_share: float = 0.25,
) -> list[Comparison]:
    """Order comparisons for labelling, each with the reason why it is shown.

    Without spreads the order is random. With them the comparisons with the largest spread come
    first, mixed with a share that is drawn from all of them at random before any spread is looked
    at. This share is an unbiased sample; the others are where a label teaches most.

    Args:
        comparisons: The comparisons.
        seed: Seed of the order.
        spreads: Disagreement of the reward models on each; `None` for a random order.
        random_share: Share of comparisons drawn at random, in [0, 1].
    """
    shuffled = sorted(comparisons, key=lambda one: seeded_rank(seed, "order", one.key))
    if spreads is None:
        return [replace(comparison, selection="random") for comparison in shuffled]
    by_key = {c.key: spread for c, spread in zip(comparisons, spreads, strict=True)}
    n_random = round(random_share * len(shuffled))
    at_random = [
        replace(one, selection="random", spread=by_key[one.key]) for one in shuffled[:n_random]
    ]
    by_spread = [
        replace(one, selection="spread", spread=by_key[one.key])
        for one in sorted(shuffled[n_random:], key=lambda one: -by_key[one.key])
    ]
    order: list[Comparison] = []
    for place in range(len(shuffled)):
        # each beginning of the order has about the same share of random ones
        is_random = int((place + 1) * random_share) > int(place * random_share)
        queue = at_random if (is_random and at_random) or not by_spread else by_spread
        order.append(queue.pop(0))
    return order
