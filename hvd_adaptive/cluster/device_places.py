"""Where ranks compute, and what is wrong with that: what only all ranks together know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class DevicePlace(NamedTuple):
    """Where a rank computes.

    Attributes:
        host: its host's name.
        uuid: its GPU, by a name that is the same for every rank of the host; None on the CPU.
        visible: the GPUs that it sees, by such names.
        named: the user asked for this GPU by its number, or for the CPU.
    """

    host: str
    uuid: str | None = None
    visible: tuple[str, ...] = ()
    named: bool = False


def shared_devices(places: Sequence[DevicePlace]) -> str | None:
    """Judge GPUs that several ranks use, from what only all ranks together know.

    More ranks than GPUs may share them; two ranks on one GPU beside an idle one is a mistake, unless each asked for that
    GPU by its number.

    Args:
        places: of every rank, in rank order.

    Returns:
        A warning to show, or None. (`choose_device` has warned ranks that see several GPUs but fewer than ranks.)

    Raises:
        RuntimeError: ranks share a GPU unasked, and another one that ranks of that host see is idle.
    """
    ranks_by_gpu: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        if place.uuid is not None:
            ranks_by_gpu[place.host, place.uuid].append(rank)
    warnings = []
    for (host, uuid), ranks in sorted(ranks_by_gpu.items()):
        if len(ranks) == 1:
            continue
        numbers = ", ".join(map(str, ranks))
        seen = {gpu for place in places if place.host == host and place.uuid for gpu in place.visible}
        idle = sorted(gpu for gpu in seen if (host, gpu) not in ranks_by_gpu)
        if idle and not all(places[rank].named for rank in ranks):
            raise RuntimeError(
                f"ranks {numbers} on {host} all use the GPU {uuid}, and {', '.join(idle)} there is idle: let every rank see "
                "all of its host's GPUs or one of its own (unset CUDA_VISIBLE_DEVICES, Slurm: --gpus-per-task=1), or ask for "
                "it with --device cuda:K"
            )
        if any(places[rank].named or len(places[rank].visible) == 1 for rank in ranks):
            warnings.append(f"ranks {numbers} on {host} share the GPU {uuid}")
    if not warnings:
        return None
    return (
        f"{'; '.join(warnings)}: they take turns, and exchange through host memory. If the host has more GPUs, make them "
        "visible (CUDA_VISIBLE_DEVICES, the scheduler's request); else start one rank per GPU"
    )


def missing_gpus(places: Sequence[DevicePlace]) -> str | None:
    """Returns a warning if some ranks see no GPU beside others that have one, which is rarely meant; else None.

    Args:
        places: of every rank, in rank order.
    """
    without = [rank for rank, place in enumerate(places) if place.uuid is None and not place.named]
    if len(without) in (0, len(places)):
        return None
    hosts = ", ".join(sorted({places[rank].host for rank in without}))
    return (
        f"ranks {', '.join(map(str, without))} on {hosts} see no GPU, and the others have one: they use the CPU. Check "
        "`nvidia-smi`, CUDA_VISIBLE_DEVICES and the scheduler's request there, or use --device cpu on all ranks"
    )
