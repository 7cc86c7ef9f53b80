"""What a script makes of a batch, computed again on two parts of some samples: is its loss a mean over samples, each by itself?

The functions on the way from the batch to the loss are kept, without what they gave. With some of the rows in the batch's place,
and their number in the place of the batch's size, they give the loss that a rank with that share would have. Losses of pairs,
means that are divided twice and a root of a mean show by their numbers here, whatever functions they are made of.

It is computed on the CPU: there, a function that gets what it cannot take raises an error, and a GPU's process would end.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap.calls import (
    Call,
    Number,
    Slot,
    leading_to,
    leaves_in,
    map_leaves,
    slots_of,
    tensors_of,
    writes,
)
from hvd_adaptive.wrap.evaluation import Change, evaluate, fits, wide
from hvd_adaptive.wrap.held_values import HeldValues
from hvd_adaptive.wrap.losses import LOSSES, mean_over_samples, plain_name, rows_dim, weighs_samples
from hvd_adaptive.wrap.sizes import is_size

# What these gave is taken for rows of the batch, as they would give others the next time.
RANDOM = {
    "rand_like", "randn_like", "randint_like", "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial",
    "poisson", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal", "gumbel_softmax",
}  # fmt: skip
# They have no numbers of their own.
_WITHOUT = {"requires_grad", "retain_grad", "register_hook", "backward", "pin_memory", "share_memory"}
# How far apart a loss that is computed twice may be, relative to it.
_REPEATED = 1e-7
# Samples that are computed again, and calls and seconds of a batch for that.
_MOST_SAMPLES = 8
# What so few calls make is computed again of all samples.
_FEW_CALLS = 20
_MOST_CALLS, _MOST_S = 50_000, 5.0
# Numbers of weights and the like that are copied for that, and of what is made of the samples.
_MOST_CONSTANT, _MOST_MADE = 100_000_000, 30_000_000
_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]


class Unclear(Exception):
    """It cannot be computed again."""


class Tape:
    """The functions of one batch.

    Args:
        is_sum: whether a tensor is a sum over the batch's samples, or over parts of each.
        weighs: ranks' gradients are averaged. Else a loss need only be as large for some samples as for more.
    """

    def __init__(self, is_sum: Callable[[Tensor], bool] = lambda tensor: False, *, weighs: bool = True) -> None:
        self._is_sum, self._weighs, self._held = is_sum, weighs, HeldValues()
        self.begin((), 0)

    def begin(self, batch: Iterable[Tensor], num_samples: int) -> None:
        """Forgets all but what the script keeps, and begins with a batch's tensors."""
        batch = list(batch)
        self._num_samples = num_samples
        self._slots: Any = WeakTensorKeyDictionary()
        self._numbers = itertools.count()
        self._calls: list[Call] = []
        # By slot: tensors whose rows are the batch's, and what was there when the loss began: what forwards have given, and data.
        self._rows: dict[int, Tensor] = {}
        self._given: dict[int, Tensor] = {}
        # By id: others, as they are computed with.
        self._constants: dict[int, Tensor] = {}
        # Gradients of a mean over the batch, which grow as it gets smaller.
        self._scaled: set[int] = set()
        self._losses: list[int] = []
        self._is_ragged = False
        self._ends_in_sum = False
        self._held.begin(batch)
        self._is_whole, self._is_after = num_samples > 1, False
        self._left_s, self._most_samples = _MOST_S, _MOST_SAMPLES
        for tensor in batch:
            self._add_rows(tensor)

    def record(
        self, func: Any, args: Any, kwargs: Any, result: Any, *, is_inside: bool, as_long: Collection[int], length_asked: bool,
        by_targets: bool = False, over_chosen: bool = False,
    ) -> None:  # fmt: skip
        """Takes note of a call.

        Args:
            func: the function, with its arguments and its result.
            is_inside: it is within a forward.
            as_long: ids of tensors that have a row for each sample, too.
            length_asked: the script has asked for the batch's length in a way that gives a plain number.
            by_targets: it divides a sum by what the samples' targets add up to.
            over_chosen: it is a mean over rows that a mask chooses.
        """
        name = plain_name(func)
        if not self._is_whole or name in _WITHOUT:
            return
        # A call that raises below is missing.
        self._is_whole = False
        for tensor in tensors_of((args, kwargs)):
            if tensor not in self._slots and id(tensor) in as_long:
                self._add_rows(tensor)
        is_made = any(tensor in self._slots for tensor in tensors_of((args, kwargs)))
        results = list(tensors_of(result)) if func is not Tensor.__setitem__ else [args[0]]
        if (name == "grad" or func == _GRADIENT) and self._take_gradients(func, args, kwargs, results):
            self._is_whole = True
            return
        self._held.computed(name, args, kwargs, results, writes=writes(func, kwargs))
        if not is_made:
            self._held.made(results, of=tensors_of((args, kwargs)))
        elif args and isinstance(args[0], Tensor) and args[0] not in self._slots and writes(func, kwargs):
            self._held.written(args[0])
        if name in RANDOM:
            for tensor in results if is_made or self._num_samples in getattr(result, "shape", ()) else ():
                # What was there before, as of torch.empty(), is another one.
                self._slots.pop(tensor, None)
                self._add_rows(tensor)
        elif results and (is_made or any(self._is_size(value, length_asked) for value in leaves_in((args, kwargs)))):
            packed, names = map_leaves(lambda value: self._pack(value, length_asked), (args, kwargs))
            # Means over targets as they are once their gradients are weighted: see target_means.py.
            is_weighted = over_chosen or (func in LOSSES and weighs_samples(func, args, kwargs, self._num_samples))
            if self._weighs and is_weighted:
                func, packed = mean_over_samples, (func, Number(int), *packed)
            elif by_targets:
                func, packed, names = torch.div, (packed[0], Number(int)), {}
            slots = [self._slot(tensor) for tensor in results]
            self._calls.append(Call(func, packed, names, slots, self._is_after and not is_inside))
            if not self._is_after and not is_inside:
                self._given |= dict(zip(slots, results, strict=True))
        # It would need the graph, or writes to what the script has.
        self._is_whole = name != "grad" and kwargs.get("out") is None and len(self._calls) < _MOST_CALLS

    def _take_gradients(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> bool:
        """Takes note of gradients with respect to samples; returns whether they are all of that kind."""
        if func == _GRADIENT:
            inputs, is_mean = [args[0]], not self._ends_in_sum
        else:
            outputs, inputs = (list(tensors_of(part)) for part in (args + tuple(kwargs.values()))[:2])
            is_mean = any(output.numel() == 1 and not self._is_sum(output) for output in outputs)
        of_samples = [rows_dim(tensor, self._num_samples) == 0 and tensor in self._slots for tensor in inputs]
        if not results or len(results) != len(inputs) or not all(of_samples):
            return False
        for tensor in results:
            self._add_rows(tensor)
            if is_mean:
                self._scaled.add(self._slots[tensor])
        return True

    def ends_in(self, loss: Tensor) -> None:
        """Takes note of a loss that backward is called on."""
        self._ends_in_sum = self._is_sum(loss)
        if loss in self._slots:
            self._losses.append(self._slots[loss])

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of the batch."""
        return tensor in self._slots

    def is_in_loss(self, tensor: Tensor) -> bool:
        """Whether something that backward was called on is a tensor, or was made of it."""
        made = {slot for call in leading_to(self._calls, self._losses) for slot in slots_of(call)}
        return tensor in self._slots and self._slots[tensor] in made

    def holds_values(self, tensors: Iterable[Tensor]) -> bool:
        """Whether some of these tensors are made of the batch's values."""
        return any(map(self._held.holds, tensors))

    def holds_state(self) -> bool:
        """Whether a loss was made of a tensor that was there before the batch, and the batch's values were written to that."""
        calls = leading_to(self._calls, self._losses)
        return self._held.are_in([tensor for call in calls for tensor in tensors_of((call.args, call.kwargs))])

    @torch.no_grad()
    def has_rows(self, tensor: Tensor) -> bool:
        """Whether a tensor that was made of the batch holds the samples one after the other, equally many numbers of each."""
        # Losses keep their targets in another shape.
        alike = (known for known in self._slots if known.data_ptr() == tensor.data_ptr() and known.numel() == tensor.numel())
        known, count = tensor if tensor in self._slots else next(alike, None), self._num_samples
        if known is None or count < 2 or tensor.numel() % self._num_samples:
            return False
        rows, shape = wide(tensor.detach()).double().reshape(self._num_samples, -1), known.shape
        # If samples are alike, their places show by its shape alone.
        if not bool((rows != rows[0]).any()) and (shape[0] != self._num_samples or self._num_samples in shape[1:]):
            return False
        calls, slot = leading_to(self._calls, {self._slots[known]}), self._slots[known]
        self._most_samples = count if len(calls) <= _FEW_CALLS else _MOST_SAMPLES
        count = min(count, self._most_samples)
        compute = functools.partial(self._compute, calls, slot, end=time.monotonic() + _MOST_S)
        parts = ((0, 1), (1, count))
        try:
            # Whatever the functions raise. Numbers may have been rounded to 16 bits.
            return all(torch.allclose(compute(*part).double().flatten(), rows[slice(*part)].flatten(), 1e-2) for part in parts)
        except Exception:
            return False
        finally:
            self._constants.clear()
            self._most_samples = _MOST_SAMPLES

    def gives(self, tensors: Iterable[Tensor]) -> None:
        """Takes note of what a forward gives."""
        self._is_after = True
        for tensor in tensors:
            if tensor in self._slots:
                self._given[self._slots[tensor]] = tensor

    @torch.no_grad()
    def tells_other(self, loss: Tensor, *, inside: bool = False) -> bool | None:
        """Whether a loss is something else than a mean over samples, each by itself; None if it cannot be computed again.

        Args:
            loss: one that backward is called on.
            inside: what follows the forwards does not tell.
        """
        if not self._is_whole or loss.numel() != 1 or loss not in self._slots:
            return None
        start = time.monotonic()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # Which the script has had already.
            warnings.simplefilter("ignore")
            of_all, of_rest = (self._differs(self._slots[loss], from_batch=from_batch) for from_batch in (True, False))
        self._constants.clear()
        self._left_s -= time.monotonic() - start
        if of_all or of_rest:
            return True
        return of_all if inside or of_rest is None else False

    def _differs(self, slot: int, *, from_batch: bool) -> bool | None:
        """Whether a loss of some samples is not the mean of those of two parts of them, for the batch's numbers and for others,
        as a loss may be a mean for some numbers only. None if that cannot be said.

        Args:
            slot: the loss's.
            from_batch: all is computed again; else what came after the first forward.
        """
        count, end = min(self._num_samples, _MOST_SAMPLES), time.monotonic() + self._left_s / 2
        self._is_ragged = False
        compute = functools.partial(self._replay, slot, from_batch=from_batch, end=end)
        try:
            whole = compute(0, count)
            # What is random would be taken for a difference.
            is_clear = abs(compute(0, count) - whole) <= _REPEATED * abs(whole)
        except Exception:
            return None
        failed = set[Change]()
        # An odd part takes pairs apart, an even one leaves them together.
        for change, cut in ((Change.NONE, 3), (Change.WIDER, 2), (Change.BOUNDED, 2)) if is_clear else ():
            if change is Change.BOUNDED and Change.WIDER not in failed:
                break
            try:
                if self._parts_differ(compute, count, cut if count > 4 else 1, change=change):
                    return True
            except Exception as error:
                # The script takes rows together, as pairs. Or a function has the batch's size by a way of its own, or the numbers
                # are none for it.
                shape = re.match(r"shape '\[-1, ([\d, ]+)\]' is invalid for input of size", str(error))
                numbers = [int(number) for number in shape.group(1).split(",")] if shape else [self._num_samples]
                if all(number % self._num_samples for number in numbers):
                    return True
                failed.add(change)
        is_clear &= not failed & {Change.NONE, Change.BOUNDED}
        return None if self._is_ragged or not is_clear else False

    def _parts_differ(self, compute: Callable[..., float], count: int, cut: int, *, change: Change) -> bool:
        whole, first, rest = (compute(*part, change=change) for part in ((0, count), (0, cut), (cut, count)))
        # A part may have nothing to divide by, which the whole has.
        lacks = change is Change.NONE and math.isfinite(whole) and not math.isfinite(first + rest)
        return lacks or not fits(whole, first, rest, cut / count, adds_up=self._ends_in_sum, weighs=self._weighs)

    def _replay(
        self, wanted: int, start: int, stop: int, *, from_batch: bool, end: float, change: Change = Change.NONE
    ) -> float:
        """Returns the loss of the samples from one to before another; for what else is given see `_differs`.

        Raises:
            Unclear: if that cannot be, or not in time. And whatever the functions raise.
        """
        calls = [call for call in self._calls if from_batch or call.is_after]
        if not from_batch and any(len(tensor) > self._num_samples for tensor in self._given.values() if tensor.dim()):
            # Several rows of a sample may stand together, or all first ones before the second ones.
            raise Unclear
        given = {} if from_batch else self._given
        return float(self._compute(calls, wanted, start, stop, given, end=end, change=change))

    def _compute(
        self, calls: Sequence[Call], wanted: int, start: int, stop: int, given: Mapping[int, Tensor] = MappingProxyType({}),
        *, end: float, change: Change = Change.NONE,
    ) -> Tensor:  # fmt: skip
        """Returns a tensor as some calls make it of the samples from one to before another, and of what else is given.

        Raises:
            Unclear: if that cannot be, or not in time. And whatever the functions raise.
        """
        last = {slot: number for number, call in enumerate(calls) for slot in slots_of(call)} | {wanted: -1}
        leaves = {**self._rows, **given}
        values = {slot: self._part(tensor, start, stop, change) for slot, tensor in leaves.items() if slot in last}
        values |= {slot: values[slot] * (self._num_samples / (stop - start)) for slot in self._scaled & values.keys()}

        def unpack(value: Any) -> Any:
            if isinstance(value, Slot):
                if value.number not in values:
                    raise Unclear
                return values[value.number]
            if isinstance(value, Number):
                return value.of(stop - start)
            return self._constant(value)

        for number, call in enumerate(calls):
            args, kwargs = map_leaves(unpack, (call.args, call.kwargs))
            if writes(call.func, kwargs) and isinstance(call.args[0], Tensor):
                args = (args[0].clone(), *args[1:])
            result = evaluate(call.func, args, kwargs)
            results = list(tensors_of(result)) if call.func is not Tensor.__setitem__ else [args[0]]
            values |= {slot: wide(tensor) for slot, tensor in zip(call.slots, results, strict=True)}
            if time.monotonic() > end or sum(tensor.numel() for tensor in values.values()) > _MOST_MADE:
                raise Unclear
            for slot in slots_of(call):
                if last[slot] == number and slot != wanted:
                    values.pop(slot, None)
        if wanted not in values:
            raise Unclear
        return values[wanted]

    def _constant(self, value: Any) -> Any:
        """Returns an argument that is not made of the batch, as it is computed with."""
        if isinstance(value, Tensor):
            if id(value) not in self._constants:
                if sum(tensor.numel() for tensor in self._constants.values()) + value.numel() > _MOST_CONSTANT:
                    raise Unclear
                # The script's own memory stays as it is.
                self._constants[id(value)] = wide(value.detach()).clone()
            return self._constants[id(value)]
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
        return "cpu" if is_device else value

    def _part(self, tensor: Tensor, start: int, stop: int, change: Change) -> Tensor:
        """Returns a copy of some samples' rows."""
        dim = rows_dim(tensor, self._num_samples)
        if dim is None:
            # As long as all samples together: a part of it cannot be known.
            self._is_ragged |= tensor.dim() > 0
            return wide(tensor.detach()).clone()
        rows = tensor.shape[dim] // self._num_samples
        most = min(self._num_samples, self._most_samples) * rows
        if tensor.numel() // tensor.shape[dim] * most > _MOST_MADE:
            raise Unclear
        part = wide(tensor.detach().narrow(dim, 0, most)).clone()
        part = change.of(part) if part.is_floating_point() else part
        return part.narrow(dim, start * rows, (stop - start) * rows).clone()

    def _add_rows(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:
            self._rows[self._slot(tensor)] = tensor

    def _slot(self, tensor: Tensor) -> int:
        number: int = self._slots.setdefault(tensor, next(self._numbers))
        return number

    def _is_size(self, value: Any, length_asked: bool) -> bool:
        return is_size(value) or (length_asked and type(value) is int and value == self._num_samples)

    def _pack(self, value: Any, length_asked: bool) -> Any:
        if isinstance(value, Tensor):
            return Slot(self._slots[value]) if value in self._slots else value
        if not self._is_size(value, length_asked):
            return value
        return Number(value.of if is_size(value) else int)
