"""The drop-in: ``import hvd_adaptive.torch as hvd`` in place of ``import horovod.torch as hvd``, and nothing else changed.

All names are Horovod's own. ``init`` also starts MPI in the right order and intercepts loaders and optimizers, as
``hvd-adaptive run`` does; options come from HVD_ADAPTIVE_* variables. The report is printed when the script ends.
"""

from __future__ import annotations

import atexit
from typing import Any

from hvd_adaptive.cli.run import make_engine, run_config
from hvd_adaptive.wrap import script
from hvd_adaptive.wrap.face import horovod_torch

__all__ = ["init"]


def init(*args: Any, **options: Any) -> None:
    """Initializes Horovod, as its own ``init`` with the same arguments, and makes the script adaptive. COLLECTIVE.

    Under ``hvd-adaptive run``, and when called again, it is Horovod's own.

    Raises:
        ValueError: for a bad HVD_ADAPTIVE_* variable.
        RuntimeError: if the launcher's world and MPI's are not one.
    """
    if not script.is_intercepted():
        config = run_config()
        atexit.register(script.print_report, make_engine(config, script.start_world(config.stall_limit_s)))
    horovod_torch().init(*args, **options)


def __getattr__(name: str) -> Any:
    return getattr(horovod_torch(), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(horovod_torch())})
