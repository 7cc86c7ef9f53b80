"""What becomes of a rank's optimizer state after a merge."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_adaptive.transport.base import Transport


def reset_(optimizer: Optimizer, initial: dict[str, Any]) -> None:
    """Puts the optimizer's state back to ``initial``, a copied ``state_dict()["state"]``; hyperparameters stay."""
    current = optimizer.state_dict()
    optimizer.state = defaultdict(dict)
    # torch takes over the tensors themselves; steps must not change the copy that the next reset needs.
    optimizer.load_state_dict({"state": copy.deepcopy(initial), "param_groups": current["param_groups"]})


@torch.no_grad()
def average_(optimizer: Optimizer, transport: Transport, weight: float) -> None:
    """Replaces the tensors and numbers of the state by their weighted mean over the ranks that have them. COLLECTIVE.

    A rank without state for a parameter (it made no step) receives the others' mean.

    Args:
        optimizer: state of any structure that holds tensors or numbers by name, as torch's optimizers do.
        transport: the world.
        weight: this rank's weight, >= 0, > 0 on some rank that has state.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {
        (index, name): (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ((), torch.float64)
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, (Tensor, int, float)) and weight > 0
    }
    everyone = transport.allgather_object((weight, own))
    specification = {key: spec for _, entries in everyone for key, spec in entries.items()}
    for key in sorted(specification):
        shape, dtype = specification[key]
        index, name = key
        parameter = parameters[index]
        total = sum(w for w, entries in everyone if key in entries)
        value = optimizer.state[parameter].get(name)
        device = (
            value.device if isinstance(value, Tensor) else parameter.device if shape else torch.device("cpu")
        )
        flat = torch.zeros(
            max(1, int(torch.Size(shape).numel())),
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
            device=device,
        )
        if key in own:
            source = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=flat.dtype)
            flat.copy_(source.reshape(-1)).mul_(weight / total)
        transport.allreduce_sum_(flat, name=f"optimizer.{index}.{name}")
        if isinstance(value, Tensor):
            value.copy_(flat.view(shape))
        elif value is not None:
            optimizer.state[parameter][name] = type(value)(flat.item())
        else:
            optimizer.state[parameter][name] = flat.view(shape).to(dtype)
