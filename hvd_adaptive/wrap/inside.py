"""What a forward of the script's own does with its batch: sizes that are fixed, numbers of the whole batch, losses that add up.

Within a forward most functions are a library's, whose layers treat each sample by itself and take sizes from what they are given.
So a forward is not followed from tensor to tensor; what is looked at are calls in the script's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.wrap import losses, sizes
from hvd_adaptive.wrap.decisions import divides_by_length, scales_by_length
from hvd_adaptive.wrap.made_of_batch import MadeOfBatch
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.tensors import tensors_in

_RESHAPES = {"view", "reshape", "expand", "repeat"}
_FACTORIES = {"zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full"}
# Over the samples these make a number of the whole batch, which each sample's result then depends on.
_STATISTICS = {
    "mean", "sum", "std", "var", "amax", "amin", "max", "min", "norm", "softmax", "log_softmax", "normalize", "logsumexp",
    "median", "cumsum",
}  # fmt: skip
_OF_ALL = {"std", "var", "amax", "amin", "max", "min", "norm", "median"}
# A loss that is one number goes through these to where it was reduced.
_BETWEEN = (
    "Add", "Sub", "Mul", "Div", "Neg", "Stack", "Cat", "ToCopy", "Clone", "View", "Unsqueeze", "Squeeze", "Select", "Alias",
    "ReshapeAlias",
)  # fmt: skip
# What a regularizer does with weights before it adds them up.
_OF_WEIGHTS = {
    "Pow", "Mul", "Div", "Abs", "Norm", "LinalgVectorNorm", "View", "Add", "Sub", "ToCopy", "Exp", "Log", "Neg", "Sum", "Mean",
    "Sigmoid", "Softplus", "Softmax", "Reciprocal", "Sqrt", "Select", "Unsqueeze", "Squeeze", "Stack", "Cat", "Clamp",
}  # fmt: skip
_MOST_NODES = 64


def findings(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor], num_samples: int, *, length_asked: bool
) -> set[Reason]:
    """Returns what a torch function shows that the script's own code has called within a forward.

    Args:
        func: the function, with its arguments and results.
        num_samples: the batch's.
        length_asked: the script has asked how long the batch is in a way that gives a plain number.
    """
    found: set[Reason] = set()
    name = losses.plain_name(func)
    if not length_asked and _is_of_fixed_size(name, args, kwargs, num_samples):
        found.add(Reason.FIXED_SIZE)
    if _is_of_whole_batch(name, args, kwargs, results, num_samples):
        found.add(Reason.MIXED)
    return found


def _is_of_fixed_size(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int) -> bool:
    """Whether a tensor is made or given another shape for as many samples as there are, by a number that is not asked of it."""
    if name in _RESHAPES and len(args) > 1:
        given = _numbers(args[1:])[:1]
    elif name in _FACTORIES:
        given = _numbers([kwargs["size"]] if "size" in kwargs else args[1:] if name.startswith("new_") else args)
        # The samples stand first or, behind the layers of a recurrent state, second.
        given = [] if any(sizes.is_size(number) for number in given) else given[:2]
    else:
        return False
    return any(type(number) is int and number == num_samples for number in given)


def _numbers(values: Any) -> list[Any]:
    first = values[0] if len(values) else None
    values = first if isinstance(first, (list, tuple)) else values
    return [value for value in values if isinstance(value, int)]


def _is_of_whole_batch(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor], num_samples: int, *, many: bool = False
) -> bool:
    source = args[0] if args else None
    if name not in _STATISTICS or not isinstance(source, Tensor) or not source.dim() or not results:
        return False
    is_of_two = len(args) > 1 and isinstance(args[1], Tensor)
    if is_of_two or not source.is_floating_point() or not holds_samples(source, num_samples, many=many):
        return False
    dims = losses.dims_of(name, args, kwargs, source)
    # A mean of all numbers is how a loss ends, which has its own look.
    is_one_number = results[0].dim() == 0
    samples = source.shape.index(num_samples) if many and num_samples in source.shape else 0
    return name in _OF_ALL and source.requires_grad if is_one_number else samples in dims


def kind_of_number(loss: Tensor, means: Collection[Any]) -> losses.Kind:
    """Returns what a number is that a forward has returned: a mean over samples, a sum, or OTHER if that cannot be read.

    Args:
        loss: one number, with gradients.
        means: autograd's nodes of means, and of sums that were divided by the number of samples.
    """
    nodes: list[Any] = [loss.grad_fn]
    known: set[Any] = set()
    kind = losses.Kind.MEAN
    while nodes and len(known) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in known or node in means:
            continue
        known.add(node)
        name = _plain(node)
        is_own = losses.is_own_function(node)
        if is_own or (name == "Sum" and not is_of_parameters(node) and not _is_of_numbers(node)):
            return losses.Kind.SUM
        if name in _BETWEEN or name == "Sum":
            nodes.extend(following for following, _ in node.next_functions)
        elif name != "Mean" and not is_weight(node) and not is_of_parameters(node):
            kind = losses.Kind.OTHER
    return kind


def may_be_of_whole_batch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor], num_samples: int
) -> bool:
    """Whether a function of the script's own code may make a number of all rows, of which each sample has several."""
    return _is_of_whole_batch(losses.plain_name(func), args, kwargs, results, num_samples, many=True)


