"""The global generators of random numbers, as the script has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def random_numbers_kept() -> Iterator[Callable[[], bool]]:
    """What is drawn within is drawn again after it. Yields what tells whether something was drawn so far."""
    before = _states()
    try:
        yield lambda: not _are_same(before, _states())
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _are_same(before: tuple[Any, Any, Any], now: tuple[Any, Any, Any]) -> bool:
    numpys = zip(before[2], now[2], strict=True)
    return torch.equal(before[0], now[0]) and before[1] == now[1] and all(np.array_equal(one, two) for one, two in numpys)
