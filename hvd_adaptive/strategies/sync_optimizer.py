"""The optimizer of strategy ``sync``: one loop for any number of ranks and micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.engine.strategy import refuse_closure
from hvd_adaptive.exchange.gradients import TOO_LATE
from hvd_adaptive.strategies.untouched_gradients import UntouchedGradients

# Backward passes of a step, more than there can be.
_UNKNOWN = 1 << 30


class Exchanger(Protocol):
    """What makes all ranks' gradients the same: :class:`HorovodExchanger`, or
    :class:`~hvd_adaptive.exchange.gradients.GradientExchange`."""

    @property
    def has_begun(self) -> bool:
        """Whether gradients of this step have come that are not reduced yet."""

    def synchronize(self) -> None:
        """Waits for the reduced gradients. COLLECTIVE."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many micro-batches' gradients add up before they are exchanged, from the next step on."""

    def remove(self) -> None:
        """Takes the hooks off the parameters."""

    @property
    def is_finite(self) -> bool | None:
        """Whether all of the last sum is finite; None: it must be looked at."""


class HorovodExchanger:
    """Horovod's exchange, for any number of backward passes in a micro-batch; see :class:`Exchanger`.

    Horovod must know beforehand how many there are. So the first step's gradients are counted, and exchanged in ``synchronize``.
    The other steps may have as many passes, or fewer.

    Args:
        wrapped: Horovod's DistributedOptimizer, which never steps.
        passes: micro-batches of a step.
    """

    # Horovod does not say.
    is_finite = None

    def __init__(self, wrapped: Any, passes: int) -> None:
        self._wrapped = wrapped
        self._passes = passes
        self._repeats = 0
        # Horovod's hooks hold it.
        wrapped._exchanger = self
        wrapped.set_backward_passes_per_step(_UNKNOWN)
        wrapped._compression = _CountedApart

    @property
    def has_begun(self) -> bool:
        """Whether gradients of this step have come that are not reduced yet."""
        return bool(self._wrapped._handles)

    def synchronize(self) -> None:
        """Waits for the reduced gradients. COLLECTIVE."""
        if self._repeats:
            self._wrapped.synchronize()
            return
        most = _UNKNOWN - min(self._wrapped._allreduce_delay.values())
        self._wrapped.synchronize()
        self._repeats = max(1, -(-most // self._passes))
        self.set_backward_passes_per_step(self._passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many micro-batches' gradients add up before they are exchanged, from the next step on."""
        self._passes = passes
        if self._repeats:
            self._wrapped.set_backward_passes_per_step(passes * self._repeats)

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        detach(self._wrapped)


class _CountedApart:
    """Gives Horovod a gradient's memory as another tensor, so that the gradient counts only the loop's changes of it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor.data, None

    @staticmethod
    def decompress(tensor: Tensor, _: None) -> Tensor:
        return tensor


class _Never(dict[Any, Any]):
    """Backward passes until a gradient is exchanged, always many; or gradients under way, always none."""

    def __init__(self, value: int | None) -> None:
        self._value = value

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __missing__(self, key: Any) -> Any:
        return self._value


@torch.no_grad()
def start_state_(wrapped: Any, own: Optimizer, transport: Collectives) -> None:
    """Has an optimizer go on from the state that rank 0's own one holds, as the model is rank 0's. COLLECTIVE.

    The groups, where learning rates are, stay shared with the script's own one whatever state is loaded later.

    Args:
        wrapped: Horovod's, which begins without a state; or ``own``.
        own: what it wraps; other ranks' gets rank 0's state.
        transport: the world.
    """
    parameters = [p for group in own.param_groups for p in group["params"]]
    entries = {(n, name): value for n, p in enumerate(parameters) for name, value in own.state.get(p, {}).items()}
    outline = {key: (v.shape, v.dtype, v.is_cpu) if isinstance(v, Tensor) else [v] for key, v in entries.items()}
    first = transport.allgather_object(None if transport.rank else outline)[0]
    if transport.rank:
        # What is under other keys than parameters, such as modules, is the rank's own.
        for parameter in parameters:
            own.state.pop(parameter, None)
        for (number, name), spec in first.items():
            parameter = parameters[number]
            if isinstance(spec, tuple):
                shape, dtype, on_host = spec
                value = torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
            else:
                (value,) = spec
            own.state[parameter][name] = entries[number, name] = value
    transport.broadcast_([entries[key] for key, spec in first.items() if isinstance(spec, tuple)])
    wrapped.state.update(own.state)
    if wrapped is not own:
        wrapped.register_load_state_dict_post_hook(functools.partial(_share_groups, own))


def _share_groups(own: Optimizer, wrapped: Optimizer) -> None:
    # An optimizer that loads a state gets new groups, and a scheduler over the script's own one would write into the old ones.
    own.param_groups[:] = wrapped.param_groups


def detach(wrapped: Any) -> None:
    """Makes Horovod's DistributedOptimizer a plain one; another is left as it is.

    Horovod keeps no handles of its hooks: they go with the nodes of autograd that it holds, or do nothing where an old graph
    holds one too.
    """
    if not hasattr(wrapped, "_allreduce_delay"):
        return
    wrapped._grad_accs.clear()
    wrapped._allreduce_delay, wrapped._handles = _Never(_UNKNOWN), _Never(None)
    wrapped.synchronize = lambda: None


def explain_passes(error: Exception) -> None:
    """Raises RuntimeError for Horovod's errors about a gradient that was computed again after its exchange began, or is gone."""
    if isinstance(error, AssertionError) and "backward_passes_per_step" in str(error):
        raise RuntimeError(f"a gradient was computed again {TOO_LATE}") from error
    if isinstance(error, AttributeError) and str(error) == "'NoneType' object has no attribute 'requires_grad'":
        raise RuntimeError(
            "a gradient is gone before its exchange, as where a hook steps and forgets it within backward(): leave it to "
            "session.optimizer.step(), or use strategy 'local'"
        ) from error


class SyncOptimizer(Optimizer):
    """Any optimizer and what exchanges its gradients, behind one face.

    Within a window of micro-batches ``zero_grad`` acts only before the first and ``step`` only after the last, so that the loop
    is the same with and without accumulation. A step whose reduced gradients hold NaN or Inf is left out; as the reduced
    gradients are the same on every rank, all leave it out. Everything else is the wrapped optimizer's.

    Args:
        inner: the wrapped optimizer, the script's own.
        exchanger: None where there is one rank without Horovod.
        gradients: finds those that the loop changes too early; None: nobody exchanges them.

    Attributes:
        step_due: whether the micro-batch in work is the last before a step.
        num_skipped: steps left out so far.
    """

    # GradScaler would else leave the unscaling to the wrapped optimizer, which cannot see its scale.
    _step_supports_amp_scaling = False

    def __init__(
        self, inner: Any, exchanger: Exchanger | None = None, gradients: UntouchedGradients | None = None
    ) -> None:
        # Not Optimizer.__init__: parameters, state and hooks are the wrapped optimizer's.
        self._inner = inner
        self._exchanger = exchanger
        self._gradients = gradients
        self._opens_window = True
        # The loop has left out all micro-batches of the window so far.
        self._is_untouched = True
        self._synchronized = False
        self._num_passes = 0
        self._is_stepping = self._has_stepped = self._is_closed = False
        self.step_due = True
        self.num_skipped = 0

    def guard(self, own: Optimizer) -> RemovableHandle:
        """Refuses steps of the script's own optimizer that do not come from here, until the handle is removed."""
        return own.register_step_pre_hook(self._refuse_others)

    def _refuse_others(self, own: Optimizer, *_: Any) -> None:
        # With a rate of 0 torch.distributed.checkpoint has an optimizer make its state.
        if not self._is_stepping and any(group.get("lr", 1) != 0 for group in own.param_groups):
            raise RuntimeError(
                "a step of the optimizer that Session was given exchanges no gradients with strategy 'sync': call "
                "session.optimizer.step(), and give schedulers and a GradScaler session.optimizer as well"
            )

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "session.optimizer of strategy 'sync' cannot be copied or pickled: take session.optimizer.state_dict(), or the "
            "optimizer that Session was given"
        )

    def remove(self) -> None:
        """Ends the exchange: from now on this is the script's own optimizer by another name."""
        for part in (self._exchanger, self._gradients):
            if part is not None:
                part.remove()
        self._exchanger, self._gradients, self._is_closed = None, None, True
        self._opens_window = self.step_due = True

    def begin(self, *, opens_window: bool, step_due: bool) -> None:
        """Begins a micro-batch.

        Args:
            opens_window: it is the first after a step.
            step_due: it is the last before one.

        Raises:
            RuntimeError: if no step has used the gradients of the one before.
        """
        self._is_untouched |= opens_window
        self._opens_window = self._is_untouched
        self.step_due = step_due
        self._synchronized = self._has_stepped = False
        if opens_window and self._exchanger is not None and self._exchanger.has_begun:
            raise RuntimeError(
                "strategy 'sync' sums the gradients of a step over the ranks, and session.optimizer.step() has not used those of "
                "the batch before: skip a batch before its backward(), on all ranks. Where two gradients make a step (SAM), use "
                "strategy 'local'"
            )
        if opens_window and self._gradients is not None:
            self._gradients.begin()

    def expect_passes(self, passes: int) -> None:
        """Sets how many micro-batches the next step has, on this rank."""
        if self._exchanger is not None and passes != self._num_passes:
            self._exchanger.set_backward_passes_per_step(passes)
        self._num_passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients before the first micro-batch of a window; does nothing before the others.

        Raises:
            RuntimeError: if some have come that no step has used.
        """
        if not self._opens_window:
            return
        self._is_untouched = False
        if self._exchanger is not None and self._exchanger.has_begun:
            raise RuntimeError(
                "strategy 'sync' sums the gradients of a step over the ranks, got session.optimizer.zero_grad() between "
                "backward() and session.optimizer.step(): leave it out, or use strategy 'local', as for a step with two "
                "gradients (SAM)"
            )
        kept = [] if set_to_none else [p for p in self._parameters() if p.grad is not None]
        # A script's own may take no argument.
        self._inner.zero_grad()
        for p in kept:
            p.grad = torch.zeros_like(p)

    def synchronize(self) -> None:
        """Waits for the reduced gradients, after the last micro-batch of a window. COLLECTIVE.

        Raises:
            RuntimeError: if the loop has changed them since backward.
        """
        self._is_untouched = False
        if self.step_due and not self._synchronized:
            if self._gradients is not None:
                self._gradients.check()
            if self._exchanger is not None:
                self._exchanger.synchronize()
            self._synchronized = True

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """As with Horovod's optimizer; ``step`` knows by itself whether the gradients are reduced."""
        return nullcontext()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Steps after the last micro-batch of a window, unless the gradients hold NaN or Inf. COLLECTIVE.

        Raises:
            ValueError: for a closure.
            RuntimeError: for a second step of the same batch, whose gradients are not exchanged.
        """
        if self._is_closed:
            self._inner.step(closure)
            return
        why = "as no other rank waits for gradients that it computes. LBFGS and SAM need strategy 'local'"
        refuse_closure((self, closure), {}, "strategy 'sync'", why)
        self._is_untouched = False
        if not self.step_due:
            return
        if self._has_stepped:
            raise RuntimeError(
                "strategy 'sync' makes one step a batch, got a second session.optimizer.step() within session.step: add up the "
                "losses, and call backward() and step() once; or use strategy 'local'"
            )
        self._has_stepped = True
        self.synchronize()
        if not self._is_finite():
            self.num_skipped += 1
            return
        self._is_stepping = True
        try:
            self._inner.step()
        finally:
            self._is_stepping = False

    def _is_finite(self) -> bool:
        known = None if self._exchanger is None else self._exchanger.is_finite
        return known if known is not None else all_finite(*(p.grad for p in self._parameters() if p.grad is not None))

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Is refused: a new parameter's gradient would be neither weighted nor exchanged.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("add_param_group must come before the Session, got one with strategy 'sync' running")

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self._inner.param_groups for p in group["params"])
