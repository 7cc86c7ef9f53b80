"""A script without chance, for ``run --verify``: no dropout, and random numbers that do not depend on the size of a batch."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from hvd_adaptive.wrap.noise_by_sample import NoiseBySample
from hvd_adaptive.wrap.random_numbers import GENERATORS, are_same_states, random_numbers_kept, random_states

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# How deep a data set's own objects are searched for generators.
_DEPTH = 4


def take_out_chance(noise: NoiseBySample, drew_collating: Callable[[], None]) -> None:
    """Switches off dropout and autocast, and has BatchNorm normalize each sample by itself.

    A data set draws the same random numbers for a sample each time. For good, in this process and in the workers that it forks.

    Args:
        noise: stands in for what draws random numbers in steps.
        drew_collating: is called when a collate_fn draws any, also in a worker.
    """
    attention, begin, enter = F.scaled_dot_product_attention, nn.RNNBase.__init__, torch.autocast.__enter__

    def without_dropout(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        # It may be the fifth argument.
        return attention(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **options)

    @functools.wraps(begin)
    def __init__(self: nn.RNNBase, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.dropout = 0.0

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        self._enabled = False
        return enter(self)

    nn.RNNBase.__init__, torch.autocast.__enter__ = __init__, __enter__  # type: ignore[method-assign]
    _MapDatasetFetcher.__init__ = _with_seeded_samples(  # type: ignore[method-assign]
        _MapDatasetFetcher.__init__, noise, drew_collating
    )
    new: dict[tuple[Any, str], Any] = {(F, name): _pass_on for name in _DROPOUTS}
    new |= {(F, "scaled_dot_product_attention"): without_dropout, (F, "batch_norm"): _of_each_sample(F.batch_norm)}
    new |= noise.replacements()
    torchs = {(module, name): getattr(module, name) for module, name in new}
    _set(new)
    script = torch.jit.script

    @functools.wraps(script)
    def script_(*args: Any, **options: Any) -> Any:
        # It compiles torch's functions, and cannot read these. Shares stay equal with it.
        _set(torchs)
        try:
            return script(*args, **options)
        finally:
            _set(new)

    torch.jit.script = script_


def _set(functions: dict[tuple[Any, str], Any]) -> None:
    for (module, name), function in functions.items():
        setattr(module, name, function)


def _pass_on(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # The script may change what it gets.
    return input.clone() if training and not inplace else input


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


def _with_seeded_samples(
    begin: Callable[..., None], noise: NoiseBySample, drew_collating: Callable[[], None]
) -> Callable[..., None]:
    @functools.wraps(begin)
    def __init__(self: Any, dataset: Any, *args: Any) -> None:
        # Else it makes samples together, in a way of its own.
        is_by_sample = isinstance(dataset, Subset) or not hasattr(dataset, "__getitems__")
        begin(self, _Seeded(dataset) if is_by_sample else dataset, *args)
        if get_worker_info() is not None:
            # The batch that the script was at when this worker was forked is not what it makes.
            noise.end()
        collate = self.collate_fn

        def collate_(samples: Any) -> Any:
            before = random_states()
            batch = collate(samples)
            if not are_same_states(before, random_states()):
                drew_collating()
            return batch

        self.collate_fn = collate_

    return __init__


class _Seeded:
    """A data set that draws random numbers for a sample by its index."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        seed = zlib.crc32(repr(index).encode())
        with random_numbers_kept():
            seed_generators(seed)
            # Anew each time: a data set may make them in its worker.
            for generator in _generators_of(self._dataset, _DEPTH):
                _seed_own(generator, seed)
            return self._dataset[index]


def _generators_of(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, GENERATORS):
        yield value
    elif depth and isinstance(value, (list, tuple)) and len(value) < 100:
        for item in value:
            yield from _generators_of(item, depth - 1)
    elif depth and not isinstance(value, (Tensor, np.ndarray, type)) and hasattr(value, "__dict__"):
        for item in list(vars(value).values()):
            yield from _generators_of(item, depth - 1)


def _seed_own(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


def seed_generators(seed: int) -> None:
    """Seeds the global generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
