"""Gradients that a script changes before Horovod has averaged them: they are the rank's own, weighted by its share.

A factor of the script's own (a loss scale) is the same on all ranks and does no harm. What follows from the gradients themselves,
as in clipping without ``optimizer.synchronize()``, comes out otherwise with every other share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"}
_SCALES = {"mul_", "div_", "true_divide_", "__imul__", "__itruediv__", "__idiv__", "_foreach_mul_", "_foreach_div_"}
_SCALED = {"mul", "div", "true_divide", "__mul__", "__truediv__"}
_OTHERS = {"__iadd__", "__isub__", "__ipow__"}
# In place, and no change that depends on the gradients.
_HARMLESS = {"zero_", "detach_", "requires_grad_", "_foreach_zero_", "_amp_foreach_non_finite_check_and_unscale_"}
_SETTERS: Any = {Tensor.grad.__set__, Tensor.data.__set__}  # type: ignore[union-attr, attr-defined]


class OwnGradients:
    """Watches for changes of gradients, function by function.

    Args:
        trained: the parameters that an optimizer trains.

    Attributes:
        are_here: a backward has run since Horovod was last waited for.
    """

    def __init__(self, trained: WeakTensorKeyDictionary) -> None:
        self._trained = trained
        self.are_here = self._is_norm_known = False
        self._written: Callable[[], Tensor | None] = lambda: None

    def arrive(self) -> None:
        """A backward has run."""
        if not self.are_here:
            self.are_here, self._is_norm_known = True, False

    def are_changed(self, func: Any, args: tuple[Any, ...], results: Sequence[Tensor] = ()) -> bool:
        """Whether a torch function changes some of them by more than a factor that does not come from them."""
        name = getattr(func, "__name__", "")
        if not self.are_here or not args or name in _HARMLESS:
            return False
        if func in _SETTERS:
            # What is set after ``parameter.grad *= 2`` is what that has written to. Zeros stand for a gradient that is missing.
            is_new = isinstance(args[1], Tensor) and args[1] is not self._written() and bool(args[1].any())
            return is_new and self._sets(args[0])
        is_scaled = name in _SCALED and len(args) > 1 and isinstance(args[1], (int, float)) and not self._is_norm_known
        if not (_writes(name) or name in _NORMS or is_scaled) or not self._hold(args[0]):
            return False
        if is_scaled or isinstance(args[0], Tensor):
            self._written = weakref.ref(results[0] if is_scaled and results else args[0])
        if is_scaled:
            return False
        if name in _NORMS:
            self._is_norm_known = True
            return False
        is_factor = name in _SCALES and len(args) > 1 and isinstance(args[1], (int, float))
        return self._is_norm_known or not is_factor

    def are_made_by(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a torch function changes or sets some of them, also those that Horovod has averaged."""
        if func in _SETTERS:
            return self._sets(args[0])
        return bool(args) and _writes(getattr(func, "__name__", "")) and self._hold(args[0])

    def _sets(self, tensor: Any) -> bool:
        """Whether it is a trained parameter, whose gradient is set, or a gradient."""
        return tensor in self._trained or any(parameter.grad is tensor for parameter in self._trained)

    def _hold(self, value: Any) -> bool:
        """Whether a value is one of them, or a list of some; ``grad.data`` is another tensor in the same memory."""
        given = [part for part in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(part, Tensor)]
        places = {tensor.data_ptr() for tensor in given if not tensor.is_sparse}
        gradients = (parameter.grad for parameter in self._trained if parameter.grad is not None)
        return any(gradient.data_ptr() in places for gradient in gradients if not gradient.is_sparse)


def _writes(name: str) -> bool:
    """Whether a function of that name writes to its first argument."""
    return name in _SCALES or name in _OTHERS or (name.endswith("_") and not name.endswith("__"))
