"""What lies between the ranks: claims at the shared cursor, and Horovod's allreduce over the link."""

from __future__ import annotations

import time

import numpy as np
import torch

from hvd_adaptive.algorithm.speed_model import fit_line
from hvd_adaptive.calibrate.file import LinkCalibration
from hvd_adaptive.comm.protocols import Transport

_NUM_CLAIMS = 200
_LINK_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
_LINK_REPEATS = 5


def measure_claims(transport: Transport) -> tuple[float, float]:
    """Claims as dispatch does, all ranks at once; returns the median over ranks and the slowest rank's 99%. COLLECTIVE."""
    transport.rendezvous("calibrate claims")
    seconds = []
    for _ in range(_NUM_CLAIMS):
        begin = time.perf_counter()
        # Reads the cursor, then adds to it.
        transport.add("calibrate.claims", 0)
        transport.add("calibrate.claims", 1)
        seconds.append(time.perf_counter() - begin)
    gathered = transport.allgather_stats(np.array([np.median(seconds), np.quantile(seconds, 0.99)]))
    transport.rendezvous("calibrate claimed")
    if transport.rank == 0:
        transport.forget("calibrate.claims")
    return float(np.median(gathered[:, 0])), float(gathered[:, 1].max())


def measure_link(transport: Transport, device: torch.device) -> LinkCalibration:
    """Fits Horovod's allreduce of fp32 over all ranks. COLLECTIVE."""
    medians = []
    for size in _LINK_BYTES:
        tensor = torch.zeros(size // 4, device=device)
        seconds = []
        for _ in range(1 + _LINK_REPEATS):
            transport.rendezvous("calibrate link")
            begin = time.perf_counter()
            transport.allreduce_sum_(tensor, f"calibrate.{size}")
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begin)
        slowest = transport.allgather_stats(np.array(seconds[1:])).max(axis=0)
        medians.append(max(float(np.median(slowest)), 1e-9))
    latency_s, per_byte_s, error = fit_line(np.array(_LINK_BYTES, dtype=np.float64), np.array(medians))
    hosts = len(set(transport.allgather_object(transport.host)))
    return LinkCalibration(
        num_hosts=hosts,
        latency_s=latency_s,
        per_byte_s=per_byte_s,
        fit_error=error,
        bytes=list(_LINK_BYTES),
        seconds=medians,
    )
