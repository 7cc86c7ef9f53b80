"""Finds gradients that a loop changes between backward and the end of their exchange, while others get them as they were."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

_MOST_NAMED = 3


class UntouchedGradients:
    """Hooks that note each dense gradient as backward leaves it, last of all hooks.

    A tensor counts its changes in place, but not those of ``gradient.data`` and by ``GradScaler.unscale_``. So the first step's
    gradients, whose exchange begins after the check, are compared by their norms as well.

    Args:
        model: its parameters' gradients are exchanged.
        rank: this rank, for errors.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._rank = rank
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._seen: dict[str, tuple[int, int]] = {}
        self._norms: dict[str, Tensor] | None = {}
        # Only what holds a parameter's node keeps the hooks on it.
        self._nodes = {name: get_gradient_edge(p).node for name, p in self._parameters.items()}
        for name, node in self._nodes.items():
            node.register_hook(functools.partial(self._note, name))

    def remove(self) -> None:
        """Takes the hooks off the model."""
        self._nodes.clear()
        self._parameters.clear()

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        self._seen.clear()

    def check(self) -> None:
        """Is called when the exchange is waited for.

        Raises:
            RuntimeError: if gradients are no longer those of backward.
        """
        changed = [name for name in self._seen if self._is_changed(name)]
        self._seen, self._norms = {}, None
        if changed:
            more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
            raise RuntimeError(
                f"rank {self._rank}: the gradients of {', '.join(changed[:_MOST_NAMED])}{more} were changed after backward(), "
                "while the ranks add them up: call session.synchronize() before gradients are clipped, unscaled or changed, and "
                "session.optimizer.step() after that"
            )

    def _note(self, name: str, *_: Any) -> None:
        # Nothing is left in it after remove(), but an old graph may hold the node.
        parameter = self._parameters.get(name)
        gradient = None if parameter is None else parameter.grad
        # A sparse one is replaced when its sum arrives.
        if gradient is None or gradient.is_sparse:
            return
        self._seen[name] = id(gradient), gradient._version
        if self._norms is not None:
            self._norms[name] = _norm(gradient)

    def _is_changed(self, name: str) -> bool:
        gradient = self._parameters[name].grad
        if gradient is None:
            return False
        if (id(gradient), gradient._version) != self._seen[name]:
            return True
        before = None if self._norms is None else self._norms[name]
        # Threads may round a sum in another order.
        return before is not None and not torch.isclose(_norm(gradient), before, rtol=1e-5, atol=0.0, equal_nan=True)


def _norm(gradient: Tensor) -> Tensor:
    return gradient.detach().float().norm()
