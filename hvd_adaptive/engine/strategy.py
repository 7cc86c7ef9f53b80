"""What the session asks of a strategy: who computes what, and how the ranks' models stay one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.claims import Claim
from hvd_adaptive.engine.records import RoundClaims, RoundRecord, RoundStats

# What a saved rank held alone.
OwnState = Callable[[int], dict[str, Any]]


class Removable(Protocol):
    """Something on a model or an optimizer, such as a hook. Unless it is torch's own handle, what it has put there keeps it
    alive."""

    def remove(self) -> None:
        """Takes it off, without collectives. A second call does nothing."""


def refuse_closure(args: Sequence[Any], kwargs: dict[str, Any], option: str, why: str) -> None:
    """Raises ValueError if an optimizer's ``step`` was given a closure.

    Args:
        args: as a step's pre-hook gets them, the optimizer first.
        kwargs: likewise.
        option: with which it does not go.
        why: what becomes of the gradients then.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        raise ValueError(f"step() takes no closure with {option}, got one: call backward() before step(), {why}")


class Strategy(Protocol):
    """One way of training over all ranks. Construction is COLLECTIVE.

    Attributes:
        optimizer: what the user's loop calls: the user's own optimizer, or a wrapper of it.
        inexact: what breaks the equality with one rank that the strategy promises, as sentences; empty where it promises none.
        claimed: this rank's claims of the round, in order.
        hooks: what is on the model and the optimizer until the session is closed, or another one takes its place.
    """

    optimizer: Optimizer
    inexact: list[str]
    claimed: list[Claim]
    hooks: list[Removable]

    @property
    def round_unit(self) -> int:
        """Samples of which a round is a whole number, except at the end of an epoch."""

    @property
    def batch_sizes(self) -> Array:
        """The ranks' batch sizes, samples, shape (world_size,), equal on every rank."""

    def mega_batch_of(self, dataset_size: int) -> int:
        """Returns the samples of the next round over all ranks, equal on every rank, on so large a data set."""

    def warm_up(self, active: bool) -> None:
        """Switches the warm-up of ``Config.warmup_epochs`` on or off; called before every round."""

    def lr_multiplier(self, batch: Batch) -> float:
        """Returns the factor on the learning rate for this batch."""

    def take_foreign_seconds(self) -> float:
        """Returns compute seconds of this step that are not the rank's own work, which an emulated slowdown must not
        stretch."""

    def synchronize(self) -> bool:
        """Waits until the gradients are those that ``optimizer.step`` will use. COLLECTIVE where ranks exchange gradients.

        Returns:
            Whether a step is due: False between the micro-batches of a step.
        """

    def take_back(self, batch: Batch) -> bool:
        """Takes back a batch that did not fit into memory, to give its samples again in smaller batches.

        Returns:
            False if it cannot: the error then ends the job.
        """

    def repeat_round(self, recorded: RoundClaims) -> None:
        """Makes the next round the recorded one; called before every round of a replay.

        Args:
            recorded: the round as it was.
        """

    def drain(self) -> None:
        """Finishes what is under way between rounds, so that the model is the one of all rounds. COLLECTIVE."""

    def round_batches(
        self, rows: Rows, *, work: NDArray[np.int64] | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's batches of a round.

        Args:
            rows: the round's rows in dispatch order, the same on every rank.
            work: their cost, or None for one unit a sample.
            source: makes batches of rows.
            round_id: names the round; never used twice.
            stats: gets the seconds spent waiting for batches.
        """

    def close_round(self) -> None:
        """Asks that the round ends early, at a place that all ranks find by themselves; batches that some rank has begun or
        holds already are still to be computed. Between two batches, on any rank. A strategy that cannot end a round before
        all its samples are consumed does nothing."""

    def round_samples(self, num_rows: int) -> int:
        """Returns how many of a round's first rows have been consumed, once the batches are over; the same on every rank.

        Args:
            num_rows: rows of the whole round.
        """

    def end_round(self, stats: RoundStats) -> tuple[Gathered, Array, int]:
        """Ends a round, so that all ranks hold the same model. COLLECTIVE.

        Args:
            stats: this rank's round; gets the seconds of waiting, control and merge.

        Returns:
            The statistics of all ranks, the merge weights, and the bytes that this rank put into exchanges.

        Raises:
            AgreedError: on all ranks, if no rank's parameters are finite.
        """

    def after_round(self, record: RoundRecord) -> None:
        """Learns from a completed round, the seconds of its merge included; the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs to go on from here, between two rounds; not copied.

        Returns:
            Two entries, each of what :func:`hvd_adaptive.state.nested.flatten_state` takes. ``shared``: what all ranks hold
            alike, of which rank 0's is saved: the model, velocities, speed models, batch sizes. ``own``: what this rank
            holds alone: optimizer state, residuals. A part such as a codec gives a ``state_dict()`` of its own, which the
            strategy puts where it belongs.
        """

    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a saved state, copying what it keeps. By this rank alone: a state may be damaged on one rank only, which
        must not leave the others in a collective.

        Args:
            shared: as from :meth:`state_dict`.
            own_of: gives the ``own`` of a saved rank, in [0, world_size).
            world_size: number of ranks that saved it. Where it is another one now, a saved rank's ``own`` may go to several
                ranks or to none (``rank % world_size``): what must not be counted twice, such as residuals, is dropped then.

        Raises:
            ValueError, KeyError: if it does not fit.
        """
