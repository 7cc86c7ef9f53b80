"""The global generators of random numbers, as the script has them, and the kinds of its own ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


@contextmanager
def random_numbers_kept() -> Iterator[Callable[[], bool]]:
    """What is drawn within is drawn again after it. Yields what tells whether something was drawn so far."""
    before = random_states()
    try:
        yield lambda: not are_same_states(before, random_states())
    finally:
        set_random_states(before)


def random_states() -> tuple[Any, Any, Any]:
    """Returns the states of torch's generator for the CPU, Python's and NumPy's."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_states(states: tuple[Any, Any, Any]) -> None:
    """Sets what :func:`random_states` has given."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def are_same_states(before: tuple[Any, Any, Any], now: tuple[Any, Any, Any]) -> bool:
    """Whether nothing was drawn between two results of :func:`random_states`."""
    numpys = zip(before[2], now[2], strict=True)
    return torch.equal(before[0], now[0]) and before[1] == now[1] and all(np.array_equal(one, two) for one, two in numpys)
