"""A factor on a parameter's gradient, put on it before what takes gradients from the parameter: Horovod's hooks, a clipping."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

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
        if factor == 0.0:
            # Of rows that do not count: a loss that is divided by their number, none, is not finite.
            return _zeros(gradient)
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
            if factor:
                parameter.grad.mul_(factor)
            else:
                parameter.grad.zero_()


def _zeros(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return torch.zeros_like(gradient)
    indices, values = gradient._indices(), torch.zeros_like(gradient._values())
    is_coalesced = gradient.is_coalesced()
    return torch.sparse_coo_tensor(indices, values, gradient.shape, is_coalesced=is_coalesced, check_invariants=False)


class GradientWeight:
    """Multiplies every gradient by this rank's weight as soon as it is computed, before Horovod's own hook sends it.

    The hooks are there only while the factor is not 1: each is a call into Python in the middle of the backward pass. Of a
    sparse gradient, all values for one row are added up first: what comes after, on every rank, has so many fewer of them.

    Args:
        model: to train. Another optimizer may have some of its parameters.
        optimizer: it may get more parameters between two steps.
        sparse: those whose gradients may be sparse.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, sparse: Iterable[Tensor] = ()) -> None:
        self._optimizer = optimizer
        self._of_model = list(model.parameters())
        self._num_parameters = 0
        self._coalescing = [p.register_hook(self._coalesced) for p in sparse]
        self._weighted: list[WeightedGradient] = []
        self._factor: Callable[[], float] = lambda: 1.0

    @property
    def value(self) -> float:
        """The factor."""
        return self._factor()

    @value.setter
    def value(self, value: float) -> None:
        if value == 1.0:
            self._factor = lambda: 1.0
            self._remove_weights()
        else:
            self.follow(lambda: value)

    def follow(self, factor: Callable[[], float]) -> None:
        """Takes the factor on each gradient from a function, when the gradient is computed."""
        self._factor = factor
        groups = [self._of_model, *(group["params"] for group in self._optimizer.param_groups)]
        num_parameters = sum(map(len, groups))
        if num_parameters != self._num_parameters:
            # add_param_group has brought others since.
            self._remove_weights()
            self._num_parameters = num_parameters
        if not self._weighted:
            parameters = {id(p): p for group in groups for p in group}.values()
            self._weighted = [WeightedGradient(p, lambda: self._factor()) for p in parameters if p.requires_grad]

    def _remove_weights(self) -> None:
        for weighted in self._weighted:
            weighted.remove()
        self._weighted.clear()

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        self._remove_weights()
        for handle in self._coalescing:
            handle.remove()
        self._coalescing.clear()

    def _coalesced(self, gradient: Tensor) -> Tensor:
        # Dense where the parameter has another use besides. A method, as hooks keep alive what removes them.
        return gradient.coalesce() if gradient.is_sparse else gradient