def scales_of_rows(args: tuple[Any, ...], results: list[Tensor], num_samples: int) -> list[Tensor]:
    """Returns the numbers that rows are combined with: they may be of all rows, as the largest one."""
    if not any(losses.rows_dim(tensor, num_samples) == 0 for tensor in results):
        return []
    return [value for value in args if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1]


def pairs_samples(
    func: Any, args: tuple[Any, ...], results: list[Tensor], num_samples: int, is_made: Callable[[Tensor], bool]
) -> bool:
    """Whether a function may compare each of the batch's rows with each: it makes a table that has as many both ways.

    Args:
        func: the function, with its arguments and results.
        num_samples: the batch's.
        is_made: whether a tensor is made of the batch.
    """
    given = [value for value in tensors_in(args) if value.requires_grad and is_made(value)]
    shape = results[0].shape if len(results) == 1 else ()
    if len(given) < 2 or len(shape) < 2 or 0 in shape[:2] or shape[0] % num_samples or shape[1] % num_samples:
        return False
    if losses.plain_name(func) in ("mm", "matmul", "cdist", "einsum", "tensordot", "inner"):
        return len(shape) == 2
    # By broadcasting.
    wide = [tensor.shape for tensor in given if tensor.dim() >= len(shape)]
    return any(of[0] == 1 for of in wide) and any(1 in of[1:] for of in wide) and min(shape[:2]) > 1


def _is_of_numbers(node: Any) -> bool:
    """Whether a sum adds up several losses, as ``torch.stack(losses).sum()`` does."""
    return all(following is not None and following.name().startswith("Stack") for following, _ in node.next_functions)


def is_of_parameters(node: Any) -> bool:
    """Whether a sum is of weights alone, as a regularizer's."""
    nodes = [following for following, _ in node.next_functions]
    for _ in range(_MOST_NODES):
        if not nodes:
            return True
        node = nodes.pop()
        if node is None or not (is_weight(node) or _plain(node) in _OF_WEIGHTS):
            return False
        nodes.extend(following for following, _ in node.next_functions)
    return False


def is_weight(node: Any) -> bool:
    """Whether a node of autograd's graph is a tensor's that gets a gradient."""
    return str(node.name()).endswith("AccumulateGrad")


def _plain(node: Any) -> str:
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def divides_by_number(func: Any, args: tuple[Any, ...], frame: FrameType) -> bool:
    """Whether something is divided by the number of samples, as the script has it from this batch."""
    if losses.plain_name(func) not in ("div", "true_divide") or len(args) < 2 or not isinstance(args[1], int):
        return False
    return sizes.is_size(args[1]) or divides_by_length(frame, lambda value: isinstance(value, Tensor) and value.dim() > 0)


def kind_with_len(kind: losses.Kind, func: Any, args: tuple[Any, ...], made: MadeOfBatch) -> losses.Kind:
    """Returns what a product or quotient outside of a forward holds, which without ``len(x)`` would be of the kind given.

    Python makes a plain number of a length, so that what is computed from it is read in the script's line.
    """
    if losses.plain_name(func) not in ("mul", "div", "true_divide") or len(args) < 2:
        return kind
    number = next((value for value in args[:2] if type(value) in (int, float)), None)
    frame = None if number is None else sizes.calling_frame()
    if number is None or frame is None:
        return kind
    if kind is losses.Kind.SUM:
        divides = losses.plain_name(func) != "mul" and args[1] is number and number == made.num_samples
        divides = divides and made.kind(args[0]) is losses.Kind.SUM
        if divides and divides_by_length(frame, made.holds_samples):
            return losses.Kind.MEAN
    return losses.Kind.OTHER if scales_by_length(frame, number, made.holds_samples) else kind


def holds_samples(value: Any, num_samples: int, *, many: bool = False) -> bool:
    """Whether a value may hold a row for each sample; or many rows, and no other dimension as long as the batch."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.dim():
        return False
    first = value.shape[0]
    if many:
        return 0 < first != num_samples and (num_samples in value.shape or first % num_samples == 0)
    return first == num_samples


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, num_samples: int) -> Any:
    """Returns what a question for a tensor's size gives, in numbers that know whether they count the batch's samples."""
    with torch._C.DisableTorchFunction():
        tensor = args[0] if args else None
        if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter):
            return result
        shape, first = list(tensor.shape), losses.rows_dim(tensor, num_samples)
    if first is None:
        return result
    marked = [sizes.as_dimension(size) if size == num_samples else size for size in shape]
    marked[first] = sizes.as_size(shape[first], num_samples)
    if isinstance(result, tuple):
        return torch.Size(marked)
    asked = args[1] if len(args) > 1 else kwargs.get("dim")
    return marked[asked] if isinstance(asked, int) else result
