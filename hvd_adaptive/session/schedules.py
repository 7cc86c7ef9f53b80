"""Torch's schedulers in a session, whose ranks make different numbers of steps: they follow the samples of all ranks."""

from __future__ import annotations

import logging
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hvd_adaptive.algorithm.statistics import Array

if TYPE_CHECKING:
    from hvd_adaptive.session.session import Session

log = logging.getLogger(__name__)

# Ranks' numbers of steps by which a scheduler may differ: by the part, once the fastest has made so many.
_UNEQUAL, _LEAST_STEPS = 1.1, 20
# torch marks the step of an optimizer that has a scheduler by one of these, by its version.
_MARKS = ("_wrapped_by_lr_sched", "_with_counter")


class Followed:
    """A scheduler that follows the training's samples.

    Args:
        scheduler: of torch.
        steps_per_epoch: its steps in a pass over the data.
    """

    def __init__(self, scheduler: LRScheduler, steps_per_epoch: float) -> None:
        self._scheduler = scheduler
        self._steps_per_epoch = steps_per_epoch
        self._num_steps = 0
        self._reached: int | None = None

    @property
    def last_epoch(self) -> int | None:
        """The scheduler's own number of its steps; None for a chain, which has none."""
        return getattr(self._scheduler, "last_epoch", None)

    def reach(self, epochs: float) -> None:
        """Steps the scheduler up to a place in the training, in epochs.

        Raises:
            RuntimeError: if somebody else has stepped it.
        """
        if self._reached not in (None, self.last_epoch):
            raise RuntimeError(
                "session.schedule steps this scheduler, and so does something else: take scheduler.step() out of your code"
            )
        # A number of steps that was rounded down by a product.
        due = math.floor(epochs * self._steps_per_epoch + 1e-6)
        while self._num_steps < due:
            self._num_steps += 1
            self._step()
        self._reached = self.last_epoch

    def _step(self) -> None:
        # Other ranks' samples may make the first step due before this rank's optimizer has made one, which is no mistake here.
        # Only until then, as each change of the filters has Python show all other warnings anew.
        if getattr(getattr(self._scheduler, "optimizer", None), "_opt_called", False):
            self._scheduler.step()
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's state, and its number of steps."""
        return {"num_steps": self._num_steps, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""
        self._num_steps = state["num_steps"]
        self._scheduler.load_state_dict(state["scheduler"])
        self._reached = None


class Schedules:
    """The schedulers of one rank.

    Args:
        optimizer: whose learning rate they set.
        rank: this rank.
        steps_alone: ranks step by themselves, each as often as it can.
    """

    def __init__(self, optimizer: Optimizer, *, rank: int, steps_alone: bool) -> None:
        self._optimizer = optimizer
        self._followed: list[Followed] = []
        self._watches = steps_alone and rank == 0
        # The learning rate that was set when the last batch of the round was given, in a tuple; None between rounds.
        self._seen: tuple[float | None] | None = None
        self._num_batches = self._num_moves = 0
        self._num_steps: Array | None = None

    @property
    def num_followed(self) -> int:
        """How many there are."""
        return len(self._followed)

    @property
    def in_round(self) -> bool:
        """Whether the loop over the batches is within a round."""
        return self._seen is not None

    def add(self, followed: Followed) -> None:
        """Adds a scheduler."""
        self._followed.append(followed)

    def reach(self, epochs: float) -> None:
        """Steps the schedulers up to a place in the training, in epochs of all ranks. Before each batch.

        Raises:
            RuntimeError: if somebody else has stepped one.
        """
        if self._seen is not None:
            (rate,) = self._seen
            self._num_batches += 1
            self._num_moves += rate is not None and rate != self._rate()
        for followed in self._followed:
            followed.reach(epochs)
        self._seen = (self._rate(),)

    def end_round(self, num_steps: Array, epochs: float) -> None:
        """Steps the schedulers up to the round's end, so that all ranks have one learning rate between rounds. Warns of one that
        is stepped once a batch, where ranks make different numbers of steps.

        Args:
            num_steps: of each rank in the round, shape (world_size,).
            epochs: the place in the training at the round's end.

        Raises:
            RuntimeError: as :meth:`reach`.
        """
        self._seen = None
        for followed in self._followed:
            followed.reach(epochs)
        self._num_steps = num_steps + (0 if self._num_steps is None else self._num_steps)
        has_scheduler = any(hasattr(self._optimizer.step, mark) for mark in _MARKS)
        follows_steps = has_scheduler and self._num_moves > 0.5 * self._num_batches
        least, most = float(self._num_steps.min()), float(self._num_steps.max())
        if self._watches and follows_steps and most > max(_LEAST_STEPS, _UNEQUAL * least):
            self._watches = False
            log.warning(
                "a scheduler is stepped after each batch, but ranks make different numbers of steps (%s so far): the fast ones "
                "come to the end of the schedule early. Take scheduler.step() out of the loop, and call "
                "session.schedule(scheduler, steps_per_epoch=...) before it",
                ", ".join(f"{n:.0f}" for n in np.asarray(self._num_steps)),
            )

    def _rate(self) -> float | None:
        rate = self._optimizer.param_groups[0].get("lr")
        # Reading it would wait for a GPU.
        return None if rate is None or isinstance(rate, Tensor) else float(rate)


def schedule(self: Session, scheduler: LRScheduler, *, steps_per_epoch: float) -> None:
    """Has a scheduler of torch follow the samples of all ranks, as ranks make different numbers of steps. Do not call its
    ``step`` yourself. It becomes part of checkpoints: call this before any is loaded, and before the loop over the batches.

    Args:
        scheduler: as for plain training, over the session's optimizer: one that counts steps, or epochs.
        steps_per_epoch: its steps in a pass over the data: 1 if it counts epochs, else as many as it was made for, such as
            len(dataset) // (batch_size * world_size). A session's loader has no length.

    Raises:
        TypeError: for a ReduceLROnPlateau, which follows a metric. ValueError: for a number that is not > 0.
        RuntimeError: within the loop over the batches, or if a checkpoint that has the scheduler's state is loaded already.
    """
    if self._schedules.in_round:
        raise RuntimeError("session.schedule was called within the loop over the batches: call it once, before the loop")
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"schedule: scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "schedule: a ReduceLROnPlateau follows a metric, not steps: call its step(metric), with the same metric on every "
            "rank, from a function in session.records"
        )
    if not steps_per_epoch > 0:
        raise ValueError(f"schedule: steps_per_epoch must be > 0, got {steps_per_epoch}")
    followed = Followed(scheduler, steps_per_epoch)
    # First, as a state that cannot be saved is refused.
    self.register_state(f"schedule {self._schedules.num_followed + 1}", followed)
    self._schedules.add(followed)
