"""What the report says of loaders that were shared out, that were not, and that were for a while."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_adaptive.wrap.closing_report import Report
from hvd_adaptive.wrap.loaders import IndexStream, Loader
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.share_rules import Controller


def test_that_updates_differ_is_said_only_if_they_may() -> None:
    report, data = Report(), DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 5, True
    report.loaders.append(loader)
    report.condition("BatchNorm")
    said = "  note: updates differ a little from those with equal shares: BatchNorm"
    assert said in report.lines()
    loader.reasons.add(Reason.MIXED)
    lines = report.lines()
    assert said not in lines
    assert any("5 steps with equal shares, because" in line for line in lines), lines
    loader.num_shared = 2
    lines = report.lines()
    assert said in lines
    assert any("3 steps with equal shares and 2 with others, whose updates may differ, because" in line for line in lines), lines


def test_figures_are_of_all_steps_with_the_shares_and_the_ceiling_knows_what_is_no_computing() -> None:
    """Two ranks, 1 and 2 ms a sample, 16 samples each, and 8 ms a step for the exchange: 40 ms become 21.3 + 8."""
    report, data = Report(), DataLoader(TensorDataset(torch.zeros(64)), batch_size=16)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 50, True
    report.loaders.append(loader)

    def window(shares: list[float], *, slower: float = 1.0, then: tuple[float, ...] | None) -> str:
        steps, samples = np.full(2, 10.0), 10 * np.array(shares)
        seconds = 1e-3 * slower * np.array([1.0, 2.0]) * samples
        wall_s = np.full(2, seconds.max() + 0.008 * steps[0])
        loader.fractions = then
        report.window(loader, {
            "timed_steps": steps, "timed_samples": samples, "compute_s": seconds, "wait_s": seconds.max() - seconds,
            "num_steps": steps, "wall_s": wall_s, "wall_steps": steps,
        })  # fmt: skip
        return "\n".join(report.lines())

    window([16, 16], slower=0.9, then=None)
    said = window([16, 16], slower=1.1, then=(0.625, 0.375))
    assert "40.0 ms a step with equal shares; the ceiling, as 8.0 ms are no computing: 1.36x" in said and " now" not in said, said
    assert "32.0 ms with equal shares; the ceiling (no rank waits): 1.50x" in said and "changed once" in said, said
    assert "40.0 ms a step with equal shares, 36.0 ms now" in window([18, 14], then=(0.625, 0.375))
    # It has steps of the old shares, and counts no more once there is another one.
    window([20, 12], slower=0.9, then=(0.625, 0.375))
    said = window([20, 12], slower=1.1, then=(0.625, 0.375))
    assert "32.0 ms with equal shares, 24.0 ms now: 1.33x; the ceiling (no rank waits): 1.50x" in said, said
    assert "40.0 ms a step with equal shares, 32.0 ms now: 1.25x; the ceiling, as 8.0 ms are no computing: 1.36x" in said, said
    assert " steps; a step is 1.25 times as fast as with equal shares\n" in said, said
    report.is_check = True
    said = "\n".join(report.lines())
    assert "shares: " in said and not any(word in said for word in ("times as fast", "ceiling", "wall clock")), said


@pytest.mark.parametrize(("num_equal", "told"), [(1, "had 1 early step only"), (9, "had 9 early steps only"), (16, None)])
def test_a_gain_beside_few_early_steps_is_doubted(num_equal: int, told: str | None) -> None:
    report, data = Report(), DataLoader(TensorDataset(torch.zeros(64)), batch_size=16)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 50, True
    report.loaders.append(loader)
    for number, fractions in ((num_equal, (0.6, 0.4)), (10, (0.6, 0.4)), (10, (0.6, 0.4))):
        steps = np.full(2, float(number))
        loader.fractions = fractions
        report.window(loader, {
            "timed_steps": steps, "timed_samples": 16 * steps, "compute_s": 0.01 * steps, "wait_s": np.zeros(2),
            "num_steps": steps, "wall_s": 0.02 * steps, "wall_steps": steps,
        })  # fmt: skip
    said = [line for line in report.lines() if "compare with a run with --shares equal" in line]
    assert len(said) == (told is not None) and all(told in line for line in said if told), report.lines()


@pytest.mark.parametrize(
    ("is_plain", "is_spread", "wait_ms", "is_told"),
    [(True, True, 4.0, True), (False, True, 4.0, False), (True, False, 4.0, False), (True, True, 2.0, False)],
)
def test_ranks_that_wait_for_a_link_are_told_what_helps(is_plain: bool, is_spread: bool, wait_ms: float, is_told: bool) -> None:
    """Also if shares stay equal. What the second rank waits for the first one is not the link's."""
    report, data = Report(is_plain=is_plain, is_spread=is_spread), DataLoader(TensorDataset(torch.zeros(64)), batch_size=16)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 50, True
    loader.reasons.add(Reason.MIXED)
    report.loaders.append(loader)
    steps = np.full(2, 10.0)
    report.window(loader, {
        "timed_steps": steps, "compute_s": 1e-3 * np.array([6.0, 1.0]) * steps, "num_steps": steps,
        "wait_s": 1e-3 * np.array([wait_ms, 9.0]) * steps, "wall_s": 0.01 * steps, "wall_steps": steps,
    })  # fmt: skip
    said = [line for line in report.lines() if "--compression maxmin:4" in line]
    assert len(said) == is_told
    assert all("at least 4 of 10 ms a step" in line for line in said)


