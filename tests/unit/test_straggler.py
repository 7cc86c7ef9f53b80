"""When a rank is called slow: three rounds in a row, against its peers or its own past, and never for waiting."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive.algorithm.statistics import Gathered
from hvd_adaptive.algorithm.straggler import Straggler, StragglerWatch
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.session.straggler_report import StragglerReport


def gathered(*ranks: RoundStats) -> Gathered:
    return RoundStats.by_name(np.array([stats.vector() for stats in ranks]))


def feed(watch: StragglerWatch, *costs: list[float]) -> list[list[Straggler]]:
    return [watch.observe(np.full(len(cost), 50.0), 50 * np.array(cost)) for cost in costs]


def test_three_rounds_in_a_row_against_the_median_of_the_others() -> None:
    watch = StragglerWatch(4, limit=3)
    slow, even = [1.0, 1.0, 1.2, 3.5], [1.0, 1.0, 1.2, 1.0]
    assert feed(watch, slow, slow, even, slow, slow) == [[]] * 5
    (first,), (second,) = feed(watch, slow, slow)
    assert first == Straggler(3, "the other ranks", pytest.approx(3.5), True) and not second.is_new
    # It takes as long to be cleared, and comes back as new.
    assert [len(found) for found in feed(watch, even, even, even)] == [1, 1, 0]
    assert [len(found) for found in feed(watch, slow, slow, slow)] == [0, 0, 1]


def test_a_rank_that_becomes_slower_than_it_was_stays_one() -> None:
    """Though it is the fastest: a throttled GPU among old ones."""
    watch = StragglerWatch(2, limit=2)
    assert feed(watch, *[[9.0, 1.0]] * 10)[-1] == [Straggler(0, "the other ranks", pytest.approx(9.0), False)]
    found = feed(watch, *[[9.0, 4.0]] * 100)
    late = [[one for one in round_ if one.rank == 1] for round_ in found]
    assert late[1] == [] and late[2] == [Straggler(1, "its own earlier rounds", pytest.approx(4.0), True)]
    # The slow rounds are not what it is measured against.
    assert late[-1] == [Straggler(1, "its own earlier rounds", pytest.approx(4.0), False)]


def test_ranks_without_work_and_alone() -> None:
    watch = StragglerWatch(3, limit=2)
    for _ in range(5):
        assert watch.observe(np.array([50.0, 0, 0]), np.array([1.0, 0, 0])) == []
    assert feed(StragglerWatch(1, limit=2), *[[1.0]] * 20) == [[]] * 20
    # The first round, in which kernels are compiled, is no history, and a single slow one is no verdict.
    assert feed(StragglerWatch(1, limit=2), [100.0], *[[1.0]] * 8, [5.0], [1.0]) == [[]] * 11


def test_the_report_names_host_and_device_and_what_took_the_time(caplog: pytest.LogCaptureFixture) -> None:
    def run(transport: LocalTransport) -> list[object]:
        report = StragglerReport(transport, torch.device("cpu"), 2.0)
        ranks = (
            RoundStats(work=10, busy_s=1, claim_s=0.5, wait_s=3), RoundStats(work=10, busy_s=4, claim_s=1, wait_s=0)
        )  # fmt: skip
        return [report.add_round(gathered(*ranks)) for _ in range(5)]

    with caplog.at_level(logging.WARNING):
        rounds = LocalWorld(2).run(run)
    assert rounds[0] == rounds[1] and rounds[0][1] == []
    (found,) = rounds[0][-1]
    assert found["rank"] == 1 and found["device"] == "cpu" and found["host"]
    assert found["factor"] == pytest.approx(5 / 1.5, abs=1e-3)
    assert (found["busy_s"], found["claim_s"], found["wait_s"]) == (4, 1, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Unless slowdown asks for it, look at" in line and line.endswith("Set straggler_limit=0 to silence this.")
    assert "3.3 times slower than the other ranks: it computed for 4 s, waited for its data for 1 s" in line
    assert StragglerReport(LocalTransport(), torch.device("cpu"), 0).add_round(gathered(RoundStats())) == []


def test_rounds_of_less_than_a_second_are_judged_together(caplog: pytest.LogCaptureFixture) -> None:
    def rounds(*seconds: float) -> list[bool]:
        return [bool(report.add_round(gathered(RoundStats(work=10, busy_s=busy_s)))) for busy_s in seconds]

    report = StragglerReport(LocalTransport(), torch.device("cpu"), 3.0)
    # A hiccup of some rounds is in the mean of more of them; a slow rank is not.
    assert not any(rounds(*[0.05, 0.05, 0.05, 0.45] * 20))
    assert rounds(*[0.6] * 6) == [False] * 5 + [True]
    assert len(caplog.records) == 1


def test_a_rank_with_few_samples_is_judged_by_what_an_equal_share_would_take_it() -> None:
    """In strategy sync: one sample in 44 ms beside 187 in 56 ms, of which 40 and 10 ms are a step's own."""

    def run(transport: LocalTransport) -> list[list[list[dict[str, Any]]]]:
        report = StragglerReport(transport, torch.device("cpu"), 2.0)
        rounds = []
        for equal_share_s in ((0.05, 0.04), (0.16, 0.04)):
            first, second = equal_share_s
            stats = gathered(
                RoundStats(work=50, busy_s=2.2, equal_share_s=first), RoundStats(work=9350, busy_s=2.8, equal_share_s=second)
            )
            rounds.append([report.add_round(stats) for _ in range(5)])
        return rounds

    similar, slow = LocalWorld(2).run(run)[0]
    assert similar == [[]] * 5
    (found,) = slow[-1]
    assert found["rank"] == 0 and found["factor"] == pytest.approx(4)
