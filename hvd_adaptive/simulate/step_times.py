"""How long the steps of described ranks take."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hvd_adaptive.algorithm.slowdown import Slowdown
from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.simulate.cluster import Cluster

_BLOCK = 1 << 14
# Until the lengths of steps that lengthen each other settle.
_ITERATIONS = 4


class StepTimes:
    """How long steps take: a + c x samples, times jitter, drift, an emulated slowdown, and what the others of the host add.

    Of a step that is slowed down by emulation, a rank computes only the part 1 / factor.

    Args:
        cluster: gives a, c, jitter and drift.
        slowdown: schedule of factors.
        seed: of the random numbers.
    """

    def __init__(self, cluster: Cluster, slowdown: Slowdown, *, seed: int) -> None:
        self._cluster = cluster
        self._slowdown = slowdown
        self._random = np.random.Generator(np.random.PCG64([seed, cluster.world_size]))
        self._drift = np.ones(cluster.world_size)
        self._noise = self._draws()
        self._contention = np.broadcast_to(cluster.contention, (cluster.world_size,))
        self._per_host = cluster.links.ranks_per_host
        self._rivals: list[float] = []

    def begin_round(self, start_s: float, last_round_s: float) -> None:
        """Lets speeds drift by the time that has passed, and takes the slowdown's factors at this second."""
        cluster = self._cluster
        if cluster.drift and last_round_s:
            step = cluster.drift * math.sqrt(last_round_s / 60)
            self._drift *= np.exp(step * self._random.standard_normal(cluster.world_size))
        slowdown = self._slowdown.factors(start_s)
        factors = self._drift * slowdown
        self._computing = 1 / slowdown
        if self._contention.any():
            # By host: what its ranks that still have work compute of their time.
            self._rivals = self._by_host(self._computing).sum(axis=1).tolist()
        self._fixed = (cluster.fixed_s * factors).tolist()
        self._per_sample = (cluster.per_sample_s * factors).tolist()

    def one(self, rank: int, num_samples: int) -> float:
        """Returns the seconds of a rank's step beside those that still have work in this round."""
        seconds: float = (self._fixed[rank] + self._per_sample[rank] * num_samples) * next(self._noise)
        if self._rivals:
            others = self._rivals[rank // self._per_host] - float(self._computing[rank])
            seconds *= 1 + float(self._contention[rank]) * others
        return seconds

    def leave(self, rank: int) -> None:
        """A rank has no more work in this round."""
        if self._rivals:
            self._rivals[rank // self._per_host] -= float(self._computing[rank])

    def all(self, num_samples: Array) -> Array:
        """Returns the seconds of a step that all ranks begin together, shape (world_size,); none where a rank has no samples.

        Args:
            num_samples: of each rank, shape (world_size,).
        """
        noise = np.fromiter(self._noise, dtype=np.float64, count=len(num_samples))
        seconds = (np.array(self._fixed) + np.array(self._per_sample) * num_samples) * noise
        seconds = np.where(num_samples > 0, seconds, 0.0)
        return self._beside_each_other(seconds) if self._rivals else seconds

    def _by_host(self, values: Array) -> Array:
        """Lays out values by host, shape (hosts, ranks of a host), zeros where the last has fewer."""
        missing = -len(values) % self._per_host
        return np.pad(values, (0, missing)).reshape(-1, self._per_host)

    def _beside_each_other(self, seconds: Array) -> Array:
        """Lengthens steps that begin together by the part of each in which others of its host compute."""
        alone, contention, computing = map(self._by_host, (seconds, self._contention, self._computing))
        others = computing[:, None, :] * ~np.eye(self._per_host, dtype=bool)
        found = alone
        for _ in range(_ITERATIONS):
            lengths = np.where(found > 0, found, np.inf)
            beside = np.minimum(1.0, found[:, None, :] / lengths[:, :, None])
            found = alone * (1 + contention * (others * beside).sum(axis=2))
        return found.reshape(-1)[: len(seconds)]

    def own_samples(self, batch_size: float, start_s: float, stop_s: float) -> float:
        """Returns the samples that the ranks could compute in a span of time, each alone, at the speeds of its first second."""
        seconds = self._slowdown.capacity_s(start_s, stop_s)
        return float(self._cluster.own_speeds(batch_size) / self._drift @ seconds)

    def _draws(self) -> Iterator[float]:
        """Factors of mean 1, log-normally distributed: a step is sometimes much longer, but never negative."""
        sigma = math.sqrt(math.log1p(self._cluster.jitter**2))
        while True:
            yield from np.exp(sigma * self._random.standard_normal(_BLOCK) - sigma**2 / 2).tolist()
