from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlhf.tools.evaluation.labels import Comparison, read_labels
from lit_rlhf.tools.labelling import LabelStore, Schedule, ScheduleOptions
from lit_rlhf.tools.labelling.schedule import ABANDONED_AFTER, REPEAT_AFTER
from lit_rlhf.tools.labelling.store import Task
from tests.support.labelling import make_comparisons


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[LabelStore]]:
    open_stores: list[LabelStore] = []
    yield open_stores
    for store in open_stores:
        store.close()


def make_schedule(
    stores: list[LabelStore],
    tmp_path: Path,
    comparisons: list[Comparison],
    clock: Clock | None = None,
    **options: float,
) -> Schedule:
    stores.append(LabelStore(tmp_path / f"labels{len(stores)}.jsonl", comparisons))
    settings = ScheduleOptions(**{"repeat_share": 0.0, **options})  # type: ignore[arg-type]
    return Schedule(comparisons, stores[-1], settings, clock=clock or Clock())


def work(schedule: Schedule, annotator: str, n: int = 9999) -> list[Task]:
    """Label until nothing is left, or `n` times."""
    done = []
    while len(done) < n and (task := schedule.next_task(annotator)) is not None:
        schedule.save(task, "b")
        done.append(task)
    return done


def test_comparisons_come_in_order_and_each_to_so_many_people(
    stores: list[LabelStore], tmp_path: Path
) -> None:
    comparisons = make_comparisons(6)
    schedule = make_schedule(stores, tmp_path, comparisons, annotators_per_comparison=2)
    first = work(schedule, "ann", 4)
    assert [task.comparison for task in first] == [comparison.key for comparison in comparisons[:4]]
    tasks_by_person = {name: work(schedule, name) for name in ("bob", "cem", "ann", "dee")}
    everything = [*first, *(task for tasks in tasks_by_person.values() for task in tasks)]
    assert len(set(everything)) == len(everything)  # nobody sees one twice
    assert set(Counter(task.comparison for task in everything).values()) == {2}
    assert tasks_by_person["dee"] == []


def test_label_has_the_responses_and_policies_of_its_comparison(
    stores: list[LabelStore], tmp_path: Path
) -> None:
    (made,) = make_comparisons(1)
    schedule = make_schedule(stores, tmp_path, [replace(made, ended_a=True, ended_b=False)])
    work(schedule, "ann")
    (label,) = stores[0].labels
    assert (label.annotator, label.comparison) == ("ann", made.key)
    assert (label.response_a, label.response_b) == ("bad 0", "good 0")
    assert (label.policy_a, label.policy_b) == ("sft", "ppo")
    assert (label.ended_a, label.ended_b) == (True, False)


def test_people_at_once_look_at_different_comparisons(
    stores: list[LabelStore], tmp_path: Path
) -> None:
    schedule = make_schedule(stores, tmp_path, make_comparisons(2))
    ann = schedule.next_task("ann")
    bob = schedule.next_task("bob")
    assert ann is not None
    assert bob is not None
    assert ann.comparison != bob.comparison
    assert schedule.next_task("cem") is None
    assert schedule.next_task("ann") == ann  # a page that is loaded again


def test_abandoned_comparison_comes_back_to_others(
    stores: list[LabelStore], tmp_path: Path
) -> None:
    clock = Clock()
    schedule = make_schedule(stores, tmp_path, make_comparisons(1), clock)
    ann = schedule.next_task("ann")
    assert ann is not None
    clock.now = ABANDONED_AFTER - 1
    assert schedule.next_task("bob") is None
    clock.now = ABANDONED_AFTER
    bob = schedule.next_task("bob")
    assert bob == Task("bob", ann.comparison)
    # what was on the page of the one who comes back is still taken
    assert schedule.is_known(ann)
    assert schedule.save(ann, "a")


def test_sides_depend_on_the_seed_alone_and_are_balanced(
    stores: list[LabelStore], tmp_path: Path
) -> None:
    comparisons = make_comparisons(400)
    first, second = (make_schedule(stores, tmp_path, comparisons, seed=7) for _ in range(2))
    other_seed = make_schedule(stores, tmp_path, comparisons, seed=8)
    tasks = [Task("ann", comparison.key) for comparison in comparisons]
    sides = [first.left_side(task) for task in tasks]
    assert sides == [second.left_side(task) for task in tasks]
    assert sides != [other_seed.left_side(task) for task in tasks]
    assert sides != [first.left_side(task._replace(annotator="bob")) for task in tasks]
    assert 160 <= sides.count("a") <= 240  # four standard deviations
    swapped = [first.left_side(task._replace(repeat=True)) for task in tasks]
    assert all(side != other for side, other in zip(sides, swapped, strict=True))


def test_share_is_asked_again_with_others_between(stores: list[LabelStore], tmp_path: Path) -> None:
    schedule = make_schedule(stores, tmp_path, make_comparisons(60), repeat_share=0.25)
    done = work(schedule, "ann")
    repeats = [position for position, task in enumerate(done) if task.repeat]
    assert 5 <= len(repeats) <= 27  # four standard deviations around 15
    for position in repeats:
        first = done.index(done[position]._replace(repeat=False))
        # the last ones have nothing left to come between
        assert position - first > REPEAT_AFTER or position >= len(done) - len(repeats)
    labels = stores[0].labels
    sides = {(label.comparison, label.repeat): label.left for label in labels}
    assert all(
        {sides[key, False], sides[key, True]} == {"a", "b"} for key, repeat in sides if repeat
    )
    assert len(work(schedule, "bob")) == 0  # a repeat does not make room for another person


