"""Checks in a live process that Horovod and mpi4py use one MPI. Runs in .venv, under mpirun or alone.

    mpirun -np 2 .venv/bin/python scripts/setup/selfcheck.py 2

COLLECTIVE over the ranks (2 here); exit code 1 on a finding.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any


def file_at(address: int, maps: str) -> str:
    """The mapped file that holds an address.

    Args:
        address: of a function, say, in this process.
        maps: text of /proc/self/maps.

    Raises:
        RuntimeError: no file is mapped there.
    """
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if start <= address < end and len(fields) == 6:
            return fields[5].strip()
    raise RuntimeError(f"no mapped file holds the address {address:#x}")


def libmpi_of(extension: str) -> str:
    """The real path of the file from which a loaded extension module gets MPI_Comm_size."""
    symbol = ctypes.CDLL(extension).MPI_Comm_size
    address = ctypes.cast(symbol, ctypes.c_void_p).value
    assert address is not None
    return os.path.realpath(file_at(address, Path("/proc/self/maps").read_text(encoding="utf-8")))


def describe() -> dict[str, Any]:
    """How the installed Horovod was built, and which MPI it loads when it is imported first."""
    import horovod.torch as hvd
    import torch
    from horovod.torch import mpi_lib_v2

    return {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "horovod_cuda": bool(hvd.cuda_built()),
        "horovod_nccl": bool(hvd.nccl_built()),
        "horovod_mpi": bool(hvd.mpi_built()),
        "libmpi": libmpi_of(mpi_lib_v2.__file__),
    }


def findings(reports: list[dict[str, Any]], *, launched: int | None) -> list[str]:
    """What is wrong with the ranks' reports, in words with a remedy; empty if nothing is.

    Args:
        reports: one a rank, as `main` gathers them.
        launched: how many ranks the launcher was asked for, or None if unknown.
    """
    result = []
    for report in reports:
        where = f"rank {report['rank']} on {report['host']}"
        if report["libmpi_mpi4py"] != report["libmpi_horovod"]:
            result.append(
                f"{where}: mpi4py uses {report['libmpi_mpi4py']}, Horovod uses {report['libmpi_horovod']}; "
                "run scripts/setup.sh --recreate with the same MPI loaded as at run time"
            )
        if report["mpi_size"] != report["hvd_size"] or report["rank"] != report["hvd_rank"]:
            result.append(
                f"{where}: MPI says rank {report['rank']} of {report['mpi_size']}, Horovod says "
                f"rank {report['hvd_rank']} of {report['hvd_size']}; start with mpirun, or horovodrun "
                "without --gloo"
            )
        if report["sum"] != sum(range(report["hvd_size"])):
            result.append(f"{where}: Horovod's allreduce returned {report['sum']}, not the sum of the ranks")
        if report["torch_cuda"] is not None and not report["horovod_nccl"]:
            result.append(
                f"{where}: PyTorch is a CUDA build and Horovod a CPU build; "
                "run scripts/setup.sh, which builds it anew"
            )
        if launched is not None and report["mpi_size"] != launched:
            result.append(
                f"{where}: the launcher started {launched} ranks, but the MPI world has "
                f"{report['mpi_size']}: the launcher belongs to another MPI; use .venv/bin/mpirun"
            )
    return result


def main() -> int:
    """Runs the check, COLLECTIVE over the MPI world; rank 0 prints.

    Returns:
        Exit code: 0 if all is well.
    """
    from mpi4py import MPI  # before Horovod, which then does not own MPI_Finalize

    # isort: split
    import horovod.torch as hvd
    import torch
    from horovod.torch import mpi_lib_v2

    hvd.init()
    report = {
        "rank": MPI.COMM_WORLD.rank,
        "mpi_size": MPI.COMM_WORLD.size,
        "hvd_rank": hvd.rank(),
        "hvd_size": hvd.size(),
        "host": socket.gethostname(),
        "libmpi_mpi4py": libmpi_of(MPI.__file__),
        "libmpi_horovod": libmpi_of(mpi_lib_v2.__file__),
        "sum": int(hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum).item()),
        "torch_cuda": torch.version.cuda,
        "horovod_nccl": bool(hvd.nccl_built()),
    }
    launched = int(sys.argv[1]) if len(sys.argv) > 1 else None
    problems = findings(MPI.COMM_WORLD.allgather(report), launched=launched)
    hvd.shutdown()
    if MPI.COMM_WORLD.rank == 0:
        for problem in problems:
            print(f"selfcheck: error: {problem}", file=sys.stderr)
        if not problems:
            print(json.dumps(report))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
