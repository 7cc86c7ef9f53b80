"""A torch function called again for some samples: on the CPU, in double precision, and as in evaluation."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_adaptive.wrap.losses import plain_name

_DROPOUT = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout"}
# How far apart a loss and what follows from its parts may be, relative to them: some functions compute in single precision.
_CLOSE, _NEAR = 1e-5, 0.05
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def evaluate(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function as in evaluation: what layers draw at random or take of the whole batch has reports of its own."""
    name = plain_name(func)
    if name in _DROPOUT or name == "cuda":
        return args[0]
    if name in _RECURRENT:
        # The part that is dropped between layers.
        return func(*(0.0 if type(value) is float else value for value in args), **kwargs)
    if name == "scaled_dot_product_attention":
        return func(*args[:4], **(kwargs | {"dropout_p": 0.0}))
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return func(*args, **kwargs)
    if "training" not in signature.parameters:
        return func(*args, **kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    bound.arguments["training"] = False
    if func is F.batch_norm and bound.arguments["running_mean"] is None:
        return args[0]
    return func(*bound.args, **bound.kwargs)


def fits(whole: float, first: float, rest: float, part: float, *, adds_up: bool, weighs: bool) -> bool:
    """Whether a loss fits those of two parts of its samples.

    Args:
        whole: the loss.
        first: that of the first part.
        rest: that of the other one.
        part: samples of the first part, as a part of all.
        adds_up: it should be their sum; else their mean.
        weighs: False: it should lie between them, as a mean does that weighs samples (over a mask, by classes).
    """
    if weighs:
        expected, close = first + rest if adds_up else part * first + (1 - part) * rest, _CLOSE
    else:
        expected, close = sorted((first, whole, rest))[1], _NEAR
    return not abs(expected - whole) > close * max(abs(whole), abs(first), abs(rest))


def wide(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU, in double precision."""
    return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()


class Change(enum.Enum):
    """Which numbers stand in the place of a batch's."""

    NONE = "its own"
    WIDER = "larger ones, of both signs"
    BOUNDED = "the same, but chances stay chances, as some functions take no other numbers"

    def of(self, tensor: Tensor) -> Tensor:
        """Returns other numbers for some; the same ones each time."""
        generator = torch.Generator().manual_seed(0)
        if self is Change.NONE:
            return tensor
        if self is Change.BOUNDED and bool(((tensor >= 0) & (tensor <= 1)).all()):
            return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return 10 * tensor + 3 * tensor.std().nan_to_num(1.0) * noise
