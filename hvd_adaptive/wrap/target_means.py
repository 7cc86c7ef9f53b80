"""Losses that are means over targets: with class weights, or without some targets (ignore_index, a mask).

Each rank's loss is divided by what the targets of its own batch count. With unequal shares that batch has samples of several
ranks' batches. So before backward the ranks add up what the targets of each of those batches count, and a sample's gradient is
multiplied by the divisor that its loss has, over that of the batch whose sample it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hvd_adaptive.wrap import losses
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.target_nodes import means_in, quotient, rows_before

if TYPE_CHECKING:
    from hvd_adaptive.wrap.loaders import IndexStream, Loader

# Means of one loss, and one more.
_MOST_MEANS = 64


class Layout(NamedTuple):
    """What a batch's losses that are means over targets are like.

    Attributes:
        num_losses: how many of them backward is called on.
        num_means: means in one of them, at most.
        are_smoothed: their labels are (label_smoothing). Then each has a second mean, of the same rows.
    """

    num_losses: int
    num_means: int
    are_smoothed: int


class Targets:
    """What is known of a loader's losses that are means over targets.

    Attributes:
        are_weighted: this rank has seen targets that count more than others.
        agreed: what they are like in each batch; None: their samples' gradients are not weighted. Changes in exchanges only.
    """

    def __init__(self) -> None:
        self.are_weighted = False
        self.agreed: Layout | None = None
        self._layouts: set[Layout | None] = set()

    def learn(self, layout: Layout | None, *, are_weighted: bool) -> None:
        """Takes note of a followed batch: what its losses are like, if they can be weighted, and whether they must be."""
        self._layouts.add(layout)
        self.are_weighted |= are_weighted

    @property
    def code(self) -> int:
        """A number for what all batches that were followed have been like; 0 if they differed, or cannot be weighted."""
        layout = next(iter(self._layouts)) if len(self._layouts) == 1 else None
        if layout is None or layout.num_means >= _MOST_MEANS:
            return 0
        return (layout.num_losses * _MOST_MEANS + layout.num_means) * 2 + layout.are_smoothed

    def agree(self, code: int, *, are_weighted: bool) -> None:
        """Takes note of what is so on all ranks."""
        self.agreed = Layout(*divmod(code // 2, _MOST_MEANS), code % 2) if code and are_weighted else None


class TargetWeights:
    """Weights the gradients of samples by targets, on this rank; one batch after the other."""

    def __init__(self) -> None:
        # Means of each loss of the batch that is followed.
        self._found: list[int] = []

    def delivered(self, stream: IndexStream) -> None:
        """A batch has come to the script."""
        self._found.clear()
        agreed = stream.loader.targets.agreed
        if agreed is not None and stream.current.is_unequal:
            stream.num_target_sums += agreed.num_losses

    def learn(self, loader: Loader, watched: WatchedTargets, *, num_optimizers: int) -> None:
        """Takes note of what a batch has shown that was followed.

        Args:
            loader: whose batch it was.
            watched: its targets.
            num_optimizers: those that have stepped on it. Of several, which loss comes before which step is not counted.
        """
        is_clear = watched.are_placed and num_optimizers < 2 and sum(self._found) == watched.num_means > 0
        layout = Layout(len(self._found), max(self._found), int(watched.num_smoothed > 0)) if is_clear else None
        loader.targets.learn(layout, are_weighted=watched.are_weighted)

    def look(self, loss: Sequence[Tensor], stream: IndexStream, *, is_followed: bool) -> None:
        """Looks at a loss before its backward; weights the gradients of its samples if shares are unequal. COLLECTIVE.

        Args:
            loss: what backward is called on.
            stream: the pass that its batch is of.
            is_followed: that batch is followed.
        """
        agreed, num_samples = stream.loader.targets.agreed, stream.current.num_samples
        is_weighted = agreed is not None and stream.current.is_unequal
        means = means_in(loss, num_samples) if is_followed or is_weighted else []
        if means and is_followed:
            self._found.append(len(means))
        if not means or not is_weighted or agreed is None:
            return
        if len(means) > agreed.num_means or not stream.num_target_sums:
            # The other ranks need not have such a loss here.
            stream.loader.reasons.add(Reason.OTHER_LOSS)
            return
        ranks = torch.tensor(stream.ranks_of_samples())
        sums = torch.zeros(agreed.num_means, stream.world_size, dtype=torch.float64)
        for of_mean, (_, _, counts) in zip(sums, means, strict=False):
            if counts is not None:
                of_mean.index_add_(0, ranks, counts.cpu())
        own = sums.sum(1).tolist()
        self._add_up(sums, stream)
        for mean, divisor, divisors in zip(means, own, sums, strict=False):
            rows_of = rows_before(mean) if agreed.are_smoothed else mean.node
            if mean.counts is None or rows_of is None:
                stream.loader.reasons.add(Reason.WEIGHTED_LOSS)
                continue
            # Without targets a sample has no gradient either.
            factors = torch.where(divisors > 0, divisor / (divisors * stream.weight), 0.0)[ranks].to(mean.counts.device)
            weigh = functools.partial(_weigh_rows, factors if divisor else None)
            (rows_of.register_prehook if agreed.are_smoothed else rows_of.register_hook)(weigh)

    def catch_up(self, stream: IndexStream | None, *, has_loss: bool) -> None:
        """Takes part in what the other ranks add up before a step, where this rank's script left out a loss. COLLECTIVE.

        Args:
            stream: the pass that feeds the step; None: none does.
            has_loss: there was another loss than those that were learnt.
        """
        agreed = None if stream is None else stream.loader.targets.agreed
        if stream is not None and stream.num_target_sums and agreed is not None:
            if has_loss:
                stream.loader.reasons.add(Reason.OTHER_LOSS)
            while stream.num_target_sums:
                self._add_up(torch.zeros(agreed.num_means, stream.world_size, dtype=torch.float64), stream)

    def _add_up(self, sums: Tensor, stream: IndexStream) -> None:
        import horovod.torch as hvd

        stream.num_target_sums -= 1
        hvd.synchronize(hvd.allreduce_async_(sums, name="hvd_adaptive.targets", op=hvd.Sum))


class WatchedTargets:
    """The targets of one batch that is followed.

    Args:
        weighs: ranks' gradients are averaged. Else none of this matters.

    Attributes:
        num_means: losses that are means over targets.
        num_smoothed: those with smoothed labels.
        are_weighted: targets, or samples, of some of these count more than others.
        are_placed: it is known which targets are whose sample's.
    """

    def __init__(self, *, weighs: bool) -> None:
        self._weighs = weighs
        self.begin()

    def begin(self) -> None:
        """Begins with a batch."""
        self.num_means, self.num_smoothed, self.are_weighted, self.are_placed = 0, 0, False, True
        self._targets: list[Tensor] = []

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int) -> None:
        """Looks at one of torch's loss functions that was called."""
        target = losses.targets_of(func, args, kwargs)
        if target is None or not self._weighs:
            return
        self.num_means += 1
        self._targets.append(target)
        self.are_weighted |= losses.weighs_samples(func, args, kwargs, num_samples)
        self.num_smoothed += bool(losses.LOSSES[func].bind(*args, **kwargs).arguments.get("label_smoothing"))

    def divides(
        self, func: Any, args: tuple[Any, ...], result: Any, num_samples: int, is_made: Callable[[Tensor], bool]
    ) -> bool:
        """Looks at a function that was called; returns whether it divides a sum by what its samples' targets add up to.

        Args:
            func: the function, with its arguments and its result.
            num_samples: of the batch.
            is_made: whether a tensor is made of the batch.
        """
        is_quotient = self._weighs and losses.plain_name(func) in ("div", "true_divide") and len(args) > 1
        mean = quotient(result, num_samples) if is_quotient else None
        if mean is None or mean.counts is None:
            return False
        self.num_means += 1
        self._targets.append(mean.targets)
        is_weighted = bool((mean.counts != mean.counts[0]).any())
        self.are_weighted |= is_weighted
        # Another number may be a constant that happens to be the same.
        return is_weighted or (isinstance(args[1], Tensor) and is_made(args[1]))

    def end(self, has_rows: Callable[[Tensor], bool]) -> set[Reason]:
        """Ends the batch; returns why shares must be equal.

        Args:
            has_rows: whether a tensor has the samples' numbers one after the other.
        """
        self.are_placed = self.num_smoothed in (0, self.num_means) and all(map(has_rows, self._targets))
        self._targets.clear()
        return {Reason.WEIGHTED_LOSS} if self.are_weighted and not self.are_placed else set()


def _weigh_rows(
    factors: Tensor | None, gradients: tuple[Tensor | None, ...], _: Any = None
) -> tuple[Tensor | None, ...] | None:
    """Multiplies the rows of the first gradient that a hook is given.

    Args:
        factors: shape (num_samples,), each of some rows; None: the loss was divided by 0, and may not be finite.
        gradients: those of the node.
    """
    gradient = gradients[0]
    if gradient is None:
        return None
    if factors is None:
        return torch.zeros_like(gradient), *gradients[1:]
    rows = factors.to(gradient.dtype).repeat_interleave(gradient.shape[0] // len(factors))
    return gradient * rows.view(-1, *[1] * (gradient.dim() - 1)), *gradients[1:]
