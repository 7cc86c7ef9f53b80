"""Meetings at a point of the script: threads for ranks, a store in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hvd_adaptive.comm.in_process_store import InProcessStore
from hvd_adaptive.wrap.meeting import Meetings

Script = Callable[[Meetings], list[bool]]


def run(scripts: list[Script], patience_s: float = 60.0) -> list[list[bool]]:
    store = InProcessStore()
    results: list[list[bool]] = [[] for _ in scripts]

    def body(rank: int) -> None:
        meetings = Meetings(store, world_size=len(scripts), patience_s=patience_s)
        results[rank] = scripts[rank](meetings)
        meetings.over()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def everywhere(meetings: Meetings) -> list[bool]:
    """Three steps, a point after the second; a merge; a step and a point."""
    meetings.advance()
    meetings.advance()
    found = [meetings.all_here()]
    meetings.advance()
    meetings.merged(1)
    meetings.advance()
    return [*found, meetings.all_here()]


def slowly(meetings: Meetings) -> list[bool]:
    time.sleep(0.3)
    return everywhere(meetings)


def elsewhere(meetings: Meetings) -> list[bool]:
    """The same steps, without the first point, and with a wait that others do not have."""
    for _ in range(4):
        meetings.advance()
    meetings.merged(1)
    meetings.advance()
    return [meetings.all_here()]


def twice(meetings: Meetings) -> list[bool]:
    meetings.advance()
    return [meetings.all_here(), meetings.all_here()]


def goes_on(meetings: Meetings) -> list[bool]:
    meetings.advance()
    time.sleep(0.2)
    meetings.advance()
    return []


def test_one_rank_that_asks_twice_is_not_two() -> None:
    assert run([twice, goes_on]) == [[False, False], []]


def test_all_ranks_meet() -> None:
    assert run([everywhere, slowly, everywhere]) == [[True, True]] * 3


def test_nobody_waits_for_a_rank_that_has_gone_on() -> None:
    assert run([everywhere, elsewhere, slowly]) == [[False, True], [True], [False, True]]


def test_nobody_waits_for_a_rank_whose_script_is_over() -> None:
    assert run([everywhere, lambda meetings: [], slowly]) == [[False, False], [], [False, False]]


def test_nobody_waits_for_a_rank_that_has_joined_and_all_meet_after_it() -> None:
    """One rank misses two merges of the others, and they stand at a point meanwhile."""
    have_joined = threading.Barrier(2)

    def joins(meetings: Meetings, *, num_missed: int) -> list[bool]:
        meetings.merged(1)
        found = []
        if num_missed:
            for number in range(num_missed):
                meetings.advance()
                meetings.merged(2 + number)
            meetings.advance()
            found.append(meetings.all_here())
        meetings.joining()
        meetings.advance()
        have_joined.wait(60)
        meetings.merged(1)
        meetings.advance()
        return [*found, meetings.all_here()]

    results = run([lambda meetings: joins(meetings, num_missed=2), lambda meetings: joins(meetings, num_missed=0)])
    assert results == [[False, True], [True]]


def test_a_rank_that_comes_too_late_finds_that_the_others_have_given_up() -> None:
    have_given_up = threading.Event()

    def gives_up(meetings: Meetings) -> list[bool]:
        found = everywhere(meetings)
        have_given_up.set()
        return found

    def comes_late(meetings: Meetings) -> list[bool]:
        assert have_given_up.wait(60)
        return everywhere(meetings)

    assert run([gives_up, comes_late], patience_s=0.1) == [[False, False]] * 2


def test_a_look_takes_two_operations_however_many_ranks_there_are() -> None:
    counted: list[str] = []

    class Counting(InProcessStore):
        def add(self, key: str, amount: int) -> int:
            counted.append(key)
            return super().add(key, amount)

        def compare_set(self, key: str, expected: str, desired: str) -> str:
            counted.append(key)
            return super().compare_set(key, expected, desired)

    store = Counting()
    first, second = (Meetings(store, world_size=1000, patience_s=0.05) for _ in range(2))
    for meetings in (first, second):
        for _ in range(5):
            meetings.advance()
    # The first rank moves on at each step; the other finds it ahead of it at the first one.
    assert len(counted) == 6
    counted.clear()
    second.advance()
    assert not first.all_here()
    assert len(counted) <= 4
