"""Merges whose exchange runs beside the next round's steps; the global model is one round behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.comm.protocols import Collectives, Pending
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.engine.flat_group import scale_
from hvd_adaptive.engine.flat_model import FlatModel
from hvd_adaptive.exchange.pipeline import UnderWay


class OverlappedMerge:
    """Exchanges the progress of round r while round r + 1 computes.

    With G the global model, equal on all ranks, and p_i what rank i's steps of a round added to where they started: round
    r + 1 starts from G + p_i(r), so that no rank loses its latest steps while they are on the way. At its end the sum
    S(r) = sum a_i(r) p_i(r) has arrived: G moves by the outer step of S(r), the sum of p_i(r + 1) starts, and round r + 2
    starts from the new G + p_i(r + 1). Every p_i enters exactly one sum. With one rank and no outer step, G + p_i is plain SGD.

    Between rounds the model is G: evaluation, hashes and files see what all ranks hold. Float buffers are merged at once:
    a stale variance could become negative.

    Needs one more copy of the trainable parameters: each rank's own progress, while its weighted copy is on the way. What codecs
    lose of it is added to what is sent a round later, as without overlap.

    Args:
        flat_model: the model; its delta is what is on the way.
        outer: the outer step.
        transport: the world.
    """

    def __init__(self, flat_model: FlatModel, outer: OuterStep, transport: Collectives) -> None:
        self._under_way = UnderWay()
        self._flat_model = flat_model
        self._outer = outer
        self._transport = transport
        self._groups = flat_model.parameter_groups
        self._progress = [torch.zeros_like(g.delta) for g in self._groups]
        self._handles: list[Pending] = []
        # Whether the delta holds a sum, or what will be one, that the global model has not taken.
        self._pending = False

    @torch.no_grad()
    def start_round_(self) -> None:
        """Loads this rank's own model, the global one and its latest progress, for its next steps."""
        self._flat_model.load_(self._starts())

    @torch.no_grad()
    def compute_progress(self) -> bool:
        """Takes down what this round's steps changed; returns whether that is finite."""
        self._flat_model.check_trainable()
        finite = self._flat_model.buffers.compute_delta()
        for group, progress, start in zip(self._groups, self._progress, self._starts(), strict=True):
            for tensor, part, own in zip(
                group.tensors, group.slices(progress), group.slices(start), strict=True
            ):
                torch.sub(tensor.to(part.dtype), own.to(tensor.dtype).to(part.dtype), out=part)
            finite &= all_finite(progress)
        return finite

    @torch.no_grad()
    def merge_(self, *, weight: float, buffer_weight: float) -> None:
        """Moves the global model by the sum that has been on the way, and sends this round's progress. COLLECTIVE.

        Args:
            weight: this rank's merge weight; 0 contributes zeros and gives up the progress, whatever it holds.
            buffer_weight: this rank's weight for float buffers.
        """
        self._arrive_()
        compressed, encoded_bytes = self._flat_model.compressed, 0
        if compressed is not None:
            compressed.begin_round()
        for group, progress in zip(self._groups, self._progress, strict=True):
            if not weight:
                progress.zero_()
            group.delta.copy_(progress)
            # Encoding multiplies on its way, by one weight for all.
            late = compressed is not None and weight > 0 and group.factors is None
            if not late:
                scale_(group, weight)
            if compressed is None:
                self._handles.append(self._transport.allreduce_sum_async_(group.delta, name=f"overlap.{group.name}"))
            else:
                compressed.prepare(group.delta, group.name, group.infos)
                for task in compressed.tasks(group.delta, group.name, weight=weight if late else 1.0):
                    self._under_way.begin(task)
                encoded_bytes += compressed.payload_bytes(group.delta, group.name)
        if compressed is not None:
            rule = self._flat_model.rule
            encoded_bytes += rule.message_bytes if rule is not None else 0
            self._flat_model.payload_bytes = self._flat_model.buffers.payload_bytes + encoded_bytes
        self._pending = True
        self._flat_model.buffers.merge_(buffer_weight)
        self._flat_model.restore_()

    @torch.no_grad()
    def poll(self) -> None:
        """Goes on with encoded sums as far as they have arrived; call it between steps."""
        self._under_way.poll()

    @torch.no_grad()
    def drain_(self) -> None:
        """Waits for what is on the way and merges it: the model is the global one, and nothing is left over. COLLECTIVE."""
        if not self._pending:
            return
        self._arrive_()
        for progress in self._progress:
            progress.zero_()
        self._flat_model.restore_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums on the way, once they are there (shared), and this rank's own progress. COLLECTIVE."""
        self._wait()
        return {
            "shared": [g.delta for g in self._groups] if self._pending else None,
            "own": list(self._progress),
        }

    @torch.no_grad()
    def load_state_dict(self, sums: list[Tensor] | None, progress: list[Tensor] | None) -> None:
        """Goes on from a state.

        Args:
            sums: what was on the way.
            progress: of this very rank; None: it starts from the global model.
        """
        self._pending = sums is not None
        for group, value in zip(self._groups, sums or [g.delta for g in self._groups], strict=True):
            group.delta.copy_(value)
        for own, value in zip(self._progress, progress or self._progress, strict=True):
            own.copy_(value) if progress else own.zero_()

    def _wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        self._under_way.finish()

    def _arrive_(self) -> None:
        self._wait()
        if self._pending:
            self._outer.begin()
            for group in self._groups:
                self._outer.apply_(group.weights, group.delta)
        self._pending = False

    def _starts(self) -> list[Tensor]:
        return [g.weights + p for g, p in zip(self._groups, self._progress, strict=True)]
