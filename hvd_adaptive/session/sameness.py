"""What all ranks must have in common: the kind of model before a run, and its bits during one."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.comm.protocols import Collectives, agree
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.shards import describe_type, shard_number


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns what is trained, by name, as small comparable values: shapes, types, and the optimizer's settings."""
    return {
        **{f"model {name}": (tuple(p.shape), describe_type(p), p.requires_grad) for name, p in model.named_parameters()},
        **{f"model {name}": (tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()},
        "optimizer": type(optimizer).__name__,
        "optimizer groups": repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
    }


def compare_models(model: nn.Module, transport: Collectives, *, buffers: bool) -> tuple[str, list[int]]:
    """Compares the ranks' models bit by bit. COLLECTIVE. Of a model in shards, ranks with the same shard are compared.

    Args:
        model: this rank's.
        transport: the world.
        buffers: compare buffers as well.

    Returns:
        The SHA-256 of the model, or of its shards' ones, equal on all ranks with equal models; and the ranks whose model is not
        that of the first rank with the same shard.
    """
    own = bytes.fromhex(model_hash(model, buffers=buffers))
    row = np.frombuffer(own + shard_number(model).to_bytes(8, "little"), dtype=np.uint8)
    found = [(bytes(other[-8:])[::-1], bytes(other[:-8])) for other in transport.allgather_array(row)]
    first: dict[bytes, bytes] = {}
    for shard, digest in found:
        first.setdefault(shard, digest)
    odd = [rank for rank, (shard, digest) in enumerate(found) if digest != first[shard]]
    if len(first) == 1 or transport.rank in odd:
        return own.hex(), odd
    return hashlib.sha256(b"".join(first[shard] for shard in sorted(first))).hexdigest(), odd


def check_same_model(model: nn.Module, transport: Collectives, *, buffers: bool, round_number: int) -> str:
    """Compares the ranks' models as :func:`compare_models` does; returns their SHA-256. COLLECTIVE.

    Args:
        model: this rank's.
        transport: the world.
        buffers: compare buffers as well.
        round_number: rounds completed, for the message.

    Raises:
        AgreedError: on all ranks, if a model differs.
    """
    own, odd = compare_models(model, transport, buffers=buffers)
    if odd:
        agree(
            transport,
            f"after round {round_number} the models of ranks {odd} differ from rank 0's; was a parameter changed outside "
            "session.step, or does a host compute differently? Compare a run with one rank a host.",
        )
    return own
