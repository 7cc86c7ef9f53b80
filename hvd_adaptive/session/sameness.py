"""What all ranks must have in common: the kind of model before a run, and its bits during one."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.comm.protocols import Collectives, agree, gather_digests
from hvd_adaptive.engine.flat_model import model_hash


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns what is trained, by name, as small comparable values: shapes, types, and the optimizer's settings."""
    return {
        **{f"model {name}": (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()},
        **{f"model {name}": (tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()},
        "optimizer": type(optimizer).__name__,
        "optimizer groups": repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
    }


def check_same_model(model: nn.Module, transport: Collectives, *, buffers: bool, round_number: int) -> str:
    """Compares the ranks' models bit by bit; returns their SHA-256. COLLECTIVE.

    Args:
        model: this rank's.
        transport: the world.
        buffers: compare buffers as well.
        round_number: rounds completed, for the message.

    Raises:
        AgreedError: on all ranks, if a model differs.
    """
    own = model_hash(model, buffers=buffers)
    hashes = gather_digests(transport, own.encode())
    if len(set(hashes)) > 1:
        odd = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
        agree(
            transport,
            f"after round {round_number} the models of ranks {odd} differ from rank 0's; was a parameter changed outside "
            "session.step, or does a host compute differently? Compare a run with one rank a host.",
        )
    return own
