"""The strategies in virtual time: the rules of algorithm/, and the seconds of a cluster."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.algorithm.batch_sizes import speed_shares
from hvd_adaptive.algorithm.ledger import ClaimRule, batches_ahead, own_parts, steps_ahead
from hvd_adaptive.algorithm.round_control import RoundControl, round_weights
from hvd_adaptive.algorithm.share_control import ShareControl
from hvd_adaptive.algorithm.shares import global_batches
from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.compress.parse import parse_codec
from hvd_adaptive.config import Config
from hvd_adaptive.simulate.cluster import Cluster
from hvd_adaptive.simulate.step_times import StepTimes
from hvd_adaptive.simulate.virtual_claims import Cursor, Pool, play_claims


@dataclass(kw_only=True)
class Round:
    """One round of a run.

    Attributes:
        epoch: epochs consumed after it, fractional.
        train_s: virtual seconds after it.
        num_samples: samples consumed after it.
        stats: the ranks' statistics by the names of a real run's records, each of shape (world_size,).
        own_samples: samples that the ranks could have computed in its time, each alone and never waiting.
        sent_bytes: bytes each rank sent in exchanges.
        num_steps: steps of the slowest rank, or of all together.
    """

    epoch: float
    train_s: float
    num_samples: int
    stats: dict[str, Array]
    own_samples: float
    sent_bytes: float
    num_steps: float


class VirtualStrategy(ABC):
    """One way of training, in virtual time.

    Args:
        config: the rules.
        cluster: what they meet.
        steps: how long steps take.
        num_bytes: of an exchange.

    Attributes:
        round_unit: a round is a whole number of so many samples, except at the end of an epoch.
    """

    def __init__(self, config: Config, cluster: Cluster, steps: StepTimes, num_bytes: float) -> None:
        self._config = config
        self._cluster = cluster
        self._steps = steps
        self._exchange_s, self._sent_bytes = exchange_cost(cluster, config, num_bytes)
        self.round_unit = 1

    @property
    def mega_batch(self) -> int:
        """Samples of the next round."""
        return self._config.mega_batch_samples

    @abstractmethod
    def play(self, num_samples: int, start_s: float) -> tuple[float, dict[str, Array], float, float]:
        """Plays a round up to its merge.

        Returns:
            The second at which it is over, the ranks' statistics, the bytes each rank sent, and the steps.
        """

    def after_round(self, done: Round, dataset_size: int) -> None:  # noqa: B027 - most have nothing to learn
        """Learns from a completed round."""


class VirtualLocal(VirtualStrategy):
    """Strategy ``local``: claims or parts of one's own, and merges."""

    def __init__(self, config: Config, cluster: Cluster, steps: StepTimes) -> None:
        super().__init__(config, cluster, steps, cluster.model_bytes)
        self._control = RoundControl(config, cluster.world_size, speaks=False)
        self._sizes = np.full(cluster.world_size, float(config.batch_size))
        self._shares = np.full(cluster.world_size, 1.0 / cluster.world_size)
        self.round_unit = config.micro_batch_size or 1

    @property
    def mega_batch(self) -> int:
        """Samples of the next round."""
        return self._control.mega_batch

    def play(self, num_samples: int, start_s: float) -> tuple[float, dict[str, Array], float, float]:
        """Plays a round; see :class:`VirtualStrategy`."""
        cluster, world_size, dispatch = self._cluster, self._cluster.world_size, self._config.dispatch
        rule_of = functools.partial(
            ClaimRule.of_round,
            batch_sizes=self._sizes,
            speed_shares=self._shares,
            work_per_sample=1.0,
            dynamic=dispatch == "dynamic",
            unit=self.round_unit,
            pads=self._config.micro_batch_size is not None,
        )
        rules = [rule_of(rank) for rank in range(world_size)]
        if dispatch == "dynamic":
            cursors = self._open_cursors(num_samples, rule_of)
        else:
            shares = self._shares if dispatch == "proportional" else np.ones(world_size)
            edges = own_parts(shares, num_samples, unit=self.round_unit).tolist()
            cursors = [Cursor(edges[rank], edges[rank + 1]) for rank in range(world_size)]
        times = play_claims(
            start_s, cursors, rules, self._steps, total_work=num_samples, first_batch_s=cluster.first_batch_s
        )
        end_s = np.array(times.end_s)
        last_s = float(end_s.max())
        stats = statistics(
            batch_size=self._sizes,
            num_samples=np.array(times.samples, dtype=np.float64),
            num_steps=np.array(times.steps, dtype=np.float64),
            busy_s=np.array(times.busy_s),
            claim_s=np.array(times.claim_s),
            first_batch_s=np.full(world_size, cluster.first_batch_s),
            wait_s=last_s - end_s,
            control_s=np.full(world_size, cluster.control_s),
        )
        # The weights do not change what a round costs, but a rule that cannot weigh these statistics would end a real run.
        round_weights(self._config, stats)
        self._shares = speed_shares(stats["work"], stats["busy_s"])
        self._sizes = self._control.next_batch_sizes(self._sizes, stats, warming_up=False)
        meet_s = last_s + cluster.control_s
        stats["merge_s"] = np.full(world_size, self._cluster.own_merge_s + self._exchange_s)
        return meet_s + float(stats["merge_s"][0]), stats, self._sent_bytes, float(stats["num_steps"].mean())

    def _open_cursors(self, num_samples: int, rule_of: Callable[[Sequence[int]], ClaimRule]) -> list[Cursor]:
        """What each rank claims from, as :func:`hvd_adaptive.engine.claim_pool.open_pool` chooses it."""
        cluster, world_size = self._cluster, self._cluster.world_size
        shared = Cursor(0, num_samples, trip_s=cluster.claim_trip_s, service_s=cluster.claim_service_s)
        num_together = cluster.links.ranks_per_host if cluster.has_host_stores else 1
        firsts = range(0, world_size, num_together)
        num_ahead = batches_ahead(len(firsts))
        if num_together == num_ahead == 1:
            return [shared] * world_size
        cursors: list[Cursor] = []
        for first in firsts:
            ranks = range(first, min(first + num_together, world_size))
            trip_s, service_s = (cluster.host_claim_trip_s, shared.service_s) if cluster.has_host_stores else (0.0, 0.0)
            pool = Pool(cursor=shared, rule=rule_of(ranks), num_ahead=num_ahead, trip_s=trip_s, service_s=service_s)
            cursors += [pool] * len(ranks)
        return cursors

    def after_round(self, done: Round, dataset_size: int) -> None:
        """Chooses the next merge period."""
        self._control.after_round(done, dataset_size)


