"""Numbers by which a script scales a loss that is a sum over samples.

The ranks' gradients of such losses add up to those of the global batch, whatever their shares are. But a number that the script
divides the loss by may count samples, or tokens, and would be another one with other shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hvd_adaptive.wrap.decisions import is_written
from hvd_adaptive.wrap.losses import plain_name
from hvd_adaptive.wrap.sizes import Ratio, calling_frame, is_size

# They make plain numbers of tensors.
_READS = {"item", "tolist", "numpy", "array", "float", "int", "index", "complex"}
_SCALE = {"mul", "rmul", "imul", "multiply", "div", "rdiv", "idiv", "divide", "truediv", "rtruediv", "itruediv", "true_divide"}


class Scales:
    """Looks for them in one batch at a time.

    Args:
        is_made: whether a tensor is made of the batch.

    Attributes:
        may_count: a number that the script has may count samples of the batch.
    """

    def __init__(self, is_made: Callable[[Tensor], bool]) -> None:
        self._is_made = is_made
        self._num_samples = 0
        self.may_count = False

    def begin(self, batch: Any, num_samples: int) -> None:
        """Begins with a batch."""
        self._num_samples = num_samples
        self.may_count = _may_hold_numbers(batch)

    def look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Looks at a function that was called outside of any forward."""
        name = plain_name(func)
        tensors = [value for value in args if isinstance(value, Tensor)]
        if name in _READS and func is not Tensor.float and func is not Tensor.int:
            # A loss that is printed counts nothing.
            self.may_count |= any(not tensor.requires_grad and self._is_made(tensor) for tensor in tensors)
        elif name in _SCALE and any(tensor.requires_grad for tensor in tensors):
            self.may_count |= any(map(self._may_be_size, (*args, *kwargs.values())))

    def _may_be_size(self, value: Any) -> bool:
        """Whether a number is a multiple of the batch's size, or the inverse of one, and does not stand in the script's line."""
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and not self._is_made(value):
            value = value.item()
        # Of those that know that they are sizes it is known what they would be for others.
        if type(value) not in (int, float) or is_size(value) or isinstance(value, Ratio) or not value:
            return False
        if not any(_is_multiple(number, self._num_samples) for number in (abs(value), 1 / abs(value))):
            return False
        frame = calling_frame()
        return frame is None or not is_written(frame, value)


def _is_multiple(number: float, of: int) -> bool:
    times = number / of
    return 0.5 < times < float("inf") and abs(times - round(times)) <= 1e-6 * times


def _may_hold_numbers(batch: Any) -> bool:
    """Whether a batch may hold anything else than tensors and text."""
    if isinstance(batch, Mapping):
        return any(map(_may_hold_numbers, batch.values()))
    if isinstance(batch, (list, tuple)):
        return any(map(_may_hold_numbers, batch))
    return not isinstance(batch, (Tensor, str, bytes, type(None)))
