"""Signals in a process that starts others: a launcher's parent, a supervisor, the doctor. Ranks have state/preemption.py."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


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
