"""Horovod's own names, for the drop-in, which may not import Horovod itself."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from hvd_adaptive.wrap import script
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.wrap.wrapped_run import Engine


def initialize(
    make_config: Callable[[], RunConfig], make_engine: Callable[[RunConfig, Any], Engine], *args: Any, **options: Any
) -> None:
    """Starts MPI, intercepts unless something in this process has done so, and calls ``horovod.torch.init``. COLLECTIVE.

    Args:
        make_config: gives the options, where they are needed.
        make_engine: intercepts, given the options and a communicator of all ranks.
        args: for Horovod.
        options: for Horovod.

    Raises:
        ValueError: for bad options.
        RuntimeError: if the world cannot be joined.
    """
    if not script.is_intercepted():
        config = make_config()
        atexit.register(script.print_report, make_engine(config, script.start_world(config.stall_limit_s)))
    import horovod.torch

    horovod.torch.init(*args, **options)


def horovod_name(name: str) -> Any:
    """Returns one of ``horovod.torch``'s names.

    Raises:
        AttributeError: if it has no such name.
    """
    import horovod.torch

    return getattr(horovod.torch, name)


def horovod_names() -> list[str]:
    """Returns all names of ``horovod.torch``."""
    import horovod.torch

    return dir(horovod.torch)
