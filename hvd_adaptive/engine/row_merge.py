"""Merging only the rows of sparse parameters that some rank touched; the result has the dense merge's bits.

A row that no rank touched has a delta of zero everywhere. The ranks exchange which rows they touched (a bit a row), pack the
deltas of the union's rows, and sum those. Locally the outer step goes on for every row whose velocity is not zero.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.algorithm.row_choice import Array, RowChoice
from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.config import Config
from hvd_adaptive.engine.touched_rows import TouchedRows

log = logging.getLogger(__name__)

# Elements that rows are moved by at a time, so that they stay in the cache of a core. A GPU takes all at once.
_CPU_CHUNK = 1 << 16
# Share of rows from which on one pass over all rows is cheaper than collecting them, and than zeroing them one by one.
_MOST = 0.25
_MOST_ZEROS = 0.1


class RowRange:
    """A sparse parameter inside the flat model.

    Args:
        touched: the rows that this rank's steps changed.
        tensor: the model's own parameter, detached, shape (num_rows, ...).
        flat_weights: the flat global model that holds it.
        flat_delta: the flat delta.
        start: where its elements start in both.

    Attributes:
        part: its elements in the flat tensors.
        num_rows: its rows.
        row_bytes: bytes of a row's delta.
        dtype: of the delta.
        trusted: False once a write was found that the marks had missed; all rows count as touched from then on.
        union: rows that some rank touched in this round, int64, ascending, the same on every rank.
        factor: this rank's weights, shape (num_rows, 1) or of the rows; None for one weight for all.
    """

    def __init__(
        self, touched: TouchedRows, tensor: Tensor, flat_weights: Tensor, flat_delta: Tensor, start: int
    ) -> None:
        self.touched = touched
        self.part = slice(start, start + tensor.numel())
        self.num_rows = tensor.shape[0]
        self.row_bytes = tensor.numel() // max(1, self.num_rows) * flat_delta.element_size()
        self._tensor = tensor.view(self.num_rows, -1)
        self._weights = self._rows_of(flat_weights)
        self._delta = self._rows_of(flat_delta)
        on_cpu = tensor.device.type == "cpu"
        self._chunk = max(1, _CPU_CHUNK // max(1, self._tensor.shape[1])) if on_cpu else max(1, self.num_rows)
        # Whether the delta is zero everywhere, and outside this rank's touched rows.
        self._is_zero = self._is_zero_outside = True
        self._velocity: tuple[Tensor, int] | None = None
        self._live = torch.zeros_like(touched.mask)
        self.trusted = True
        self.dtype = flat_delta.dtype
        self.union = torch.empty(0, dtype=torch.int64, device=tensor.device)
        self.factor: Tensor | None = None

    def rebind(self, tensor: Tensor) -> None:
        """Takes the parameter anew. If it has other memory, all its rows count as touched."""
        if tensor.data_ptr() != self._tensor.data_ptr():
            self._tensor = tensor.view(self.num_rows, -1)
            self.touched.mark_all("was put into other memory")

    def _rows_of(self, flat: Tensor) -> Tensor:
        return flat[self.part].view(self.num_rows, -1)

    def compute_delta_(self, *, verify: bool) -> bool:
        """Fills the delta of touched rows, zeros elsewhere; returns whether it is finite.

        Args:
            verify: go over all rows, and find those that changed without a mark.
        """
        self.touched.check_version()
        mask = self.touched.mask
        if not self.trusted:
            mask.fill_(True)
        rows = mask.nonzero().view(-1)
        self._is_zero_outside = not verify and len(rows) <= _MOST * self.num_rows
        if self._is_zero_outside:
            if not self._is_zero:
                self._delta.zero_()
            self._is_zero = False
            finite = True
            for some in rows.split(self._chunk):
                own = self._tensor.index_select(0, some)
                delta = own.to(self._delta.dtype).sub_(self._start(self._weights.index_select(0, some)))
                finite = finite and all_finite(delta.view(-1))
                self._delta[some] = delta
            return finite
        self._is_zero = False
        torch.sub(self._tensor.to(self._delta.dtype), self._start(self._weights), out=self._delta)
        if verify:
            changed = torch.cat([(some != 0).any(1) for some in self._delta.split(self._chunk)])
            if (changed & ~mask).any():
                self.trusted = False
                mask.fill_(True)
        return all_finite(self._delta.view(-1))

    def _start(self, weights: Tensor) -> Tensor:
        # Half-precision parameters hold the rounded global model: that is what they started from.
        return weights.to(self._tensor.dtype).to(self._delta.dtype)

    def scale_(self, factor: float) -> None:
        """Multiplies this rank's delta by its weight > 0, or by the rows' own weights."""
        self._delta.mul_(factor if self.factor is None else self.factor)

    def pack_(self, factor: float) -> Tensor:
        """Moves the delta of the union's rows to the front of the delta's memory, weighted.

        Args:
            factor: this rank's weight; 0 gives zeros, whatever the delta holds. Rows' own weights take its place.

        Returns:
            That part of the delta, shape (rows of the union x row length,).
        """
        packed = self._delta[: len(self.union)]
        # The union ascends, so a row never moves onto one that is still to be moved.
        for rows, target in zip(self.union.split(self._chunk), packed.split(self._chunk), strict=True):
            if not factor:
                target.zero_()
                continue
            some = self._delta.index_select(0, rows)
            target.copy_(some.mul_(factor if self.factor is None else self.factor.index_select(0, rows)))
        return packed.view(-1)

    def unpack_(self) -> None:
        """Moves the rows at the front of the delta's memory back to their places, with zeros everywhere else."""
        if not self._is_zero_outside:
            self._delta[len(self.union) :].zero_()
        targets = self.union.split(self._chunk)
        packed = self._delta[: len(self.union)].split(self._chunk)
        for rows, source in zip(reversed(targets), reversed(packed), strict=True):
            some = source.clone()
            source.zero_()
            self._delta[rows] = some

    def apply_(self, outer: OuterStep, flat_weights: Tensor, flat_delta: Tensor) -> None:
        """Takes the outer step with the summed delta and loads the global model, on rows where that changes anything.

        Args:
            outer: the outer step.
            flat_weights: the flat global model.
            flat_delta: the sum of weighted deltas.
        """
        velocity = outer.velocity_of(flat_weights)
        live = self.union
        if velocity is not None:
            # Where both the velocity and the delta are zero, the dense step adds zero.
            left = self._velocity
            if left is None or left[0] is not velocity or left[1] != velocity._version:
                # Not as the last merge of touched rows left it: new, loaded, or moved by a dense merge.
                self._live = (self._rows_of(velocity) != 0).any(1)
            live = self._live.index_fill_(0, self.union, True).nonzero().view(-1)
        if len(live) > _MOST * self.num_rows:
            outer.apply_(flat_weights, flat_delta, [self.part])
            self._tensor.copy_(self._weights)
        else:
            self._apply_rows_(outer, live, None if velocity is None else self._rows_of(velocity))
        self._velocity = None if velocity is None else (velocity, velocity._version)

    def _apply_rows_(self, outer: OuterStep, live: Tensor, velocity: Tensor | None) -> None:
        for rows in live.split(self._chunk):
            weights, delta = self._weights.index_select(0, rows), self._delta.index_select(0, rows)
            some = None if velocity is None else velocity.index_select(0, rows)
            outer.move_(weights, delta, some)
            self._weights[rows] = weights
            self._tensor[rows] = weights.to(self._tensor.dtype)
            if velocity is not None and some is not None:
                velocity[rows] = some
        if len(self.union) > _MOST_ZEROS * self.num_rows:
            self._delta.zero_()
        else:
            self._delta.index_fill_(0, self.union, 0)
        self._is_zero = True


