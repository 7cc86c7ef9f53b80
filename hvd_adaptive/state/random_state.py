"""The random states of a process: Python's, NumPy's and torch's global generators, and the device's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of all global generators and of the device's.

    Args:
        device: the rank's device; its generator counts where it is a GPU.
    """
    version, python, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "state": np.array(python, dtype=np.int64), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


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
    version, python, gauss = random.Random(whole).getstate()
    name, keys, position, has_gauss, cached = np.random.RandomState(words).get_state(legacy=True)
    cuda = device.type == "cuda"
    return {
        "python": {"version": version, "state": np.array(python, dtype=np.int64), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
        "torch": torch.Generator().manual_seed(whole).get_state(),
        "cuda": torch.Generator(device).manual_seed(whole).get_state() if cuda else None,
    }
