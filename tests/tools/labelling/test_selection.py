from lit_rlhf.tools.labelling import order_comparisons
from tests.support.labelling import make_comparisons

COMPARISONS = make_comparisons(80)
SPREADS = [float(number) for number in range(80)]


def test_random_order_depends_on_the_seed_alone() -> None:
    order = order_comparisons(COMPARISONS, seed=1)
    assert order == order_comparisons(COMPARISONS[::-1], seed=1)
    assert order != order_comparisons(COMPARISONS, seed=2)
    assert {one.key for one in order} == {one.key for one in COMPARISONS}
    assert {one.selection for one in order} == {"random"}


def test_largest_spreads_come_first_beside_a_random_share() -> None:
    order = order_comparisons(COMPARISONS, seed=1, spreads=SPREADS, random_share=0.25)
    assert {one.key for one in order} == {one.key for one in COMPARISONS}
    by_spread = [one.spread for one in order if one.selection == "spread"]
    assert by_spread == sorted(by_spread, reverse=True)  # type: ignore[type-var]
    for end in (4, 20, 40, 80):
        assert sum(one.selection == "random" for one in order[:end]) == end // 4


def test_random_share_does_not_depend_on_the_spread() -> None:
    def drawn(spreads: list[float]) -> list[str]:
        order = order_comparisons(COMPARISONS, seed=3, spreads=spreads, random_share=0.5)
        return [one.key for one in order if one.selection == "random"]

    assert drawn(SPREADS) == drawn(SPREADS[::-1])
    assert drawn(SPREADS) == [one.key for one in order_comparisons(COMPARISONS, seed=3)][:40]


def test_share_of_none_and_of_all() -> None:
    for share, kind in ((0.0, "spread"), (1.0, "random")):
        order = order_comparisons(COMPARISONS, seed=1, spreads=SPREADS, random_share=share)
        assert {one.selection for one in order} == {kind}