def test_no_share_means_no_second_look(stores: list[LabelStore], tmp_path: Path) -> None:
    assert len(work(make_schedule(stores, tmp_path, make_comparisons(30)), "ann")) == 30
    twice = make_schedule(stores, tmp_path, make_comparisons(30), repeat_share=1.0)
    assert len(work(twice, "ann")) == 60


def test_undone_comparison_is_shown_again_with_the_same_sides(
    stores: list[LabelStore], tmp_path: Path
) -> None:
    schedule = make_schedule(stores, tmp_path, make_comparisons(5))
    tasks = work(schedule, "ann", 2)
    waiting = schedule.next_task("ann")
    assert schedule.undo("bob") is None
    assert schedule.undo("ann") == tasks[1]
    assert schedule.next_task("ann") == tasks[1]
    assert schedule.undo("ann") == tasks[0]
    assert [schedule.next_task("ann")] == tasks[:1]
    schedule.save(tasks[0], "a")
    assert schedule.next_task("ann") == tasks[1]
    schedule.save(tasks[1], "a")
    assert schedule.next_task("ann") == waiting
    assert [label.choice for label in read_labels(str(stores[0].path))] == ["a", "a"]


def test_equal_responses_are_ties_that_nobody_sees(
    stores: list[LabelStore], tmp_path: Path
) -> None:
    comparisons = make_comparisons(6)
    for position in (1, 4):
        text = f"{comparisons[position].response_a} "
        comparisons[position] = replace(comparisons[position], response_b=text)
    schedule = make_schedule(stores, tmp_path, comparisons)
    assert len(work(schedule, "ann", 2)) == 2
    noted = [label for label in stores[0].labels if label.annotator is None]
    # the second one has not been reached: the labelled part stays a fair sample
    assert [(label.comparison, label.choice) for label in noted] == [(comparisons[1].key, "tie")]
    assert len(work(schedule, "ann")) == 2
    assert len(stores[0].labels) == 6


def test_schedule_goes_on_after_a_restart(stores: list[LabelStore], tmp_path: Path) -> None:
    comparisons = make_comparisons(30)
    uninterrupted = make_schedule(stores, tmp_path, comparisons, repeat_share=0.3)
    expected = work(uninterrupted, "ann")
    first = make_schedule(stores, tmp_path, comparisons, repeat_share=0.3)
    done = work(first, "ann", 13)
    path = first.store.path
    stores.pop().close()
    store = LabelStore(path, comparisons)
    stores.append(store)
    resumed = Schedule(comparisons, store, ScheduleOptions(repeat_share=0.3))
    assert [*done, *work(resumed, "ann")] == expected


@pytest.fixture
def restart(
    stores: list[LabelStore], tmp_path: Path
) -> Callable[[list[Comparison], Clock], Schedule]:
    """Makes a schedule with the files of the one before, as a server does that was killed."""

    def make(comparisons: list[Comparison], clock: Clock) -> Schedule:
        if stores:
            stores.pop().close()
        stores.append(LabelStore(tmp_path / "labels.jsonl", comparisons))
        options = ScheduleOptions(repeat_share=0.0)
        open_tasks = tmp_path / "open.json"
        return Schedule(comparisons, stores[-1], options, open_tasks=open_tasks, clock=clock)

    return make


def test_everybody_sees_the_same_page_after_a_restart(
    restart: Callable[[list[Comparison], Clock], Schedule],
) -> None:
    comparisons = make_comparisons(4)
    clock = Clock()
    schedule = restart(comparisons, clock)
    work(schedule, "ann", 1)
    ann = schedule.next_task("ann")
    bob = schedule.next_task("bob")
    restarted = restart(comparisons, clock)
    assert restarted.next_task("cem") == Task("cem", comparisons[3].key)  # neither Ann's nor Bob's
    assert restarted.next_task("bob") == bob
    assert restarted.next_task("ann") == ann


def test_comparison_that_is_undone_is_shown_again_after_a_restart(
    restart: Callable[[list[Comparison], Clock], Schedule],
) -> None:
    comparisons = make_comparisons(3)
    schedule = restart(comparisons, Clock())
    work(schedule, "ann", 2)
    schedule.next_task("ann")
    undone = schedule.undo("ann")
    assert restart(comparisons, Clock()).next_task("ann") == undone


def test_page_that_nobody_comes_back_to_goes_to_others_after_a_restart(
    restart: Callable[[list[Comparison], Clock], Schedule],
) -> None:
    comparisons = make_comparisons(1)
    clock = Clock()
    restart(comparisons, clock).next_task("ann")
    restarted = restart(comparisons, clock)
    assert restarted.next_task("bob") is None
    clock.now = ABANDONED_AFTER
    assert restarted.next_task("bob") == Task("bob", comparisons[0].key)


def test_open_comparison_that_is_no_longer_in_the_order_is_forgotten(
    restart: Callable[[list[Comparison], Clock], Schedule],
) -> None:
    comparisons = make_comparisons(2)
    restart(comparisons[:1], Clock()).next_task("ann")
    restarted = restart(comparisons[1:], Clock())
    assert restarted.next_task("ann") == Task("ann", comparisons[1].key)


def test_progress_counts_what_is_left(stores: list[LabelStore], tmp_path: Path) -> None:
    schedule = make_schedule(stores, tmp_path, make_comparisons(8))
    assert schedule.progress("ann") == (0, 8, None)
    for seconds in (10.0, 20.0, 600.0):
        task = schedule.next_task("ann")
        assert task is not None
        schedule.save(task, "b", seconds=seconds)
    schedule.next_task("ann")
    assert schedule.next_task("bob") is not None
    # one of the five is on another person's page
    assert schedule.progress("ann") == (3, 7, 4 * 20.0)
