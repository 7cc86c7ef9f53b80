"""What a script makes of a batch between forward and backward: whether it is a mean over samples, each by itself.

Each tensor on the way from the forward's result to the loss is of a kind, which follows from the function that made it and the
kinds that it was given. A function that is not known here gives a kind that is not known either: then shares stay equal.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.sizes import first_of, is_size


class Kind(enum.Enum):
    """What a tensor that is made of the batch holds."""

    ROWS = "a row for each sample"
    CUT = "some of the rows"
    SOME = "those rows that a mask chooses, by each sample's own data"
    SUM = "a sum over samples"
    MEAN = "a mean over samples"
    REDUCED = "something of the whole batch, without gradients"
    RAGGED = "data of another length than the batch's, without gradients"
    OTHER = "something else"


# Why shares must be equal where a loss is of that kind.
REASONS = {
    Kind.ROWS: Reason.SUM_LOSS,
    Kind.CUT: Reason.SELECTED,
    Kind.SOME: Reason.SELECTED,
    Kind.OTHER: Reason.MIXED,
    Kind.REDUCED: Reason.MIXED,
    Kind.RAGGED: Reason.MIXED,
}


LOSSES = {
    getattr(F, name): inspect.signature(getattr(F, name))
    for name in (
        "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss",
        "gaussian_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "ctc_loss", "soft_margin_loss",
        "multilabel_soft_margin_loss", "multilabel_margin_loss", "multi_margin_loss", "hinge_embedding_loss",
        "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
    )
    if hasattr(F, name)
}  # fmt: skip
# They take a layer's statistics beside the data.
NORMS = {F.batch_norm, F.instance_norm}
_CUTS = {"narrow": 1, "select": 1, "unbind": 1, "split": 2, "chunk": 2, "tensor_split": 2, "__iter__": 1}
# What keeps a mean or a sum over samples what it is, if all else that it is given is not made of the batch.
_LINEAR = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "neg", "clone", "contiguous", "to", "float", "double", "half", "bfloat16",
    "type", "type_as", "view", "reshape", "squeeze", "unsqueeze", "sum", "mean", "stack", "cat", "flatten", "requires_grad",
    "cuda", "cpu", "alias", "getitem", "unbind", "iter", "view_as", "expand", "hstack", "vstack", "detach", "scale", "get",
}  # fmt: skip
# Work on each number by itself, or on each row, so that a row depends on no other.
_ROWWISE = (_LINEAR - {"sum", "mean"}) | {
    "pow", "rpow", "rdiv", "rtruediv", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "square",
    "abs", "sigmoid", "logsigmoid", "log_sigmoid", "tanh", "tanhshrink", "relu", "relu6", "leaky_relu", "prelu", "elu",
    "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid", "threshold",
    "clamp", "clip", "clamp_min", "clamp_max", "where", "maximum", "minimum", "sin", "cos", "tan", "atan", "atan2", "erf", "erfc",
    "lgamma", "digamma", "lerp", "dropout", "nan_to_num", "masked_fill", "expand_as", "repeat_interleave", "linear", "addcmul",
    "conv1d", "conv2d", "conv3d", "interpolate", "pad", "fold", "unfold", "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d",
    "layer_norm", "pairwise_distance", "one_hot", "embedding", "xlogy", "frac", "sign", "heaviside", "hypot", "logit", "grad",
    "permute", "transpose", "t", "swapaxes", "movedim", "real", "imag", "view_as_real", "view_as_complex", "cross", "diff",
}  # fmt: skip
# Some of these move rows, or make others of them.
_MOVES = {
    "stack", "cat", "hstack", "vstack", "repeat_interleave", "expand", "expand_as", "permute", "transpose", "t", "swapaxes",
    "movedim", "unbind", "iter", "unfold", "fold", "grad", "diff",
}  # fmt: skip
# Work along dimensions: where the argument stands that says which, and those without it (None: all of them).
_ALONG: dict[str, tuple[int, Any]] = {
    "softmax": (1, None), "log_softmax": (1, None), "logsumexp": (1, None), "amax": (1, None), "amin": (1, None),
    "max": (1, None), "min": (1, None), "argmax": (1, None), "prod": (1, None), "std": (1, None), "var": (1, None),
    "norm": (2, None), "vector_norm": (2, None), "normalize": (2, 1), "cosine_similarity": (2, 1), "gather": (1, None),
    "index_select": (1, None), "cumsum": (1, None), "cumprod": (1, None), "topk": (2, -1), "sort": (1, -1),
    "argsort": (1, -1), "median": (1, None),
    "softmin": (1, None), "glu": (1, -1), "scatter": (1, None), "scatter_add": (1, None), "flip": (1, None), "roll": (2, None),
    "take_along_dim": (2, None), "logcumsumexp": (1, None), "count_nonzero": (1, None), "any": (1, None), "all": (1, None),
}  # fmt: skip
_PRODUCTS = {"matmul", "mm", "bmm", "baddbmm", "einsum", "tensordot", "bilinear", "rmatmul", "dot", "mv", "inner", "addmm"}


def plain_name(func: Any) -> str:
    """Returns a torch function's name, without what tells operators and in-place functions apart."""
    return str(getattr(func, "__name__", "")).strip("_")


