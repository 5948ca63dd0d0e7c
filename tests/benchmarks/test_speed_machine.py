"""Foreign load and memory, from faked texts of /proc."""

import pytest

from benchmarks.speed import machine
from benchmarks.speed.machine import TICKS_PER_SECOND, Clocks, busy_seconds, foreign_cores
from benchmarks.speed.report import quiet_updates

#        user nice system idle iowait irq softirq steal guest guest_nice
STAT = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 1\n"


def test_busy_time_leaves_idle_and_waiting_out_and_counts_guests_once() -> None:
    assert busy_seconds(STAT) * TICKS_PER_SECOND == 100 + 20 + 30 + 6 + 7 + 8


def test_foreign_load_is_what_this_process_did_not_use() -> None:
    # ten seconds: the machine was busy for 17, of which this process used 14
    start, end = Clocks(100.0, 5.0, 1000.0), Clocks(110.0, 19.0, 1017.0)
    assert foreign_cores(start, end) == pytest.approx(0.3)


def test_waiting_ends_with_the_first_quiet_window(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([Clocks(0, 0, 0), Clocks(4, 0, 6), Clocks(4, 0, 6), Clocks(8, 0, 6.2)])
    monkeypatch.setattr(machine, "read_clocks", lambda: next(moments))
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    assert machine.wait_until_quiet(limit=60) == pytest.approx(0.05)


def test_memory_is_read_from_the_processs_status() -> None:
    text = "Name:\tpython\nVmPeak:\t  99 kB\nVmHWM:\t  2048 kB\n"
    assert machine.status_kib(text, "VmHWM") == 2048


def run_with(*loads: float) -> dict[str, object]:
    return {"updates": [{"seconds": 1.0, "foreign_cores": load} for load in loads]}


def test_updates_with_foreign_load_are_dropped() -> None:
    used = quiet_updates([run_with(0.0, 0.2), run_with(0.05, 0.051)], "case")
    assert [update["foreign_cores"] for update in used] == [0.0, 0.05]


def test_case_without_a_quiet_update_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"TRL, full: expected .* 0.05 .* got 0.20 at least"):
        quiet_updates([run_with(0.4, 0.2)], "TRL, full")
