"""Adaptive data-parallel training with Horovod and MPI on GPUs that are not equal."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from hvd_adaptive.cluster.output import Spokesman

__version__ = "0.1.0"
__all__ = [
    "EXIT_PREEMPTED",
    "Batch",
    "Checkpointer",
    "Compression",
    "Config",
    "RoundsFile",
    "Session",
    "__version__",
    "bind_device",
    "catch_signals",
    "island_mesh",
]

if TYPE_CHECKING:
    from hvd_adaptive.cluster.device import bind_device
    from hvd_adaptive.compress.compressor import Compression
    from hvd_adaptive.config import Config
    from hvd_adaptive.exit_codes import EXIT_PREEMPTED
    from hvd_adaptive.session.checkpointer import Checkpointer
    from hvd_adaptive.session.island_mesh import island_mesh
    from hvd_adaptive.session.rounds_file import RoundsFile
    from hvd_adaptive.session.session import Batch, Session
    from hvd_adaptive.state.preemption import catch_signals

_MODULES = {
    "Batch": "session.session",
    "Checkpointer": "session.checkpointer",
    "Compression": "compress.compressor",
    "Config": "config",
    "EXIT_PREEMPTED": "exit_codes",
    "RoundsFile": "session.rounds_file",
    "Session": "session.session",
    "bind_device": "cluster.device",
    "catch_signals": "state.preemption",
    "island_mesh": "session.island_mesh",
}


logging.getLogger(__name__).addHandler(Spokesman())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Imported on first use: `hvd-adaptive --help` and a bad option must not wait for torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
