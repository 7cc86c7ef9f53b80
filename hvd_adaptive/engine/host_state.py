"""The global model in host memory, for models near the GPU's size: it comes to the GPU piece by piece.

On the CPU, where a model is in host memory anyway, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements on their way at a time: large enough for the link's full speed.
PIECE = 1 << 22


def to_host(values: Tensor) -> Tensor:
    """Returns a copy in pinned host memory; the values themselves where they are in host memory."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


def pieces(tensor: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields contiguous tensors of equally many elements piece by piece, flat."""
    flat = [t.view(-1) for t in (tensor, *others)]
    for start in range(0, tensor.numel(), PIECE):
        yield tuple(t[start : start + PIECE] for t in flat)


@torch.no_grad()
def fill_delta_(tensor: Tensor, weights: Tensor, delta: Tensor) -> None:
    """Fills the delta with a tensor of the device minus the global model in host memory, all of one shape."""
    for own, host, difference in pieces(tensor.contiguous(), weights, delta):
        start = host.to(delta.device, non_blocking=True)
        torch.sub(own.to(delta.dtype), start.to(tensor.dtype).to(delta.dtype), out=difference)


@torch.no_grad()
def load_(tensor: Tensor, weights: Tensor) -> None:
    """Loads the global model in host memory into a tensor of the device."""
    if not tensor.is_contiguous():
        tensor.copy_(weights.to(tensor.device, non_blocking=True))
        return
    for own, host in pieces(tensor, weights):
        own.copy_(host.to(tensor.device, non_blocking=True))
