"""What a loss is made of, read off autograd's graph at each backward: cheap enough for every step.

The first batches are followed function by function; a script may compute another loss later (hard examples after a warm-up,
labels that are ignored). Its graph then begins with other nodes than those that were seen, or with other options of theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
        # Of each, the nodes by their places: which input of which input of the loss.
        self._seen: set[tuple[tuple[tuple[int, ...], str], ...]] = set()
        # The parameters that required gradients at those that were learnt.
        self._trained: set[frozenset[int]] = set()
        self.is_new = self.is_hidden = False
        # Targets of each loss so far, and how many of them it took, on the device: to read a number is to wait for it.
        self._targets: list[tuple[int, Tensor]] = []
        self._is_ignored = False

    def look(
        self,
        loss: Tensor,
        *,
        learn: bool,
        trained: Callable[[], frozenset[int]] = frozenset,
        ends: Collection[Any] = (),
    ) -> bool:
        """Looks at a loss; where it is not to be learnt, another kind than those before is noticed.

        Args:
            loss: what backward is called on.
            learn: it is one of those that are looked at closely.
            trained: returns the parameters that require gradients now.
            ends: nodes behind which a model is whose graph may change.

        Returns:
            Whether the graph has changed, but may be that of a loss before: the script has frozen or unfrozen parameters.
        """
        names: list[tuple[tuple[int, ...], str]] = []
        nodes: list[tuple[tuple[int, ...], Any]] = [((), loss.grad_fn)]
        known = set()
        for _ in range(_DEPTH):
            if not nodes:
                break
            place, node = nodes.pop(0)
            if node is None or node in known:
                continue
            known.add(node)
            name = node.name()
            names.append((place, name + _options(node)))
            if not learn and name.startswith("NllLoss"):
                self._count_ignored(node)
            if node not in ends:
                nodes.extend(((*place, number), following) for number, (following, _) in enumerate(node.next_functions))
        head = tuple(names)
        is_changed = not learn and head not in self._seen
        if learn:
            self._trained.add(trained())
        may_be_seen = is_changed and trained() not in self._trained and any(_agree(head, seen) for seen in self._seen)
        self._seen.add(head)
        self.is_new |= is_changed and not may_be_seen
        return may_be_seen

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


def _agree(one: Iterable[tuple[tuple[int, ...], str]], other: Iterable[tuple[tuple[int, ...], str]]) -> bool:
    """Whether two graphs have the same nodes at all places that both have: what needs no gradients has none."""
    names = dict(other)
    return all(names.get(place, name) == name for place, name in one)


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
