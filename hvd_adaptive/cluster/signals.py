"""Signals in a process that starts others: a launcher's parent, a supervisor, the doctor. Ranks have state/preemption.py, and
share the rule of when a second signal counts."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from hvd_adaptive.cluster.output import say
from hvd_adaptive.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED

if TYPE_CHECKING:
    import subprocess

Handler = Callable[[int, FrameType | None], Any]

# Launchers may deliver one signal twice: srun its own and slurmstepd's, mpirun to a rank and to its group.
_SAME_SIGNAL_S = 2.0
# Of SIGINT, which a person may repeat on purpose.
_SAME_CTRL_C_S = 0.4
# mpirun drops what it gets before it has ranks to pass it to, well within this time of its start.
_YOUNG_S = 5.0
# Together less than _SAME_SIGNAL_S, so that ranks which got the first one drop the others.
_AGAIN_S = 0.4
_NUM_AGAIN = 3
# Ranks that get the signal have ended by then, unless writing their checkpoint takes long.
_LONG_S = 120.0
# How many signals each launcher has been passed.
_passed_on: weakref.WeakKeyDictionary[subprocess.Popen[bytes], int] = weakref.WeakKeyDictionary()


class Stop:
    """Signals that ask a process to end: the first in order, a second at once. One too soon after the first is the same again.

    Attributes:
        first: number of the first signal; 0 until one comes.
        first_s: when it came, by time.monotonic.
        is_at_once: a second one has come.
    """

    def __init__(self) -> None:
        self.first = 0
        self.first_s = 0.0
        self.is_at_once = False

    def take(self, number: int) -> bool:
        """Takes note of a signal; returns False for one that is to be dropped."""
        if not self.first:
            self.first_s = time.monotonic()
            self.first = number
            return True
        same_s = _SAME_CTRL_C_S if number == self.first == signal.SIGINT else _SAME_SIGNAL_S
        counts = time.monotonic() - self.first_s >= same_s
        self.is_at_once = self.is_at_once or counts
        return counts

    @property
    def exit_code(self) -> int:
        """Of a job that has ended as it was asked to: 130 after Ctrl-C, else 75."""
        return EXIT_INTERRUPTED if self.first == signal.SIGINT else EXIT_PREEMPTED

    def job_code(self, code: int, *, in_order: bool) -> int:
        """Returns the exit code of a job that was asked to end.

        Args:
            code: its launcher's.
            in_order: as for `for_launcher`.
        """
        # Ranks that do not yet catch the order to stop are killed by it, and have nothing to save.
        was_asked = in_order and (self.is_at_once or code == 128 + signal.SIGUSR1)
        return self.exit_code if was_asked or self.first == signal.SIGINT else code


def ending_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a process to end: of a scheduler, of Ctrl-C, and of a terminal that is closed, unless this
    process ignores that one (nohup)."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


@contextlib.contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Has a function handle signals in this block. From the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def blocked(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Has signals wait until this block is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def for_launcher(number: int, *, in_order: bool) -> int:
    """Returns the signal by which a launcher's parent passes one on.

    Args:
        number: what this process got. A terminal that is closed counts as SIGTERM: in its own session the launcher would not hear
            of it.
        in_order: the ranks end by themselves after SIGUSR1; mpirun leaves them one second after a SIGTERM or SIGINT.
    """
    if in_order and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        return signal.SIGUSR1
    return signal.SIGTERM if number == signal.SIGHUP else number


def pass_on(launcher: subprocess.Popen[bytes], number: int, in_order: bool, *, started_s: float) -> None:
    """Passes a signal on to a launcher. An order to end that comes soon after its start is repeated. If the launcher still runs
    two minutes after an order to end, standard error says what to do.

    Args:
        launcher: what started the ranks.
        number: as for `for_launcher`.
        in_order: as for `for_launcher`.
        started_s: when it was started, by time.monotonic.
    """
    passed_on = for_launcher(number, in_order=in_order)
    launcher.send_signal(passed_on)
    count = _passed_on[launcher] = _passed_on.get(launcher, 0) + 1
    if not in_order or passed_on != signal.SIGUSR1:
        return
    is_young = time.monotonic() - started_s <= _YOUNG_S

    def again() -> None:
        for _ in range(_NUM_AGAIN * is_young):
            time.sleep(_AGAIN_S)
            launcher.send_signal(passed_on)
        time.sleep(_LONG_S)
        if launcher.poll() is None and _passed_on[launcher] == count:
            said = f"the launcher still runs {_LONG_S:.0f} s after the signal. A second signal ends the job at once"
            say(f"{said}; what is being saved is lost")

    # Not by a timer of the process, whose signal may come when it ends, and would be its end.
    threading.Thread(target=again, name="hvd_adaptive-stop-again", daemon=True).start()
