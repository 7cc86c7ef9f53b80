"""What rank 0 says when a launcher ends it by SIGTERM, as mpirun does at Ctrl-C: a second later it kills its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType


class LastWords:
    """Says them in a thread of its own: the main thread may stand in a wait for ranks that are gone. From the main thread.

    A handler of the script's own takes the place of this one.

    Args:
        say: says them; then the process ends.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._is_said = threading.Lock()
        # Python writes a signal's number here at once.
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        os.register_at_fork(after_in_child=self.stop)
        threading.Thread(target=self._watch, args=(reader,), name="hvd_adaptive-last-words", daemon=True).start()

    def stop(self) -> None:
        """Gives the signal back; also in a forked child, whose signals are not this process's."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        fd = signal.set_wakeup_fd(-1)
        if fd not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(fd)

    def _watch(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._handle:
                self._end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The script may have taken the place of the socket. Not in this thread, which may be in the midst of a write.
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        if self._is_said.acquire(blocking=False):
            with contextlib.ExitStack() as leaving:
                leaving.callback(os._exit, 128 + signal.SIGTERM)
                self._say()
