"""``run --verify`` on a rank: what a script's first gradients were, for a comparison of two runs.

One run has equal batches, the other unequal ones. Chance is taken out of both: dropout and autocast are off, BatchNorm normalizes
each sample by itself, and a sample gets the same random numbers each time, from its data set and within steps.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.wrap.noise_by_sample import NoiseBySample
from hvd_adaptive.wrap.random_numbers import are_same_states, random_states, set_random_states
from hvd_adaptive.wrap.recorded_gradients import RecordedGradients
from hvd_adaptive.wrap.share_exchange import DryRunOver
from hvd_adaptive.wrap.without_chance import seed_generators, take_out_chance

if TYPE_CHECKING:
    from hvd_adaptive.wrap.loaders import IndexStream
    from hvd_adaptive.wrap.wrapped_run import Engine

# Numbers in a sketch.
_WIDTH = 64


class Verification:
    """Keeps sketches of each step's averaged gradients, and ends the script after some steps.

    The distance of two sketches is that of their gradients, within some tenths: they are sums of gradients with random signs
    (Alon, Matias and Szegedy, 1996).

    Args:
        file: where rank 0 writes what came, a NumPy archive:

            * sketches, shape (steps, parameters, 64): of each parameter's gradient, zeros where there is none;
            * optimizers, shape (steps,): which wrapped optimizer's they are;
            * names, shape (optimizers, parameters): of their parameters, "" where the script has given none;
            * are_unequal, shape (steps,): whether shares were unequal;
            * are_recorded, shape (steps,): whether the step's gradients are the first run's;
            * draws: random numbers were drawn that another share may change;
            * has_16_bits: gradients were rounded to 16 bits;
            * has_reasons: the report says why shares stay equal.
        num_steps: exchanges of gradients after which the script ends, >= 1.
    """

    def __init__(self, file: Path, num_steps: int) -> None:
        self._file, self._num_steps = file, num_steps
        self._sketches: list[np.ndarray[Any, Any]] = []
        self._are_unequal: list[bool] = []
        self._are_recorded: list[bool] = []
        # By the wrapped optimizers, in the order of their first steps.
        self._names: dict[Any, list[str]] = {}
        self._optimizers: list[int] = []
        self._has_16_bits = False
        # A worker sets it, too.
        self._draws = multiprocessing.RawValue("b", 0)
        # The generators' states: the script's own when it got the batch that it is at, and what they were set to then.
        self._own_states: Any = None
        self._at_batch: Any = None
        self._noise = NoiseBySample(self._drew_in_step)
        self._engine: Engine | None = None

    def intercept(self, engine: Engine) -> None:
        """Takes note of the gradients after each exchange, and takes chance out of the script.

        Args:
            engine: what has intercepted Horovod already.
        """
        import horovod.torch as hvd
        from horovod.torch import optimizer

        self._engine = engine
        # Its second run tells, and what it took out needs no words.
        engine.report.is_silent, engine.report.is_check = engine.config.has_equal_shares(), True
        # Horovod, and the engine's rank, are not there yet.
        rank = read_launcher(os.environ).rank or 0
        recorded = RecordedGradients(self._file.with_name("gradients"), writes=engine.config.has_equal_shares(), rank=rank)
        cls = optimizer._DistributedOptimizer
        synchronize, delivered, fetching = cls.synchronize, engine.delivered, engine.fetching

        def num_shared() -> int:
            return sum(loader.num_shared for loader in engine.report.loaders)

        @functools.wraps(synchronize)
        def synchronize_(this: Any) -> None:
            if self._at_batch is not None and _has_drawn(*self._at_batch):
                self._drew()
            before = num_shared()
            synchronize(this)
            # Another optimizer's step may follow on the batch.
            self._at_batch = None if self._at_batch is None else _states()
            self._are_unequal.append(num_shared() > before)
            # The batch may be followed still, for another optimizer's step.
            with engine.follower.unwatched():
                if engine.rank == 0:
                    self._has_16_bits |= this._compression is hvd.Compression.fp16
                    self._keep(this)
                self._are_recorded.append(recorded.record(this))
            if len(self._are_unequal) >= self._num_steps:
                raise DryRunOver(0)

        def fetching_(stream: IndexStream) -> None:
            self._end_batch()
            fetching(stream)

        def delivered_(stream: IndexStream, batch: Any) -> None:
            delivered(stream, batch)
            self._begin_batch(stream)

        cls.synchronize, engine.delivered, engine.fetching = synchronize_, delivered_, fetching_  # type: ignore[method-assign]
        # Ranks of a script that sets no seed differ.
        seed_generators(rank)
        take_out_chance(self._noise, self._drew)
        self._watch_workers()

    def save(self) -> None:
        """Writes the file, on rank 0."""
        if read_launcher(os.environ).rank or self._engine is None:
            return
        used = [loader for loader in self._engine.report.loaders if loader.num_steps]
        width = max((len(of_step) for of_step in self._sketches), default=0)
        sketches = np.zeros((len(self._sketches), width, _WIDTH), dtype=np.float64)
        for number, of_step in enumerate(self._sketches):
            sketches[number, : len(of_step)] = of_step
        np.savez(
            self._file,
            allow_pickle=False,
            sketches=sketches,
            optimizers=np.array(self._optimizers, dtype=int),
            names=np.array([(names + [""] * width)[:width] for names in self._names.values()], dtype=str).reshape(-1, width),
            are_unequal=np.array(self._are_unequal, dtype=bool),
            are_recorded=np.array(self._are_recorded, dtype=bool),
            draws=bool(self._draws.value),
            has_16_bits=self._has_16_bits,
            has_reasons=not used or any(loader.reasons for loader in used),
        )

    def _begin_batch(self, stream: IndexStream) -> None:
        if stream.is_beside:
            # The script is at another one.
            return
        self._own_states = _states()
        # Alike on all ranks.
        seed_generators(len(self._are_unequal))
        self._at_batch = _states()
        self._noise.begin(stream.indices or ())

    def _end_batch(self) -> None:
        if self._own_states is not None:
            _set_states(*self._own_states)
        self._own_states = self._at_batch = None
        self._noise.end()

    def _keep(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients: list[Tensor | None] = [parameter.grad for parameter in parameters]
        self._has_16_bits |= any(g.dtype in (torch.float16, torch.bfloat16) for g in gradients if g is not None)
        self._names[optimizer] = [optimizer._parameter_names.get(parameter) or "" for parameter in parameters]
        self._optimizers.append(list(self._names).index(optimizer))
        self._sketches.append(np.stack([_sketch(g, seed=number) for number, g in enumerate(gradients)]))

    def _drew(self) -> None:
        self._draws.value = 1

    def _drew_in_step(self) -> None:
        # Between batches samplers draw.
        if self._at_batch is not None:
            self._drew()

    def _watch_workers(self) -> None:
        """Takes note of workers that are not forked: they draw as the script has it."""
        begin = _BaseDataLoaderIter.__init__

        @functools.wraps(begin)
        def __init__(this: Any, loader: Any) -> None:
            begin(this, loader)
            context = loader.multiprocessing_context or multiprocessing
            if loader.num_workers > 0 and context.get_start_method() != "fork":
                self._drew()

        _BaseDataLoaderIter.__init__ = __init__  # type: ignore[assignment,method-assign]


def _states() -> tuple[Any, Tensor | None]:
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random_states(), on_gpu


def _set_states(states: Any, on_gpu: Tensor | None) -> None:
    set_random_states(states)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)


def _has_drawn(states: Any, on_gpu: Tensor | None) -> bool:
    now, on_gpu_now = _states()
    if on_gpu is not None and on_gpu_now is not None and not torch.equal(on_gpu, on_gpu_now):
        return True
    return not are_same_states(states, now)


def _sketch(gradient: Tensor | None, *, seed: int) -> np.ndarray[Any, Any]:
    """Returns the sketch of a gradient, shape (64,)."""
    if gradient is None or not gradient.numel():
        return np.zeros(_WIDTH)
    values = gradient.detach()
    values = values.to_dense() if values.layout != torch.strided else values
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    values = values if values.dtype == torch.float64 else values.float()
    rows = F.pad(values, (0, -len(values) % _WIDTH)).view(-1, _WIDTH)
    signs = torch.randint(2, (len(rows),), generator=torch.Generator().manual_seed(seed)).to(rows) * 2 - 1
    return np.asarray((signs @ rows).double().cpu().numpy())