def rows_dim(tensor: Tensor, num_samples: int) -> int | None:
    """Returns the dimension along which a tensor holds the batch's samples, some rows each; None if there is none."""
    sizes = list(tensor.shape)
    if num_samples in sizes:
        return sizes.index(num_samples)
    return 0 if sizes and sizes[0] and sizes[0] % num_samples == 0 else None


def cuts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor], num_samples: int) -> bool:
    """Whether a function takes some of the rows of its first argument; a slice counts even if it takes all of them."""
    source = args[0] if args else None
    if not isinstance(source, Tensor) or source.dim() == 0 or source.shape[0] != num_samples:
        return False
    name = getattr(func, "__name__", "")
    if name == "__getitem__":
        first = first_of(args[1])
        if isinstance(first, (Tensor, list, range)):
            # A permutation, as of mixup, or a choice.
            return any(tensor.dim() == 0 or tensor.shape[0] != num_samples for tensor in results)
        return not (first is None or first is Ellipsis or first == slice(None))
    if name == "masked_select":
        return True
    position = _CUTS.get(name)
    return position is not None and bool(_argument(args, kwargs, position, 0) == 0)


def selects(func: Any, args: tuple[Any, ...], num_samples: int) -> bool:
    """Whether a function that is given rows with gradients takes some of them, or in another order."""
    name = plain_name(func)
    if name in ("masked_select", "nonzero", "take", "unique"):
        return True
    if name == "getitem" and len(args) > 1:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        for part in parts:
            if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
                return True
        first = parts[0] if parts else None
        if isinstance(first, (list, range)) and all(isinstance(index, int) for index in first):
            return list(first) != list(range(num_samples))
        if isinstance(first, Tensor) and first.dim() == 1 and args[0].dim() and args[0].shape[0] == num_samples:
            order = torch.arange(num_samples, device=first.device, dtype=first.dtype)
            return first.shape != order.shape or not torch.equal(first, order)
    return False


def mixes_inside(func: Any, args: tuple[Any, ...], results: Sequence[Tensor], num_samples: int) -> bool:
    """Whether a function within a forward chooses among its batch's samples, or compares each with each."""
    given = [value for value in args if isinstance(value, Tensor)]
    if not given or not any(tensor.requires_grad for tensor in given):
        return False
    name = plain_name(func)
    if name == "masked_select":
        return True
    if name == "getitem" and len(args) > 1:
        return _takes_some(first_of(args[1]), given[0], num_samples)
    if name == "index_select" and len(args) > 2 and args[1] == 0:
        return _takes_some(args[2], given[0], num_samples)
    if name in ("topk", "sort", "kthvalue") and given[0].dim() == 1 and given[0].numel() % num_samples == 0:
        # Of what has a number for each sample, or for each place of each.
        return not is_weight(given[0])
    if name in ("mm", "matmul", "cdist") and len(given) > 1:
        whole = all(tensor.dim() == 2 and tensor.requires_grad and not is_weight(tensor) for tensor in given[:2])
        return whole and any(tuple(tensor.shape) == (num_samples, num_samples) for tensor in results)
    return False


def _takes_some(index: Any, source: Tensor, num_samples: int) -> bool:
    """Whether an index takes some of the batch's rows by a mask, or another number of rows than there are samples."""
    if isinstance(index, (list, range)):
        index = torch.tensor(list(index)) if all(isinstance(value, int) for value in index) else None
    if not isinstance(index, Tensor):
        return False
    if index.dtype in (torch.bool, torch.uint8):
        return True
    of_rows = index.dim() == 1 and source.shape[0] == num_samples and not is_weight(source)
    return of_rows and index.shape[0] % num_samples != 0


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or data that no function made with gradients."""
    base = tensor._base
    return tensor.is_leaf or (base is not None and base.is_leaf)


def kind_of_loss(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[tuple[Tensor, Kind]], num_samples: int
) -> Kind:
    """Returns the kind of a function's result with gradients, given the kinds of those arguments that are made of the batch."""
    name = plain_name(func)
    kinds = {Kind.ROWS if kind is Kind.OTHER and is_index(name, tensor) else kind for tensor, kind in given}
    if func in LOSSES:
        if kinds != {Kind.ROWS}:
            return Kind.CUT if Kind.CUT in kinds else Kind.OTHER
        return {"sum": Kind.SUM, "none": Kind.ROWS}.get(reduction(func, args, kwargs), Kind.MEAN)
    if kinds == {Kind.ROWS}:
        return _kind_of_rows(func, name, args, kwargs, given, num_samples)
    if not kinds <= {Kind.SUM, Kind.MEAN}:
        return Kind.CUT if kinds <= {Kind.CUT, Kind.ROWS} else Kind.OTHER
    return _kind_of_reduced(name, args, kinds, given[0][0], len(given), num_samples)


