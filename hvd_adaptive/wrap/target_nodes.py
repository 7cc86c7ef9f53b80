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
from hvd_adaptive.wrap.inside import is_of_parameters, is_weight

# Nodes of a loss's graph that are searched, and those between two that give the same numbers another shape or type.
_MOST_NODES, _MOST_BETWEEN = 512, 4
# Nodes behind a mean among which a mask is looked for.
_MOST_BEHIND = 24
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
        rows: the sample of each row of these gradients, if a mask has chosen them; None: they are equally many of each sample.
        is_certain: it cannot be a sum that is divided by the number of samples, which is as large by chance.
    """

    node: Any
    targets: Tensor
    counts: Tensor | None
    rows: Tensor | None = None
    is_certain: bool = True

    @property
    def kind(self) -> str:
        """What tells it from others of the same loss."""
        return f"{self.node.name()}{' chosen' if self.rows is not None else ''}"


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
    if _is_mean(node):
        return _of_chosen(node, num_samples)
    if not node.name().startswith("DivBackward") or is_packed(node, "other") or not _is_linear(node):
        return None
    divisor, sums = node._saved_other, node.next_functions[0][0]
    found = _of_sum(sums, num_samples)
    if found is None or found.counts is None or not isinstance(divisor, Tensor) or divisor.numel() != 1:
        return None
    total, by = float(found.counts.sum()), float(divisor)
    # Without any targets a script may divide by something else.
    is_mean = total == 0 or abs(total - by) <= _CLOSE * abs(total)
    return found._replace(is_certain=total != 0 and by != num_samples) if is_mean else None


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
    if not rows.name().startswith("MulBackward"):
        return _of_chosen(node, num_samples)
    if is_packed(rows, "self") or is_packed(rows, "other"):
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
    if target.dim() and (mask := _mask_behind(node, len(target), num_samples)) is not None:
        return _of_mask(node, mask, counts if counts.dim() == 1 else counts.flatten(1).sum(1), num_samples)
    return Mean(node, target, _by_samples(counts, num_samples))


def _is_mean(node: Any) -> bool:
    """Whether a node is a mean over all that it is given, or one of torch's other losses."""
    return node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == _MEAN


def _of_chosen(node: Any, num_samples: int) -> Mean | None:
    """Returns the mean, or the sum, over rows that a mask has chosen; None if it is of others."""
    if is_packed(node, "self"):
        return None
    sizes: Any = getattr(node, "_saved_self_sym_sizes", None) or getattr(getattr(node, "_saved_self", None), "shape", ())
    # One row may have lost its dimension.
    num_rows = int(sizes[0]) if len(sizes) else 1
    mask = _mask_behind(node, num_rows, num_samples)
    return None if mask is None else _of_mask(node, mask, torch.ones(num_rows, dtype=torch.float64), num_samples)


def _of_mask(node: Any, mask: Tensor, counts: Tensor, num_samples: int) -> Mean | None:
    rows = mask.reshape(num_samples, -1).nonzero()[:, 0]
    of_samples = torch.zeros(num_samples, dtype=torch.float64, device=rows.device)
    return Mean(node, mask, of_samples.index_add_(0, rows, counts.to(rows.device)), rows)


def _mask_behind(node: Any, num_rows: int, num_samples: int) -> Tensor | None:
    """Returns the mask that has chosen all rows that a node is given; None if there is none, or there are others besides."""
    masks: list[Tensor] = []
    following = [before for before, _ in node.next_functions]
    for count, before in enumerate(walk(following, 4 * _MOST_BEHIND, lambda before: _mask_of(before) is None)):
        mask = _mask_of(before)
        if mask is None:
            # What no mask has chosen.
            if count == _MOST_BEHIND or is_weight(before):
                return None
            continue
        of_samples = mask.dim() > 0 and mask.shape[0] > 0 and mask.shape[0] % num_samples == 0
        if not of_samples or is_of_parameters(before) or (masks and not torch.equal(mask, masks[0])):
            return None
        masks.append(mask)
    return masks[0] if masks and int(masks[0].sum()) == num_rows else None


def _mask_of(node: Any) -> Tensor | None:
    """Returns the mask by which a node takes places of a tensor; None if it does something else."""
    name = node.name()
    if name.startswith("MaskedSelect"):
        return None if is_packed(node, "mask") else node._saved_mask
    if not name.startswith("IndexBackward"):
        return None
    first, *others = node._raw_saved_indices
    if first is None or first.unpack_hook is not None or any(other is not None for other in others):
        return None
    index = node._saved_indices[0]
    return index if index.dtype is torch.bool else None


def _by_samples(counts: Tensor, num_samples: int) -> Tensor | None:
    return None if counts.numel() % num_samples else counts.reshape(num_samples, -1).sum(1)


def _is_cross_entropy(node: Any) -> bool:
    return bool(node.name().startswith("NllLoss"))
