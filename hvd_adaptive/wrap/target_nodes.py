"""Means over targets in autograd's graph of a loss: what divides them, and where its samples' gradients have rows.

Found are cross-entropies that are means (with class weights, or without some targets), and sums of cross-entropies, or of losses
times a mask, that are divided by what their targets or the mask add up to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_adaptive.wrap.graphs import is_packed, signed, walk

# Nodes of a loss's graph that are searched, and those between two that give the same numbers another shape or type.
_MOST_NODES, _MOST_BETWEEN = 512, 4
# A loss is linear in what these are given, if nothing else that they are given has gradients. Else a mean's own value would go
# into gradients, and that has another divisor.
_LINEAR = {
    "Add", "Sub", "Rsub", "Neg", "Mul", "Div", "Sum", "Mean", "Stack", "Cat", "Unbind", "Select", "Split", "Slice", "View",
    "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Expand",
}  # fmt: skip
_RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Alias", "Contiguous", "Clone")
# How a cross-entropy is reduced.
_NONE, _MEAN, _SUM = 0, 1, 2
# How far apart a divisor and what the targets add up to may be, relative to it: some scripts add a small number.
_CLOSE = 1e-5


class Mean(NamedTuple):
    """One mean over targets.

    Attributes:
        node: the graph's node that gives the gradients of the samples, some rows each.
        targets: what counts: targets, or a mask.
        counts: what those of each sample count, shape (num_samples,), float64; None if these are not equally many.
    """

    node: Any
    targets: Tensor
    counts: Tensor | None


def means_in(loss: Iterable[Tensor], num_samples: int) -> list[Mean]:
    """Returns the means over targets that a loss is made of, in the same order on all ranks.

    Args:
        loss: what backward is called on.
        num_samples: of the batch.
    """
    means: dict[Any, Mean] = {}
    nodes = [tensor.grad_fn for tensor in loss]
    for node in walk(nodes, _MOST_NODES, lambda node: node not in means and _is_linear(node)):
        if (found := _mean(node, num_samples)) is not None:
            means[node] = found
    return list(means.values())


def quotient(result: Any, num_samples: int) -> Mean | None:
    """Returns the mean over targets that a quotient is; None if it is none, or without gradients."""
    node = result.grad_fn if isinstance(result, Tensor) else None
    if node is None or _is_cross_entropy(node):
        return None
    try:
        return _mean(node, num_samples)
    except RuntimeError:
        # The script has changed what the graph keeps. It will fail in backward by itself, if it comes to that.
        return None


def rows_before(mean: Mean) -> Any:
    """Returns the node whose results a cross-entropy with smoothed labels takes, rows of all samples; None if it is not found."""
    node = mean.node
    for _ in range(_MOST_BETWEEN):
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
        if node is not None and node.name().startswith("LogSoftmax"):
            return node
    return None


def _is_linear(node: Any) -> bool:
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    factors = [number for number, (following, _) in enumerate(node.next_functions) if following is not None]
    if name == "Mul":
        return len(factors) == 1
    return name in _LINEAR and (name != "Div" or factors == [0])


def _mean(node: Any, num_samples: int) -> Mean | None:
    if _is_cross_entropy(node):
        return _of_cross_entropy(node, num_samples) if node._saved_reduction == _MEAN else None
    if not node.name().startswith("DivBackward") or is_packed(node, "other") or not _is_linear(node):
        return None
    divisor, sums = node._saved_other, node.next_functions[0][0]
    found = _of_sum(sums, num_samples)
    if found is None or found.counts is None or not isinstance(divisor, Tensor) or divisor.numel() != 1:
        return None
    total, by = float(found.counts.sum()), float(divisor)
    # Without any targets a script may divide by something else.
    return found if total == 0 or abs(total - by) <= _CLOSE * abs(total) else None


def _of_sum(node: Any, num_samples: int) -> Mean | None:
    """Returns what a sum of losses would be as a mean."""
    if node is None:
        return None
    if _is_cross_entropy(node):
        return _of_cross_entropy(node, num_samples) if node._saved_reduction == _SUM else None
    if node.name() != "SumBackward0":
        return None
    rows = node.next_functions[0][0]
    for _ in range(_MOST_BETWEEN):
        if rows is None or not rows.name().startswith(_RESHAPES):
            break
        rows = rows.next_functions[0][0]
    if rows is None:
        return None
    if _is_cross_entropy(rows):
        return _of_cross_entropy(rows, num_samples) if rows._saved_reduction == _NONE else None
    if not rows.name().startswith("MulBackward") or is_packed(rows, "self") or is_packed(rows, "other"):
        return None
    masks = [mask for mask in (rows._saved_self, rows._saved_other) if isinstance(mask, Tensor) and not mask.requires_grad]
    if len(masks) != 1 or not masks[0].dim():
        return None
    return Mean(node, masks[0], _by_samples(masks[0].double(), num_samples))


def _of_cross_entropy(node: Any, num_samples: int) -> Mean | None:
    if any(is_packed(node, name) for name in ("target", "weight", "total_weight")):
        return None
    target, weight = node._saved_target, node._saved_weight
    counted = target != signed(node._saved_ignore_index)
    counts = counted.double() if weight is None else weight.double()[torch.where(counted, target, 0).long()] * counted
    return Mean(node, target, _by_samples(counts, num_samples))


def _by_samples(counts: Tensor, num_samples: int) -> Tensor | None:
    return None if counts.numel() % num_samples else counts.reshape(num_samples, -1).sum(1)


def _is_cross_entropy(node: Any) -> bool:
    return bool(node.name().startswith("NllLoss"))
