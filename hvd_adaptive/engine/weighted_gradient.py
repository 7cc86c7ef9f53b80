"""A factor on a parameter's gradient, put on it before what takes gradients from the parameter: Horovod's hooks, a clipping."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

# Elements from which on new memory for a product costs more than to find out that it is not needed.
LARGE = 1 << 15


class WeightedGradient:
    """Multiplies each gradient of a parameter by a factor as soon as it is computed, dense or sparse.

    A tensor's hooks run before its gradient is accumulated, and Horovod's own after that. The first large gradient of a step is
    multiplied where it lies, once it is the parameter's: a product of its own takes new memory in every step, which can cost
    more than all of the backward pass. A gradient that is added to others, returned by ``torch.autograd.grad``, differentiated
    again, or taken by somebody else's hook as soon as it is there, is multiplied before.

    Args:
        parameter: the parameter, which requires a gradient. Its hooks do not keep it alive.
        factor: returns the factor on a gradient of the present backward pass.
    """

    def __init__(self, parameter: Tensor, factor: Callable[[], float]) -> None:
        self._parameter = weakref.ref(parameter)
        self._factor = factor
        # Of a gradient that is about to become the parameter's.
        self._later = 1.0
        self._handles = [
            parameter.register_hook(self._computed),
            parameter.register_post_accumulate_grad_hook(self._accumulated),
        ]

    def remove(self) -> None:
        """Takes the hooks off the parameter."""
        for handle in self._handles:
            handle.remove()

    def _computed(self, gradient: Tensor) -> Tensor | None:
        # A backward pass that failed may have left one.
        factor, self._later = self._factor(), 1.0
        if factor == 1.0:
            return None
        if gradient.numel() >= LARGE and self._becomes_the_parameters():
            self._later = factor
            return None
        return gradient * factor

    def _becomes_the_parameters(self) -> bool:
        parameter = self._parameter()
        if parameter is None or parameter.grad is not None or torch.is_grad_enabled():
            return False
        if len(parameter._post_accumulate_grad_hooks) > 1:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
        except RuntimeError:
            # torch's answer for a leaf whose gradient torch.autograd.grad will return.
            return False

    @torch.no_grad()
    def _accumulated(self, parameter: Tensor) -> None:
        factor, self._later = self._later, 1.0
        if factor != 1.0:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
