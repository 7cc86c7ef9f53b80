"""Optimizers that reduce over a process set: some ranks may have none, so in their steps the ranks exchange nothing of ours."""

from __future__ import annotations

from typing import Any


def is_over_set(optimizer: Any) -> bool:
    """Whether a wrapped optimizer reduces over a process set of its own."""
    import horovod.torch as hvd

    return getattr(optimizer, "process_set", hvd.global_process_set) is not hvd.global_process_set
