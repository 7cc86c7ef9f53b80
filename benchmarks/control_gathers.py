"""What MPI takes for the control plane's collectives, before and after: with as many processes as fit, without torch.

mpirun -np 64 --oversubscribe python benchmarks/control_gathers.py

Rank 0 prints a row for each collective: the median over repeats of the slowest rank's milliseconds, and CPU milliseconds a rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

STATISTICS = 28  # numbers of a rank's round
CONFIGURATION_BYTES = 15_000  # of a rank's options and model, pickled
ROWS = 670_000
REPEATS = 15


def main() -> None:
    comm = MPI.COMM_WORLD
    size = comm.Get_size()
    marks = np.random.default_rng(comm.Get_rank()).integers(0, 256, ROWS // 8, dtype=np.uint8)
    digest, vector = np.zeros(32, dtype=np.uint8), np.zeros(STATISTICS)
    configuration = bytes(CONFIGURATION_BYTES)
    cases: dict[str, Callable[[], object]] = {
        "statistics of a round": lambda: comm.Allgather(vector, np.empty((size, STATISTICS))),
        "configuration, from each to each (before)": lambda: comm.allgather(configuration),
        "configuration, 32 bytes of each": lambda: comm.Allgather(digest, np.empty((size, 32), dtype=np.uint8)),
        f"marks of {ROWS:,} rows, from each to each (before)": lambda: gather_union(comm, marks),
        f"marks of {ROWS:,} rows, OR": lambda: comm.Allreduce(MPI.IN_PLACE, marks, op=MPI.BOR),
    }
    if comm.Get_rank() == 0:
        print(f"| {size} processes | slowest rank, ms | CPU of a rank, ms |\n| --- | --- | --- |")
    for name, action in cases.items():
        walls, cpus = [], []
        for _ in range(REPEATS):
            comm.Barrier()
            start, cpu = time.perf_counter(), time.process_time()
            action()
            cpus.append(time.process_time() - cpu)
            walls.append(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))
        cpu_s = comm.allreduce(statistics.median(cpus)) / size
        if comm.Get_rank() == 0:
            print(f"| {name} | {1e3 * statistics.median(walls):.2f} | {1e3 * cpu_s:.2f} |", flush=True)


def gather_union(comm: MPI.Comm, marks: np.ndarray) -> np.ndarray:
    """The rows that some rank marks, as every rank found them before."""
    gathered = np.empty((comm.Get_size(), len(marks)), dtype=np.uint8)
    comm.Allgather(marks, gathered)
    return np.unpackbits(gathered, axis=1).astype(bool).any(axis=0)


if __name__ == "__main__":
    main()
