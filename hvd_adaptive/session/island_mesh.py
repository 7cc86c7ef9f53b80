"""The ranks of an island as torch.distributed knows them, for ``fully_shard``; and the world that was joined to find them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hvd_adaptive.algorithm.islands import Islands
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.comm.torch_groups import make_group
from hvd_adaptive.config import Config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Joined for a mesh, and not yet a session's.
_joined: list[Transport] = []


def island_mesh(config: Config, *, transport: Transport | None = None) -> DeviceMesh:
    """Returns the ranks of this rank's island as a mesh of one dimension, to shard a model over. COLLECTIVE.

    mesh = hvd_adaptive.island_mesh(config)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    session = hvd_adaptive.Session(model, torch.optim.AdamW(model.parameters()), config)

    Joins the ranks, as a :class:`hvd_adaptive.Session` does; the next session takes them from here. torch.distributed begins
    where it has not, with Gloo for CPUs and NCCL for GPUs.

    Args:
        config: the session's, with ``island``.
        transport: the world of ranks, if the session is given one.

    Raises:
        ValueError: for a configuration without islands.
        AgreedError: on all ranks, if they cannot be divided into such islands of equally many ranks.
    """
    if config.island is None:
        raise ValueError("island_mesh needs a configuration with islands, got island None: for example Config(island='node')")
    world = transport or join(config)
    try:
        islands = Islands.of(config.island, world.allgather_object(world.host))
        islands.check_shards()
    except ValueError as error:
        # Every rank has the same hosts and configuration, so every rank is here.
        raise AgreedError(str(error)) from None
    group = make_group(world, islands.members)
    if transport is None:
        _joined.append(world)
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cuda" if torch.cuda.is_available() else "cpu")


def join(config: Config) -> Transport:
    """Returns the world that :func:`island_mesh` has joined for the next session, or joins it. COLLECTIVE."""
    if _joined:
        return _joined.pop()
    # Merges may turn out to be encoded.
    groups = None if config.compression == "auto" and config.sums_seldom else config.uses_groups
    return connect(
        stall_limit_s=config.stall_limit_s, backend=config.backend, groups=groups, repeatable=config.repeatable,
        seldom=config.sums_seldom,
    )  # fmt: skip
