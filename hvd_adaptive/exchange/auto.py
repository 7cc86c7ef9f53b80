"""Chooses how to sum by trying: whatever is fastest on this link with these processors, the same on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.comm.protocols import Collectives

log = logging.getLogger(__name__)


def fastest(
    transport: Collectives,
    candidates: Mapping[str, Callable[[Tensor], None]],
    values: Tensor,
    *,
    num_trials: int = 3,
    least_gain: float = 1.05,
) -> tuple[str, dict[str, float]]:
    """Times each candidate on a tensor and returns the name of the fastest, and the seconds of all. COLLECTIVE.

    The slowest rank's time counts, the median of the trials, after one more trial that compiles and connects; all ranks decide
    from the same numbers. Candidates take turns, so that a load that comes and goes disturbs all alike. The first
    candidate wins unless another takes less time by a factor.

    Args:
        transport: the world.
        candidates: each sums a tensor over ranks in place; in the same order on all ranks.
        values: what to sum; stays as it is.
        num_trials: after the first.
        least_gain: that factor.
    """
    seconds = np.zeros((num_trials + 1, len(candidates)))
    for trial in range(num_trials + 1):
        for index, (name, run) in enumerate(candidates.items()):
            flat = values.clone()
            transport.rendezvous(f"trial of {name}")
            begin = time.perf_counter()
            run(flat)
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)
            seconds[trial, index] = time.perf_counter() - begin
    slowest = transport.allgather_stats(seconds[1:].reshape(-1)).max(axis=0).reshape(num_trials, -1)
    medians = np.median(slowest, axis=0)
    best = int(medians.argmin())
    if medians[best] * least_gain > medians[0]:
        best = 0
    names = list(candidates)
    taken = dict(zip(names, medians.tolist(), strict=True))
    if transport.rank == 0:
        times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in taken.items())
        mib = values.numel() * values.element_size() / 2**20
        log.info("exchange: %s is the fastest for %.1f MiB (%s)", names[best], mib, times)
    return names[best], taken
