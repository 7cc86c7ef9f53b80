"""Which of the batches that a loop was given it has begun. One that it leaves out counts as used, and is named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from weakref import WeakSet

from torch import Tensor

from hvd_adaptive.engine.batches import Batch, Rows
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.engine.worker_batches import WorkerSource

log = logging.getLogger(__name__)

# Rounds of which a rank names what was left out, and rows of a batch that it names.
_MOST_ROUNDS, _MOST_ROWS = 3, 8
# AMP leaves out some steps at first, until its gradients are finite.
_LEAST_STEPS = 30


class HandedOut:
    """The batches of one rank's loop.

    Args:
        rank: this rank.
        strategy: the strategy's name.
        num_ranks: of all.

    Attributes:
        is_closed: whether the session is.
        sources: what reads batches for its loops.
    """

    def __init__(self, rank: int, strategy: str, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._strategy = strategy
        self._steps_together = strategy in ("sync", "horovod")
        self._num_given = 0
        self._waiting: dict[int, Rows] = {}
        self._num_told = 0
        self._left_out: set[int] = set()
        # The round of the batch that the loop has, and whether it will ask for no other one.
        self._in_round: int | None = None
        self._is_left = False
        self._end_of_loops = 0.0
        self._says_no_update = False
        self.is_closed = self._is_replaced = False
        self.sources: WeakSet[WorkerSource] = WeakSet()

    @contextmanager
    def give(self, batch: Batch, stats: RoundStats, round_number: int) -> Iterator[None]:
        """Takes note of a batch that the loop gets within this block, and of a loop that never comes back for the next one."""
        if self._steps_together:
            # At once: this rank may never come to the end of the round.
            self._tell(stats)
        self._num_given += 1
        batch.number = self._num_given
        self._waiting[batch.number] = batch.rows
        stats.handed_samples += batch.num_samples
        self._in_round = round_number
        try:
            yield
        except GeneratorExit:
            self._is_left = True
            raise
        self._in_round = None
        self._check_not_replaced()

    def begin_loop(self, num_epochs: float | None, num_done: float) -> None:
        """Takes note of a loop over the data.

        Args:
            num_epochs: up to which it goes, as all loops count from the session's first one; None: without end.
            num_done: epochs that are done.

        Raises:
            TypeError: for a number of epochs that is none.
            ValueError: on all ranks, if a loop before went as far, so that this one would do nothing.
            RuntimeError: as :meth:`check_open`, or if a loop before is within a round, whose batches would come twice.
        """
        self.check_open()
        self._check_round_over()
        if num_epochs is not None:
            if not isinstance(num_epochs, (Real, Tensor)) or num_epochs != num_epochs:
                raise TypeError(f"num_epochs must be a number, or None for a loop until session.stop(), got {num_epochs!r}")
            if num_epochs <= self._end_of_loops and num_done >= num_epochs - 1e-9:
                raise ValueError(
                    f"num_epochs {num_epochs:g} counts from the session's beginning, and {num_done:g} are done: give "
                    f"num_epochs=epoch + 1 in a loop over epochs, or all of them to one loop over the batches"
                )
            self._end_of_loops = num_epochs

    def close(self, *, is_replaced: bool = False) -> None:
        """Ends what reads batches, with the session.

        Args:
            is_replaced: the session was not closed, and another one trains its model now.
        """
        self.is_closed, self._is_replaced = True, is_replaced
        for source in self.sources:
            source.stop()

    def check_open(self) -> None:
        """Raises RuntimeError if the session is closed or another one has its model, or the loop over the batches was left, or
        if it is within a round with strategy ``local``, whose ranks make different numbers of steps."""
        self._check_not_replaced()
        self.check_not_closed()
        if self._is_left or not self._steps_together:
            self.check_left()

    def check_not_closed(self) -> None:
        """Raises RuntimeError if the session is closed."""
        if self.is_closed:
            raise RuntimeError(
                f"rank {self._rank}: this Session is closed, and gives no more batches, steps, gathers or checkpoints: call "
                "session.close() last, after Checkpointer.close(), or make a new Session"
            )

    def check_left(self) -> None:
        """Raises RuntimeError if the loop is within a round, at whose end other ranks may wait for this one, or if another
        session has the model."""
        self._check_not_replaced()
        if self._num_ranks > 1:
            self._check_round_over()

    def _check_not_replaced(self) -> None:
        if self._is_replaced:
            raise RuntimeError(
                f"rank {self._rank}: this Session was not closed before another one was made with its model or optimizer, and "
                "cannot go on: use the newer one. Call session.close() before you make the next Session"
            )

    def _check_round_over(self) -> None:
        if self._in_round is not None:
            if not self._is_left:
                raise RuntimeError(
                    f"rank {self._rank}: this was called within round {self._in_round} of the loop over the batches, or after a "
                    "break out of it, where the other ranks are not: gather, save, close and the next loop are for all ranks "
                    "together. Call them after the loop, or from session.records. To end it early call session.stop(), not break"
                )
            raise RuntimeError(
                f"rank {self._rank}: the loop over the batches was left within round {self._in_round}, by break, return or an "
                "exception, and never came to the round's end, where other ranks wait for this one: call session.stop() in its "
                "place and go on, so that all ranks' loops end together. After an exception make a new Session"
            )

    def begin(self, batch: Batch) -> None:
        """Takes note that the loop computes a batch; with strategy ``local`` it may do so later than the next one of its round.

        Raises:
            TypeError: for what is no batch. RuntimeError: if the session is closed, or the batch's step is over or too late.
        """
        if not isinstance(batch, Batch):
            raise TypeError(
                f"session.step takes a batch as session.batches yields it, got {type(batch).__name__}: write "
                "`with session.step(batch):`, not batch.x"
            )
        if self.is_closed:
            self.check_open()
        if batch._is_over or batch._is_open:
            raise RuntimeError(
                f"rank {self._rank}: the step of batch {batch.number} (rows {_shown(batch.rows)}) "
                f"{'is over' if batch._is_over else 'has begun'}, got a second "
                "session.step for it, and its samples would count twice: do all that you do with a batch within one "
                "session.step. To add up gradients set micro_batch_size, or accumulation_steps with strategy 'sync'"
            )
        if batch.number in self._left_out:
            end = "the loop asked for the next batch" if self._steps_together else "its round was over"
            raise RuntimeError(
                f"rank {self._rank}: the step of batch {batch.number} (rows {_shown(batch.rows)}) began after {end}, which "
                "counts it as left out: finish each batch before you ask for the next one, without a prefetcher around "
                "session.batches. It reads ahead by itself, and session.loader(dataset, num_workers=...) in worker processes"
            )
        batch._is_open = True
        self._waiting.pop(batch.number, None)

    def take_back(self, batch: Batch, stats: RoundStats) -> None:
        """Takes note that a batch's samples will come again."""
        stats.handed_samples -= batch.num_samples
        batch._is_over = True

    def end_round(self, stats: RoundStats, round_number: int, *, num_updates: int) -> None:
        """Names what the loop has left out. Before the ranks meet: with steps that all make together they may not.

        Args:
            stats: of the round.
            round_number: its number.
            num_updates: steps of the optimizer so far.
        """
        self._tell(stats, round_number)
        if not num_updates and not self._says_no_update and self._num_given >= _LEAST_STEPS:
            self._says_no_update = True
            log.warning(
                "rank %d: no optimizer.step() in the first %d batches, so the model learns nothing: call "
                "session.optimizer.step() within session.step", self._rank, self._num_given,
            )  # fmt: skip

    def _tell(self, stats: RoundStats, round_number: int | None = None) -> None:
        self._left_out.update(self._waiting)
        left, self._waiting = list(self._waiting.values()), {}
        if not left:
            return
        self._num_told += 1
        if self._num_told > _MOST_ROUNDS:
            return
        num_samples = sum(map(len, left))
        where = "" if round_number is None else f" of round {round_number}"
        log.warning(
            "rank %d: the loop left out %d batch%s%s with %d samples (rows %s): no session.step. They count as used. If the "
            "loop has stepped the optimizer for them, the model has moved, but merge weights, batch sizes and records do not "
            "count it: do all that you do with a batch within session.step(batch).%s%s",
            self._rank, len(left), "es" * (len(left) > 1), where, num_samples, "; ".join(map(_shown, left[:_MOST_ROUNDS])),
            f" With strategy {self._strategy!r} the other ranks wait for its gradients, unless they leave out the same step: "
            "compute it with a loss of 0 times the model's output, or use strategy 'local'." if self._steps_together else "",
            " From now on the records count them: handed_samples less samples." if self._num_told == _MOST_ROUNDS else "",
        )  # fmt: skip


def _shown(rows: Rows) -> str:
    return ", ".join(map(str, rows[:_MOST_ROWS])) + ", ..." * (len(rows) > _MOST_ROWS)
