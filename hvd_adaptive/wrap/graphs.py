"""What a loss is made of, read off autograd's graph at each backward: cheap enough for every step.

The first batches are followed function by function; a script may compute another loss later (hard examples after a warm-up,
labels that are ignored). Its graph then begins with other nodes than those that were seen, or with other options of theirs.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.wrap.compilers import is_reading
from hvd_adaptive.wrap.losses import left_out

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
        # Targets that those losses left out of each sample.
        self._left_out: set[int] = set()
        # Whether each later loss left out as many, on the device: to read it is to wait for it.
        self._as_many: list[Tensor] = []
        self._is_ignored = False

    def look(self, loss: Tensor, num_samples: int, *, learn: bool, ends: Collection[Any] = ()) -> None:
        """Looks at a loss; where it is not to be learnt, another kind than those before is noticed.

        Args:
            loss: what backward is called on.
            num_samples: of the batch that it is of.
            learn: it is one of those that are looked at closely.
            ends: nodes behind which a model is whose graph may change.
        """
        names: list[str] = []
        for node in walk([loss.grad_fn], _DEPTH, lambda node: node not in ends):
            name = node.name()
            names.append(name + _options(node))
            if name.startswith("NllLoss"):
                self._count_ignored(node, num_samples, learn=learn)
        head = tuple(names)
        if learn:
            self._seen.add(head)
        elif head not in self._seen:
            self._seen.add(head)
            self.is_new = True

    def take_ignored(self) -> bool:
        """Returns whether other numbers of targets were left out since this was last asked."""
        self._compare()
        is_ignored, self._is_ignored = self._is_ignored, False
        return is_ignored

    def _compare(self) -> None:
        self._is_ignored |= not all(map(bool, self._as_many))
        self._as_many.clear()

    def _count_ignored(self, node: Any, num_samples: int, *, learn: bool) -> None:
        # Reduced as a mean, and not by class weights.
        if getattr(node, "_saved_reduction", 0) != 1 or _is_weighted(node):
            return
        if is_packed(node, "total_weight") or is_packed(node, "target"):
            self.is_hidden |= not learn
            return
        target = node._saved_target
        if not learn and self._left_out <= {0}:
            self._as_many.append(node._saved_total_weight.detach() == target.numel())
        else:
            number, as_many = left_out(target, signed(node._saved_ignore_index), num_samples)
            if learn:
                # Where they are not, the loss function was found to be so.
                self._left_out.add(int(number))
            else:
                self._as_many.append(as_many & torch.stack([number == learnt for learnt in self._left_out]).any())
        # Of a loader at whose steps no exchange comes, nobody else would ask.
        if len(self._as_many) == _MOST_TARGETS:
            self._compare()


def walk(nodes: Iterable[Any], most: int, goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """Yields nodes of a graph, the nearest to the loss first.

    Args:
        nodes: where to begin.
        most: how many are looked at.
        goes_on: whether to go on behind a node, asked once that was dealt with.
    """
    ahead, known = deque(nodes), set[Any]()
    for _ in range(most):
        if not ahead:
            return
        node = ahead.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        yield node
        if goes_on(node):
            ahead.extend(following for following, _ in node.next_functions)


def _options(node: Any) -> str:
    """Returns what makes another loss of a node of the same name: how it is reduced, and whether classes have weights."""
    options = str(getattr(node, "_saved_reduction", ""))
    return f"{options} by class" if node.name().startswith("NllLoss") and _is_weighted(node) else options


def _is_weighted(node: Any) -> bool:
    return is_packed(node, "weight") or getattr(node, "_saved_weight", None) is not None


def signed(number: int) -> int:
    """Autograd shows a signed number as if it had no sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def is_packed(node: Any, name: str) -> bool:
    """Whether a node's tensor is in the hands of hooks, as within torch.utils.checkpoint: to read it would run a part of the
    model again."""
    return getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None


def intercept_backward(looks: Callable[[Sequence[Tensor]], None]) -> None:
    """Replaces ``torch.autograd.backward``, which ``Tensor.backward`` uses as well.

    Args:
        looks: is told of the tensors, before.
    """
    own, is_inside = torch.autograd.backward, False

    @functools.wraps(own)
    def backward(tensors: Any, *args: Any, **options: Any) -> Any:
        nonlocal is_inside
        # It may be an iterator, or an edge of the graph, which is a tuple.
        given = tuple(tensors) if isinstance(tensors, Iterator) else tensors
        # A mode of torch's functions calls this again, with what it was given; a part of the graph may call it as well.
        before, is_again = is_inside, is_inside and torch._C._current_graph_task_id() == -1
        is_inside = True
        try:
            if not is_again and not is_reading():
                found = [given] if isinstance(given, Tensor) else given
                looks([tensor for tensor in found if isinstance(tensor, Tensor)])
            return own(given, *args, **options)
        finally:
            is_inside = before

    torch.autograd.backward = backward
