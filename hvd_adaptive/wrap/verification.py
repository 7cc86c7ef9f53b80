"""``run --verify`` on a rank: what a script's first gradients were, for a comparison of two runs.

One run has equal batches, the other unequal ones. Chance is taken out of both: dropout is off, BatchNorm normalizes each sample
by itself, and a data set draws the same random numbers for a sample each time.
"""

from __future__ import annotations

import functools
import os
import random
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.wrap.random_numbers import are_same_states, random_numbers_kept, random_states
from hvd_adaptive.wrap.share_exchange import DryRunOver

if TYPE_CHECKING:
    from hvd_adaptive.wrap.loaders import IndexStream
    from hvd_adaptive.wrap.wrapped_run import Engine

# Numbers in a sketch.
_WIDTH = 4096
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Verification:
    """Keeps a sketch of each step's averaged gradients, and ends the script after some steps.

    The distance of two sketches is that of their gradients, within some percent: they are sums of gradients with random signs
    (Alon, Matias and Szegedy, 1996).

    Args:
        file: where rank 0 writes what came, a NumPy archive: sketches, shape (steps, 4096); are_unequal, shape (steps,), whether
            shares were unequal; draws, whether the script drew random numbers between a batch and its step.
        num_steps: exchanges of gradients after which the script ends, >= 1.
    """

    def __init__(self, file: Path, num_steps: int) -> None:
        self._file, self._num_steps = file, num_steps
        self._sketches: list[Tensor] = []
        self._are_unequal: list[bool] = []
        self._draws = False
        self._at_batch: Any = None

    def intercept(self, engine: Engine) -> None:
        """Takes note of the gradients after each exchange, and takes chance out of the script.

        Args:
            engine: what has intercepted Horovod already.
        """
        from horovod.torch import optimizer

        # Its second run tells.
        engine.report.is_silent = engine.config.has_equal_shares()
        cls = optimizer._DistributedOptimizer
        synchronize, delivered = cls.synchronize, engine.delivered

        def num_shared() -> int:
            return sum(loader.num_shared for loader in engine.report.loaders)

        @functools.wraps(synchronize)
        def synchronize_(this: Any) -> None:
            self._draws |= self._at_batch is not None and _has_drawn(*self._at_batch)
            before = num_shared()
            synchronize(this)
            self._at_batch = None
            self._are_unequal.append(num_shared() > before)
            if engine.rank == 0:
                self._sketches.append(_sketch([p.grad for group in this.param_groups for p in group["params"]]))
            if len(self._are_unequal) >= self._num_steps:
                raise DryRunOver(0)

        def delivered_(stream: IndexStream, batch: Any) -> None:
            delivered(stream, batch)
            self._at_batch = random_states(), _gpu_state()

        cls.synchronize, engine.delivered = synchronize_, delivered_  # type: ignore[method-assign]
        # Ranks of a script that sets no seed differ.
        _seed(read_launcher(os.environ).rank or 0)
        _take_out_chance()

    def save(self) -> None:
        """Writes the file, on rank 0."""
        if read_launcher(os.environ).rank:
            return
        sketches = np.stack([sketch.numpy() for sketch in self._sketches]) if self._sketches else np.zeros((0, _WIDTH))
        np.savez(self._file, sketches=sketches, are_unequal=np.array(self._are_unequal, dtype=bool), draws=self._draws)


def _gpu_state() -> Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _has_drawn(states: Any, gpu_state: Tensor | None) -> bool:
    now = _gpu_state()
    of_gpu = gpu_state is not None and now is not None and not torch.equal(gpu_state, now)
    return of_gpu or not are_same_states(states, random_states())


def _sketch(gradients: list[Tensor | None]) -> Tensor:
    total = torch.zeros(_WIDTH, dtype=torch.float64)
    for number, gradient in enumerate(gradients):
        if gradient is None or not gradient.numel():
            continue
        values = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
        values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
        values = values if values.dtype == torch.float64 else values.float()
        rows = F.pad(values, (0, -len(values) % _WIDTH)).view(-1, _WIDTH)
        generator = torch.Generator().manual_seed(number)
        signs = torch.randint(2, (len(rows),), generator=generator).to(rows) * 2 - 1
        place = int(torch.randint(_WIDTH, (), generator=generator))
        total += (signs @ rows).double().cpu().roll(place)
    return total


def _take_out_chance() -> None:
    for name in _DROPOUTS:
        setattr(F, name, lambda input, *args, **options: input)
    attention, begin = F.scaled_dot_product_attention, nn.RNNBase.__init__

    def without_dropout(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        # Its fifth argument.
        return attention(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **options)

    @functools.wraps(begin)
    def __init__(self: nn.RNNBase, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.dropout = 0.0

    F.scaled_dot_product_attention, nn.RNNBase.__init__ = without_dropout, __init__  # type: ignore[method-assign]
    F.batch_norm = _of_each_sample(F.batch_norm)
    _MapDatasetFetcher.__init__ = _with_seeded_samples(_MapDatasetFetcher.__init__)  # type: ignore[method-assign]


def _of_each_sample(batch_norm: Any) -> Any:
    @functools.wraps(batch_norm)
    def normalize(
        input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if training and (input[:1].numel() > 1 or running_mean is None):
            return F.group_norm(input, 1, weight, bias, eps)
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)

    return normalize


def _with_seeded_samples(begin: Any) -> Any:
    @functools.wraps(begin)
    def __init__(self: Any, dataset: Any, *args: Any) -> None:
        # Else it makes samples together, in a way of its own.
        is_by_sample = isinstance(dataset, Subset) or not hasattr(dataset, "__getitems__")
        begin(self, _Seeded(dataset) if is_by_sample else dataset, *args)

    return __init__


class _Seeded:
    """A data set that draws random numbers for a sample by its index."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        with random_numbers_kept():
            _seed(zlib.crc32(repr(index).encode()))
            return self._dataset[index]


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
