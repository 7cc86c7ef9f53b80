"""The world where islands of ranks stand for one rank each: an island's first rank talks to the others and tells its island."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_adaptive.comm.horovod_collectives import in_parts
from hvd_adaptive.comm.protocols import Group, InOrder, Pending, Transport


class Inside:
    """The ranks of one island: what :class:`hvd_adaptive.exchange.gradients.GradientExchange` needs of
    :class:`hvd_adaptive.comm.protocols.Collectives`.

    Args:
        group: the island's ranks.
    """

    groups = False

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.world_size = group.world_size

    def __getattr__(self, name: str) -> Any:
        if name == "_group":
            raise AttributeError(name)
        return getattr(self._group, name)

    def allgather_array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Gathers an array of one shape and dtype from every rank of the island. COLLECTIVE inside."""
        own = np.ascontiguousarray(values)
        sizes = [own.nbytes] * self.world_size
        received = self._gather(own.reshape(-1).view(np.uint8), sizes)
        return received.view(own.dtype).reshape(self.world_size, *own.shape)

    def allgather_object(self, value: Any) -> list[Any]:
        """Gathers what JSON can write from every rank of the island. COLLECTIVE inside."""
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = self.allgather_array(np.array([len(text)])).reshape(-1).tolist()
        received = self._gather(text, sizes).tobytes()
        edges = np.cumsum([0, *sizes])
        return [json.loads(received[start:stop]) for start, stop in itertools.pairwise(edges)]

    def tell_(self, tensor: Tensor, name: str) -> None:
        """Replaces a contiguous tensor by that of the island's first rank, in place. COLLECTIVE inside."""
        if self.world_size > 1 and tensor.numel():
            for part_name, raw in in_parts(name, tensor.view(-1).view(torch.uint8)):
                told = self.tell(raw if self.rank == 0 else raw[:0], part_name, num_bytes=raw.numel())
                if self.rank:
                    raw.copy_(told)

    def tell(self, content: Tensor, name: str, *, num_bytes: int | None) -> Tensor:
        """Returns the bytes of the island's first rank. COLLECTIVE inside.

        Args:
            content: uint8, one dimension; empty on the other ranks.
            name: of the collective.
            num_bytes: how many there are; None: not known.
        """
        if self.world_size == 1:
            return content
        sizes = None if num_bytes is None else [num_bytes, *[0] * (self.world_size - 1)]
        return self._group.allgather_bytes_async(content, receive_bytes=sizes, name=f"{name}.inside").wait()

    def _gather(self, own: NDArray[np.uint8], sizes: Sequence[int]) -> NDArray[np.uint8]:
        part = torch.from_numpy(own.copy())
        if self.world_size == 1:
            return part.numpy()
        return self._group.allgather_bytes_async(part, receive_bytes=sizes, name="inside").wait().numpy()


class IslandWorld:
    """A :class:`hvd_adaptive.comm.protocols.Transport` whose ranks are islands. Construction is COLLECTIVE.

    Every rank calls its methods as its island; all ranks of an island call them alike, with the same bits. Sums and bytes cross
    between the islands' first ranks only, and each of these tells its island. Gathered is what the first ranks gave. All else is
    the world's: broadcasts, maxima and marks of rows, whose bytes are few, claims, heartbeats.

    Args:
        world: all ranks.
        of_rank: the island of each rank, int64, shape (world.world_size,).

    Attributes:
        rank: this rank's island.
        world_size: number of islands.
        inside: the ranks of this rank's island.
        leads: whether this rank is the first of its island.
        groups: False.
        host_store: None: islands claim from the world's store.
    """

    groups = False
    host_store = None

    def __init__(self, world: Transport, of_rank: NDArray[np.int64]) -> None:
        self._world = world
        self._leaders = np.unique(of_rank, return_index=True)[1]
        self.rank = int(of_rank[world.rank])
        self.world_size = len(self._leaders)
        self.inside = Inside(world.split(self.rank))
        self.leads = self.inside.rank == 0
        between = world.split(int(not self.leads))
        self._between = between if self.leads else None

    def __getattr__(self, name: str) -> Any:
        if name == "_world":
            raise AttributeError(name)
        return getattr(self._world, name)

    def allgather_stats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._world.allgather_stats(values)[self._leaders]

    def allgather_array(self, values: NDArray[Any]) -> NDArray[Any]:
        return self._world.allgather_array(values)[self._leaders]

    def allgather_object(self, value: Any) -> list[Any]:
        gathered = self._world.allgather_object(value)
        return [gathered[leader] for leader in self._leaders]

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        self.allreduce_sum_async_(tensor, name).wait()

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> InOrder:
        alone = self._between is None or self.world_size == 1
        pending = None if alone else self._between.allreduce_sum_async_(tensor, name)  # type: ignore[union-attr]

        def finish() -> Tensor:
            if pending is not None:
                pending.wait()
            # A single island too: its ranks' buffers differ, as BatchNorm's statistics do.
            self.inside.tell_(tensor, name)
            return tensor

        return InOrder(finish)

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> InOrder:
        pending = None
        if self._between is not None:
            pending = self._between.alltoall_bytes_async(
                tensor, send_bytes=send_bytes, receive_bytes=receive_bytes, name=name
            )
        return InOrder(
            lambda: self.inside.tell(tensor[:0] if pending is None else pending.wait(), name, num_bytes=sum(receive_bytes))
        )

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> InOrder:
        pending = None
        if self._between is not None:
            pending = self._between.allgather_bytes_async(tensor, receive_bytes=receive_bytes, name=name)
        num_bytes = None if receive_bytes is None else sum(receive_bytes)
        return InOrder(lambda: self.inside.tell(tensor[:0] if pending is None else pending.wait(), name, num_bytes=num_bytes))


class ShardWorld:
    """A :class:`hvd_adaptive.comm.protocols.Transport` whose ranks are islands, each of which holds one model in shards: sums and
    bytes cross between the ranks that have the same shard. Construction is COLLECTIVE.

    Args:
        whole: the islands, of equally many ranks.

    Attributes:
        whole: the islands, for what is not cut up.
        rank: this rank's island.
        world_size: number of islands.
    """

    def __init__(self, whole: IslandWorld) -> None:
        self.whole = whole
        self.rank, self.world_size = whole.rank, whole.world_size
        self._beside = whole._world.split(whole.inside.rank)

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        self.allreduce_sum_async_(tensor, name).wait()

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> Pending:
        if self.world_size == 1:
            return InOrder(lambda: tensor)
        return self._beside.allreduce_sum_async_(tensor, name)

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> Pending:
        return self._beside.alltoall_bytes_async(tensor, send_bytes=send_bytes, receive_bytes=receive_bytes, name=name)

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> Pending:
        return self._beside.allgather_bytes_async(tensor, receive_bytes=receive_bytes, name=name)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces contiguous tensors by those of the first island's rank that has the same shard. COLLECTIVE."""
        beside = Inside(self._beside)
        for index, tensor in enumerate(tensors):
            beside.tell_(tensor, f"shards.{index}")
