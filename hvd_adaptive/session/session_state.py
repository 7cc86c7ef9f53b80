"""All that a session needs to go on from between two rounds, gathered into one nested state and put back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hvd_adaptive.algorithm.ledger import Ledger
from hvd_adaptive.engine.learning_rate import LearningRateMultiplier
from hvd_adaptive.engine.strategy import OwnState, Strategy
from hvd_adaptive.state.nested import flatten_state
from hvd_adaptive.state.random_state import random_state, seeded_random_state, set_random_state

if TYPE_CHECKING:
    from hvd_adaptive.session.session import Session

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """What can be part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Takes a state over."""


class SessionState:
    """A session's state, and the objects of others that belong to it.

    Args:
        session: the session.
        strategy: its strategy.
        lr: its learning-rate multiplier.

    Attributes:
        before_loop: called on every rank before each loop over the batches.
    """

    def __init__(self, session: Session, strategy: Strategy, lr: LearningRateMultiplier) -> None:
        self._session = session
        self._strategy = strategy
        self._lr = lr
        self.before_loop: list[Callable[[], None]] = []
        self._registered: dict[str, tuple[Stateful, bool]] = {}
        self._dataset_size: int | None = None
        # Names in the checkpoint that was loaded for which nothing was registered.
        self._unclaimed: list[str] = []

    def register(self, name: str, value: Stateful, *, shared: bool) -> None:
        """Adds an object; see :meth:`hvd_adaptive.Session.register_state`."""
        if not isinstance(name, str):
            raise TypeError(f"register_state: name must be a string, got {name!r}")
        if name in self._registered:
            raise ValueError(f"register_state: the name {name!r} is taken, got it twice")
        if name in self._unclaimed:
            raise RuntimeError(
                f"the checkpoint that was loaded holds a state of {name!r}, which was registered too late to get it: call "
                "session.schedule and session.register_state before Checkpointer.resume()"
            )
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"register_state: {name!r} must have state_dict() and load_state_dict(state), got {type(value).__name__}"
            )
        try:
            # Now, and not at the first checkpoint, after hours.
            flatten_state({name: value.state_dict()}, copy=False)
        except TypeError as error:
            raise TypeError(f"register_state: {error}") from None
        self._registered[name] = (value, shared)

    def begin_loop(self, num_samples: int) -> None:
        """Raises ValueError for a data set of another size in the middle of an epoch: the ledger would count other rows.

        Then calls ``before_loop``, and warns once of states in the checkpoint that nothing is registered for. COLLECTIVE.
        """
        if self._session.ledger.cursor and self._dataset_size not in (None, num_samples):
            raise ValueError(
                f"dataset must have as many samples as in the first part of this epoch, {self._dataset_size}, got {num_samples}"
            )
        self._dataset_size = num_samples
        for check in self.before_loop:
            check()
        if self._unclaimed and self._session.rank == 0:
            log.warning(
                "the checkpoint that was loaded holds a state of %s, for which nothing is registered: it is dropped. If that is "
                "a mistake, call session.schedule or session.register_state before Checkpointer.resume()",
                ", ".join(map(repr, self._unclaimed)),
            )
        self._unclaimed = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; see :meth:`hvd_adaptive.Session.state_dict`."""
        session = self._session
        strategy = self._strategy.state_dict()
        registered: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        for name, (value, shared) in self._registered.items():
            registered[shared][name] = value.state_dict()
        return {
            "world_size": session.world_size,
            "shared": {
                "ledger": {"epoch": session.ledger.epoch, "cursor": session.ledger.cursor},
                "dataset_size": self._dataset_size,
                "round": session.round,
                "train_s": session.train_s,
                "num_samples": session.num_samples,
                "strategy": strategy["shared"],
                "registered": registered[True],
            },
            "own": {
                "strategy": strategy["own"],
                "registered": registered[False],
                "lr": self._lr.applied_lr,
                "random": random_state(session.device),
            },
        }

    def load_state_dict(self, state: dict[str, Any], own_of: OwnState) -> None:
        """Takes a state over; see :meth:`hvd_adaptive.Session.load_state_dict`."""
        session = self._session
        shared, world_size = state["shared"], state["world_size"]
        own = own_of(session.rank % world_size)
        for name, (value, is_shared) in self._registered.items():
            saved = (shared if is_shared else own)["registered"]
            if name not in saved:
                raise ValueError(f"it has no state of {name!r}, which is registered with the session")
            value.load_state_dict(saved[name])
        self._strategy.load_state_dict(
            shared["strategy"], lambda rank: own_of(rank)["strategy"], world_size=world_size
        )
        session.ledger = Ledger(**shared["ledger"])
        self._dataset_size = shared["dataset_size"]
        session.round, session.train_s = shared["round"], shared["train_s"]
        session.num_samples = shared["num_samples"]
        self._lr.applied_lr = own["lr"]
        self._unclaimed = sorted({*shared["registered"], *own["registered"]} - set(self._registered))
        if session.rank < world_size:
            set_random_state(own["random"], session.device)
        else:
            # The round, so that a second resume does not repeat the first one's numbers.
            seed = (session.config.seed, session.rank, session.round)
            set_random_state(seeded_random_state(seed, session.device), session.device)
