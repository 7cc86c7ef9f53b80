"""Numbers in a loss: does one of them come from the batch? Are all in a sum over samples the script's own constants?

The ranks' gradients of such a loss add up to those of the global batch, whatever their shares are. But a number in it may count
samples, or tokens, and would be another one with other shares. Where it comes from cannot be seen, so only those are constants
that stand in the script.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap.decisions import is_constant
from hvd_adaptive.wrap.losses import LOSSES, plain_name
from hvd_adaptive.wrap.sizes import Ratio, Size, caller_frame, calling_frame, is_size
from hvd_adaptive.wrap.tape import RANDOM

_SCALING = {
    *(f"{form}{name}" for form in ("", "r", "i") for name in ("mul", "div", "truediv", "pow")),
    "multiply", "divide", "true_divide", "float_power", "lerp", "addcmul", "addcdiv", "scale",
}  # fmt: skip
_ARITHMETIC = {
    *_SCALING,
    *(f"{form}{name}" for form in ("", "r", "i") for name in ("add", "sub", "floordiv", "mod")),
    "subtract", "floor_divide", "remainder", "clamp", "clip", "clamp_min", "clamp_max", "where", "maximum", "minimum", "fill",
    "masked_fill", "xlogy",
}  # fmt: skip
# What takes numbers out of a tensor; how many of them are remembered, and how near to one a number is that one.
_OUT = {Tensor.item, Tensor.__float__, Tensor.tolist}
_MOST_FIGURES, _CLOSE = 32, 1e-6
# Not torchvision, which may stand beside it.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_AMP = f"{_TORCH}amp{os.sep}"


class Scales:
    """Looks at the numbers of one batch at a time.

    Args:
        is_made: whether a tensor is made of the batch.

    Attributes:
        may_count: a number, or a tensor of some, may be another one for another batch.
        are_figures: something was scaled by a number that the script took out of a tensor of the batch, as ``loss.item()``.
    """

    def __init__(self, is_made: Callable[[Tensor], bool]) -> None:
        self._is_made = is_made
        self.begin()

    def begin(self) -> None:
        """Begins with a batch."""
        self.may_count = self.are_figures = False
        # The newest numbers that were taken out of the batch's tensors.
        self._figures: deque[float] = deque(maxlen=_MOST_FIGURES)
        # Made since, of anything else than constants and the batch's tensors.
        self._new: Any = WeakTensorKeyDictionary()

    def look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Looks at a function that was called outside of any forward."""
        if func in _OUT and self._is_made(args[0]):
            # A whole number is a count, of targets: see target_means.py.
            numbers = (abs(value) for value in _leaves(result) if type(value) is float and math.isfinite(value))
            self._figures.extend(number for number in numbers if not number.is_integer())
            return
        given = list(_leaves([args, kwargs]))
        tensors = [value for value in given if isinstance(value, Tensor)]
        is_new = any(tensor in self._new for tensor in tensors)
        caller = caller_frame()
        path = "" if caller is None else caller.f_code.co_filename
        if not any(tensor.requires_grad for tensor in tensors):
            # The scale of a GradScaler is the same for all ranks' batches.
            is_constant = path.startswith(_AMP) or (plain_name(func) not in RANDOM and all(map(_is_fixed, given)))
            if is_new or (not any(map(self._is_made, tensors)) and not is_constant):
                self._new.update((tensor, True) for tensor in _leaves(result) if isinstance(tensor, Tensor))
            return
        self.may_count |= is_new
        if plain_name(func) in _SCALING:
            self.are_figures |= any(self._is_figure(value) and not _is_fixed(value) for value in given)
        # Torch's own code, as of distributions, has numbers of its own.
        if func not in LOSSES and not path.startswith(_TORCH):
            # Other whole numbers are places and dimensions.
            kinds = (int, float, np.number) if plain_name(func) in _ARITHMETIC else (float, np.floating)
            self.may_count |= any(isinstance(value, kinds) and not _is_fixed(value) for value in given)

    def _is_figure(self, value: Any) -> bool:
        """Whether a number was taken out of the batch's tensors, or is a product or a quotient of two, nearly: a tiny number may
        have been added."""
        if type(value) is not float or value.is_integer():
            return False
        own = np.array(self._figures)
        # A product may be too large. The script need not hear of it.
        with np.errstate(all="ignore"):
            made = np.concatenate([own, 1 / own, np.outer(own, own).ravel(), np.outer(own, 1 / own).ravel()])
            return bool((np.abs(made - abs(value)) <= _CLOSE * abs(value)).any())


def may_be_size(value: Any, num_samples: int) -> bool:
    """Whether a number is made of a batch's size, or may be: a multiple that is no constant."""
    return is_size(value) or (type(value) is int and value > 0 and value % num_samples == 0 and not _is_fixed(value))


def _is_fixed(value: Any) -> bool:
    """Whether a value is the same for each batch, or a number that knows what it would be for another batch."""
    if isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, Size, Ratio)) and value:
        frame = calling_frame()
        return frame is not None and is_constant(frame, value)  # type: ignore[arg-type]
    return isinstance(value, (int, float, str, Tensor, torch.dtype, torch.device, torch.layout, type(None)))


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
