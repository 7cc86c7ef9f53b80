"""Compiled modules, called with micro-batches of one size, so that they are compiled once whatever a rank's share is.

The script calls the module once with its whole batch, and gets the whole result. In between the module is called with as many
samples at a time as a micro-batch has, and the results are put behind each other; of a mean, such as a loss, comes the mean. So
the script's loss is the one that it has always been, and one backward goes through all the calls. What is too short for a
micro-batch is filled up with samples of its own, whose results are cut off again: they have no gradients. Beside a mean this
cannot be done, so that a short batch is compiled apart.

What was compiled cannot be looked into. So while a batch is followed, the Python that it was made of runs in its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvd_adaptive.wrap.closing_report import Report
from hvd_adaptive.wrap.follow import Follower
from hvd_adaptive.wrap.losses import rows_dim
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.tensors import tensors_in

# Where a tensor's rows are: the dimension, and rows of a sample.
_Rows = tuple[int, int]
# The same of a result; None: it is one number, a mean over the samples, else the loader keeps equal shares.
_Place = _Rows | None


class MicroBatches:
    """Calls compiled modules.

    Args:
        size: samples of a micro-batch.
        follower: knows which batch the script is at, and where its samples are in a module's arguments.
        report: gets conditions, and a line at the end.
    """

    def __init__(self, size: int, follower: Follower, report: Report) -> None:
        self._size = size
        self._follower = follower
        self._report = report
        self._results: weakref.WeakKeyDictionary[nn.Module, list[_Place]] = weakref.WeakKeyDictionary()
        # Whose results are neither.
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: list[str] = []

    def lines(self) -> list[str]:
        """Returns what the report says of it."""
        if not self._names:
            return [
                f"  micro-batches: no compiled model of the script's was called with {self._size} samples at a time; shares are "
                "whole numbers of them, where the script's batch is, and forwards get them at once"
            ]
        return [f"  micro-batches: {name}, compiled, was called with {self._size} samples at a time" for name in self._names]

    def call(self, module: nn.Module, eager: Callable[..., Any], compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a compiled module for the script; returns what the script would get.

        Args:
            module: that was compiled.
            eager: the Python that it was made of.
            compiled: what torch made of it.
            args: the script's.
            kwargs: likewise.
        """
        follower = self._follower
        if follower.is_tracing:
            num_samples = follower.num_samples
            result = eager(*args, **kwargs)
            if not torch.is_grad_enabled() or not num_samples:
                # Without a batch: its backward has come before, and this is a further forward on it.
                return result
            if num_samples > 1 and any(_is_for_each_sample(part, num_samples) for part in (*args, *kwargs.values())):
                # It would go whole into each micro-batch.
                self._refused.add(module)
                follower.refuse(Reason.UNSEEN)
            return self._learn(module, result)
        if not torch.is_grad_enabled():
            follower.evaluated(module)
        else:
            tensors = list(tensors_in([args, kwargs]))
            follower.forward_begins(module, tensors)
            cut = self._cut(module, tensors)
            if cut is not None:
                with follower.unwatched():
                    result = self._run(module, compiled, args, kwargs, *cut)
                # Not only its last one may be looked at.
                follower.results.update(t.grad_fn for t in tensors_in([result]))
                return result
        with follower.unwatched():
            return compiled(*args, **kwargs)

    def _learn(self, module: nn.Module, result: Any) -> Any:
        """Takes note of where the samples are in a result; returns it as micro-batches' results would be put together."""
        num_samples = self._follower.num_samples
        tensors = list(tensors_in([result]))
        dims = [rows_dim(tensor, num_samples) for tensor in tensors]
        found = [None if dim is None else (dim, t.shape[dim] // num_samples) for t, dim in zip(tensors, dims, strict=True)]
        is_known = all(dim is not None or tensor.numel() == 1 for tensor, dim in zip(tensors, dims, strict=True))
        try:
            whole = _join([result], found, [num_samples]) if is_known and tensors else None
        except TypeError:
            whole = None
        if whole is None or self._results.setdefault(module, found) != found:
            self._refused.add(module)
            self._follower.refuse(Reason.MICRO_RESULT)
            return result
        self._follower.results.update(tensor.grad_fn for tensor in tensors_in([whole]))
        return whole

    def _cut(self, module: nn.Module, tensors: list[Tensor]) -> tuple[dict[int, _Rows], int] | None:
        """Returns which tensors to cut, by id, and the samples in them; None: the module is to be called as the script does."""
        follower, places = self._follower, self._follower.places(module)
        rows = self._results.get(module)
        if not places or rows is None:
            # A part of another module, or one that was never followed.
            follower.refuse(Reason.COMPILED)
            return None
        if follower.keeps_equal_shares or module in self._refused:
            return None
        num_samples = follower.num_samples
        found: dict[int, _Rows] = {}
        for number, dim, per_sample in places:
            tensor = tensors[number] if number < len(tensors) else None
            if tensor is None or dim >= tensor.dim() or tensor.shape[dim] != per_sample * num_samples:
                continue
            if found.setdefault(id(tensor), (dim, per_sample)) != (dim, per_sample):
                follower.refuse(Reason.UNSEEN)
                return None
        return (found, num_samples) if found else None

    def _run(
        self, module: nn.Module, compiled: Callable[..., Any], args: Any, kwargs: Any, cut: dict[int, _Rows], num_samples: int
    ) -> Any:
        if module not in self._called:
            self._called.add(module)
            self._names.append(type(module).__name__)
            # It is compiled now, which says nothing of the rank's speed.
            self._follower.was_traced = True
            if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
                self._report.condition(
                    f"BatchNorm normalizes over micro-batches of {self._size} samples, and moves its running statistics with "
                    "each; in a short batch some samples fill them up, and count more than once"
                )
        places = self._results[module]
        fills_up = None not in places
        counts = [min(self._size, num_samples - start) for start in range(0, num_samples, self._size)]
        results = []
        for number, count in enumerate(counts):
            size = self._size if fills_up else count
            take = functools.partial(_part, cut=cut, start=number * self._size, count=count, size=size)
            part = _map([args, kwargs], take)
            result = compiled(*part[0], **part[1])
            results.append(result if count == size else _shortened(result, places, count))
        return _join(results, places, counts)


def _is_for_each_sample(value: Any, num_samples: int) -> bool:
    """Whether an argument is or holds something other than a tensor with an entry for each sample."""
    if isinstance(value, Mapping):
        return any(_is_for_each_sample(item, num_samples) for item in value.values())
    if isinstance(value, np.ndarray):
        return num_samples in value.shape[:1]
    if not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
        return False
    if all(isinstance(item, Tensor) and item.shape[:1] == (num_samples,) for item in value):
        # Feature maps, or a state's parts, are cut each.
        return False
    return len(value) == num_samples or any(_is_for_each_sample(item, num_samples) for item in value)


def _part(tensor: Tensor, *, cut: dict[int, _Rows], start: int, count: int, size: int) -> Tensor:
    """Returns some samples of a tensor, filled up to a size."""
    if id(tensor) not in cut:
        return tensor
    dim, per_sample = cut[id(tensor)]
    part = tensor.narrow(dim, start * per_sample, count * per_sample)
    if count < size:
        order = torch.arange(size * per_sample, device=tensor.device) % (count * per_sample)
        part = part.index_select(dim, order)
    # Else its strides would tell of the whole batch.
    return part.contiguous()


def _shortened(result: Any, places: Sequence[_Place], count: int) -> Any:
    """Returns the first samples of a result."""
    rest = iter(places)

    def shorten(tensor: Tensor) -> Tensor:
        dim, per_sample = next(rest) or (0, 1)
        return tensor.narrow(dim, 0, per_sample * count)

    return _map(result, shorten)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a value with its tensors replaced, in lists, tuples and mappings.

    Raises:
        TypeError: for tensors in anything else.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: _map(item, function) for key, item in value.items()}
        # As Hugging Face's outputs, which take their entries by name.
        return dict(items) if type(value) is dict else type(value)(**items)
    if isinstance(value, (list, tuple)):
        parts = [_map(item, function) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if any(True for _ in tensors_in([value])):
        raise TypeError(f"a {type(value).__name__} cannot be put together")
    return value


def _join(results: Sequence[Any], places: Sequence[_Place], counts: Sequence[int]) -> Any:
    """Puts results behind each other, tensor by tensor.

    Args:
        results: of the micro-batches, alike but for their numbers.
        places: where the rows of each tensor are.
        counts: samples of each micro-batch.

    Raises:
        TypeError: for tensors in anything but lists, tuples and mappings.
    """
    columns = iter(zip(*(list(tensors_in([result])) for result in results), strict=True))
    rest = iter(places)

    def join(_: Tensor) -> Tensor:
        tensors, place = next(columns), next(rest)
        if place is not None:
            return torch.cat(tensors, dim=place[0])
        parts = [tensor * (count / sum(counts)) for tensor, count in zip(tensors, counts, strict=True)]
        # The same node of the graph at its end, however many there are.
        return sum(parts[1:], parts[0]) * 1.0

    return _map(results[0], join)
