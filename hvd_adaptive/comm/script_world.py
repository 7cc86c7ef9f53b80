"""The ranks of a script that has called hvd.init() itself: all goes through Horovod, under MPI and Gloo alike."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adaptive.comm.horovod_collectives import HorovodCollectives
from hvd_adaptive.comm.protocols import Group

_PREFIX = "hvd_adaptive."


class ScriptWorld(HorovodCollectives):
    """All ranks; see :class:`hvd_adaptive.comm.protocols.Collectives`.

    Args:
        hvd: the module ``horovod.torch``, initialized by the script.
        waiting: wraps what waits for other ranks.
    """

    groups = False

    def __init__(self, hvd: Any, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        super().__init__(hvd, hvd.global_process_set, waiting, prefix=_PREFIX)
        self.host = socket.gethostname()
        self.speaks = self.rank == 0
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()

    def allgather_stats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Gathers a small vector, shape (k,): shape (world_size, k). COLLECTIVE."""
        with self._waiting("statistics"):
            gathered = self._hvd.allgather(torch.from_numpy(values.reshape(1, -1)), name=_PREFIX + "statistics")
        return np.asarray(gathered.numpy())

    def allgather_array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Gathers an array of one shape and dtype from every rank: shape (world_size, *shape). COLLECTIVE."""
        own = torch.from_numpy(np.ascontiguousarray(values).reshape(1, -1).view(np.uint8).copy())
        with self._waiting("gathering"):
            gathered = self._hvd.allgather(own, name=_PREFIX + "array")
        return np.asarray(gathered.numpy().view(values.dtype).reshape(-1, *values.shape))

    def allreduce_or_(self, bits: NDArray[np.uint8]) -> None:
        """Replaces bytes by their bitwise OR over ranks, in place. COLLECTIVE."""
        # Horovod knows no OR, but sums of int64: each bit becomes a count in a lane of its own, which no carry leaves.
        lane = np.uint8 if self.world_size < 1 << 8 else np.uint16 if self.world_size < 1 << 16 else np.uint32
        counts = np.unpackbits(bits).astype(lane)
        with self._waiting("row marks"):
            total = self._hvd.allreduce(torch.from_numpy(counts.view(np.int64)), name=_PREFIX + "or", op=self._hvd.Sum)
        bits[:] = np.packbits(total.numpy().view(lane) > 0)

    def split(self, color: int) -> Group:
        """Is refused: the script has initialized Horovod, without process sets that can be added."""
        raise RuntimeError("a wrapped script's Horovod has no groups of ranks: use reducer 'sra'")

    def allgather_object(self, value: Any) -> list[Any]:
        """Gathers a small Python object from every rank. COLLECTIVE."""
        with self._waiting("agreement"):
            gathered: list[Any] = self._hvd.allgather_object(value, name=_PREFIX + "agreement")
        return gathered

    def rendezvous(self, name: str) -> float:
        """Waits until every rank has arrived. COLLECTIVE."""
        with self._waiting(name):
            self._hvd.barrier()
        return 0.0
