"""Which of a script's threads trains. Others may read its loaders ahead of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hvd_adaptive.wrap.loaders import IndexStream, Loader


class TrainingThread:
    """The thread that trains: the one that has wrapped an optimizer, until another one steps."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    @property
    def is_here(self) -> bool:
        """Whether nothing that is done here comes amid the training: this thread trains, or the one that did has ended."""
        return threading.current_thread() is self._thread or not self._thread.is_alive()

    def is_this(self, loaders: Iterable[Loader]) -> None:
        """Takes note that this thread trains: passes that it has read before that was known are no other thread's."""
        if threading.current_thread() is self._thread:
            return
        self._thread = threading.current_thread()
        for loader in loaders:
            if loader.beside is not None and loader.beside.reader is self._thread:
                loader.beside = None

    def reads_ahead(self, stream: IndexStream) -> bool:
        """Returns whether the batch of a pass that is asked for now is for another thread."""
        if not self.is_here:
            stream.loader.beside, stream.reader = stream, threading.current_thread()
        return stream.is_beside
