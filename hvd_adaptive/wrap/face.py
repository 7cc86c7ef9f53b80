"""Horovod for the drop-in, which may not import it itself."""

from __future__ import annotations

from typing import Any


def horovod_torch() -> Any:
    """Returns the module ``horovod.torch``, which is loaded now."""
    import horovod.torch

    return horovod.torch
