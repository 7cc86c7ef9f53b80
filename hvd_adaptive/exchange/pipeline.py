"""Runs exchanges step by step, so that one is on the wire while the next is encoded.

A task is a generator: it starts a collective, yields it, gets its result sent in, and goes on. It yields None where other
ranks' tasks have a collective and it has none, so that all ranks' tasks have the same steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from typing import Any

import torch

from hvd_adaptive.comm.protocols import Pending

Task = Generator[Pending | None, Any, None]


class _Begun:
    """A task up to its next collective, which is under way.

    Attributes:
        depth: collectives whose result it has got.
        is_over: whether it has returned.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._pending: Pending | None = None
        self.depth = -1
        self.is_over = False
        self.step()

    def arrived(self) -> bool:
        """Returns whether `step` would not wait."""
        return self._pending is None or self._pending.done()

    def step(self) -> None:
        """Waits for the collective under way and goes on to the next one."""
        result = None if self._pending is None else self._pending.wait()
        self.depth += 1
        try:
            self._pending = self._task.send(result)
        except StopIteration:
            self._pending, self.is_over = None, True


def run_pipeline(tasks: Iterable[Task]) -> None:
    """Runs tasks to their end, each step of a task after the same step of the task before.

    The next task begins before the one before it is waited for. The order is the same on all ranks, whatever is slow. At
    most as many tasks as a task has steps are under way together. COLLECTIVE.
    """
    under_way: list[_Begun] = []
    waiting = iter(tasks)
    while True:
        task = next(waiting, None)
        begun = [] if task is None else [_Begun(task)]
        for other in reversed(under_way):
            other.step()
        under_way = [other for other in under_way + begun if not other.is_over]
        if task is None and not under_way:
            return


# Between two looks of the thread that goes on with tasks.
_PAUSE_S = 2e-3


class UnderWay:
    """Tasks that go on whenever their collectives have arrived, beside other work.

    Which step comes first may differ between ranks. No rank waits for ever: of all steps on which ranks wait, the one of
    least depth, and then of the earliest task, has been begun by every rank.

    Args:
        threaded: a thread goes on with them, until they are over: a training step may take longer than a whole exchange. Else
            they go on in :meth:`poll`.
    """

    def __init__(self, *, threaded: bool = False) -> None:
        self._tasks: list[_Begun] = []
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def begin(self, task: Task) -> None:
        """Runs a task up to its first collective. All ranks begin the same tasks in the same order."""
        with self._lock:
            self._tasks.append(_Begun(task))
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), name="exchange", daemon=True)
                self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether all tasks have ended."""
        return not self._tasks

    def poll(self) -> None:
        """Runs tasks as far as they go without waiting.

        Raises:
            RuntimeError: what a task has raised, here or in the thread.
        """
        with self._lock:
            self._poll()

    def finish(self) -> None:
        """Runs all tasks to their end. COLLECTIVE: every rank has begun the same tasks.

        Raises:
            RuntimeError: as :meth:`poll`.
        """
        with self._lock:
            self._raise()
            while self._tasks:
                depth = min(task.depth for task in self._tasks)
                for task in self._tasks:
                    if task.depth == depth:
                        task.step()
                self._tasks = [task for task in self._tasks if not task.is_over]

    def _poll(self) -> None:
        self._raise()
        for task in self._tasks:
            while not task.is_over and task.arrived():
                task.step()
        self._tasks = [task for task in self._tasks if not task.is_over]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    @torch.no_grad()
    def _run(self, num_threads: int) -> None:
        # A new thread would take as many as the machine has cores.
        torch.set_num_threads(num_threads)
        while True:
            with self._lock:
                try:
                    self._poll()
                except BaseException as error:
                    self._error = error
                if not self._tasks or self._error is not None:
                    self._thread = None
                    return
            time.sleep(_PAUSE_S)
