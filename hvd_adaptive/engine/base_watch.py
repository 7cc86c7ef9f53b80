"""Parameters that a loop changes between two rounds, such as by going back to its best model: they become the global model."""

from __future__ import annotations

import logging
import zlib

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.engine.flat_model import FlatModel

log = logging.getLogger(__name__)

_MOST_WARNINGS = 3


class BaseWatch:
    """Takes such parameters as what the next steps start from. The outer step's velocity forgets the elements that changed: it
    would move them on to where the old model was going.

    Ranks learn at the next merge whether all made the same change. If not, the change counts as progress of the ranks that made
    it, or the job ends where merges go beside steps. A write that PyTorch does not count, as by ``p.data.copy_``, is not seen and
    counts as such progress, too.

    Args:
        flat_model: the model.
        outer: its outer step.

    Attributes:
        checksum: of the parameters that were changed since the last merge; 0: none were.
        is_whole: every parameter was, and what codecs have lost of the way to the old model is still to be forgotten.
    """

    def __init__(self, flat_model: FlatModel, outer: OuterStep) -> None:
        self._flat = flat_model
        self._outer = outer
        self.checksum = 0
        # What was before, by group and tensor: flat tensors and copies of them.
        self._before: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._num_warnings = 0
        self.is_whole = False

    @torch.no_grad()
    def find(self) -> list[tuple[int, int]]:
        """Returns which parameters are not as the last merge left them, by group and tensor. Quick unless one was written to."""
        if not self._flat.was_written():
            return []
        self._flat.follow()
        return [
            (number, index)
            for number, group in enumerate(self._flat.parameter_groups)
            for index, (base, tensor) in enumerate(zip(group.slices(group.weights), group.tensors, strict=True))
            # Half-precision parameters hold the rounded global model.
            if not torch.equal(base.to(tensor.device, tensor.dtype), tensor)
        ]

    @torch.no_grad()
    def adopt_(self) -> bool:
        """Takes changed elements into the global model; returns whether there are any. Between two rounds."""
        found = self.find()
        self._flat.mark()
        for number, index in found:
            group = self._flat.parameter_groups[number]
            base, tensor = group.slices(group.weights)[index], group.tensors[index]
            velocity = self._outer.velocity_of(group.weights)
            flats = [base] if velocity is None else [base, group.slices(velocity)[index]]
            self._before.setdefault((number, index), [(flat, flat.clone()) for flat in flats])
            changed = (base.to(tensor.device, tensor.dtype) != tensor).to(base.device)
            # Elements that nobody wrote keep what a half-precision parameter rounds. Of one that is replaced, some round alike.
            if tensor.dtype != base.dtype and 2 * int(changed.sum()) >= changed.numel():
                changed.fill_(True)
            base.copy_(torch.where(changed, tensor.to(base.device, base.dtype), base))
            if velocity is not None:
                flats[1].masked_fill_(changed, 0.0)
        if found:
            self.checksum = self._checksum()
            self.is_whole = len(self._before) == sum(len(group.tensors) for group in self._flat.parameter_groups)
            if self._flat.rule is not None:
                self._flat.rule.restart()
        return bool(found)

    def forget_residuals(self) -> None:
        """Forgets what codecs have lost, if every parameter has changed. Where one has, such as by a constraint after each
        merge, the others' way goes on."""
        if self._flat.compressed is not None and self.is_whole:
            self._flat.compressed.reset()
        self.is_whole = False

    def forget(self) -> None:
        """Takes the global model as it is, such as one of a checkpoint."""
        self._before, self.checksum, self.is_whole = {}, 0, False

    @torch.no_grad()
    def settle_(self, checksums: Array, *, who: str | None) -> bool:
        """Ends a round; returns whether what ranks changed was the same on all. If not, the global model is the old one again.

        Args:
            checksums: of all ranks, shape (world_size,).
            who: what a warning calls them; None: there is none.
        """
        agreed = bool((checksums == checksums[0]).all() and checksums[0] >= 0)
        if agreed:
            self.forget_residuals()
        else:
            for pairs in self._before.values():
                for flat, before in pairs:
                    flat.copy_(before)
            self._num_warnings += 1
            if who is not None and self._num_warnings <= _MOST_WARNINGS:
                log.warning(
                    "%s %s changed parameters between two rounds, and the others did not, or otherwise: the merge has averaged "
                    "these changes. Make them alike on all of them, in session.records, or within session.step.",
                    who, np.flatnonzero(checksums).tolist(),
                )  # fmt: skip
        self.forget()
        return agreed

    def _checksum(self) -> int:
        sums = []
        for number, index in sorted(self._before):
            group = self._flat.parameter_groups[number]
            bits = group.slices(group.weights)[index].view(torch.int64 if group.weights.dtype == torch.float64 else torch.int32)
            sums.append((number, index, int(bits.sum(dtype=torch.int64))))
        return 1 + zlib.crc32(repr(sums).encode())