class RowMerge:
    """Decides round by round, together with the other ranks, which rows cross the wire. Construction is COLLECTIVE.

    Args:
        ranges: the sparse parameters, in the same order on every rank; at least one.
        transport: the world.
        config: the rules.
        payload_bytes: of a merge of all rows, and of all else.

    Attributes:
        sparse: whether this round's merge takes only the union's rows.
        num_rows: rows of sparse parameters that this round's merge exchanges.
        message_bytes: bytes of the marks that a rank sends.
    """

    def __init__(self, ranges: Sequence[RowRange], transport: Collectives, config: Config, *, payload_bytes: int) -> None:
        self._ranges = ranges
        self._transport = transport
        # Seconds, by which 'auto' chooses, do not repeat.
        self._choice = RowChoice("always" if config.repeatable and config.sparse_merge == "auto" else config.sparse_merge)
        self._dense_bytes = payload_bytes
        self._rest_bytes = payload_bytes - sum(r.num_rows * r.row_bytes for r in ranges)
        self._told: bool | None = None
        self._named: set[str] = set()
        self.sparse = False
        self.num_rows = 0
        self.message_bytes = 0

    def exchange(self) -> None:
        """Learns which rows some rank touched, and chooses. COLLECTIVE."""
        header = np.array([*self._choice.measured(), *(not r.trusted for r in self._ranges)], dtype=np.float64)
        masks = [r.touched.mask.cpu().numpy() for r in self._ranges]
        marks = np.packbits(np.concatenate(masks))
        self.message_bytes = header.nbytes + marks.nbytes
        headers = self._transport.allgather_stats(header)
        # The union, and not every rank's marks: those of 670,000 rows from 512 ranks would be 43 MB for each rank.
        self._transport.allreduce_or_(marks)
        touched, position = np.unpackbits(marks, count=sum(map(len, masks))).view(bool), 0
        for index, part in enumerate(self._ranges):
            self._distrust(part, headers[:, 2 + index] > 0)
            own = touched[position : position + part.num_rows]
            position += part.num_rows
            part.union = torch.from_numpy(np.flatnonzero(own)).to(part.union.device)
        self._choose(headers[:, :2])

    def unions(self) -> dict[int, Tensor]:
        """Returns the rows that some rank touched in this round, by ``id`` of the parameter."""
        return {r.touched.parameter_id: r.union for r in self._ranges}

    def observe(self, seconds: float, num_bytes: int) -> None:
        """Tells how long this rank's merge took, waiting excluded, and what it sent."""
        self._choice.observe(self.sparse, seconds=seconds, num_bytes=max(1, num_bytes))

    def _choose(self, measured: Array) -> None:
        num_rows = sum(len(r.union) for r in self._ranges)
        sparse_bytes = self._rest_bytes + sum(len(r.union) * r.row_bytes for r in self._ranges)
        all_rows = sum(r.num_rows for r in self._ranges)
        dense_bytes = max(1, self._dense_bytes)
        self.sparse = self._choice.choose(sparse_bytes=sparse_bytes, dense_bytes=dense_bytes, measured=measured)
        self.num_rows = num_rows if self.sparse else all_rows
        if self.sparse != self._told and self._transport.rank == 0:
            log.debug(
                "merges exchange %s of sparse parameters: some rank touched %d of %d (%.1f of %.1f MB with all else); "
                "seconds of a merge: all rows %s, touched rows %s",
                "only the touched rows" if self.sparse else "all rows",
                num_rows,
                all_rows,
                sparse_bytes / 1e6,
                dense_bytes / 1e6,
                *(f"{s:.4f}" if s == s else "not measured yet" for s in measured.max(axis=0) * (1.0, sparse_bytes)),
            )
        self._told = self.sparse

    def _distrust(self, part: RowRange, found: NDArray[np.bool_]) -> None:
        part.trusted = not found.any()
        if found.any() and part.touched.name not in self._named:
            self._named.add(part.touched.name)
            if self._transport.rank == 0:
                log.warning(
                    "%s changed on ranks %s in rows without a gradient, by a way that leaves no trace (parameter.data): part of "
                    "the change may be lost, and all its rows are merged from now on. Write to it under torch.no_grad().",
                    part.touched.name,
                    np.flatnonzero(found).tolist(),
                )
