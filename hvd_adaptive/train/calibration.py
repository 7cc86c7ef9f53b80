"""Each rank's own speed, measured alone before a run: what its utilisation is measured against."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.train.batches import Batch, BatchSource
from hvd_adaptive.train.emulation import compute_seconds
from hvd_adaptive.train.optimizer_state import reset_
from hvd_adaptive.transport.base import Transport

_REPEATS = 5
_REPEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Speeds:
    """Samples a second of each rank, alone: by its own CPU time, and by the wall clock; shape (world_size,)."""

    compute: NDArray[np.float64]
    wall: NDArray[np.float64]


def measure_speeds(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[Batch], object],
    source: BatchSource,
    *,
    batch_size: int,
    seed: int,
    transport: Transport,
) -> Speeds:
    """Measures every rank in turn while the others sleep; the median of five. COLLECTIVE.

    Trains real batches and then puts model and optimizer back as they were; needs one copy of the model for that long.

    Args:
        model: the model that ``step`` trains.
        optimizer: its optimizer.
        step: a whole local step on a batch.
        source: the training data.
        batch_size: samples in a batch.
        seed: of the rows.
        transport: the world.
    """

    def measure() -> tuple[float, float]:
        device = next(model.parameters()).device
        weights = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(optimizer.state_dict()["state"])
        generator = np.random.default_rng([seed, transport.rank])

        def run(num_batches: int) -> tuple[float, float, int]:
            batches = [
                source.load(generator.integers(0, len(source), batch_size), batch_size)
                for _ in range(num_batches)
            ]
            compute, wall = compute_seconds(device), time.perf_counter()
            for batch in batches:
                step(batch)
            return compute_seconds(device) - compute, time.perf_counter() - wall, num_batches * batch_size

        run(3)
        num_batches = max(2, round(_REPEAT_S / max(run(3)[0] / 3, 1e-6)))
        results = [run(min(num_batches, 200)) for _ in range(_REPEATS)]
        model.load_state_dict(weights)
        reset_(optimizer, state)
        optimizer.zero_grad()
        return (
            float(np.median([n / compute for compute, _, n in results])),
            float(np.median([n / wall for _, wall, n in results])),
        )

    mine = transport.take_turns("calibration", measure)
    gathered = transport.allgather_stats(np.array(mine))
    return Speeds(compute=gathered[:, 0], wall=gathered[:, 1])
