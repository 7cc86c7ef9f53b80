"""Adaptive data-parallel training with Horovod and MPI on GPUs that are not equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "EXIT_PREEMPTED",
    "Batch",
    "Checkpointer",
    "Compression",
    "Config",
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
    from hvd_adaptive.session.session import Batch, Session
    from hvd_adaptive.state.preemption import catch_signals


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Imported on first use: `hvd-adaptive --help` and a bad option must not wait for torch.
    if name == "Config":
        from hvd_adaptive.config import Config

        return Config
    if name in ("Session", "Batch"):
        from hvd_adaptive.session import session

        return getattr(session, name)
    if name == "Compression":
        from hvd_adaptive.compress.compressor import Compression

        return Compression
    if name == "Checkpointer":
        from hvd_adaptive.session.checkpointer import Checkpointer

        return Checkpointer
    if name == "EXIT_PREEMPTED":
        from hvd_adaptive.exit_codes import EXIT_PREEMPTED

        return EXIT_PREEMPTED
    if name == "catch_signals":
        from hvd_adaptive.state.preemption import catch_signals

        return catch_signals
    if name == "island_mesh":
        from hvd_adaptive.session.island_mesh import island_mesh

        return island_mesh
    if name == "bind_device":
        from hvd_adaptive.cluster.device import bind_device

        return bind_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
