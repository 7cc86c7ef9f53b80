"""The tensors in what a script hands around: batches, and arguments and results of forwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_MAX_DEPTH = 6


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yields the tensors in a batch or in arguments: in lists, tuples, mappings and simple objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth >= _MAX_DEPTH or isinstance(value, (str, bytes, nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif type(value).__module__.startswith("torch."):
        # Torch's own objects, as fx's nodes, may hold whole graphs.
        return
    elif depth and isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        yield from tensors_in(vars(value), depth + 1)