class VirtualSync(VirtualStrategy):
    """Strategies ``sync`` and ``horovod``: all ranks make every step together.

    Raises:
        ValueError: if the global batch has too few samples for the ranks.
    """

    def __init__(self, config: Config, cluster: Cluster, steps: StepTimes) -> None:
        super().__init__(config, cluster, steps, cluster.gradient_bytes)
        self._shares: ShareControl | None = None
        self.round_unit = config.batch_size * cluster.world_size
        if config.strategy == "sync":
            self.round_unit = config.global_batch_size or self.round_unit
            self._shares = ShareControl(config, cluster.world_size, global_batch_size=self.round_unit, smallest=1)

    def play(self, num_samples: int, start_s: float) -> tuple[float, dict[str, Array], float, float]:
        """Plays a round; see :class:`VirtualStrategy`."""
        cluster, world_size = self._cluster, self._cluster.world_size
        batch_size = np.full(world_size, float(self._config.batch_size)) if self._shares is None else self._shares.whole
        sums = {name: np.zeros(world_size) for name in ("num_samples", "num_steps", "busy_s", "wait_s")}
        now, exposed_s, num_steps, control_s = start_s + cluster.first_batch_s, 0.0, 0, cluster.control_s
        for sizes in self._steps_of(num_samples):
            seconds = self._steps.all(sizes)
            slowest_s = float(seconds.max())
            # Every rank asks the store beside a step whether the round goes on, for some steps at once.
            asking_s = cluster.step_service_s / steps_ahead(slowest_s)
            exposed = cluster.exposed_s(self._exchange_s, slowest_s, encoded=self._config.encodes)
            exchange_s = max(exposed, asking_s - slowest_s)
            now += slowest_s + exchange_s
            exposed_s += exchange_s
            num_steps += 1
            for name, values in (
                ("num_samples", sizes), ("num_steps", 1), ("busy_s", seconds), ("wait_s", slowest_s - seconds)
            ):  # fmt: skip
                sums[name] += values
            window = None
            if self._shares is not None and sizes.sum() == self.round_unit:
                window = self._shares.count(sizes, seconds)
            if self._shares is not None and window is not None:
                self._shares.observe(window, step=num_steps - 1)
                now += cluster.control_s
                control_s += cluster.control_s
        stats = statistics(
            batch_size=batch_size,
            claim_s=np.full(world_size, cluster.first_batch_s),
            control_s=np.full(world_size, control_s),
            **sums,
        )
        # In a real run this is a part of the waiting.
        stats["merge_s"] = np.full(world_size, exposed_s)
        return now + cluster.control_s, stats, num_steps * self._sent_bytes, float(num_steps)

    def _steps_of(self, num_samples: int) -> Iterator[Array]:
        """Yields the ranks' samples of each step, shape (world_size,)."""
        if self._shares is None:
            size = self._config.batch_size
            # The last batches are padded.
            for _ in range(-(-num_samples // (size * self._cluster.world_size))):
                yield np.full(self._cluster.world_size, float(size))
            return
        self._shares.begin_round()
        batches = global_batches(
            num_samples,
            total=self.round_unit,
            shares_at=self._shares.shares_at,
            lower=1,
            unit=self._config.micro_batch_size or 1,
        )
        for _, _, mine in batches:
            yield np.array(mine, dtype=np.float64)


def statistics(**columns: Array) -> dict[str, Array]:
    """Returns a round's statistics as the rules read them: those given, and those that follow or do not occur here."""
    nothing: dict[str, Any] = dict.fromkeys(("ceiling", "norm_per_parameter", "merge_s"), np.zeros(len(columns["num_samples"])))
    return {
        **nothing,
        "finite": np.ones(len(columns["num_samples"])),
        "work": columns["num_samples"],
        "num_updates": columns["num_samples"] / columns["batch_size"],
        **columns,
    }


def exchange_cost(cluster: Cluster, config: Config, num_bytes: float) -> tuple[float, float]:
    """Returns the seconds of one exchange of so many bytes of fp32 values, and the bytes that each rank sends in it.

    Raises:
        ValueError: for a compression or reducer that the simulator does not know.
    """
    codec, reducer = _codec(config), config.reducer
    return cluster.exchange_s(num_bytes, codec, reducer), cluster.links.sent_bytes(codec, int(num_bytes // 4), reducer)


def _codec(config: Config) -> ValueCodec | None:
    """The codec of what is exchanged.

    Raises:
        ValueError: if it depends on the model's layers, which the simulator does not know.
    """
    if not config.encodes:
        return None
    if ";" in config.compression or "=" in config.compression.partition(",")[0]:
        raise ValueError(
            f"compression must be one codec for all layers here, got {config.compression!r}: only the model's size is known"
        )
    codec = parse_codec(config.compression)
    if not isinstance(codec, ValueCodec):
        raise ValueError(f"compression must not be powersgd here, got {config.compression!r}: only the model's size is known")
    return codec
