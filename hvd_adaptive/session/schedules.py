"""Torch's schedulers in a session, whose ranks make different numbers of steps: they follow the samples of all ranks."""

from __future__ import annotations

import logging
import math
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hvd_adaptive.algorithm.statistics import Array

if TYPE_CHECKING:
    from hvd_adaptive.session.session import Session

log = logging.getLogger(__name__)

# Between rounds the ranks' learning rates may differ by this part, and by more in fewer rounds than this, as ranks that are alike
# may be a step apart.
_UNEQUAL, _MOST_ROUNDS = 0.1, 3


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
        self._num_unequal = 0
        # Whether the loop over the batches is within a round.
        self.in_round = False

    @property
    def num_followed(self) -> int:
        """How many there are."""
        return len(self._followed)

    def add(self, followed: Followed) -> None:
        """Adds a scheduler."""
        self._followed.append(followed)

    def reach(self, epochs: float) -> None:
        """Steps the schedulers up to a place in the training, in epochs of all ranks. Before each batch.

        Raises:
            RuntimeError: if somebody else has stepped one.
        """
        self.in_round = True
        for followed in self._followed:
            followed.reach(epochs)

    def end_round(self, epochs: float) -> float:
        """Steps the schedulers up to the round's end, so that all ranks have one learning rate between rounds, and returns that.

        Args:
            epochs: the place in the training at the round's end.

        Raises:
            RuntimeError: as :meth:`reach`.
        """
        self.in_round = False
        for followed in self._followed:
            followed.reach(epochs)
        return self._rate()

    def compare(self, rates: Array) -> None:
        """Warns once of ranks whose learning rates differ between rounds, as where each steps a scheduler after its own batches.

        Args:
            rates: of the ranks, from :meth:`end_round`, shape (world_size,).
        """
        self._num_unequal = self._num_unequal + 1 if np.ptp(rates) > _UNEQUAL * np.abs(rates).max() else 0
        if self._watches and self._num_unequal >= _MOST_ROUNDS:
            self._watches = False
            log.warning(
                "the ranks' learning rates differ (%s): a scheduler that is stepped in the loop over the batches follows each "
                "rank's own number of steps. Take scheduler.step() out of the loop, and call session.schedule(scheduler, "
                "steps_per_epoch=...) before it",
                ", ".join(f"{rate:.3g}" for rate in rates),
            )

    def _rate(self) -> float:
        rate = self._optimizer.param_groups[0].get("lr")
        # To read a tensor would wait for a GPU.
        return 0.0 if rate is None or isinstance(rate, Tensor) else float(rate)


def schedule(self: Session, scheduler: LRScheduler, *, steps_per_epoch: float) -> None:
    """Has a scheduler of torch follow the samples of all ranks, as ranks make different numbers of steps. Do not call its
    ``step`` yourself. It becomes part of checkpoints: call this before any is loaded, and before the loop over the batches.

    Args:
        scheduler: as for plain training, over the session's optimizer: one that counts steps, or epochs.
        steps_per_epoch: its steps in a pass over the data: 1 if it counts epochs, else as many as it was made for, such as
            len(dataset) // (batch_size * world_size). A session's loader has no length.

    Raises:
        TypeError: for a ReduceLROnPlateau, which follows a metric. ValueError: for a number that is not > 0 and finite.
        RuntimeError: if the session is closed, within the loop over the batches, or if a checkpoint that has the scheduler's
            state is loaded already.
    """
    self._handed_out.check_not_closed()
    if self._schedules.in_round:
        raise RuntimeError("session.schedule was called within the loop over the batches: call it once, before the loop")
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"schedule: scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "schedule: a ReduceLROnPlateau follows a metric, not steps: call its step(metric), with the same metric on every "
            "rank, from a function in session.records"
        )
    if not (isinstance(steps_per_epoch, Real) and 0 < steps_per_epoch < math.inf):
        raise ValueError(f"schedule: steps_per_epoch must be a number > 0, got {steps_per_epoch!r}")
    followed = Followed(scheduler, steps_per_epoch)
    # First, as a state that cannot be saved is refused.
    self.register_state(f"schedule {self._schedules.num_followed + 1}", followed)
    self._schedules.add(followed)
