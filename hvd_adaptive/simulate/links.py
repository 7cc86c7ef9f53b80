"""What collectives cost on described links: bytes over bandwidth plus messages times latency.

Ranks are numbered host by host. A host's ranks share its link to the others, which carries `bandwidth` each way at once.
The costs are those of the algorithms that MPI libraries use for large messages (Thakur, Rabenseifner, Gropp, 2005: ring,
and recursive halving and doubling for the latency), and of this project's reducers for encoded values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.exchange.plan import Span, pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The network of a world of ranks.

    Attributes:
        world_size: number of ranks.
        ranks_per_host: ranks on each host; the last may have fewer.
        bandwidth: bytes a second of a host's link, each way.
        latency_s: seconds of an empty message between hosts.
        host_bandwidth: bytes a second between two ranks of a host.
        host_latency_s: seconds of an empty message between them.
    """

    world_size: int
    ranks_per_host: int
    bandwidth: float
    latency_s: float
    host_bandwidth: float
    host_latency_s: float

    @property
    def num_hosts(self) -> int:
        """Hosts in use."""
        return -(-self.world_size // self.ranks_per_host)

    @property
    def farthest_latency_s(self) -> float:
        """Seconds of an empty message between the two ranks that are farthest from each other."""
        return self.latency_s if self.num_hosts > 1 else self.host_latency_s

    def sums_by_host(self, reducer: str) -> bool:
        """Returns whether a reducer sums inside hosts first, as :class:`hvd_adaptive.exchange.exchange.Exchange` has it.

        Raises:
            ValueError: for hierarchical, if hosts have different numbers of ranks.
        """
        if reducer not in ("by-host", "hierarchical") or self.ranks_per_host == 1 or self.num_hosts == 1:
            return False
        is_equal = self.world_size % self.ranks_per_host == 0
        if reducer == "hierarchical" and not is_equal:
            raise ValueError(
                f"reducer 'hierarchical' needs the same number of ranks on every host, got {self.world_size} ranks, "
                f"{self.ranks_per_host} a host; use 'sra'"
            )
        return is_equal

    def allreduce_s(self, num_bytes: float) -> float:
        """Returns the seconds of a sum over all ranks, each holding so many bytes."""
        size = self.world_size
        if size == 1:
            return 0.0
        # The ring crosses each host's link once each way.
        slowest = self.host_bandwidth if self.num_hosts == 1 else min(self.bandwidth, self.host_bandwidth)
        return 2 * (size - 1) / size * num_bytes / slowest + 2 * self._doublings * self.farthest_latency_s

    def allgather_s(self, num_bytes: float) -> float:
        """Returns the seconds in which every rank gets so many bytes from each."""
        if self.world_size == 1:
            return 0.0
        slowest = self.host_bandwidth if self.num_hosts == 1 else min(self.bandwidth, self.host_bandwidth)
        return (self.world_size - 1) * num_bytes / slowest + self._doublings * self.farthest_latency_s

    def sra_s(self, codec: ValueCodec, num_elements: int) -> float:
        """Returns the seconds of a scatter-reduce-allgather of encoded values, without coding them."""
        size = self.world_size
        if size == 1:
            return 0.0
        # Twice, to the owners and back, each rank sends every other its piece.
        payload, local = self.payload_bytes(codec, num_elements, size), min(self.ranks_per_host, size)
        inside = payload * (local - 1) / size / self.host_bandwidth
        across = local * payload * (size - local) / size / self.bandwidth
        # A rank's messages follow each other on the wire, so that their latencies overlap but for what a message costs.
        return 2 * (max(inside, across) + self.farthest_latency_s * self._doublings)

    def hierarchical_s(self, codec: ValueCodec, num_elements: int) -> float:
        """Returns the seconds of the hierarchical reducer: fp32 inside hosts, encoded between them, without coding."""
        local = min(self.ranks_per_host, self.world_size)
        inside = 4 * num_elements * (local - 1) / local / self.host_bandwidth
        payload = self.payload_bytes(codec, num_elements, self.world_size)
        between = 2 * payload * (1 - 1 / self.num_hosts) / self.bandwidth
        # Two hosts swap their codes in one step, and both are spread.
        num_steps, num_codes = (1, 2) if self.num_hosts == 2 else (2, 1)
        spread = num_codes * payload * (local - 1) / local / self.host_bandwidth
        messages = num_steps * (self.num_hosts - 1) * self.latency_s + 2 * (local - 1) * self.host_latency_s
        return inside + between + spread + messages

    def sent_bytes(self, codec: ValueCodec | None, num_elements: int, reducer: str) -> float:
        """Returns the bytes that a rank sends in one sum of fp32 values: as they are in a ring (None), or encoded."""
        size = self.world_size
        total = 4 * num_elements if codec is None else self.payload_bytes(codec, num_elements, size)
        if codec is None or not self.sums_by_host(reducer):
            return 2 * (size - 1) / size * total
        # In fp32 to its host's ranks, its part of the host's sum to the other hosts, and the whole sum of this part to its own:
        # of two hosts both codes.
        local, hosts = self.ranks_per_host, self.num_hosts
        num_codes = 2 if hosts == 2 else 1
        return (local - 1) / local * (4 * num_elements + num_codes * total) + 2 * (hosts - 1) / hosts * total / local

    @staticmethod
    def payload_bytes(codec: ValueCodec, num_elements: int, num_pieces: int) -> int:
        """Returns the bytes of all values, encoded in one piece for each owner."""
        cut = pieces(Span(0, num_elements), num_pieces=num_pieces, granularity=codec.granularity)
        # All but the last that has any are alike.
        sizes = [piece.size for piece in cut if piece.size]
        return codec.payload_bytes(sizes[0]) * (len(sizes) - 1) + codec.payload_bytes(sizes[-1]) if sizes else 0

    @property
    def _doublings(self) -> int:
        return math.ceil(math.log2(self.world_size)) if self.world_size > 1 else 0
