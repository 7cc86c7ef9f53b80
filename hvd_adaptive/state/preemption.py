"""Signals that announce the end of the job: a rank takes note, and the ranks save what they have before the end comes.

All that ranks do about signals is here. Processes that start others pass signals on instead: cluster/signals.py.

Python's own handler writes the signal's number to a socket at once, also while the main thread stands inside MPI or a kernel
of torch; a thread reads it there, and keeps the time. Nothing else happens in a handler. Imports neither torch nor MPI, so
that signals can be caught before they are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.cluster.signals import Stop

if TYPE_CHECKING:
    from hvd_adaptive.comm.protocols import Transport

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# Rank 0 speaks for all.
_OTHERS_LATER_S = 1.0


class Preemption:
    """What this process knows of such a signal.

    Attributes:
        signal_number: of the first signal; 0 until one comes.
        drain_limit_s: seconds from the first signal until the job is ended, whatever its ranks still do.
        rank: of this process; others than 0 leave the message of the end to rank 0.
        saved: says in words what is saved, for that message.
        saved_at_first: what `saved` is until a session's checkpointer changes it.
        end_job: ends the job on all ranks: gets the message and the exit code. By default it ends this process alone.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.drain_limit_s = 60.0
        self.rank = 0
        self.saved = self.saved_at_first = _nothing
        self.end_job: Callable[[str, int], object] = _end_process
        self._stop = Stop()
        self._pid = 0
        self._writer: socket.socket | None = None
        self._before: dict[int, Any] = {}
        self._is_worker = False
        self._ends_late = True

    def catch_signals(self, numbers: Sequence[signal.Signals] = SIGNALS, *, ends_late: bool = True) -> None:
        """Begins to catch signals; again does nothing. From the main thread.

        A second one that comes two seconds or more after the first, of SIGINT 0.4 s, ends the job at once. Processes that this
        one forks do not react to SIGUSR1 and SIGINT, and those of multiprocessing (a DataLoader's workers) to SIGTERM of their
        parent only, also where a fork server starts them. Workers that are spawned are so once they have come here: they import
        the script's main module, so that this must not stand behind ``if __name__ == "__main__"``.

        Args:
            numbers: SIGUSR1, or it and SIGTERM, or these and SIGINT.
            ends_late: whether a job that is not ready in time, and a second signal, end the job.

        Raises:
            ValueError: not in the main thread.
        """
        if self._writer is not None or self._is_worker:
            return
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            self.become_worker()
            return
        self._ends_late = ends_late
        with contextlib.suppress(ValueError):
            # Until a session knows better; one that reads the launcher's variables says what is wrong with them.
            self.rank = read_launcher(os.environ).rank or 0
        self._before = {number: signal.signal(number, _take_note) for number in numbers}
        for number in numbers:
            # System calls of MPI and Horovod go on.
            signal.siginterrupt(number, False)
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if not self._pid and signal.SIGTERM in numbers:
            preload = vars(multiprocessing.forkserver._forkserver)["_preload_modules"]
            multiprocessing.set_forkserver_preload([*preload, "hvd_adaptive.state.fork_server"])
            multiprocessing.util.register_after_fork(self, Preemption._heed_only_parent)
        if not self._pid:
            atexit.register(self._ignore)
            os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._leave_to_parent)
        self._pid = os.getpid()
        threading.Thread(target=self._watch, args=(reader,), name="hvd_adaptive-signals", daemon=True).start()

    def watch_over(self, transport: Transport, drain_limit_s: float) -> None:
        """Makes the end the whole job's.

        Args:
            transport: of the job.
            drain_limit_s: see the attribute.
        """
        self.rank, self.drain_limit_s, self.end_job = transport.rank, drain_limit_s, transport.abort
        self.saved = self.saved_at_first
        transport.last_words = lambda: f"{self.saved()[:1].upper()}{self.saved()[1:]}."

    def stop(self) -> None:
        """Gives the signals back to whom they belonged before."""
        if self._writer is None:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()
        self._writer, self.signal_number, self._stop = None, 0, Stop()
        self.saved = self.saved_at_first = _nothing

    def _ignore(self) -> None:
        # Python gives its handlers back before MPI has finished, and a late signal would end what has ended well.
        if self._writer is not None:
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)

    def _watch(self, reader: socket.socket) -> None:
        with reader:
            while True:
                if self.signal_number and self._ends_late:
                    reader.settimeout(max(0.01, self._stop.first_s + self.drain_limit_s - time.monotonic()))
                try:
                    numbers = reader.recv(64)
                except TimeoutError:
                    self._end(f"the ranks were not ready to end {self.drain_limit_s:g} s (drain_limit_s) after {self._name}")
                    return
                if not numbers:
                    return
                for number in filter(self._before.__contains__, numbers):
                    self._stop.take(number)
                self.signal_number = self.signal_number or self._stop.first
                if self._stop.is_at_once and self._ends_late:
                    self._end(f"a second signal came while the ranks got ready to end after {self._name}")
                    return

    @property
    def exit_code(self) -> int:
        """Of a process that has ended in order: 130 after Ctrl-C, else 75."""
        return self._stop.exit_code

    @property
    def _name(self) -> str:
        return signal.Signals(self.signal_number).name

    def _end(self, why: str) -> None:
        if self.rank:
            time.sleep(_OTHERS_LATER_S)
        self.end_job(f"hvd_adaptive: rank {self.rank}: {why}; the job ends now: {self.saved()}", self.exit_code)

    # -- around a fork

    def _hold(self) -> None:
        if self._writer is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._before)

    def _release(self) -> None:
        if self._writer is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)

    def _leave_to_parent(self) -> None:
        if self._writer is None:
            return
        # The socket is the parent's: what is written there counts for it.
        signal.set_wakeup_fd(-1)
        self._writer.close()
        self._writer, self._is_worker = None, True
        for number in self._before:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)

    def become_worker(self) -> None:
        """Reacts to none of the signals but SIGTERM of the process that started this one: in a worker that has an interpreter of
        its own, or in the server that forks workers."""
        self._is_worker = True
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if "--multiprocessing-fork" in sys.orig_argv:
            _heed_only(os.getppid())
        else:
            multiprocessing.util.register_after_fork(self, Preemption._heed_only_parent)

    def _heed_only_parent(self) -> None:
        """In a process of multiprocessing: a SIGTERM for all processes of the job must not take a worker from its rank, which
        is still to save its work; the parent's own does end it."""
        # A fork server's workers have another parent than the process that ends them.
        parent = multiprocessing.process.parent_process()
        if self._is_worker and parent is not None and parent.pid is not None:
            _heed_only(parent.pid)


def _heed_only(parent: int) -> None:
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        data = sys.modules.get("torch.utils.data")
        if data is not None and data.get_worker_info() is not None:
            os._exit(0)  # As torch's own handler, which takes no signal but its parent's for the end of the job.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="hvd_adaptive-signals", daemon=True).start()


def _take_note(number: int, frame: FrameType | None) -> None:
    """Nothing: the number is in the socket already."""


def _nothing() -> str:
    return "nothing was saved by this process"


def _end_process(text: str, code: int) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
    os._exit(code)


# Signals belong to the process, and so does what is known of them.
PREEMPTION = Preemption()


def catch_signals() -> None:
    """Has SIGUSR1 and SIGTERM end the run in order: a :class:`hvd_adaptive.Session` then closes its round and ends its batches
    on all ranks. Call it as early as you can, from the main thread: until then such a signal ends the process.

    Raises:
        ValueError: not in the main thread.
    """
    PREEMPTION.catch_signals()
