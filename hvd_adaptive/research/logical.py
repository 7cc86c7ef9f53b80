"""Logical ranks: a run whose bits do not depend on how many ranks there are (EasyScale, arXiv 2208.14228).

A fixed number V of logical ranks train; each real rank plays some of them, one after the other. A logical rank has its own
share of every round, random state, optimizer state and buffers, and the V deltas are summed in logical order. Deviation
from EasyScale: turns change once a round, not every step, because that is where models of strategy ``local`` meet.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.ledger import MegaBatch, claim_size
from hvd_adaptive.algorithm.merge_period import capped_mega_batch
from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.claims import OwnPart
from hvd_adaptive.engine.rank_warnings import warn_of_broken
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.engine.strategy import OwnState
from hvd_adaptive.state.random_state import random_state, seeded_random_state, set_random_state
from hvd_adaptive.strategies.local import LocalStrategy

log = logging.getLogger(__name__)

# Elements of an exchange, over all logical ranks: the only memory that grows with V on a rank that plays one of them.
_CHUNK = 1 << 22


@dataclass(slots=True)
class _LogicalRank:
    """What a logical rank keeps while others have their turn.

    Attributes:
        random: as from :func:`random_state`.
        optimizer: the optimizer's ``state``.
        deltas: one a group of the flat model, of this round.
        stats: of this round.
    """

    random: dict[str, Any]
    optimizer: defaultdict[Any, Any]
    deltas: list[Tensor] = field(default_factory=list)
    stats: RoundStats = field(default_factory=RoundStats)


class LogicalStrategy(LocalStrategy):
    """Strategy ``local`` with ``Config.logical_ranks``: fixed shares, fixed batch sizes. Construction is COLLECTIVE.

    Batches are loaded in the main thread, between steps, so that a data set may draw from the logical rank's generators.
    Gradients left over from an unfinished accumulation are dropped when turns change.

    Memory beyond strategy ``local``'s: an optimizer state and a delta, of all rows, for each logical rank that this rank plays.

    Raises:
        AgreedError: on all ranks, if there are more ranks than logical ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        assert config.logical_ranks is not None
        self._num_logical = config.logical_ranks
        if self._num_logical < transport.world_size:
            raise AgreedError(
                f"logical_ranks must be >= the number of ranks, got {self._num_logical} < {transport.world_size}: "
                "a rank without a logical rank would idle. Start fewer ranks; raising logical_ranks is another run."
            )
        super().__init__(model, optimizer, config, transport)
        self._model = model
        self._groups = self.flat_model.groups
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._device = next(model.parameters()).device
        # Contiguous, so that rows gathered in rank order are in logical order.
        self._first = self._first_of(transport.world_size)
        self._fresh = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
        self._own = {
            number: _LogicalRank(
                random=seeded_random_state((config.seed, number), self._device), optimizer=self._fresh_state()
            )
            for number in range(self._first[transport.rank], self._first[transport.rank + 1])
        }
        self._delta_s = 0.0
        if transport.rank == 0:
            log.info(
                "%d logical ranks on %d ranks: shares and batch sizes are fixed, adaptivity is off",
                self._num_logical, transport.world_size,
            )  # fmt: skip

    def mega_batch_of(self, dataset_size: int) -> int:
        """Returns the samples of the next round over all logical ranks, however many ranks play them."""
        return capped_mega_batch(self._config, self._control.mega_batch, dataset_size, self._num_logical)

    def round_batches(
        self, rows: Rows, *, work: np.ndarray | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields the batches of this rank's logical ranks in turn; each starts from the global model."""
        mega_batch = MegaBatch(rows, work)
        outside = random_state(self._device)
        integers = self.flat_model.buffers.integers
        start = [b.clone() for b in integers]
        highest = [b.clone() for b in integers]
        self._delta_s = 0.0
        try:
            for number, logical in self._own.items():
                self.flat_model.restore_()
                for buffer, value in zip(integers, start, strict=True):
                    buffer.copy_(value)
                for parameter in self._model.parameters():
                    parameter.grad = None
                self.optimizer.state = logical.optimizer
                set_random_state(logical.random, self._device)
                logical.stats = RoundStats(batch_size=float(self.batch_sizes[self._transport.rank]))
                for batch in self._share(number, mega_batch, source, stats):
                    logical.stats.num_samples += batch.num_samples
                    yield batch
                logical.random = random_state(self._device)
                logical.optimizer = self.optimizer.state
                self._end_turn(logical)
                highest = [torch.maximum(*pair) for pair in zip(highest, integers, strict=True)]
        finally:
            set_random_state(outside, self._device)
        for buffer, value in zip(integers, highest, strict=True):
            buffer.copy_(value)

    def take_back(self, batch: Batch) -> bool:
        """Returns False: parts of a failed batch would come in the turn of another logical rank."""
        return False

    def close_round(self) -> None:
        """Goes on to the round's end: the result must not depend on when someone wanted to stop."""

    def round_samples(self, num_rows: int) -> int:
        """Returns all of them."""
        return num_rows

    def _share(
        self, number: int, mega_batch: MegaBatch, source: BatchSource, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields the batches of a logical rank's fixed part of the mega-batch."""
        total = mega_batch.total_work
        begin, end = (total * n // self._num_logical for n in (number, number + 1))
        part = OwnPart(begin, end)
        work_per_sample = total / max(1, len(mega_batch.rows))

        def size(remaining: int) -> int:
            return claim_size(
                remaining=remaining,
                full_claim=self.batch_sizes[self._transport.rank] * work_per_sample,
                own_pending=0,
                others_full_claims=0,
                speed_share=1.0,
                smallest=2 * work_per_sample,
            )

        while (claim := part.claim(size)) is not None:
            with source.times.waiting(stats):
                claimed = mega_batch.claimed(*claim)
                batch = source.load(claimed, claim[1] - claim[0]) if len(claimed) else None
            if batch is not None:
                # As if all computed side by side.
                batch._place = mega_batch.num_rows_before((claim[0] - begin) * self._num_logical)
                yield batch

    def _end_turn(self, logical: _LogicalRank) -> None:
        start = time.perf_counter()
        stats = logical.stats
        stats.num_updates = stats.num_samples / stats.batch_size
        self.merge.measure_(stats)
        logical.deltas = [group.delta.clone() for group in self._groups]
        self._delta_s += time.perf_counter() - start

    def end_round(self, stats: RoundStats) -> tuple[Gathered, Array, int]:
        """Merges the logical ranks' models. COLLECTIVE.

        Returns:
            The statistics of all ranks, each rank's sum of its logical ranks' weights, and the mean bytes a rank sent.

        Raises:
            AgreedError: on all ranks, if no logical rank's parameters are finite.
        """
        stats.finite = min(logical.stats.finite for logical in self._own.values())
        stats.wait_s = self._transport.rendezvous("round")
        start = time.perf_counter()
        gathered = stats.gather(self._transport.allgather_stats)
        logical_stats = self._gather_logical()
        weight = self.merge.weights(logical_stats)
        convex = weight / weight.sum()
        stats.control_s = time.perf_counter() - start

        start = time.perf_counter()
        finite = logical_stats["finite"] > 0
        for number, logical in self._own.items():
            for index, delta in enumerate(logical.deltas):
                parameters = index < len(self.flat_model.parameter_groups)
                factor = float((weight if parameters else convex)[number])
                # Not delta * 0: NaN times 0 is NaN.
                delta.mul_(factor) if factor else delta.zero_()
            if self.merge.state_rule == "reset" or not finite[number]:
                logical.optimizer = self._fresh_state()
        self._sum_in_logical_order()
        self.merge.outer.count(float(logical_stats["num_updates"].max()))
        self.flat_model.apply_(self.merge.outer)
        self.flat_model.buffers.start_(None)
        self.flat_model.buffers.finish_()
        if self._transport.rank == 0:
            warn_of_broken(finite, "logical ranks")
        stats.merge_s = self._delta_s + time.perf_counter() - start
        sent = self.flat_model.payload_bytes * self._num_logical // self._transport.world_size
        return gathered, np.add.reduceat(weight, self._first[:-1]), sent

    def _gather_logical(self) -> Gathered:
        """Returns the statistics of the logical ranks in logical order. COLLECTIVE."""
        table = np.zeros((self._num_logical, len(RoundStats.names())))
        for number, logical in self._own.items():
            table[number] = logical.stats.vector()
        tables = self._transport.allgather_stats(table.reshape(-1)).reshape(-1, *table.shape)
        owners = np.repeat(np.arange(self._transport.world_size), np.diff(self._first))
        return RoundStats.by_name(tables[owners, np.arange(self._num_logical)])

    @torch.no_grad()
    def _sum_in_logical_order(self) -> None:
        """Fills the flat model's delta with the sum of all logical ranks' weighted deltas. COLLECTIVE.

        Not an allreduce: its order of additions, and so its bits, would follow the number of ranks.
        """
        chunk = max(1, _CHUNK // self._num_logical)
        for index, group in enumerate(self._groups):
            for start in range(0, group.delta.numel(), chunk):
                part = slice(start, start + chunk)
                own = torch.stack([logical.deltas[index][part] for logical in self._own.values()])
                rows = self._gather_rows(own, f"logical.{group.name}")
                total = torch.zeros_like(rows[0], dtype=torch.float64)
                for row in rows:
                    total += row
                group.delta[part] = total
        for logical in self._own.values():
            logical.deltas = []

    def _gather_rows(self, own: Tensor, name: str) -> Tensor:
        """Gathers this rank's rows, one a logical rank: shape (logical ranks, row length). COLLECTIVE."""
        row_bytes = own.shape[1] * own.element_size()
        pending = self._transport.allgather_bytes_async(
            own.view(torch.uint8).view(-1), receive_bytes=(np.diff(self._first) * row_bytes).tolist(), name=name
        )
        return pending.wait().view(own.dtype).view(self._num_logical, -1)

    def _first_of(self, world_size: int) -> NDArray[np.int64]:
        """The first logical rank of each of so many ranks, and the number of logical ranks at last."""
        return np.arange(world_size + 1) * self._num_logical // world_size

    def _fresh_state(self) -> defaultdict[Any, Any]:
        return defaultdict(dict, {p: copy.deepcopy(state) for p, state in self._fresh.items()})

    def logical_state(self, number: int) -> dict[str, Any]:
        """Returns what a logical rank needs to go on after this round, on any rank of any number of ranks.

        Args:
            number: one of those that this rank plays.

        Returns:
            ``random``, as from :func:`random_state`, and ``optimizer``: the parameter's position in the optimizer's
            groups, as text, to its state by name. Tensors are the live ones, not copies.
        """
        logical = self._own[number]
        optimizer = {
            str(i): dict(logical.optimizer[p])
            for i, p in enumerate(self._parameters)
            if p in logical.optimizer
        }
        return {"random": logical.random, "optimizer": optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Returns the shared state of strategy ``local``, and the logical ranks' that this rank plays."""
        return {**super().state_dict(), "own": {"logical": self.logical_states()}}

    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a state of any number of ranks: each logical rank goes on as it was."""
        self._load_shared(shared, world_size=world_size)
        first = self._first_of(world_size)
        states: dict[str, Any] = {}
        for saved in range(world_size):
            if any(first[saved] <= number < first[saved + 1] for number in self._own):
                states |= own_of(saved)["logical"]
        self.load_logical_states(states)

    def logical_states(self) -> dict[str, Any]:
        """Returns the states of the logical ranks that this rank plays, by number, as text."""
        return {str(number): self.logical_state(number) for number in self._own}

    def load_logical_states(self, states: dict[str, Any]) -> None:
        """Takes over the states of the logical ranks that this rank plays.

        Args:
            states: those of all logical ranks, or of this rank's at least: all saving ranks' :meth:`logical_states`, joined.

        Raises:
            ValueError: if one of them is missing.
        """
        groups = [group for group in self.optimizer.param_groups for _ in group["params"]]
        for number, logical in self._own.items():
            saved = states.get(str(number))
            if saved is None:
                raise ValueError(
                    f"states must hold logical rank {number}, got {', '.join(states) or 'none'}: join those of all ranks that "
                    "saved, and keep logical_ranks as it was"
                )
            logical.random = saved["random"]
            logical.optimizer = defaultdict(
                dict,
                {
                    self._parameters[int(i)]: _loaded(entries, self._parameters[int(i)].device, groups[int(i)])
                    for i, entries in saved["optimizer"].items()
                },
            )


def _loaded(value: Any, device: torch.device, group: dict[str, Any], name: str = "") -> Any:
    """Copies a parameter's loaded state to its device, as ``Optimizer.load_state_dict`` does; dtypes stay."""
    if isinstance(value, Tensor):
        # Steps are counted on the CPU where the host reads the count.
        stays = name == "step" and not (group.get("fused") or group.get("capturable"))
        return value.clone() if stays else value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _loaded(item, device, group, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_loaded(item, device, group) for item in value)
    return copy.deepcopy(value)
