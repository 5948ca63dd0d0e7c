"""Comparisons: pairs of responses to the same prompt."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lit_rlhf.tools.evaluation.labels import Comparison
from lit_rlhf.tools.evaluation.responses import ResponseLine, Turns, check_same_prompts


def pair_responses(by_policy: Mapping[str, Sequence[ResponseLine]]) -> list[Comparison]:
    """Pair the responses of each policy with the baseline's, or one policy's with each other.

    Args:
        by_policy: Responses by policy, the baseline first. Several policies respond to the same
            prompts in the same order. A single policy has two or more responses to each prompt, of
            which the first two make a comparison, the next two another one, and so on.
    """
    baseline, *others = by_policy
    pairs: list[tuple[ResponseLine, ResponseLine]] = []
    if others:
        check_same_prompts(by_policy)
        for policy in others:
            pairs += zip(by_policy[baseline], by_policy[policy], strict=True)
    else:
        by_prompt: dict[Turns, list[ResponseLine]] = {}
        for line in by_policy[baseline]:
            by_prompt.setdefault(line.prompt, []).append(line)
        for lines in by_prompt.values():
            pairs += list(pairwise(lines))[::2]
        if not pairs:
            raise ValueError(
                f"policies: expected two or more responses of {baseline!r} to a prompt, or "
                "responses of two policies, got one; --responses_per_prompt 2 samples two"
            )
    seen: Counter[tuple[Turns, str, str]] = Counter()
    comparisons = []
    for first, second in pairs:
        place = (first.prompt, first.policy, second.policy)
        comparisons.append(
            Comparison(
                prompt=first.prompt,
                response_a=first.response,
                response_b=second.response,
                policy_a=first.policy,
                policy_b=second.policy,
                ended_a=first.ended,
                ended_b=second.ended,
                occurrence=seen[place],
            )
        )
        seen[place] += 1
    if all(comparison.is_equal for comparison in comparisons):
        raise ValueError(
            "responses: expected some that differ, got only pairs of equal ones; sample with "
            "another temperature, or compare other policies"
        )
    return comparisons
