"""The algorithms: NumPy and torch only; no MPI, no Horovod, no I/O, no clock."""
