"""Ranks that share a GPU: found by its UUID, told of, and led through host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hvd_adaptive.cluster import device as devices
from hvd_adaptive.comm.protocols import Transport

log = logging.getLogger(__name__)

# A rank's host and its GPU's UUID; None for one that computes on the CPU.
Place = tuple[str, str | None]


def gpu_of(device: torch.device) -> str | None:
    """Returns the UUID of a device; None if it is no GPU."""
    if device.type != "cuda":
        return None
    return devices.gpu_uuid(torch.cuda.current_device() if device.index is None else device.index)


def sharing_notice(places: Sequence[Place]) -> str | None:
    """Returns what to tell people of ranks that share GPUs; None if none do.

    Args:
        places: of every rank, in rank order.
    """
    ranks_by_gpu: dict[Place, list[int]] = {}
    for rank, place in enumerate(places):
        if place[1] is not None:
            ranks_by_gpu.setdefault(place, []).append(rank)
    shared = [
        f"ranks {', '.join(map(str, ranks))} on {host} share the GPU {uuid}"
        for (host, uuid), ranks in sorted(ranks_by_gpu.items(), key=lambda item: item[1])
        if len(ranks) > 1
    ]
    if not shared:
        return None
    return (
        f"{'; '.join(shared)}: NCCL refuses that, so all ranks exchange through host memory, which is slower, and ranks take "
        "turns at a GPU unless NVIDIA MPS runs there. If the host has more GPUs, make them visible (CUDA_VISIBLE_DEVICES, the "
        "scheduler's request); else start one rank per GPU, or see docs/gpus.md"
    )


def settle_shared_gpus(transport: Transport, device: torch.device) -> None:
    """Has the ranks exchange through host memory if some share a GPU, with a notice. COLLECTIVE.

    Args:
        transport: the world.
        device: that this rank computes on.
    """
    notice = sharing_notice(transport.allgather_object((transport.host, gpu_of(device))))
    if notice is not None and transport.exchange_through_host() and transport.rank == 0:
        log.warning(notice)
