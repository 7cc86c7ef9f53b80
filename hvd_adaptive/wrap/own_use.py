"""What a script does by itself with gradients of the rank's own batch, which are not those of the whole batch.

It may train parameters whose gradients it reduces by hand, or not at all: nobody weights those. And it may move the model by its
own gradients before it computes those that Horovod averages, as sharpness-aware minimization and adversarial training do.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap.compilers import is_reading
from hvd_adaptive.wrap.graphs import walk
from hvd_adaptive.wrap.inside import is_weight
from hvd_adaptive.wrap.reasons import Reason


class _Model(NamedTuple):
    """What tells whether a model's tensors have changed."""

    num_tensors: int
    version: int
    norms: list[Tensor]


class OwnUse:
    """Watches for both, at a script's calls: cheap enough for every step.

    Args:
        refuse: takes note of why the batch that the script is at must have equal shares.
    """

    def __init__(self, refuse: Callable[[Reason], None]) -> None:
        self._refuse = refuse
        # Parameters that wrapped optimizers train; and a list of them, which is read several times as fast.
        self._exchanged = WeakTensorKeyDictionary()
        self._references: list[weakref.ref[Tensor]] = []
        # Other leaves of a loss, and their norms before the step; None: the step has been looked at.
        self._others = WeakTensorKeyDictionary()
        # What is trained as it was when the first gradients since the last synchronize were computed.
        self._before: _Model | None = None

    def trains(self, parameters: Sequence[Tensor]) -> None:
        """Adds parameters that a wrapped optimizer trains."""
        for parameter in parameters:
            self._exchanged[parameter] = True
        self._references = [weakref.ref(parameter) for parameter in self._exchanged]
        self._before = None

    def backward(self, losses: Sequence[Tensor], *, num_samples: int, closely: bool) -> None:
        """The script is about to call backward on losses.

        Args:
            losses: those.
            num_samples: of the batch that they are of.
            closely: a batch is followed.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if closely and len(self._exchanged):
                for leaf in _leaves(losses):
                    # Data of the batch, or made for it.
                    is_data = num_samples in leaf.shape[:1] and not isinstance(leaf, torch.nn.Parameter)
                    is_other = leaf not in self._exchanged and not is_data and leaf.layout == torch.strided
                    if is_other and self._others.get(leaf) is None:
                        self._others[leaf] = _norm(leaf)
            self._look_at_moves(closely=closely)

    def taken(self, inputs: Iterable[Any]) -> None:
        """The script is about to call torch.autograd.grad."""
        with torch._C.DisableTorchFunction():
            if any(isinstance(tensor, Tensor) and tensor in self._exchanged for tensor in inputs):
                self._refuse(Reason.OWN_GRADIENTS)

    def exchanged(self, tensors: Sequence[Tensor]) -> None:
        """The script gives tensors to a collective."""
        if len(self._others):
            places = {tensor.data_ptr() for tensor in tensors if tensor.layout == torch.strided}
            gradients = [leaf.grad for leaf in self._others if leaf not in self._exchanged and leaf.grad is not None]
            if any(gradient.layout == torch.strided and gradient.data_ptr() in places for gradient in gradients):
                self._refuse(Reason.UNEXCHANGED)

    def stepping(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to step."""
        if len(self._others):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if any(p in self._others and p not in self._exchanged for p in parameters):
                self._refuse(Reason.UNEXCHANGED)

    def synchronized(self) -> None:
        """A wrapped optimizer is about to wait for its gradients; after that they are those of all ranks."""
        if self._before is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._look_at_moves(closely=False)
        self._before = None

    def settle(self) -> None:
        """The script has done with a batch: has it moved other leaves of its loss?"""
        if not len(self._others):
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for leaf, norm in list(self._others.items()):
                if norm is not None and leaf not in self._exchanged and _differ(_norm(leaf), norm):
                    self._refuse(Reason.UNEXCHANGED)
                self._others[leaf] = None

    def _look_at_moves(self, *, closely: bool) -> None:
        """Compares what is trained with what it was."""
        # Within backward a part of a model runs again.
        if torch._C._current_graph_task_id() != -1:
            return
        before = self._before
        is_close = closely or (before is not None and bool(before.norms))
        parameters = [parameter for reference in self._references if (parameter := reference()) is not None]
        now = _Model(
            num_tensors=len(parameters),
            version=sum(parameter._version for parameter in parameters),
            # A change of ``parameter.data`` shows nowhere else.
            norms=[_norm(p) for p in parameters if p.layout == torch.strided] if is_close else [],
        )
        if before is None:
            self._before = now
        elif before.num_tensors == now.num_tensors and (
            before.version != now.version
            or any(_differ(one, other) for one, other in zip(before.norms, now.norms, strict=False))
        ):
            self._refuse(Reason.OWN_GRADIENTS)


def intercept_own_use(own_use: OwnUse) -> None:
    """Replaces ``torch.autograd.grad``, and has each step of an optimizer told of."""
    own = torch.autograd.grad

    @functools.wraps(own)
    def grad(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        given = tuple(inputs) if isinstance(inputs, Iterator) else inputs
        # Within backward it is a part of a model that runs again.
        if not is_reading() and torch._C._current_graph_task_id() == -1:
            own_use.taken(given if isinstance(given, (list, tuple)) else (given,))
        return own(outputs, given, *args, **options)

    torch.autograd.grad = grad
    register_optimizer_step_pre_hook(own_use.stepping)


def _leaves(losses: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of autograd's graph."""
    nodes = walk([loss.grad_fn for loss in losses], sys.maxsize, lambda node: True)
    return [node.variable for node in nodes if is_weight(node)]


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach())


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
