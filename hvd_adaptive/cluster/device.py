"""Binds this rank to its GPU, from what the launcher's environment says."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence

import torch

from hvd_adaptive.cluster.binding import choose_device, num_threads, read_launcher, requested_threads
from hvd_adaptive.cluster.device_places import DevicePlace
from hvd_adaptive.cluster.host import quota_of_ranks

log = logging.getLogger(__name__)


def bind_device(
    option: str = "auto",
    *,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> torch.device:
    """Chooses this rank's device and makes it torch's current one. Call it before building the model.

    All of a host's GPUs visible: the device is the local rank. Exactly one visible: that one.

    Args:
        option: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` (a GPU, or an error) or ``cuda:K``.
        local_rank: this rank among those of its host; by default what the launcher says, else 0.
        local_size: ranks on this host; by default what the launcher says, else ``local_rank + 1``.

    Raises:
        ValueError: for another option.
        RuntimeError: if a GPU is asked for that is not there.
    """
    info = read_launcher(os.environ)
    rank = local_rank if local_rank is not None else info.local_rank or 0
    size = local_size if local_size is not None else info.local_size or rank + 1
    choice = choose_device(
        option, local_rank=rank, local_size=size, cuda_device_count=torch.cuda.device_count()
    )
    if choice.warning:
        log.warning(choice.warning)
    device = torch.device(choice.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_place(device: torch.device, option: str, host: str) -> DevicePlace:
    """Describes a rank's device for `shared_devices`.

    Args:
        device: from `bind_device`.
        option: what was asked for.
        host: this rank's host.
    """
    if device.type != "cuda":
        return DevicePlace(host, named=option == "cpu")
    visible = visible_gpus()
    return DevicePlace(host, visible[device.index], visible, option.startswith("cuda:"))


def visible_gpus() -> tuple[str, ...]:
    """Returns the GPUs that this process sees, by names that are the same for every rank of the host."""
    return tuple(gpu_uuid(index) for index in range(torch.cuda.device_count()))


def compute_threads(places: Sequence[tuple[str, Sequence[int]]], rank: int) -> int:
    """Returns the threads that a rank should compute with: OMP_NUM_THREADS, else its share of its host's cores or CPU quota.

    Args:
        places: host and cores that it may run on, of every rank, in rank order.
        rank: whose threads.

    Raises:
        ValueError: OMP_NUM_THREADS is not a list of whole numbers >= 1.
    """
    host = places[rank][0]
    neighbours = [cores for other, cores in places if other == host]
    local_rank = sum(other == host for other, _ in places[:rank])
    quota = quota_of_ranks(len(neighbours))
    most = math.inf if quota is None else max(1, quota // len(neighbours))
    return requested_threads(os.environ) or int(min(most, num_threads(neighbours, local_rank)))


def gpu_uuid(index: int) -> str:
    """Returns what names a GPU on its host, whatever number it has in this process.

    Args:
        index: its number in this process.
    """
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return str(uuid)
    # Before torch 2.4: what the launcher chose from, or the number on the host.
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return chosen[index] if index < len(chosen) and chosen[index] else str(index)
