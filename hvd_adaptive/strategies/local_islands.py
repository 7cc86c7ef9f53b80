"""Strategy ``local`` between islands of ranks: inside, every step is one of all its ranks; outside, an island is one rank.

Inside it is data parallelism: each rank computes its part of the island's batch, and their gradients meet while backward goes on.
So the ranks of an island have the same bits after every step, and merge as one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.islands import Islands, own_part
from hvd_adaptive.algorithm.ledger import ClaimRule
from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.comm.island_world import Inside, IslandWorld, ShardWorld
from hvd_adaptive.comm.protocols import AgreedError, Collectives, Transport, attempt
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.claims import Claims, IslandClaims
from hvd_adaptive.engine.flat_model import has_batch_norm
from hvd_adaptive.engine.optimizer_state import checksum
from hvd_adaptive.engine.records import RoundRecord, RoundStats
from hvd_adaptive.engine.shards import check_shards
from hvd_adaptive.engine.strategy import OwnState, refuse_closure
from hvd_adaptive.engine.touched_rows import sparse_parameters
from hvd_adaptive.strategies.island_gradients import ExchangedGradients, IslandGradients, ShardedGradients
from hvd_adaptive.strategies.local import LocalStrategy
from hvd_adaptive.strategies.sync_optimizer import start_state_
from hvd_adaptive.strategies.synchronous import SynchronousClock

log = logging.getLogger(__name__)

# Parts of the state that all ranks hold alike, unless each has its own shard.
_OF_SHARDS = ("model", "outer")


class IslandStrategy(LocalStrategy):
    """Strategy ``local`` whose ranks are islands (``Config.island``). Construction is COLLECTIVE.

    Islands end where as many ranks would with the islands' whole batches, for losses that are a mean over samples, and layers
    that do not look at the other samples of a batch. Of buffers, those of an island's first rank count in a merge.

    The ``work`` of a rank's part of a batch is that of the whole batch. A rank without samples in it gets others' rows, which
    count nothing.

    Args:
        model: to train.
        optimizer: the user's. Its steps take the island's gradients.
        config: as the user gave it.
        transport: all ranks.

    Raises:
        AgreedError: on all ranks, if they cannot be divided into such islands.
    """

    # Which rows are a rank's is known when its island has claimed them.
    _settles = _steps_alone = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        assert config.island is not None
        hosts = transport.allgather_object(transport.host)
        try:
            self._islands = Islands.of(config.island, hosts)
        except ValueError as error:
            # Every rank has the same hosts and configuration, so every rank is here.
            raise AgreedError(str(error)) from None
        self._all = transport
        world = self._world = IslandWorld(transport, self._islands.of_rank)
        self._inside = world.inside
        self._is_sharded = attempt(transport, lambda: self._check_shards(model, config))
        self._start_state(optimizer)
        super().__init__(model, optimizer, config, cast(Transport, ShardWorld(world) if self._is_sharded else world))
        speaks = transport.rank == 0
        self.merge.who = "islands" if speaks else None
        self._control.speaks = speaks
        if speaks:
            self._tell(hosts)
        self._smallest = 2 if has_batch_norm(model) else 1
        self._gradients: IslandGradients
        if self._is_sharded:
            self._gradients = ShardedGradients(model, f"rank {transport.rank}")
        else:
            plain = dataclasses.replace(self._config, compression="none", reducer="sra", auto_bits=0, error_feedback=False)
            self._gradients = ExchangedGradients(model, optimizer, plain, self._inside, rank=transport.rank)
        # Of shards it sees nothing: their ranks wait for each other within forward and backward passes.
        emulates = config.slowdown is not None
        self._clock = SynchronousClock(self._gradients, next(model.parameters()).device, transport, emulates=emulates)
        # Seconds of the islands' steps in the last round, their ranks' waiting for each other included.
        self._step_s: Array | None = None
        self.hooks += [optimizer.register_step_pre_hook(self._before_step), *self._gradients.hooks]
        self._share = 1.0
        self._is_reduced = True
        self._island_claims: IslandClaims | None = None

    @property
    def batch_sizes(self) -> Array:
        """The batch size of each rank's island, samples, shape (world_size,), equal on every rank."""
        return self._sizes[self._islands.of_rank]

    def synchronize(self) -> bool:
        """Waits until the gradients are the island's; returns True. COLLECTIVE inside the island."""
        if not self._is_reduced:
            self._gradients.synchronize()
            self._is_reduced = True
        return True

    def take_foreign_seconds(self) -> float:
        """Returns compute seconds of this step spent polling for gradients, which an emulated slowdown must not stretch."""
        return self._clock.take_foreign_seconds()

    def take_back(self, batch: Batch) -> bool:
        """Returns False: the other ranks of the island wait for this step."""
        return False

    def round_batches(
        self, rows: Rows, *, work: np.ndarray | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's parts of the island's batches, the same number on every rank of it; see :class:`LocalStrategy`.

        Raises:
            RuntimeError: if a step was left out, for which the other ranks of the island wait.
        """
        parts = cast(BatchSource, _Parts(source, self._own_part))
        self._clock.times = source.times
        for batch in super().round_batches(rows, work=work, source=parts, round_id=round_id, stats=stats):
            # The mean over the ranks of gradients so weighted is the mean over the island's samples.
            self._share = self._inside.world_size * batch.num_samples / batch.work
            self._gradients.weight = self._share
            self._gradients.begin()
            if self._config.micro_batch_size is not None:
                self._gradients.expect(batch.num_micro_batches)
                batch._weigh = self._weigh
            self._is_reduced = False
            yield batch
            if not self._is_reduced:
                raise RuntimeError(
                    f"rank {self._all.rank} made no step with a batch of its island, and the other ranks of the island wait for "
                    "its gradients: call optimizer.step() for every batch. To leave out steps that are not finite, or to clip or "
                    "unscale gradients (AMP), call session.synchronize() before: all ranks of the island then decide alike"
                )

    def _own_part(self, num_samples: int) -> tuple[int, int]:
        inside, unit = self._inside, self._unit
        return own_part(num_samples, member=inside.rank, size=inside.world_size, unit=unit, smallest=self._smallest)

    def _computed(self, stats: RoundStats) -> float:
        # This rank's parts are of whole batches, which are the island's work.
        return stats.work

    def _step_samples(self, batch: Batch) -> int:
        return batch.work

    def _weigh(self, micro: Batch) -> None:
        self._gradients.weight = micro.weight * self._share

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        refuse_closure(args, kwargs, f"island {self._config.island!r}", "whose gradients the ranks of an island exchange")
        self.synchronize()

    def _open_claims(self, total_work: int, rule_of: Callable[[Sequence[int]], ClaimRule], *, merges: int) -> Claims:
        claims = super()._open_claims(total_work, rule_of, merges=merges)
        world = self._world
        key = f"island.{self._round}.{world.rank}"
        self._island_claims = IslandClaims(claims, self._transport, key, leads=world.leads)
        return self._island_claims

    def end_round(self, stats: RoundStats) -> tuple[Gathered, Array, int]:
        """Merges the islands' models and rebalances. COLLECTIVE.

        Returns:
            The statistics of all islands as they were before the merge; the merge weights, an island's divided among its ranks;
            and the bytes that this rank sent to other islands.
        """
        gathered, weight, payload_bytes = super().end_round(stats)
        # An island is as fast as its steps, and a rank as its own part of them.
        self._step_s = gathered["busy_s"]
        self._clock.end_round(stats)
        if self._island_claims is not None and self._world.leads:
            self._island_claims.forget()
        of_rank = self._islands.of_rank
        sends = self._is_sharded or self._world.leads
        return gathered, weight[of_rank] / self._islands.sizes[of_rank], payload_bytes if sends else 0

    def _gather(self, stats: RoundStats) -> Gathered:
        return self._islands.combine(stats.gather(self._all.allgather_stats))

    def after_round(self, record: RoundRecord) -> None:
        """Chooses the next merge period, by what the islands did."""
        stats = self._islands.combine(record.stats)
        if self._step_s is not None:
            stats["busy_s"] = self._step_s
        super().after_round(dataclasses.replace(record, stats=stats))

    def state_dict(self) -> dict[str, Any]:
        """Returns the strategy's state, and which ranks made up which island. Of a model in shards, each rank has its own."""
        state = super().state_dict()
        if self._is_sharded:
            state["own"]["shard"] = {name: state["shared"].pop(name) for name in _OF_SHARDS}
        state["shared"]["islands"] = self._islands.of_rank.tolist()
        return state

    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a state of the same islands; each rank that of its island's first, or its own one of a model in shards.

        Raises:
            ValueError: for one of other islands.
        """
        mine = self._islands.of_rank.tolist()
        if shared["islands"] != mine:
            raise ValueError(
                f"it is of other islands: its ranks were in islands {shared['islands']}, and are in {mine} here. Start as many "
                "ranks on as many hosts as then"
            )
        leaders, rank = self._islands.leaders, self._all.rank
        if self._is_sharded:
            shared = {**shared, **own_of(rank)["shard"]}
        of_island: OwnState = lambda island: own_of(rank if self._is_sharded else leaders[island])  # noqa: E731
        super().load_state_dict(shared, of_island, world_size=len(leaders))

    def _start_state(self, optimizer: Optimizer) -> None:
        """Has the ranks of an island begin with one state of the optimizer: that of its first rank, which alone may have loaded
        one. COLLECTIVE.

        Raises:
            AgreedError: on all ranks, if those of an island have different entries for their shards.
        """
        mine = self._islands.members[self._world.rank]
        if not self._is_sharded:
            start_state_(optimizer, optimizer, cast(Collectives, _Start(self._all, self._inside, mine)))
            return
        found = self._all.allgather_object(checksum(optimizer))
        apart = [ranks for ranks in self._islands.members if len({found[rank] for rank in ranks}) > 1]
        if apart:
            raise AgreedError(
                f"ranks {apart[0]} of an island have different entries in their optimizers' states, of which each has a shard: "
                "load the state on all ranks of the island, or on none"
            )

    def _check_shards(self, model: nn.Module, config: Config) -> bool:
        if not check_shards(model, self._islands.members[self._world.rank]):
            return False
        self._islands.check_shards()
        refused = {
            "micro_batch_size": "all ranks of the island must make equally many backward passes",
            "merge_fragments": "all shards of a fragment must be finite, which ranks learn at the end of a round",
            "auto_bits": "bits are chosen for whole layers",
            "outlier_limit": "a rank knows the norm of its shard only",
            "clip_delta": "a rank knows the norm of its shard only",
            "perturbation": "a rank knows the norm of its shard only",
        }
        for name, why in refused.items():
            if getattr(config, name) != type(config).__dataclass_fields__[name].default:
                raise ValueError(f"a sharded model needs no {name}, got {getattr(config, name)!r}: {why}. Leave one of them out")
        if sparse := sorted(sparse_parameters(model)):
            raise ValueError(f"a sharded model has dense gradients only, got sparse=True for {', '.join(sparse)}: set it False")
        return True

    def _tell(self, hosts: Sequence[str]) -> None:
        sizes, of_rank = self._islands.sizes.tolist(), self._islands.of_rank
        log.info("%d islands of %s ranks: each computes its batches together and merges as one", len(sizes), sizes)
        apart = [i for i in range(len(sizes)) if len({h for h, island in zip(hosts, of_rank, strict=True) if island == i}) > 1]
        if apart:
            log.warning(
                "islands %s have ranks on more than one host: their gradients cross the network in every step. Choose island "
                "'node', or sizes that fit the hosts",
                apart,
            )


class _Start:
    """What :func:`start_state_` needs of :class:`Collectives`, of the ranks of an island.

    Args:
        world: all ranks, which make an optimizer's state known: it may hold what is no JSON.
        inside: the ranks of the island.
        members: their ranks in the world.
    """

    def __init__(self, world: Transport, inside: Inside, members: Sequence[int]) -> None:
        self._world = world
        self._inside = inside
        self._members = members
        self.rank = inside.rank

    def allgather_object(self, value: Any) -> list[Any]:
        """Gathers from every rank of the island. COLLECTIVE over the world."""
        gathered = self._world.allgather_object(value)
        return [gathered[rank] for rank in self._members]

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by those of the island's first rank, in place. COLLECTIVE inside."""
        for index, tensor in enumerate(tensors):
            flat = tensor.contiguous()
            self._inside.tell_(flat, f"state.{index}")
            if flat is not tensor:
                tensor.copy_(flat)


class _Parts:
    """A :class:`BatchSource` that makes this rank's parts of batches.

    Args:
        source: of whole batches.
        own_part: returns which of so many samples are this rank's.
    """

    def __init__(self, source: BatchSource, own_part: Any) -> None:
        self._source = source
        self._own_part = own_part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def request(self, rows: Rows, work: int) -> Batch:
        """Returns this rank's part of the batch, whose work is that of all."""
        start, stop = self._own_part(len(rows))
        if start == stop:
            return self._source.request(rows[:2], work, stands_in=True)
        return self._source.request(rows[start:stop], work)