def _kind_of_reduced(
    name: str, args: tuple[Any, ...], kinds: set[Kind], source: Tensor, count: int, num_samples: int
) -> Kind:
    if name not in _LINEAR:
        return Kind.OTHER
    if name in ("mul", "div", "true_divide") and count > 1:
        return Kind.OTHER
    if name in ("div", "true_divide") and args[0] is not source:
        return Kind.OTHER
    if kinds == {Kind.MEAN} and name in ("mul", "div", "true_divide") and any(is_size(value) for value in args):
        return Kind.OTHER
    if kinds == {Kind.SUM} and name in ("div", "true_divide"):
        divisor = args[1] if len(args) > 1 else None
        # Of a number that the script has from this batch, the mean over it comes out whatever its size.
        return Kind.MEAN if divisor is not None and is_size(divisor) and divisor % num_samples == 0 else Kind.SUM
    # A sum beside a mean is neither.
    return next(iter(kinds)) if len(kinds) == 1 else Kind.OTHER


def _kind_of_rows(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[tuple[Tensor, Kind]], num_samples: int
) -> Kind:
    source = given[0][0]
    along = rows_dim(source, num_samples)
    if name in ("sum", "mean"):
        dims = dims_of(name, args, kwargs, source)
        return Kind.ROWS if along not in dims else (Kind.SUM if name == "sum" else Kind.MEAN)
    if selects(func, args, num_samples):
        return Kind.CUT
    if name in _PRODUCTS:
        batched = all(tensor.dim() >= 3 and tensor.shape[0] == num_samples for tensor, _ in given)
        is_product = len(given) == 1 and source.dim() > 1 and args[0] is source
        return Kind.ROWS if is_product or (batched and name in ("bmm", "matmul", "baddbmm")) else Kind.OTHER
    if name in _ALONG:
        if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
            return Kind.ROWS
        return Kind.ROWS if along not in dims_of(name, args, kwargs, source) else Kind.OTHER
    if name == "cat":
        return Kind.ROWS if len(given) == len(list(args[0])) or _argument(args, kwargs, 1, 0) not in (0, along) else Kind.OTHER
    return Kind.ROWS if name in _ROWWISE else Kind.OTHER


def kind_of_some(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[tuple[Tensor, Kind]]) -> Kind:
    """Returns the kind of a function's result, given arguments that are made of the batch: rows that a mask chooses."""
    if any(kind is not Kind.SOME or tensor.shape[:1] != given[0][0].shape[:1] for tensor, kind in given):
        return Kind.CUT
    if func in LOSSES:
        is_smoothed = bool(LOSSES[func].bind(*args, **kwargs).arguments.get("label_smoothing"))
        kinds = {"sum": Kind.SUM, "none": Kind.SOME, "mean": Kind.CUT if is_smoothed else Kind.MEAN}
        return kinds.get(reduction(func, args, kwargs), Kind.CUT)
    name, source = plain_name(func), given[0][0]
    if name in ("sum", "mean"):
        dims = dims_of(name, args, kwargs, source)
        if 0 not in dims:
            return Kind.SOME
        return Kind.CUT if len(dims) < source.dim() else Kind.SUM if name == "sum" else Kind.MEAN
    if name in _ALONG:
        return Kind.CUT if 0 in dims_of(name, args, kwargs, source) else Kind.SOME
    return Kind.SOME if name in _ROWWISE - _MOVES else Kind.CUT


def works_along(name: str) -> bool:
    """Whether a function of that name takes dimensions, and no other numbers."""
    return name in _ALONG and name not in ("norm", "vector_norm", "normalize")


def may_keep_rows(
    func: Any, args: tuple[Any, ...], given: Iterable[tuple[Tensor, Kind]], results: Sequence[Tensor], num_samples: int
) -> bool:
    """Whether a function that is not known here may give a row for each row, each by itself: the numbers must show it."""
    name = plain_name(func)
    is_known = name in _ALONG or name in _PRODUCTS - {"einsum"} or name == "cat" or func in LOSSES
    if is_known or selects(func, args, num_samples) or any(kind is not Kind.ROWS for _, kind in given):
        return False
    return all(tensor.dim() > 0 and tensor.shape[0] == num_samples for tensor in results)


