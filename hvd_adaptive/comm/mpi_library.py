"""Which MPI library Horovod and mpi4py load, and what they were built with; nothing here starts MPI."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")


def loaded_mpi_libraries(maps: str) -> list[str]:
    """Returns the distinct MPI libraries in a process's memory map (the text of /proc/self/maps)."""
    paths = re.findall(r"(/\S*/libmpi(?:ch)?\.so\S*)", maps)
    return sorted({os.path.realpath(path) for path in paths})


def own_mpi_libraries() -> list[str]:
    """Returns the distinct MPI libraries that this process has loaded; empty where the system does not list them."""
    try:
        return loaded_mpi_libraries(_MAPS.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        # Only Linux lists a process's libraries there; elsewhere the world sizes are still compared.
        return []


def hold_back_mpi() -> None:
    """Makes the next import of mpi4py's MPI start nothing, and leaves the end of MPI to mpi4py."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True


def mpi_library_version() -> str:
    """Returns what the MPI library says of itself; loads it, and does not initialize it."""
    hold_back_mpi()
    import horovod.torch  # noqa: F401 - first, as it finds its library by the path that it was built with
    from mpi4py import MPI

    return str(MPI.Get_library_version())


def check_one_mpi() -> None:
    """Refuses a process in which Horovod and mpi4py have loaded different MPI libraries.

    Raises:
        RuntimeError: naming them.
    """
    libraries = own_mpi_libraries()
    if len(libraries) > 1:
        raise RuntimeError(
            f"Horovod and mpi4py use different MPI libraries: {' and '.join(libraries)}. "
            "Run scripts/setup.sh --recreate, which builds both against one MPI, and unset MPI4PY_LIBMPI."
        )


def describe_horovod() -> dict[str, Any]:
    """Loads Horovod, before mpi4py; returns what it was built with, and the MPI library that it loads."""
    import horovod
    import horovod.torch as hvd

    return {
        "version": horovod.__version__,
        "mpi_built": bool(hvd.mpi_built()),
        "gloo_built": bool(hvd.gloo_built()),
        "nccl_built": bool(hvd.nccl_built()),
        "cuda_built": bool(hvd.cuda_built()),
        "mpi_libraries": own_mpi_libraries(),
    }


def describe_mpi4py() -> dict[str, Any]:
    """Loads mpi4py's MPI, after Horovod; returns its version, the MPI library's, and the libraries that are loaded then."""
    hold_back_mpi()
    import mpi4py
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().split("\0")[0].split())
    return {
        "version": mpi4py.__version__,
        "library_version": library.split(", package")[0][:100],
        "mpi_libraries": own_mpi_libraries(),
    }
