"""The largest batch that a rank's memory allows: by trying on a GPU, by the growth of the process on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvd_adaptive.engine.out_of_memory import free_cached, is_out_of_memory
from hvd_adaptive.engine.start_speeds import StepProbe

# Batches beyond this are not tried on a GPU: a step is then long, whatever it costs.
_LONGEST_STEP_S = 5.0
# Less growth of a process's memory than this tells nothing.
_LEAST_GROWTH_BYTES = 8 << 20


def tried(device: torch.device, optimizer: torch.optim.Optimizer, action: Callable[[], Any]) -> tuple[bool, Any]:
    """Runs steps; returns whether they fit into memory, and what they gave."""
    result = None
    try:
        result, fits = action(), True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    if not fits:
        # Only here: while the error is handled, its traceback holds the step's tensors.
        optimizer.zero_grad(set_to_none=True)
        free_cached(device)
    return fits, result


def largest_fitting(
    device: torch.device, optimizer: torch.optim.Optimizer, probe: StepProbe, *, below: int, above: int
) -> int:
    """Returns the largest batch that fits, to an eighth: ``above`` does (or is 0), ``below`` does not."""
    while below - above > max(1, below // 8):
        middle = (above + below) // 2
        fits, _ = tried(device, optimizer, partial(probe.run, 1, middle))
        above, below = (middle, below) if fits else (above, middle)
    return above


def largest_on_gpu(
    device: torch.device, optimizer: torch.optim.Optimizer, probe: StepProbe, *, start: int, most: int
) -> tuple[int | None, str]:
    """Doubles the batch until memory runs out, a step takes seconds, or the data end."""
    size = start
    while 2 * size <= most:
        fits, steps = tried(device, optimizer, partial(probe.run, 1, 2 * size))
        if not fits:
            largest = largest_fitting(device, optimizer, probe, below=2 * size, above=size)
            return largest, "measured: larger batches ran out of memory"
        size *= 2
        if steps.wall_s > _LONGEST_STEP_S:
            break
    return None, f"no limit found up to {size} samples"


def largest_by_growth(peaks: dict[int, int], limit_bytes: int | None) -> tuple[int | None, str]:
    """Extrapolates a process's peak memory over batch sizes to its limit: a host that runs out of memory kills."""
    sizes = sorted(peaks)
    if limit_bytes is None or len(sizes) < 2 or not peaks[sizes[-1]]:
        return None, "not measured: this system does not tell a process's peak memory"
    growth = peaks[sizes[-1]] - peaks[sizes[-2]]
    if growth < _LEAST_GROWTH_BYTES:
        return None, f"not measured: up to {sizes[-1]} samples the process does not grow enough to tell"
    per_sample = growth / (sizes[-1] - sizes[-2])
    largest = int(sizes[-1] + (limit_bytes - peaks[sizes[-1]]) / per_sample)
    return max(
        largest, 0
    ), f"estimated: {per_sample / 1024:.0f} KiB a sample, and {limit_bytes / 2**30:.1f} GiB for this process"


def limit_bytes(free_bytes: int | None, num_processes: int) -> int | None:
    """Returns the resident memory to which this process may grow: what it has, and its part of what is free.

    Args:
        free_bytes: of the host; None: not known.
        num_processes: that share it equally.
    """
    return None if free_bytes is None else _status_bytes("VmRSS") + free_bytes // num_processes


def reset_peak() -> None:
    """Makes the system forget this process's peak memory, where it can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """Returns this process's peak resident memory since `reset_peak`; 0 where the system does not tell."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    try:
        match = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
