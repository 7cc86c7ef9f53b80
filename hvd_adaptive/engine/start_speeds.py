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

from hvd_adaptive.comm.protocols import Transport, take_turns
from hvd_adaptive.engine.batches import Batch, BatchSource
from hvd_adaptive.engine.emulation import compute_seconds
from hvd_adaptive.engine.optimizer_state import reset_
from hvd_adaptive.engine.out_of_memory import free_cached, is_out_of_memory

_REPEATS = 5
_REPEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Steps:
    """Some steps in a row: samples and work of all of them, seconds of compute and by the wall clock."""

    num_steps: int
    num_samples: int
    work: float
    compute_s: float
    wall_s: float


class StepProbe:
    """Times real local steps inside a ``with`` block, and puts model and optimizer back as they were at its end.

    Needs one copy of the model for that long.

    Args:
        model: the model that ``step`` trains.
        optimizer: its optimizer.
        step: a whole local step on a batch.
        source: the training data.
        seed: of the rows.
        rank: ranks time other rows.
        work: cost of each row; None: one a row.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step: Callable[[Batch], object],
        source: BatchSource,
        *,
        seed: int,
        rank: int,
        work: NDArray[np.int64] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._source = source
        self._work = work
        self._generator = np.random.default_rng([seed, rank])
        self._device = next(model.parameters()).device

    def __enter__(self) -> StepProbe:
        self._weights = copy.deepcopy(self._model.state_dict())
        self._state = copy.deepcopy(self._optimizer.state_dict()["state"])
        return self

    def __exit__(self, *error: object) -> None:
        self._optimizer.zero_grad()
        self._model.load_state_dict(self._weights)
        reset_(self._optimizer, self._state)

    def run(self, num_steps: int, batch_size: int) -> Steps:
        """Makes steps with batches of random rows, which are loaded before the clock starts."""
        chosen = [self._generator.integers(0, len(self._source), batch_size) for _ in range(num_steps)]
        work = [len(rows) if self._work is None else int(self._work[rows].sum()) for rows in chosen]
        batches = [self._source.load(rows, cost) for rows, cost in zip(chosen, work, strict=True)]
        compute_s, wall_s = compute_seconds(self._device), time.perf_counter()
        for batch in batches:
            self._step(batch)
        compute_s = compute_seconds(self._device) - compute_s
        wall_s = time.perf_counter() - wall_s
        return Steps(num_steps, num_steps * batch_size, float(sum(work)), compute_s, wall_s)

    def repeat(self, batch_size: int, *, repeat_s: float) -> list[Steps]:
        """Makes steps of one size, after some that do not count, in five repeats.

        Args:
            batch_size: samples in a batch.
            repeat_s: seconds that a repeat takes about, but for at least two steps and at most 200.
        """
        self.run(3, batch_size)
        num_steps = max(2, round(repeat_s / max(self.run(3, batch_size).compute_s / 3, 1e-6)))
        return [self.run(min(num_steps, 200), batch_size) for _ in range(_REPEATS)]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Samples a second of each rank, alone: by the clock of :func:`compute_seconds`, and by the wall's; shape (world_size,)."""

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
    """Measures the ranks of each host in turn while its others sleep; the median of five. COLLECTIVE.

    Trains real batches and then puts model and optimizer back as they were; needs one copy of the model for that long.

    Args:
        model: the model that ``step`` trains.
        optimizer: its optimizer.
        step: a whole local step on a batch.
        source: the training data.
        batch_size: samples in a batch; a rank without the memory for it halves it until one fits.
        seed: of the rows.
        transport: the world.
    """

    def measure_at(size: int) -> tuple[float, float]:
        with StepProbe(model, optimizer, step, source, seed=seed, rank=transport.rank) as probe:
            results = probe.repeat(size, repeat_s=_REPEAT_S)
        return (
            float(np.median([one.num_samples / one.compute_s for one in results])),
            float(np.median([one.num_samples / one.wall_s for one in results])),
        )

    def measure() -> tuple[float, float]:
        size = batch_size
        while True:
            try:
                return measure_at(size)
            except Exception as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # Only here: while the error is handled, its traceback holds the step's tensors and the probe's copy of the model.
            free_cached(next(model.parameters()).device)
            size //= 2

    mine = take_turns(transport, "calibration", measure)
    gathered = transport.allgather_stats(np.array(mine))
    return Speeds(compute=gathered[:, 0], wall=gathered[:, 1])