def test_the_report_says_why_shares_are_equal_again() -> None:
    """The second rank computes twice as long, and yet steps with other shares take as long by the wall clock."""
    report, data = Report(), DataLoader(TensorDataset(torch.zeros(64)), batch_size=16)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 200, True
    report.loaders.append(loader)
    loader.controller = controller = Controller(2, pinned=None)
    was_unequal = False
    for _ in range(20):
        shares = np.full(2, 16.0) if loader.fractions is None else 32 * np.array(loader.fractions)
        steps = np.full(2, 10.0)
        seconds = 1e-3 * np.array([1.0, 2.0]) * shares
        gathered = {
            "timed_steps": steps, "timed_samples": steps * shares, "timed_global_samples": 32 * steps,
            "compute_s": steps * seconds, "compute_sq": steps * seconds**2, "wait_s": np.zeros(2), "num_steps": steps,
            "wall_s": 0.04 * steps, "wall_steps": steps, "smallest": np.ones(2),
        }  # fmt: skip
        is_equal = np.ptp(controller.proposal) < 1e-9
        loader.fractions = None if is_equal else (float(controller.proposal[0]), float(controller.proposal[1]))
        report.window(loader, gathered)
        controller.propose(gathered, None)
        was_unequal |= not is_equal
        if was_unequal and is_equal:
            break
    assert was_unequal and loader.fractions is None
    why = "    shares are equal again: others have not made steps 3% shorter by the wall clock"
    assert why in report.lines(), report.lines()
    assert not any(" now" in line for line in report.lines()), report.lines()


def test_the_gain_stays_below_its_ceiling_where_speeds_follow_the_size_of_a_batch() -> None:
    """The slow rank's cache holds a small batch: it computes three times as fast with one."""
    report, data = Report(), DataLoader(TensorDataset(torch.zeros(64)), batch_size=16)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 50, True
    report.loaders.append(loader)
    for samples, seconds, then in (
        ([160, 160], [0.16, 0.64], (0.5625, 0.4375)),
        ([180, 140], [0.18, 0.19], (0.5625, 0.4375)),
        ([180, 140], [0.18, 0.19], (0.5625, 0.4375)),
    ):
        loader.fractions, steps, compute_s = then, np.full(2, 10.0), np.array(seconds)
        report.window(loader, {
            "timed_steps": steps, "timed_samples": np.array(samples, dtype=float), "compute_s": compute_s,
            "wait_s": compute_s.max() - compute_s, "num_steps": steps, "wall_s": np.full(2, compute_s.max() + 0.01),
            "wall_steps": steps,
        })  # fmt: skip
    said = "\n".join(report.lines())
    assert "64.0 ms with equal shares, 19.0 ms now: 3.37x; the ceiling (no rank waits): 3.47x" in said, said
    assert "65.0 ms a step with equal shares, 20.0 ms now: 3.25x; the ceiling, as 1.0 ms are no computing: 3.35x" in said, said


def test_fixed_shares_are_called_so() -> None:
    report, data = Report(pinned="1,1"), DataLoader(TensorDataset(torch.zeros(64)), batch_size=16)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 50, True
    report.loaders.append(loader)
    steps = np.full(2, 10.0)
    report.window(loader, {
        "timed_steps": steps, "timed_samples": 16 * steps, "compute_s": np.array([0.1, 0.2]), "wait_s": np.zeros(2),
        "num_steps": steps, "wall_s": steps, "wall_steps": steps,
    })  # fmt: skip
    lines = report.lines()
    assert any("  fixed by --shares 1,1: DataLoader 1 (" in line for line in lines), lines
    said = "\n".join(lines)
    assert "    shares: 50.0, 50.0 % of each global batch\n" in said and "adaptive: " not in said and " now" not in said, said
    assert "    speeds: 1600, 800 samples/s\n" in said, said


@pytest.mark.parametrize(
    ("batch_size", "said"),
    [
        (1, "    shares: 25.0, 25.0, 25.0, 25.0 % of each global batch; 12.5, 25.0, 37.5, 25.0 % were asked for"),
        # The last global batch has four samples only.
        (2, "    shares: 12.5, 25.0, 37.5, 25.0 % of each global batch"),
    ],
)
def test_shares_are_those_of_whole_samples(batch_size: int, said: str) -> None:
    report, rows = Report(pinned="1,2,3,2"), TensorDataset(torch.zeros(12))
    data = DataLoader(rows, batch_size=batch_size, sampler=DistributedSampler(rows, num_replicas=4, rank=0))
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 50, True
    report.loaders.append(loader)
    loader.fractions = (0.125, 0.25, 0.375, 0.25)
    assert len(list(IndexStream(loader, data.batch_sampler, world_size=4, rank=0, upper=None))) == -(-3 // batch_size)
    steps = np.full(4, 10.0)
    report.window(loader, {
        "timed_steps": steps, "timed_samples": batch_size * steps, "compute_s": steps, "wait_s": steps, "num_steps": steps,
        "wall_s": steps, "wall_steps": steps,
    })  # fmt: skip
    assert said in report.lines(), report.lines()


def test_a_loader_that_ended_before_fixed_shares_held_is_called_so() -> None:
    report, data = Report(pinned="1,3"), DataLoader(TensorDataset(torch.zeros(64)), batch_size=16)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 18, True
    report.loaders.append(loader)
    said = "\n".join(report.lines())
    assert "18 steps, all with equal shares: it ended before the first measurement (--interval) after its third" in said, said
    assert "fixed by" not in said, said


def test_what_was_found_because_of_a_reason_is_not_told_with_it() -> None:
    report, loader = Report(), Loader(DataLoader(TensorDataset(torch.zeros(8)), batch_size=2), 1)
    loader.num_steps, loader.is_traced = 5, True
    loader.reasons |= {Reason.OTHER_INPUT, Reason.UNSEEN, Reason.INTERLEAVED}
    report.loaders.append(loader)
    assert [line for line in report.lines() if line.startswith("    - ")] == [f"    - {Reason.INTERLEAVED.value}"]
