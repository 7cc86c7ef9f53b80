"""What a loss is made of, read off autograd's graph at each backward: cheap enough for every step.

The first batches are followed function by function; a script may compute another loss later (hard examples after a warm-up,
labels that are ignored). Its graph then begins with other nodes than those that were seen, or with other options of theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.wrap.compilers import is_reading

# Nodes of the graph, from the loss on: it, and the last layers of the model.
_DEPTH = 10
_MOST_TARGETS = 1024


class Heads:
    """The kinds of losses that a script has called backward on while they were looked at closely.

    Attributes:
        is_new: a loss of another kind was seen since this was last reset.
        is_hidden: of a loss it could not be seen how many targets it took.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()
        self.is_new = self.is_hidden = False
        # Targets of each loss so far, and how many of them it took, on the device: to read a number is to wait for it.
        self._targets: list[tuple[int, Tensor]] = []
        self._is_ignored = False

    def look(self, loss: Tensor, *, learn: bool, ends: Collection[Any] = ()) -> None:
        """Looks at a loss; where it is not to be learnt, another kind than those before is noticed.

        Args:
            loss: what backward is called on.
            learn: it is one of those that are looked at closely.
            ends: nodes behind which a model is whose graph may change.
        """
        names: list[str] = []
        nodes, known = [loss.grad_fn], set()
        for _ in range(_DEPTH):
            if not nodes:
                break
            node = nodes.pop(0)
            if node is None or node in known:
                continue
            known.add(node)
            name = node.name()
            names.append(name + _options(node))
            if not learn and name.startswith("NllLoss"):
                self._count_ignored(node)
            if node not in ends:
                nodes.extend(following for following, _ in node.next_functions)
        head = tuple(names)
        if learn:
            self._seen.add(head)
        elif head not in self._seen:
            self._seen.add(head)
            self.is_new = True

    def take_ignored(self) -> bool:
        """Returns whether targets were left out since this was last asked."""
        self._compare()
        is_ignored, self._is_ignored = self._is_ignored, False
        return is_ignored

    def _compare(self) -> None:
        self._is_ignored |= any(bool(taken != number) for number, taken in self._targets)
        self._targets.clear()

    def _count_ignored(self, node: Any) -> None:
        # Reduced as a mean, and not by class weights.
        if getattr(node, "_saved_reduction", 0) == 1 and not _is_weighted(node):
            if _is_packed(node, "total_weight"):
                self.is_hidden = True
                return
            self._targets.append((node._saved_target.numel(), node._saved_total_weight.detach()))
            # Of a loader at whose steps no exchange comes, nobody else would ask.
            if len(self._targets) == _MOST_TARGETS:
                self._compare()


def _options(node: Any) -> str:
    """Returns what makes another loss of a node of the same name: how it is reduced, and whether classes have weights."""
    options = str(getattr(node, "_saved_reduction", ""))
    return f"{options} by class" if node.name().startswith("NllLoss") and _is_weighted(node) else options


def _is_weighted(node: Any) -> bool:
    return _is_packed(node, "weight") or getattr(node, "_saved_weight", None) is not None


def _is_packed(node: Any, name: str) -> bool:
    """Whether a node's tensor is in the hands of hooks, as within torch.utils.checkpoint: to read it would run a part of the
    model again."""
    return getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None


def intercept_backward(looks: Callable[[Sequence[Tensor]], None]) -> None:
    """Replaces ``torch.autograd.backward``, which ``Tensor.backward`` uses as well.

    Args:
        looks: is told of the tensors, before.
    """
    own = torch.autograd.backward

    @functools.wraps(own)
    def backward(tensors: Any, *args: Any, **options: Any) -> Any:
        # It may be an iterator, or an edge of the graph, which is a tuple.
        given = tuple(tensors) if isinstance(tensors, Iterator) else tensors
        if not is_reading():
            found = [given] if isinstance(given, Tensor) else given
            looks([tensor for tensor in found if isinstance(tensor, Tensor)])
        return own(given, *args, **options)

    torch.autograd.backward = backward
