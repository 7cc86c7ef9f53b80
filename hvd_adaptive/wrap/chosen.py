"""Rows that a mask chooses, as ``logits[mask]`` and ``loss[mask]``: each sample has some, and their mean is one over targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Number
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.wrap import losses, sizes
from hvd_adaptive.wrap.losses import Kind
from hvd_adaptive.wrap.tensors import tensors_in


class Chosen:
    """The tensors of one batch whose rows a mask has chosen.

    Attributes:
        are_counted: the script has asked how many such rows there are, which gives a plain number.
    """

    def __init__(self) -> None:
        # By id, with the tensor itself, so that its id is not used again.
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}
        self._reduced: dict[int, tuple[Tensor, Tensor]] = {}
        self.are_counted = False

    def clear(self) -> None:
        """Forgets them."""
        self._masks.clear()
        self._reduced.clear()
        self.are_counted = False

    def kind(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[tuple[Tensor, Kind]],
        results: Sequence[Tensor], num_samples: int,
    ) -> Kind | None:  # fmt: skip
        """Returns what a function gives that chooses rows by a mask, or is given such; None if it does neither.

        Args:
            func: the function, with its arguments and results.
            made: those arguments that are made of the batch, and what they hold.
            num_samples: of the batch.
        """
        kinds = {kind for _, kind in made}
        self.are_counted |= func in sizes.SIZES and Kind.SOME in kinds
        if not results:
            return None
        if self.are_counted and kinds & {Kind.SUM, Kind.MEAN, Kind.SOME} and _takes_others(func, args, kwargs, made):
            # It may be scaled by their number.
            return Kind.CUT
        mask = _mask_in(func, args, num_samples)
        if mask is not None and {id(args[0]), id(mask)} <= {id(tensor) for tensor, kind in made if kind is Kind.ROWS}:
            kind = Kind.SOME
        else:
            if Kind.SOME not in kinds:
                return None
            kind, mask = losses.kind_of_some(func, args, kwargs, made), self.mask(tensor for tensor, _ in made)
            # By a further mask others may be chosen the next time, also if these were all.
            is_other = kind is Kind.SOME and any(result.shape[:1] != made[0][0].shape[:1] for result in results)
            if mask is None or is_other or _is_by_mask(func, args):
                kind = Kind.CUT
        if kind is not Kind.CUT and mask is not None:
            kept = self._masks if kind is Kind.SOME else self._reduced
            kept.update((id(tensor), (tensor, mask)) for tensor in results)
        return kind

    def is_reduced(self, value: Any) -> bool:
        """Whether a value is a sum or a mean over chosen rows."""
        return id(value) in self._reduced

    def mask(self, tensors: Iterable[Tensor]) -> Tensor | None:
        """Returns the mask by which the rows of tensors were chosen; None if it was not one for all of them."""
        masks = [self._masks[id(tensor)][1] for tensor in tensors if id(tensor) in self._masks]
        return masks[0] if masks and all(mask is masks[0] or torch.equal(mask, masks[0]) for mask in masks) else None

    def means(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function makes one number of chosen rows, which is their mean."""
        made = [(value, Kind.SOME) for value in args if isinstance(value, Tensor) and id(value) in self._masks]
        return bool(made) and losses.kind_of_some(func, args, kwargs, made) is Kind.MEAN


def _takes_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[tuple[Tensor, Kind]]) -> bool:
    """Whether a function takes numbers, other than of dimensions, or tensors that are not made of the batch."""
    known, name = {id(tensor) for tensor, _ in made}, losses.plain_name(func)
    if name in ("sum", "mean") or losses.works_along(name):
        return False
    values: Iterable[Any] = (*args, *kwargs.values())
    if func in losses.LOSSES:
        given, parameters = losses.LOSSES[func].bind(*args, **kwargs).arguments, losses.LOSSES[func].parameters
        values = [value for key, value in given.items() if isinstance(value, Tensor) or value != parameters[key].default]
    others = [value for value in values if id(value) not in known]
    return any(isinstance(value, (Tensor, Number, tuple, list)) for value in others)


def _is_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    index = args[1:2] if losses.plain_name(func) in ("getitem", "masked_select") else ()
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(index))


def _mask_in(func: Any, args: tuple[Any, ...], num_samples: int) -> Tensor | None:
    """Returns the mask by which a function takes places of its first argument, some of each sample; None if it does not."""
    name = losses.plain_name(func)
    if name not in ("getitem", "masked_select") or len(args) < 2:
        return None
    source, mask = args[:2]
    if isinstance(mask, tuple) and mask and all(isinstance(part, (slice, int, EllipsisType)) for part in mask[1:]):
        mask = mask[0]
    if not isinstance(source, Tensor) or not isinstance(mask, Tensor) or mask.dtype is not torch.bool or not mask.dim():
        return None
    fits = mask.shape == (source.shape[: mask.dim()] if name == "getitem" else source.shape)
    return mask if fits and mask.shape[0] and mask.shape[0] % num_samples == 0 else None
