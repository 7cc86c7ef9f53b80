"""What open sessions have put on models and optimizers. A session that was never closed must not act on the next one's steps."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hvd_adaptive.engine.strategy import Removable
from hvd_adaptive.session.handed_out import HandedOut

log = logging.getLogger(__name__)

_open: list[SessionHooks] = []
_lock = threading.Lock()


class SessionHooks:
    """The hooks of one session. It stays known until they are removed, or what they are on is gone.

    It keeps nothing alive, so a session may be garbage-collected unclosed. Then its hooks may still be on the model and the
    optimizer. They keep the parts alive that remove them, but for torch's handles, which keep nothing alive and are kept here.

    Args:
        model: what the session trains.
        optimizer: the one that it was given.
        parts: what removes the hooks.
        handed_out: of the session.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, parts: Iterable[Removable], handed_out: HandedOut
    ) -> None:
        # The next model may have parameters of this one, as with a new head on old layers.
        self._trained: list[weakref.ref[Any]] = [weakref.ref(it) for it in (model, optimizer, *model.parameters())]
        self._parts = [_found(part) for part in parts]
        self._handed_out = weakref.ref(handed_out)
        with _lock:
            _open.append(self)

    @property
    def trained_ids(self) -> set[int]:
        """``id`` of the model, the optimizer and the parameters, as far as they are still there."""
        return {id(it) for ref in self._trained if (it := ref()) is not None}

    def remove(self) -> None:
        """Takes the hooks off. A second call does nothing."""
        with _lock:
            if self in _open:
                _open.remove(self)
        for find in self._parts:
            if (part := find()) is not None:
                part.remove()
        self._parts.clear()

    def replace(self) -> None:
        """Takes the hooks off, and has the session raise RuntimeError if it is used again."""
        self.remove()
        if (handed_out := self._handed_out()) is not None:
            handed_out.close(is_replaced=True)


def _found(part: Removable) -> Callable[[], Removable | None]:
    return (lambda: part) if isinstance(part, RemovableHandle) else weakref.ref(part)


def take_over(model: nn.Module, optimizer: Optimizer, *, speaks: bool) -> None:
    """Takes the hooks of sessions that were not closed off a model and an optimizer, before the next session puts on its own.
    By this rank alone.

    Args:
        model: what the next session trains.
        optimizer: its own.
        speaks: whether this rank warns.
    """
    coming = {id(it) for it in (model, optimizer, *model.parameters())}
    older = []
    with _lock:
        for hooks in [*_open]:
            trained = hooks.trained_ids
            if trained & coming:
                older.append(hooks)
            elif not trained:
                _open.remove(hooks)
    for hooks in older:
        hooks.replace()
    if older and speaks:
        log.warning(
            "the session before on this model or optimizer was not closed: call session.close() before you make the next one. "
            "Its hooks have been removed, and it cannot be used any more"
        )
