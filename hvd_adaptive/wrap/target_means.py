"""Losses that are means over targets: with class weights, or without some targets (ignore_index, a mask).

Each rank's loss is divided by what the targets of its own batch count. With unequal shares that batch has samples of several
ranks' batches. So before backward the ranks add up what the targets of each of those batches count, and a sample's gradient is
multiplied by the divisor that its loss has, over that of the batch whose sample it is.

A rank may leave out a loss that the others have. Then it takes part with zeros, as early as it can be known.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hvd_adaptive.wrap import losses
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.target_nodes import Mean, means_in, quotient, rows_before

if TYPE_CHECKING:
    from hvd_adaptive.wrap.chosen import Chosen
    from hvd_adaptive.wrap.loaders import IndexStream, Loader
    from hvd_adaptive.wrap.tape import Tape

# Calls of backward on a batch, and means in each of them: the ranks tell each other one number, of 53 bits.
_MOST_CALLS, _MOST_MEANS = 6, 63
# Marks a node of a graph that backward was called on.
_SEEN = "hvd_adaptive.seen"


class Layout(NamedTuple):
    """What a batch's losses that are means over targets are like.

    Attributes:
        means: how many each call of backward has, in order.
        are_smoothed: their labels are (label_smoothing). Then each has a second mean, of the same rows.
    """

    means: tuple[int, ...]
    are_smoothed: bool


class Targets:
    """What is known of a loader's losses that are means over targets.

    Attributes:
        are_weighted: this rank has seen targets that count more than others.
        agreed: what they are like in each batch; None: their samples' gradients are not weighted. Changes in exchanges only.
        collectives_at: how many calls of backward a batch has had when the script called collectives of its own.
        kinds: of each call of backward the kinds of its means, as this rank has learnt them.
    """

    def __init__(self) -> None:
        self.are_weighted = False
        self.agreed: Layout | None = None
        self.collectives_at: set[int] = set()
        self.kinds: list[list[str]] = []
        self._layouts: set[Layout | None] = set()
        self._seen_collectives_at: set[int] = set()

    def learn(self, layout: Layout | None, *, are_weighted: bool, collectives_at: set[int]) -> None:
        """Takes note of a followed batch: what its losses are like, if they can be weighted, and whether they must be."""
        self._layouts.add(layout)
        self.are_weighted |= are_weighted
        self._seen_collectives_at |= collectives_at

    @property
    def code(self) -> int:
        """A number for what all batches that were followed have been like; 0 if they differed, or cannot be weighted."""
        layout = next(iter(self._layouts)) if len(self._layouts) == 1 else None
        if layout is None or len(layout.means) > _MOST_CALLS or max(layout.means) > _MOST_MEANS:
            return 0
        code = 1
        for count in layout.means:
            code = code * (_MOST_MEANS + 1) + count
        for number in range(_MOST_CALLS + 1):
            code = code * 2 + (number in self._seen_collectives_at)
        return code * 2 + layout.are_smoothed

    def agree(self, code: int, *, are_weighted: bool) -> None:
        """Takes note of what is so on all ranks."""
        self.agreed = None
        if code and are_weighted:
            code, are_smoothed = divmod(code, 2)
            code, bits = divmod(code, 2 ** (_MOST_CALLS + 1))
            means: list[int] = []
            while code > 1:
                code, count = divmod(code, _MOST_MEANS + 1)
                means.append(count)
            self.agreed = Layout(tuple(means[::-1]), bool(are_smoothed))
            self.collectives_at = {number for number in range(_MOST_CALLS + 1) if bits >> (_MOST_CALLS - number) & 1}


class TargetWeights:
    """Weights the gradients of samples by targets, on this rank; one batch after the other."""

    def __init__(self) -> None:
        # Calls of backward on the batch, and of each the means, node and kind, if the batch is followed.
        self._num_calls = 0
        self._found: list[list[tuple[Any, str]]] = []
        self._is_clear = True
        self._collectives_at: set[int] = set()

    def delivered(self, stream: IndexStream) -> None:
        """A batch has come to the script."""
        self._num_calls, self._found, self._is_clear, self._collectives_at = 0, [], True, set()
        agreed = stream.loader.targets.agreed
        if agreed is not None and stream.current.is_unequal:
            stream.num_target_sums += sum(map(bool, agreed.means))

    def learn(self, loader: Loader, watched: WatchedTargets) -> None:
        """Takes note of what a batch has shown that was followed.

        Args:
            loader: whose batch it was.
            watched: its targets.
        """
        if watched.are_weighted and loader.may_reorder:
            loader.reasons.add(Reason.WEIGHTED_LOSS)
        counts, nodes = tuple(map(len, self._found)), {node for of_call in self._found for node, _ in of_call}
        is_clear = self._is_clear and watched.are_placed and sum(counts) == watched.num_means > 0 and watched.chosen <= nodes
        layout = Layout(counts, watched.num_smoothed > 0) if is_clear else None
        if is_clear:
            loader.targets.kinds = [[kind for _, kind in of_call] for of_call in self._found]
        loader.targets.learn(layout, are_weighted=watched.are_weighted, collectives_at=self._collectives_at)

    def look(self, loss: Sequence[Tensor], stream: IndexStream, *, is_followed: bool, is_after_step: bool) -> None:
        """Looks at a loss before its backward; weights the gradients of its samples if shares are unequal. COLLECTIVE.

        Args:
            loss: what backward is called on.
            stream: the pass that its batch is of.
            is_followed: that batch is followed.
            is_after_step: an optimizer has stepped on a followed batch.
        """
        agreed, number = stream.loader.targets.agreed, self._num_calls
        is_weighted = agreed is not None and stream.current.is_unequal
        self._num_calls += 1
        if not (is_followed or is_weighted):
            return
        means = means_in(loss, stream.current.num_samples)
        is_again = any(mean.node.metadata.get(_SEEN) for mean in means)
        for mean in means:
            mean.node.metadata[_SEEN] = True
        if is_followed:
            self._found.append([(mean.node, mean.kind) for mean in means])
            # What a step left out would be made up for before it.
            self._is_clear &= not is_again and not (means and is_after_step)
        if not is_weighted or agreed is None:
            return
        expected = agreed.means[number] if number < len(agreed.means) else 0
        if len(means) > expected:
            means = [mean for mean in means if mean.is_certain]
        places = _places(means, stream.loader.targets.kinds[number:][:1], expected)
        # Of batches before, whose loss this rank has left out.
        self._make_up(stream, stream.num_target_sums - sum(map(bool, agreed.means[number:])))
        if (expected or means) and not (expected and stream.num_target_sums and self._weigh(means, places, stream, agreed)):
            # The other ranks need not have such a loss here.
            stream.loader.reasons.add(Reason.OTHER_LOSS)

    def collective(self, stream: IndexStream | None, *, is_followed: bool) -> None:
        """The script is about to call a collective of its own: where the others may be in its loss before that, as this rank has
        left that out, takes part. COLLECTIVE.

        Args:
            stream: the pass of the last forward; None: there is none. Another may be one rank's own, as where it looks at data.
            is_followed: the present batch is followed.
        """
        if is_followed:
            self._collectives_at.add(self._num_calls)
        agreed = None if stream is None else stream.loader.targets.agreed
        if stream is not None and agreed is not None and stream.num_target_sums:
            is_usual = self._num_calls in stream.loader.targets.collectives_at
            still = sum(map(bool, agreed.means[self._num_calls :])) if is_usual else 0
            self._make_up(stream, stream.num_target_sums - still)

    def ends(self, stream: IndexStream | None) -> None:
        """A step is about to end, or a pass: takes part in what this rank has left out. COLLECTIVE."""
        if stream is not None and stream.num_shared:
            self._make_up(stream, stream.num_target_sums)

    def _make_up(self, stream: IndexStream, count: int) -> None:
        agreed = stream.loader.targets.agreed
        if agreed is None:
            return
        for _ in range(min(count, stream.num_target_sums)):
            self._add_up(torch.zeros(max(agreed.means), stream.world_size, dtype=torch.float64), stream)

    def _weigh(self, means: list[Mean], places: list[int] | None, stream: IndexStream, agreed: Layout) -> bool:
        """Adds up what targets count and weights the gradients; returns whether these means are like those that were learnt.

        Args:
            means: of this call of backward.
            places: of each of them among those that were learnt; None: they are others.
            stream: the pass that the batch is of.
            agreed: what was learnt.
        """
        nodes = [rows_before(mean) if agreed.are_smoothed else mean.node for mean in means]
        counts = [mean.counts for mean in means if mean.counts is not None]
        is_known = places is not None and len(means) == len(counts) and None not in nodes
        ranks = torch.tensor(stream.ranks_of_samples())
        sums = torch.zeros(max(agreed.means), stream.world_size, dtype=torch.float64)
        for place, of_samples in zip(places or (), counts if is_known else (), strict=False):
            sums[place].index_add_(0, ranks, of_samples.cpu())
        if means and not is_known:
            # Which of them this rank lacks cannot be told: then no rank weights any.
            sums.fill_(torch.nan)
        own = sums.sum(1).tolist()
        self._add_up(sums, stream)
        is_known &= not bool(sums.isnan().any())
        for mean, node, place in zip(means, nodes, places or (), strict=False) if is_known else ():
            divisor, divisors = own[place], sums[place]
            # Without targets a sample has no gradient either.
            factors = torch.where(divisors > 0, divisor / (divisors * stream.weight), 0.0)[ranks].to(mean.targets.device)
            if mean.rows is not None:
                factors = factors[mean.rows]
            weigh = functools.partial(_weigh_rows, factors if divisor else None)
            (node.register_prehook if agreed.are_smoothed else node.register_hook)(weigh)
        return is_known

    def _add_up(self, sums: Tensor, stream: IndexStream) -> None:
        import horovod.torch as hvd

        stream.num_target_sums -= 1
        hvd.synchronize(hvd.allreduce_async_(sums, name="hvd_adaptive.targets", op=hvd.Sum))


def _places(means: Sequence[Mean], learnt: Sequence[Sequence[str]], expected: int) -> list[int] | None:
    """Returns which of the means that were learnt each of some is; None if that cannot be said.

    Args:
        means: those of a loss. A rank may lack some, as where a mask chooses nothing.
        learnt: the kinds of those that were learnt, one list of them; none: this rank does not know them.
        expected: how many there were.
    """
    if len(means) == expected:
        return list(range(expected))
    kinds = [kind for of_call in learnt for kind in of_call]
    found = [mean.kind for mean in means]
    is_unclear = any(kind not in kinds or found.count(kind) != kinds.count(kind) > 1 for kind in {*kinds, *found})
    if len(kinds) != expected or is_unclear:
        return None
    # Of each kind there are as many, or one that is missing.
    ahead = {kind: [place for place, other in enumerate(kinds) if other == kind] for kind in kinds}
    return [ahead[kind].pop(0) for kind in found]


class _Watched(NamedTuple):
    """A mean over targets.

    Attributes:
        result: what it gives.
        targets: what counts.
        is_weighted: some count more than others.
        is_smoothed: labels are.
        is_placed: it was known, before the model has changed, that these are the samples' one after the other.
        chosen: the graph's node of a mean over rows that a mask has chosen.
    """

    result: Tensor
    targets: Tensor
    is_weighted: bool
    is_smoothed: bool
    is_placed: bool = False
    chosen: Any = None


class WatchedTargets:
    """The targets of one batch that is followed.

    Args:
        tape: how its losses are made.
        weighs: ranks' gradients are averaged. Else none of this matters.

    Attributes:
        num_means: losses that are means over targets, and parts of what backward is called on.
        num_smoothed: those with smoothed labels.
        are_weighted: targets, or samples, of some of these count more than others.
        are_placed: it is known which targets are whose sample's.
        chosen: the graph's nodes of means over rows that a mask has chosen.
    """

    def __init__(self, tape: Tape, *, weighs: bool) -> None:
        self._tape, self._weighs = tape, weighs
        self.begin()

    def begin(self) -> None:
        """Begins with a batch."""
        self.num_means, self.num_smoothed, self.are_weighted, self.are_placed = 0, 0, False, True
        self.chosen: set[Any] = set()
        self._losses: list[_Watched] = []

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, num_samples: int) -> None:
        """Looks at one of torch's loss functions that was called."""
        target = losses.targets_of(func, args, kwargs)
        if target is not None and self._weighs:
            is_smoothed = bool(losses.LOSSES[func].bind(*args, **kwargs).arguments.get("label_smoothing"))
            is_weighted = losses.weighs_samples(func, args, kwargs, num_samples)
            self._losses.append(_Watched(result, target, is_weighted, is_smoothed))

    def choose(self, result: Tensor, mask: Tensor | None) -> None:
        """Takes note of a mean over rows that a mask has chosen."""
        if mask is not None and self._weighs:
            self._losses.append(_Watched(result, mask, True, False, self._tape.has_rows(mask), result.grad_fn))

    def divides(self, func: Any, args: tuple[Any, ...], result: Any, num_samples: int, chosen: Chosen) -> bool:
        """Looks at a function that was called; returns whether it divides a sum by what its samples' targets add up to.

        Args:
            func: the function, with its arguments and its result.
            num_samples: of the batch.
            chosen: rows that a mask has chosen.
        """
        is_quotient = self._weighs and losses.plain_name(func) in ("div", "true_divide") and len(args) > 1
        mean = quotient(result, num_samples) if is_quotient else None
        if mean is None or mean.counts is None or (mean.rows is not None) is not chosen.is_reduced(args[0]):
            return False
        # Another number may be a constant that happens to be the same, if samples count alike.
        is_made = isinstance(args[1], Tensor) and self._tape.is_made(args[1])
        is_weighted = is_made or bool((mean.counts != mean.counts[0]).any()) or (chosen.are_counted and mean.rows is not None)
        is_placed = is_weighted and self._tape.has_rows(mean.targets)
        self._losses.append(_Watched(result, mean.targets, is_weighted, False, is_placed))
        return is_weighted

    def end(self) -> set[Reason]:
        """Ends the batch; returns why shares must be equal."""
        # Others are for a log.
        used = [loss for loss in self._losses if self._tape.is_in_loss(loss.result)]
        self._losses.clear()
        self.num_means, self.num_smoothed = len(used), sum(loss.is_smoothed for loss in used)
        self.are_weighted = any(loss.is_weighted for loss in used)
        self.chosen = {loss.chosen for loss in used if loss.chosen is not None}
        placed = (loss.is_placed or self._tape.has_rows(loss.targets) for loss in used)
        self.are_placed = self.num_smoothed in (0, self.num_means) and all(placed)
        return {Reason.WEIGHTED_LOSS} if self.are_weighted and not self.are_placed else set()


def _weigh_rows(
    factors: Tensor | None, gradients: tuple[Tensor | None, ...], _: Any = None
) -> tuple[Tensor | None, ...]:
    """Multiplies the rows of the gradients that a hook is given.

    Args:
        factors: each of some rows, equally many; None: the loss was divided by 0, and may not be finite.
        gradients: those of the node.
    """
    return tuple(gradient if gradient is None else _weighed(gradient, factors) for gradient in gradients)


def _weighed(gradient: Tensor, factors: Tensor | None) -> Tensor:
    if factors is None:
        return torch.zeros_like(gradient)
    if not gradient.dim():
        return gradient * factors.to(gradient.dtype).sum()
    rows = factors.to(gradient.dtype).repeat_interleave(gradient.shape[0] // len(factors))
    return gradient * rows.view(-1, *[1] * (gradient.dim() - 1))
