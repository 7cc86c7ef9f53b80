"""Batches on their way to the device. To a GPU they go from pinned memory and on a stream of their own, beside the steps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# What is hashed at a time: large enough that waiting for copies costs nothing.
_PART_BYTES = 1 << 24


def to_device(value: Any, device: torch.device) -> Any:
    """Moves tensors, whatever has ``to``, and lists, tuples and dicts of them.

    To a GPU tensors go by way of pinned memory, and so does what has ``pin_memory``; the copies are then on the current stream,
    and this process does not wait for them. torch keeps the pinned memory, and gives it again when its copy is over: with one
    batch copied at a time it holds two.
    """
    if isinstance(value, Tensor) or hasattr(value, "to"):
        if device.type != "cuda":
            return value.to(device)
        if isinstance(value, Tensor):
            if value.device == device or value.layout is not torch.strided:
                return value.to(device)
            pinned = value if value.is_cuda or value.is_pinned() else value.pin_memory()
            return pinned.to(device, non_blocking=True)
        if hasattr(value, "pin_memory"):
            return value.pin_memory().to(device, non_blocking=True)
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(one, device) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(one, device) for one in value)
    if isinstance(value, dict):
        return {key: to_device(one, device) for key, one in value.items()}
    return value


def record_stream(value: Any, stream: Any) -> None:
    """Keeps the memory of tensors from being given again before ``stream`` has done what it was told by then."""
    if hasattr(value, "record_stream"):
        if not isinstance(value, Tensor) or value.is_cuda:
            value.record_stream(stream)
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            record_stream(one, stream)


def host_bytes(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the bytes of tensors, in host memory, one part after the other, each valid until the next is asked for.

    Those of an NVIDIA or AMD GPU come through two pinned buffers, so that the caller works on one part while the next is copied.

    Args:
        tensors: on one device.
    """
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        yield from (_bytes(tensor).cpu() for tensor in tensors if tensor.numel())
        return
    size = min(_PART_BYTES, max(1, sum(tensor.nbytes for tensor in tensors)))
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied: tuple[Tensor, Any] | None = None
    for number, pieces in enumerate(_parts(tensors, size)):
        buffer, start = buffers[number % 2], 0
        for piece in pieces:
            buffer[start : start + piece.numel()].copy_(piece, non_blocking=True)
            start += piece.numel()
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        before, copied = copied, (buffer[:start], event)
        if before is not None:
            yield _arrived(*before)
    if copied is not None:
        yield _arrived(*copied)


def memory_of(part: Tensor) -> ctypes.Array[Any]:
    """Returns the memory of a contiguous tensor of bytes on the CPU, valid as long as the tensor is.

    Unlike ``tensor.numpy()`` this does not forbid that the memory be resized later, as PyTorch's observers do to buffers.

    Raises:
        ValueError: for a tensor on another device.
    """
    if part.device.type != "cpu":
        raise ValueError(f"part must be on the CPU, got a tensor on {part.device}")
    return (ctypes.c_ubyte * part.numel()).from_address(part.data_ptr())


def _arrived(part: Tensor, event: Any) -> Tensor:
    event.synchronize()
    return part


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _parts(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cuts the tensors' bytes, one after the other, into parts of ``size`` bytes, each as pieces of tensors."""
    part: list[Tensor] = []
    room = size
    for tensor in tensors:
        rest = _bytes(tensor)
        while rest.numel():
            part.append(rest[:room])
            rest = rest[room:]
            room -= part[-1].numel()
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


class CopyStream:
    """The stream on which batches are made while steps compute; nothing where the device is not a GPU.

    Args:
        device: where batches go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def begin(self) -> None:
        """Has what is copied from now on come after all that the present stream was told by now: a data set may be on the GPU."""
        if self._device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Within it, this thread's copies are on the stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def hand_over(self, *values: Any) -> None:
        """Has the present stream use what was copied, once it is there; no later copy is waited for.

        Args:
            values: that were copied, with no copy begun since.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for value in values:
            record_stream(value, current)
