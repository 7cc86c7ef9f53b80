"""Seconds of a device that computes beside this process: what a rank claims follows them, and not how fast it launches."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from scripted_device import Samples, ScriptedDevice
from torch import nn

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.device_clock import Moment
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.records import RoundRecord, RoundStats
from hvd_adaptive.session import session as sessions
from hvd_adaptive.session.session import Session

SLOWNESS = np.array([1.0, 1.0, 2.0, 4.0])
FASTEST_S = 1.5e-3


class Script:
    """Events that are past when the test says so."""

    is_immediate = False

    def __init__(self, *at_s: float) -> None:
        self.at_s = list(at_s)
        self.now_s = 0.0
        self.waits: list[Moment] = []

    def mark(self) -> Moment:
        return self.at_s.pop(0)

    def is_past(self, moment: Moment) -> bool:
        return moment <= self.now_s

    def wait(self, moment: Moment) -> None:
        self.waits.append(moment)
        self.now_s = max(self.now_s, moment)

    def seconds(self, start: Moment, stop: Moment) -> float:
        assert stop <= self.now_s
        return stop - start


def test_seconds_count_in_order_once_the_device_is_through() -> None:
    script = Script(1.0, 4.0, 5.0, 11.0)
    times, stats, seen = DeviceTimes(script), RoundStats(), []
    times.end_step(stats, times.mark(), 8, 8, None)
    times.then(lambda: seen.append(stats.busy_s))
    times.end_step(stats, times.mark(), 8, 8, None)
    times.then(lambda: seen.append(stats.busy_s))
    assert (stats.num_steps, stats.busy_s, seen, times.last_step) == (2, 0.0, [], 11.0)
    script.now_s = 4.0
    times.collect()
    assert (stats.busy_s, seen) == (3.0, [3.0])
    times.end_round(stats)
    assert (stats.busy_s, seen, script.now_s) == (9.0, [3.0, 9.0], 11.0)
    script.waits.clear()
    times.end_round(stats)
    assert (stats.busy_s, script.waits) == (9.0, [])


def test_on_this_process_seconds_count_at_once() -> None:
    times, stats, seen = DeviceTimes(), RoundStats(), []
    times.end_step(stats, times.mark() - 2.0, 8, 8, torch.tensor(3.0))
    times.then(lambda: seen.append(stats.busy_s))
    assert 2.0 <= stats.busy_s < 3.0 and seen == [stats.busy_s] and times.last_step is None
    assert (stats.loss_sum, stats.loss_samples) == (24.0, 8.0)


class Ranks:
    """Ranks whose model costs nothing, on devices that take their time."""

    def __init__(self, slowness: np.ndarray, config: Config, num_samples: int) -> None:
        self.config, self.num_samples = config, num_samples
        self.devices = [ScriptedDevice(FASTEST_S * factor) for factor in slowness]
        self.early: list[int] = []

    def run(self, monkeypatch: pytest.MonkeyPatch) -> list[RoundRecord]:
        """Trains for an epoch; returns the records of rank 0."""
        own = threading.local()
        monkeypatch.setattr(sessions, "device_clock", lambda _: own.device)

        def train(transport: LocalTransport) -> list[RoundRecord]:
            own.device = self.devices[transport.rank]
            return self._train(transport, own.device)

        return LocalWorld(len(self.devices)).run(train)[0]

    def _train(self, transport: LocalTransport, device: ScriptedDevice) -> list[RoundRecord]:
        model, records, ends, loads = nn.Linear(2, 1), [], [], 0

        def loaded(rows: Any) -> None:
            nonlocal loads
            if loads >= 2 and (len(ends) < loads - 1 or not device.is_past(ends[loads - 2])):
                self.early.append(loads)
            loads += 1

        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), self.config, transport=transport)
        session.records.append(records.append)
        for batch in session.batches(Samples(self.num_samples, loaded)):
            with session.step(batch):
                session.optimizer.zero_grad()
                model(batch.x).mean().backward()
                session.optimizer.step()
                device.launch(batch.num_samples)
            ends.append(device.free_s)
        session.close()
        return records


def shares(record: RoundRecord, slowness: np.ndarray) -> np.ndarray:
    """Each rank's share of a round's samples over what its speed is of all ranks' speeds."""
    samples = record.stats["num_samples"]
    return samples / samples.sum() * slowness * (1 / slowness).sum()


def test_claims_follow_the_devices_speed_though_launches_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(batch_size=16, mega_batch=704, batch_size_rule="fixed", hash_interval=0)
    ranks = Ranks(SLOWNESS, config, 5 * 704)
    records = ranks.run(monkeypatch)
    assert len(records) == 5 and not ranks.early
    for record in records[1:]:
        stats = record.stats
        seconds = stats["busy_s"] / stats["num_samples"]
        assert np.allclose(seconds / seconds[0], SLOWNESS, rtol=0.25)
        # The slowest rank's batches take 96 ms, a round 384 ms.
        assert np.ptp(stats["wait_s"]) < 0.06
    mean = np.mean([shares(record, SLOWNESS) for record in records[1:]], axis=0)
    assert np.allclose(mean, 1.0, atol=0.15)


def test_claims_of_ranks_whose_launches_were_measured_would_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests guard against."""
    config = Config(batch_size=16, mega_batch=704, batch_size_rule="fixed", hash_interval=0)
    ranks = Ranks(SLOWNESS, config, 2 * 704)
    for device in ranks.devices:
        device.is_immediate, device.mark, device.wait = True, time.perf_counter, lambda moment: None  # type: ignore[assignment]
    records = ranks.run(monkeypatch)
    # On a busy machine others than launches decide, too.
    assert ranks.early and not np.allclose(shares(records[-1], SLOWNESS), 1.0, atol=0.1)
