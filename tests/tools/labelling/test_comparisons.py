import pytest

from lit_rlhf.data import Location, Message
from lit_rlhf.tools.evaluation.responses import ResponseLine
from lit_rlhf.tools.labelling import pair_responses


def lines(policy: str, *pairs: tuple[str, str], ended: bool | None = None) -> list[ResponseLine]:
    return [
        ResponseLine(
            policy=policy,
            prompt=(Message("user", prompt),),
            response=response,
            location=Location(f"{policy}.jsonl", number + 1),
            ended=ended,
        )
        for number, (prompt, response) in enumerate(pairs)
    ]


def test_policies_are_compared_with_the_first() -> None:
    by_policy = {
        "sft": lines("sft", ("p", "1"), ("q", "2"), ended=True),
        "ppo": lines("ppo", ("p", "3"), ("q", "4"), ended=False),
        "raw": lines("raw", ("p", "5"), ("q", "6")),
    }
    pairs = [
        (one.policy_a, one.response_a, one.policy_b, one.response_b, one.ended_a, one.ended_b)
        for one in pair_responses(by_policy)
    ]
    assert pairs == [
        ("sft", "1", "ppo", "3", True, False),
        ("sft", "2", "ppo", "4", True, False),
        ("sft", "1", "raw", "5", True, None),
        ("sft", "2", "raw", "6", True, None),
    ]


def test_samples_of_one_policy_are_compared_two_by_two() -> None:
    by_policy = {"sft": lines("sft", *[("p", str(number)) for number in range(5)], ("q", "9"))}
    pairs = pair_responses(by_policy)
    assert [(one.response_a, one.response_b) for one in pairs] == [("0", "1"), ("2", "3")]
    assert len({one.key for one in pairs}) == 2


def test_key_says_what_is_compared_and_the_hash_says_by_which_text() -> None:
    (one,) = pair_responses({n: lines(n, ("p", n)) for n in ("sft", "ppo")})
    (other,) = pair_responses({n: lines(n, ("p", f"{n}!")) for n in ("sft", "ppo")})
    assert one.key == other.key
    assert one.text_hash != other.text_hash
    (third,) = pair_responses({n: lines(n, ("q", n)) for n in ("sft", "ppo")})
    assert third.key != one.key


@pytest.mark.parametrize(
    ("by_policy", "said"),
    [
        ({"sft": lines("sft", ("p", "1"))}, "--responses_per_prompt 2 samples two"),
        ({"sft": lines("sft", ("p", "1"), ("p", "1 "))}, "got only pairs of equal ones"),
        (
            {"sft": lines("sft", ("p", "1")), "ppo": lines("ppo", ("q", "2"))},
            "every policy has to respond to the same prompts",
        ),
    ],
)
def test_responses_that_make_no_comparison_are_refused(
    by_policy: dict[str, list[ResponseLine]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        pair_responses(by_policy)
