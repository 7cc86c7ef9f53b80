"""The random states of a process: Python's, NumPy's and torch's global generators, and the device's."""

from __future__ import annotations

import random
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


def seed_random_state(*, seed: int, rank: int, round_number: int) -> None:
    """Seeds all global generators, for a rank that the checkpoint's run did not have.

    Args:
        seed: the run's seed.
        rank: the rank, so that no two draw the same numbers.
        round_number: rounds completed, so that a second resume does not repeat the first one's numbers.
    """
    own, numpy = np.random.SeedSequence([seed, rank, round_number]).generate_state(2).tolist()
    random.seed(own)
    np.random.seed(numpy)
    torch.manual_seed(own)
