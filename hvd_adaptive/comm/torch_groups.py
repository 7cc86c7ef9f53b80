"""Process groups of torch.distributed for what is torch's own: the ranks of an island, for ``fully_shard``."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hvd_adaptive.comm.protocols import AgreedError, Transport, is_one_host
from hvd_adaptive.comm.store_address import find_server, serve

# How long a collective may last is for the heartbeats to judge.
FOREVER = timedelta(days=7)
# Rank 0 serves the store as long as it lives: groups that are made later meet there as well.
_served: list[dist.TCPStore] = []


def make_group(world: Transport, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Returns torch.distributed's group that this rank is in, Gloo for CPUs and NCCL for GPUs. COLLECTIVE.

    Where torch.distributed has not begun, it begins: with the same ranks.

    Args:
        world: all ranks, processes of their own.
        groups: the ranks of each group; each rank is in one.

    Raises:
        AgreedError: on all ranks, if they are threads of one process, or torch.distributed counts them otherwise.
    """
    if world.backend == "none" and world.world_size > 1:
        raise AgreedError("ranks that are threads of one process have no groups of torch.distributed: start them as processes")
    if not dist.is_initialized():
        _begin(world)
    found = world.allgather_object((dist.get_rank(), dist.get_world_size()))
    if found != [(rank, world.world_size) for rank in range(world.world_size)]:
        raise AgreedError(
            f"torch.distributed must count the ranks as this job does, got its (rank, world size) {found} of ranks 0 to "
            f"{world.world_size - 1}: leave init_process_group out, which is done here, or give it the launcher's ranks"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    mine = None
    for members in groups:
        # Every rank takes part in making every group, in the same order.
        group = dist.new_group(list(members), backend=backend, timeout=FOREVER)
        if world.rank in members:
            mine = group
    assert mine is not None
    return mine


def _begin(world: Transport) -> None:
    rank, world_size = world.rank, world.world_size
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        server, offer = None, None
        same_host = is_one_host(world)
        if rank == 0:
            server, offer = serve(same_host=same_host, world_size=world_size)
            _served.append(server)
        offer = world.allgather_object(offer)[0]
        assert offer is not None
        store = server or dist.TCPStore(
            find_server(offer, rank, server="rank 0's store for torch.distributed"),
            offer.port, is_master=False, wait_for_workers=False, timeout=FOREVER,
        )  # fmt: skip
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=FOREVER)
    atexit.register(leave_process_group)


def leave_process_group() -> None:
    """Ends all groups with the process."""
    # Gloo's threads would end the process if they still ran when C++ takes it apart.
    if dist.is_initialized():
        dist.destroy_process_group()
