"""What counts of a rank's steps, and that nobody waits for a device to learn what they took."""

from __future__ import annotations

import pytest

from hvd_adaptive.wrap.index_lists import Handed
from hvd_adaptive.wrap.meter import Meter
from hvd_adaptive.wrap.stopwatch import Stretch


class Event:
    """As torch.cuda.Event: of a stream that is as far as ``now``; to read it before would wait."""

    now = 0.0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Event.now

    def synchronize(self) -> None:
        assert self.query(), "the script was made to wait for its device"

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query()
        return 1e3 * (end.at - self.at)


def on_gpu(begin: float, end: float) -> Stretch:
    return Stretch(0.001, 0.0, (Event(begin), Event(end)))


BATCH = [Handed(3, 8, 0.75, is_unequal=True)]


def test_a_gpus_steps_are_timed_once_it_is_through_with_them() -> None:
    Event.now, meter, told = 0.0, Meter(), []
    for step in range(4):
        # This process runs two steps ahead of the device.
        Event.now = max(0.0, step - 2.0)
        meter.step(BATCH, [on_gpu(step - 0.2, step), on_gpu(step, step + 0.5)], told.append)
    window = meter.take()
    assert (window.num_steps, window.num_samples, window.global_samples) == (4, 12, 32)
    assert (window.timed_steps, window.timed_samples) == (1, 3) and told == [pytest.approx(0.7)]
    Event.now = 10.0
    later = meter.take()
    assert (later.num_steps, later.timed_steps, later.timed_samples, later.timed_global_samples) == (0, 3, 9, 24)
    assert later.compute_s == pytest.approx(2.1) and later.compute_sq == pytest.approx(3 * 0.49) and len(told) == 4


def test_steps_of_several_optimizers_on_one_batch_are_one() -> None:
    meter = Meter()
    for _ in range(5):
        meter.step(BATCH, [Stretch(0.1, 0.0, None)])
        meter.step([], [Stretch(0.3, 0.0, None)])
        # Without gradients of its own, without a measure, and without a loader.
        meter.step(None, [])
        meter.step(BATCH, [])
        meter.step(None, [Stretch(5.0, 0.0, None)])
    window = meter.take()
    assert (window.timed_steps, window.timed_samples) == (5, 15)
    assert window.compute_s == pytest.approx(2.0) and window.compute_sq == pytest.approx(5 * 0.4**2)
    meter.step([], [Stretch(0.3, 0.0, None)])
    assert meter.take().compute_s == 0.0


def test_the_scripts_own_batches_need_not_be_equally_long() -> None:
    meter = Meter()
    meter.step([Handed(7, 14, 1.0)], [])
    meter.step(BATCH, [])
    window = meter.take()
    assert (window.num_steps, window.num_samples, window.global_samples) == (2, 3, 8)


def test_a_stalled_step_counts_as_a_few_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("hvd_adaptive.wrap.meter.time.perf_counter", lambda: now[0])
    meter = Meter()
    for seconds in (0.5, 0.25, 40.0, 0.5, 0.5):
        meter.begins(counts=True)
        now[0] += seconds
        meter.ends()
    window = meter.take()
    assert window.wall_steps == 5 and window.wall_s == pytest.approx(0.5 + 0.25 + 4 * 0.5 + 0.5 + 0.5)
    assert meter.take().wall_steps == 0
