"""Numbers taken over a batch's data, without gradients, and what a script makes of its samples by them.

``adv = (adv - adv.mean()) / adv.std()`` makes each row depend on all others. Of another share it gives other rows, so the loss is
no longer a mean over samples, each by itself. So do rows of other samples in a fixed order: ``0.7 * x + 0.3 * x.flip(0)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_adaptive.wrap import losses
from hvd_adaptive.wrap.losses import Kind
from hvd_adaptive.wrap.orders import reorders
from hvd_adaptive.wrap.reasons import Reason

# Where the argument stands that says which dimensions a function works along, and those without it (None: all of them).
# Functions that only take rows from elsewhere (flip, gather) are not among these: see orders.py.
_ALONG: dict[str, tuple[int, Any]] = {
    "sum": (1, None), "mean": (1, None), "nansum": (1, None), "nanmean": (1, None), "std": (1, None), "var": (1, None),
    "std_mean": (1, None), "var_mean": (1, None), "max": (1, None), "min": (1, None), "amax": (1, None), "amin": (1, None),
    "aminmax": (1, None), "median": (1, None), "nanmedian": (1, None), "mode": (1, -1), "quantile": (2, None),
    "nanquantile": (2, None), "kthvalue": (2, -1), "prod": (1, None), "norm": (2, None), "linalg_norm": (2, None),
    "linalg_vector_norm": (2, None), "logsumexp": (1, None), "any": (1, None), "all": (1, None), "count_nonzero": (1, None),
    "argmax": (1, None), "argmin": (1, None), "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None),
    "normalize": (2, 1), "cumsum": (1, None), "cumprod": (1, None), "logcumsumexp": (1, None), "sort": (1, -1), "topk": (2, -1),
    "argsort": (1, -1),
}  # fmt: skip
_ARITHMETIC = {
    "add", "sub", "rsub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rdiv", "rtruediv", "floor_divide",
    "floordiv", "rfloordiv", "remainder", "pow", "rpow", "addcmul", "addcdiv",
}  # fmt: skip
_COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal"}
# Of all but their first argument only the type or the shape is taken.
_LIKE = {"type_as", "view_as", "expand_as", "reshape_as", "to"}


def kinds_of_data(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Sequence[tuple[Tensor, Kind]],
    results: Sequence[Tensor],
    num_samples: int,
) -> list[Kind]:
    """Returns the kinds of a function's results without gradients, given those arguments that are made of the batch."""
    name = losses.plain_name(func)
    source: Any = args[0] if args else kwargs.get("input")
    given = [(tensor, kind) for tensor, kind in made if _is_data(name, tensor, source)]
    is_along = any(tensor is source and kind in (Kind.ROWS, Kind.OTHER, Kind.RAGGED) for tensor, kind in made) and (
        _works_along_samples(func, name, args, kwargs, source, num_samples)
    )
    is_moved = reorders(func, args, kwargs, [tensor for tensor, _ in made], num_samples)
    kinds = []
    for number, result in enumerate(results):
        has_rows = losses.rows_dim(result, num_samples) is not None
        if is_along and result.shape != source.shape:
            kinds.append(Kind.REDUCED)
        elif not has_rows:
            is_ragged = all(kind is Kind.RAGGED or losses.rows_dim(tensor, num_samples) is None for tensor, kind in given)
            is_data = not any(kind in (Kind.REDUCED, Kind.MEAN, Kind.SUM) for _, kind in given)
            kinds.append(Kind.RAGGED if is_ragged and is_data and not is_along else Kind.REDUCED)
        elif is_moved or (is_along and _is_of_all(name, number, result)):
            kinds.append(Kind.OTHER)
        else:
            kinds.append(Kind.OTHER if _takes_statistic(name, given, result, num_samples) else Kind.ROWS)
    return kinds


def _is_data(name: str, tensor: Tensor, source: Any) -> bool:
    """Whether a function takes a tensor's numbers, rather than its type, its shape, or places by it."""
    # A gradient with respect to the samples, of their summed losses, is each sample's own.
    if name == "grad" or name.startswith("new_") or name.endswith("_like"):
        return False
    if name in _LIKE:
        return tensor is source
    return tensor is source if name == "getitem" else not losses.is_index(name, tensor)


def _works_along_samples(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, num_samples: int
) -> bool:
    if name not in _ALONG or num_samples == 1 or isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        return False
    default = _ALONG[name][1]
    if func in (F.softmax, F.log_softmax, F.softmin):
        # As torch chooses where the script does not; it then is told of a dimension that is None.
        default = 0 if source.dim() in (0, 1, 3) else 1
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
    dims = losses.dims_along(args, kwargs, (_ALONG[name][0], default), source)
    # By their sizes several dimensions may hold the samples.
    along = losses.rows_dim(source, num_samples)
    places = {0 if along is None else along} | ({0} if source.dim() and source.shape[0] % num_samples == 0 else set())
    return places <= dims


def _is_of_all(name: str, number: int, result: Tensor) -> bool:
    """Whether a function that works along the samples makes each row of others; sorted rows are still the batch's own."""
    if name in ("sort", "topk"):
        return number > 0
    # Sums of lengths are where samples begin in a tensor that holds them one behind the other.
    return name not in ("cumsum", "cumprod") or result.is_floating_point()


def _takes_statistic(name: str, given: Sequence[tuple[Tensor, Kind]], result: Tensor, num_samples: int) -> bool:
    """Whether rows come from numbers of the whole batch, or from rows that do.

    Whole numbers are often lengths (``arange(lengths.max()) < lengths``); they count in sums and products alone.
    """
    for tensor, kind in given:
        if kind is Kind.OTHER and not tensor.requires_grad and losses.rows_dim(tensor, num_samples) is not None:
            return True
        if kind not in (Kind.REDUCED, Kind.MEAN, Kind.SUM):
            continue
        if result.is_floating_point() and (tensor.is_floating_point() or name in _ARITHMETIC):
            return True
        if name in _COMPARISONS and tensor.is_floating_point() and tensor.dim() == 0:
            return True
    return False


def findings_of_argument(tensor: Tensor, kind: Kind) -> set[Reason]:
    """Returns what an argument of a forward shows; of one whole number a sample, such as an order, it is not known what for."""
    if kind in (Kind.CUT, Kind.SOME):
        return {Reason.SUB_BATCHES}
    is_data = tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() > 1
    return {Reason.MIXED} if kind is Kind.OTHER and is_data and not tensor.requires_grad else set()
