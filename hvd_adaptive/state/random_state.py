"""The random states of a process: Python's, NumPy's and torch's global generators, and the device's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of all global generators and of the device's.

    Args:
        device: the rank's device; its generator counts where it is a GPU.
    """
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return _as_dict(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), cuda)


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts all global generators, and the device's where it is a GPU, into a state of :func:`random_state`."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    np.random.set_state(
        (numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def seeded_random_state(seed: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Returns the state of generators that were seeded together; touches none.

    Args:
        seed: numbers >= 0, such as the run's seed and a rank; states of different ones are independent.
        device: as for :func:`random_state`.
    """
    words = np.random.SeedSequence(seed).generate_state(4)
    whole = int(words[0]) << 32 | int(words[1])
    cpu = torch.Generator().manual_seed(whole).get_state()
    cuda = torch.Generator(device).manual_seed(whole).get_state() if device.type == "cuda" else None
    return _as_dict(random.Random(whole).getstate(), np.random.RandomState(words).get_state(legacy=True), cpu, cuda)


def _as_dict(python: tuple[Any, ...], numpy: Any, cpu: Tensor, cuda: Tensor | None) -> dict[str, Any]:
    version, words, gauss = python
    name, keys, position, has_gauss, cached = numpy
    return {
        "python": {"version": version, "state": np.array(words, dtype=np.int64), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
        "torch": cpu,
        "cuda": cuda,
    }
