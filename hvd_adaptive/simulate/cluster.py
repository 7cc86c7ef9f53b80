"""The cluster that is simulated: how fast its ranks are, what connects them, how large the model is."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.simulate.links import Links
from hvd_adaptive.simulate.scenario_options import ClusterConfig
from hvd_adaptive.simulate.units import parse_rate, parse_seconds, parse_speeds

# Operations on a store's one thread: a claim reads the cursor and moves it; at a meeting each rank is counted, is told, and asks
# whether all meet at the same place.
_CLAIM_OPERATIONS, _MEETING_OPERATIONS = 2, 3
# Round trips to the store that a claim takes.
_CLAIM_TRIPS = 2
# A rank's statistics of a round.
_STATS_BYTES = 8 * 28
# From so many ranks on, those of a host meet and claim together, and districts of more hosts meet, as
# hvd_adaptive.comm.host_store has it.
_HOST_STORES_FROM = 65
_MOST_HOSTS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds that were measured, which the description's stand back behind.

    Attributes:
        world_size: number of ranks they were measured with.
        claim_s: one claim; None: not measured, as there was one rank.
        control_s: statistics, weights and next batch sizes of a round.
        own_merge_s: a rank's own part of a merge.
        exchange_s: what the exchange of gradients adds to a step of this strategy; None: not measured.
    """

    world_size: int
    claim_s: float | None
    control_s: float
    own_merge_s: float
    exchange_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of a certain number of ranks, in seconds and bytes.

    Attributes:
        fixed_s: what every step of a rank costs, shape (world_size,), >= 0.
        per_sample_s: what each sample adds, shape (world_size,), > 0.
        jitter: relative standard deviation of a step's seconds.
        drift: relative standard deviation of a rank's speed after a minute.
        links: the network.
        model_bytes: of the parameters in fp32.
        gradient_bytes: what a synchronous step exchanges.
        overlap: part of a step beside which gradients may cross the wire.
        exchange_overhead_s: what every exchange costs, whatever its size.
        merge_bytes_per_s: bytes of model a second of a rank's own part of a merge.
        codec_bytes_per_s: bytes of fp32 values a second through encoding and decoding.
        store_operation_s: what an operation costs the thread that serves the cursor.
        first_batch_s: until a round's first batch is there, its claim apart.
        contention: part by which each other rank of the host that computes beside it lengthens a rank's step, >= 0, shape
            (world_size,).
        measured: seconds that were measured; None: all are described.
    """

    fixed_s: Array
    per_sample_s: Array
    jitter: float
    drift: float
    links: Links
    model_bytes: float
    gradient_bytes: float
    overlap: float
    exchange_overhead_s: float
    merge_bytes_per_s: float
    codec_bytes_per_s: float
    store_operation_s: float
    first_batch_s: float
    contention: Array | float = 0.0
    measured: Measured | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.links.world_size

    def own_speeds(self, batch_size: float) -> Array:
        """Returns the samples a second of each rank alone, at steps of this batch, shape (world_size,)."""
        return batch_size / (self.fixed_s + self.per_sample_s * batch_size)

    @property
    def has_host_stores(self) -> bool:
        """Whether the ranks of a host meet and claim together."""
        return self.world_size >= _HOST_STORES_FROM and 1 < self.links.num_hosts <= self.world_size // 2

    @property
    def num_districts(self) -> int:
        """Districts of hosts, whose ranks meet before they meet all others; 0: hosts are few enough without."""
        num_hosts = self.links.num_hosts
        return 0 if num_hosts <= _MOST_HOSTS else math.ceil(num_hosts / math.ceil(math.sqrt(num_hosts)))

    @property
    def host_claim_trip_s(self) -> float:
        """Seconds of a claim on its way to its own host's store and, as many again, on its way back."""
        return _CLAIM_TRIPS * self.links.host_latency_s

    @property
    def claim_trip_s(self) -> float:
        """Seconds of a claim on its way to the store and, as many again, on its way back, the store's own apart."""
        if self.measured is not None and self.measured.claim_s is not None:
            return max(0.0, self.measured.claim_s - self.claim_service_s) / 2
        return _CLAIM_TRIPS * self.links.farthest_latency_s if self.world_size > 1 else 0.0

    @property
    def claim_service_s(self) -> float:
        """Seconds that a claim takes of the thread that serves the cursor."""
        return _CLAIM_OPERATIONS * self.store_operation_s if self.world_size > 1 else 0.0

    @property
    def step_service_s(self) -> float:
        """Seconds that all ranks' questions before a synchronous step take of the thread that serves them."""
        return self.world_size * self.store_operation_s if self.world_size > 1 else 0.0

    @property
    def control_s(self) -> float:
        """Seconds in which the ranks meet, once all are there, and gather their statistics."""
        if self.measured is None:
            return self._described_control_s(self.world_size)
        # What more ranks than were measured add is as described.
        added_s = self._described_control_s(self.world_size) - self._described_control_s(self.measured.world_size)
        return max(0.0, self.measured.control_s + added_s)

    def _described_control_s(self, world_size: int) -> float:
        if world_size == 1:
            return 0.0
        described = dataclasses.replace(self, links=dataclasses.replace(self.links, world_size=world_size))
        links, num_there, meeting_s = described.links, world_size, 0.0

        def meet_s(count: float, latency_s: float) -> float:
            return _MEETING_OPERATIONS * (count * self.store_operation_s + 2 * latency_s)

        if described.has_host_stores:
            num_there = links.num_hosts
            meeting_s += meet_s(links.ranks_per_host, links.host_latency_s)
        if described.num_districts:
            meeting_s += meet_s(num_there / described.num_districts, links.latency_s)
            num_there = described.num_districts
        meeting_s += meet_s(num_there, links.farthest_latency_s)
        return meeting_s + 2 * links.allgather_s(_STATS_BYTES)

    def exchange_s(self, num_bytes: float, codec: ValueCodec | None, reducer: str) -> float:
        """Returns the seconds in which values are coded and summed over all ranks.

        Args:
            num_bytes: of the values in fp32.
            codec: None: they are summed as they are.
            reducer: how encoded ones meet: by-host, sra, hierarchical or allreduce.

        Raises:
            ValueError: for a reducer that this codec, these hosts, or the simulator, do not know.
        """
        if self.world_size == 1:
            return 0.0
        if codec is None:
            return self.exchange_overhead_s + self.links.allreduce_s(num_bytes)
        num_elements = int(num_bytes // 4)
        coding_s = num_bytes / self.codec_bytes_per_s
        if self.links.sums_by_host(reducer):
            wire_s = self.links.hierarchical_s(codec, num_elements)
        elif reducer in ("by-host", "sra", "hierarchical"):
            wire_s = self.links.sra_s(codec, num_elements)
        elif reducer == "allreduce" and codec.wire_dtype is not None:
            wire_s = self.links.allreduce_s(codec.payload_bytes(num_elements))
        else:
            raise ValueError(
                f"reducer must be by-host, sra, hierarchical, or allreduce with a linear codec (none, fp16), got {reducer!r} "
                f"with {codec.spec}"
            )
        return 2 * self.exchange_overhead_s + coding_s + wire_s

    def exposed_s(self, exchange_s: float, step_s: float, *, encoded: bool) -> float:
        """Returns what the exchange of gradients adds to a step.

        Args:
            exchange_s: of the exchange by itself.
            step_s: seconds of the slowest rank's own step, beside which gradients may cross the wire.
            encoded: the gradients are; only the plain exchange is measured.
        """
        measured = self.measured
        if measured is None or measured.exchange_s is None or encoded:
            return max(0.0, exchange_s - self.overlap * step_s)
        # What more ranks than were measured add is as described.
        then = dataclasses.replace(self, links=dataclasses.replace(self.links, world_size=measured.world_size))
        beside_s = self.overlap * step_s
        added_s = max(0.0, exchange_s - beside_s) - max(0.0, then.exchange_s(self.gradient_bytes, None, "") - beside_s)
        return max(0.0, measured.exchange_s + added_s)

    @property
    def own_merge_s(self) -> float:
        """Seconds of a rank's own part of a merge."""
        if self.measured is not None:
            return self.measured.own_merge_s
        return self.model_bytes / self.merge_bytes_per_s


def described_cluster(config: ClusterConfig, world_size: int) -> Cluster:
    """Returns the cluster of so many ranks that a configuration describes."""
    speeds = np.array(parse_speeds(config.speeds))
    places = np.arange(world_size)
    if world_size < len(speeds):
        # A part of the list that is like the whole.
        places = (2 * places + 1) * len(speeds) // (2 * world_size)
    per_sample_s = 1 / (config.samples_per_s * speeds[places % len(speeds)])
    return Cluster(
        fixed_s=np.full(world_size, parse_seconds("step_overhead", config.step_overhead)),
        per_sample_s=per_sample_s,
        jitter=config.jitter,
        drift=config.drift,
        links=Links(
            world_size=world_size,
            ranks_per_host=config.ranks_per_host,
            bandwidth=parse_rate("link", config.link),
            latency_s=parse_seconds("latency", config.latency),
            host_bandwidth=parse_rate("host_link", config.host_link),
            host_latency_s=parse_seconds("host_latency", config.host_latency),
        ),
        model_bytes=1e6 * config.model_mb,
        gradient_bytes=1e6 * (config.gradient_mb or config.model_mb),
        overlap=config.overlap,
        exchange_overhead_s=parse_seconds("exchange_overhead", config.exchange_overhead),
        merge_bytes_per_s=1e9 * config.merge_gbs,
        codec_bytes_per_s=1e9 * config.codec_gbs,
        store_operation_s=parse_seconds("store_operation", config.store_operation),
        first_batch_s=parse_seconds("first_batch", config.first_batch),
    )