def is_index(name: str, tensor: Tensor) -> bool:
    """Whether a function takes rows or numbers by a tensor that says which."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return is_whole and name in ("getitem", "setitem", "gather", "index_select", "take_along_dim", "take", "embedding")


def dims_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> set[int]:
    """Returns the dimensions that a function works along, given its name; all of them where it is not told any."""
    return dims_along(args, kwargs, _ALONG.get(name, (1, None)), tensor)


def dims_along(args: tuple[Any, ...], kwargs: dict[str, Any], place: tuple[int, Any], tensor: Tensor) -> set[int]:
    """Returns the dimensions that a function works along, given where the argument stands that says so, and its default."""
    value = _argument(args, kwargs, *place)
    if value is None:
        return set(range(max(tensor.dim(), 1)))
    values = [value] if isinstance(value, int) else list(value)
    return {dim % max(tensor.dim(), 1) for dim in values}


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: Any) -> Any:
    value = kwargs.get("dim", kwargs.get("axis", kwargs.get("dims", args[position] if len(args) > position else default)))
    return value if value is None or isinstance(value, (int, list, tuple)) else default


def reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns how one of torch's loss functions reduces its samples: "mean", "sum", "none" and the like."""
    given = LOSSES[func].bind(*args, **kwargs).arguments
    if given.get("size_average") is False:
        return "sum"
    if given.get("reduce") is False:
        return "none"
    return str(given.get("reduction", "mean"))


def targets_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the targets of one of torch's loss functions that is a mean over those that it counts, each by its class's weight;
    None of another one."""
    if func not in (F.cross_entropy, F.nll_loss) or reduction(func, args, kwargs) != "mean":
        return None
    target = LOSSES[func].bind(*args, **kwargs).arguments["target"]
    # A mean over samples, if they are chances of the classes.
    return None if target.is_floating_point() else target


def weighs_samples(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int) -> bool:
    """Whether one of torch's loss functions gives samples weights that depend on the others, by classes or targets left out."""
    target, given = targets_of(func, args, kwargs), LOSSES[func].bind(*args, **kwargs).arguments
    if target is None:
        return False
    ignored = given.get("ignore_index", -100)
    return given.get("weight") is not None or ignored >= 0 or not bool(left_out(target, ignored, num_samples)[1])


def mean_over_samples(func: Any, num_samples: int, *args: Any, **kwargs: Any) -> Tensor:
    """Returns a mean, or one of torch's loss functions, as a mean over samples, whatever the targets of each count."""
    if func not in LOSSES:
        return torch.sum(args[0]) / num_samples
    given = LOSSES[func].bind(*args, **kwargs)
    given.arguments.update(reduction="sum", size_average=None, reduce=None)
    return func(*given.args, **given.kwargs) / num_samples


def left_out(target: Tensor, ignored: int, num_samples: int) -> tuple[Tensor, Tensor]:
    """Returns how many targets of a sample a loss leaves out, and whether these are as many of each sample: then it still is a
    mean over samples, as where a language model has no target for a sequence's last place."""
    is_ignored = target == ignored
    of_one = target.numel() // max(num_samples, 1)
    if of_one * num_samples != target.numel() or of_one == 0 or (target.dim() == 1 and of_one == num_samples > 1):
        return is_ignored.sum(), ~is_ignored.any()
    rows = is_ignored.reshape(num_samples, of_one)
    of_samples = rows.sum(1)
    as_many = (of_samples == of_samples[0]).all()
    if target.dim() == 1:
        # Each place of all samples may come first. Then what a whole sample leaves out returns within what is taken for a row.
        kept = ~rows[0]
        num_stretches = kept[0].int() + (kept[1:] & ~kept[:-1]).sum()
        as_many = as_many & (rows == rows[0]).all() & (num_stretches <= 1)
    return of_samples[0], as_many


def goes_by_rows_of_batch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an embedding that is trained does something with a row that depends on the batch's samples."""
    if func not in (F.embedding, F.embedding_bag) or not any(tensor.requires_grad for tensor in args[:2]):
        return False
    return bool(kwargs.get("scale_grad_by_freq")) or kwargs.get("max_norm") is not None


def reduces_by_itself(made: Iterable[tuple[Tensor, Kind]]) -> bool:
    """Whether an autograd.Function of the script's own gives something of the whole batch: its backward cannot be looked at.

    Args:
        made: tensors that are made of the batch, and their kinds.
    """
    return any(kind is not Kind.ROWS and is_own_function(tensor.grad_fn) for tensor, kind in made)


def is_own_function(node: Any) -> bool:
    """Whether a node of autograd's graph is an autograd.Function's that neither torch nor Horovod has."""
    own = getattr(type(node), "_forward_cls", None)
    return own is not None and not own.__module__.startswith(("torch.", "horovod."))
