"""The heterogeneity emulator's clock: a rank's compute is stretched by sleeping, for experiments on equal machines.

A run that uses it says so in its summary, tables and pictures.
"""

from __future__ import annotations

import time

import torch


def compute_seconds(device: torch.device) -> float:
    """Returns a clock that runs while this rank computes, not while other processes have its core.

    The thread's CPU time. Wall time on a GPU, and where torch computes with several threads: their CPU times add up to more than
    a step's length.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()
