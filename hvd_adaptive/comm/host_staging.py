"""Copies between a GPU and pinned host memory, for collectives that take only what is in host memory."""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Returns a tensor in pinned host memory, once the GPU has computed and copied it. Waits without using a core."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return host


def to_device(received: Tensor, device: torch.device) -> Tensor:
    """Returns what a collective has received on the device of the present stream, which waits for the copy.

    Memory on a GPU that a collective took for itself belongs to another stream. It is not given again before the present stream
    has done what it was told by then.
    """
    if device.type != "cuda":
        return received
    if received.is_cuda:
        received.record_stream(torch.cuda.current_stream(device))
        return received
    return received.pin_memory().to(device, non_blocking=True)
