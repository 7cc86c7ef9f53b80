"""Averaged gradients of a run's steps in a file. A second run steps with them, so both begin each step from the same weights.

Without it, rounding makes the weights differ a little, a ReLU is then on in one run only, and some dozens of steps later nothing
can be compared.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.cluster.output import say
from hvd_adaptive.engine.device_copies import host_bytes, memory_of
from hvd_adaptive.wrap.process_sets import is_over_set

# Of the file; and the part of the folder's free space that it takes at most.
_MOST_BYTES, _PART = 4 << 30, 0.25
_HEADER = 8


class RecordedGradients:
    """Of one process of one of the two runs.

    Args:
        file: rank 0 writes it in the first run, and reads it in the second.
        writes: this is the first run.
        rank: this rank.
    """

    def __init__(self, file: Path, *, writes: bool, rank: int) -> None:
        self._name, self._writes = file, writes
        self._is_over = False
        self._file: Any = None
        if rank == 0:
            file.touch()
            self._file = file.open("ab" if writes else "rb")
            self._left = min(_MOST_BYTES, int(shutil.disk_usage(file.parent).free * _PART))

    def record(self, optimizer: Any) -> bool:
        """Records the gradients of a step that begins, or replaces them by the first run's. COLLECTIVE in the second run.

        Args:
            optimizer: Horovod's, after its exchange.

        Returns:
            In the second run, whether all of them were replaced: those that are sparse are not.
        """
        from horovod.common.exceptions import HorovodInternalError

        # Only some ranks step with others.
        self._is_over |= is_over_set(optimizer)
        if self._is_over:
            return False
        try:
            done = self._write(optimizer) if self._writes else self._replace(optimizer)
        except (OSError, HorovodInternalError) as error:
            # No space is left, or a rank has joined.
            done = False
            if self._file is not None:
                say(f"verify: later steps are compared less closely: {self._name}: {error}")
        self._is_over = not done
        return done and all(p.grad is None or _is_dense(p.grad) for group in optimizer.param_groups for p in group["params"])

    def _write(self, optimizer: Any) -> bool:
        if self._file is None:
            return True
        gradients = list(_dense(optimizer))
        num_bytes = sum(gradient.nbytes for gradient in gradients)
        self._left -= num_bytes + _HEADER
        if self._left < 0:
            return False
        self._file.write(num_bytes.to_bytes(_HEADER, "little"))
        # One by one: they may be on several devices.
        for part in (part for gradient in gradients for part in host_bytes([gradient])):
            self._file.write(memory_of(part))
        # The script may end the process at any time.
        self._file.flush()
        return True

    @torch.no_grad()
    def _replace(self, optimizer: Any) -> bool:
        from horovod.torch import mpi_ops

        gradients = list(_dense(optimizer))
        sizes = [gradient.nbytes for gradient in gradients]
        # The first one says whether there are any.
        whole = torch.zeros(1 + sum(sizes), dtype=torch.uint8)
        if self._file is not None:
            # The others wait for this rank also where a file cannot be read.
            with contextlib.suppress(OSError):
                if int.from_bytes(self._file.read(_HEADER), "little") == sum(sizes):
                    whole[0] = self._file.readinto(whole[1:].numpy()) == sum(sizes)
        mpi_ops.broadcast_(whole, root_rank=0, name="hvd_adaptive.verify")
        if not whole[0]:
            return False
        for gradient, part in zip(gradients, whole[1:].split(sizes), strict=True):
            # Its own memory: a view of a type must begin at a multiple of its size.
            gradient.copy_(part.clone().view(gradient.dtype).view(gradient.shape))
        return True


def _dense(optimizer: Any) -> Iterator[Tensor]:
    """Yields the gradients that are not sparse."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and _is_dense(parameter.grad):
                yield parameter.grad


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout == torch.strided
