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


# Between two looks of the thread that goes on with tasks: Horovod itself looks as seldom where sums are beside steps.
_PAUSE_S = 5e-3
# For so long it waits for others when all are over: to start one takes a step more time than to wake it.
_LINGER_S = 0.3


class UnderWay:
    """Tasks that go on whenever their collectives have arrived, beside other work.

    Which step comes first may differ between ranks. No rank waits for ever: of all steps on which ranks wait, the one of
    least depth, and then of the earliest task, has been begun by every rank.

    Args:
        beside: goes on with them, until they are over: a training step may take longer than a whole exchange. None: they go on
            in :meth:`poll` alone.
    """

    def __init__(self, beside: Beside | None = None) -> None:
        self._tasks: list[_Begun] = []
        self._beside = beside
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def begin(self, task: Task) -> None:
        """Runs a task up to its first collective. All ranks begin the same tasks in the same order."""
        with self._lock:
            self._tasks.append(_Begun(task))
        if self._beside is not None:
            self._beside.follow(self)

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
            self._raise()
            self._poll()

    @property
    def needs_thread(self) -> bool:
        """Whether there is something to go on with."""
        return bool(self._tasks) and self._error is None

    def go_on(self) -> None:
        """As :meth:`poll`, in the thread: what a task raises is raised by the next call in another one."""
        # Who holds the lock goes on with them itself, and may wait for other ranks, which may wait for others of our tasks.
        if self._lock.acquire(blocking=False):
            try:
                self._poll()
            except BaseException as error:
                self._error = error
            finally:
                self._lock.release()

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
        for task in self._tasks:
            while not task.is_over and task.arrived():
                task.step()
        self._tasks = [task for task in self._tasks if not task.is_over]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class Beside:
    """A thread that goes on with tasks that are under way. It ends a moment after them, and comes again with the next ones."""

    def __init__(self) -> None:
        self._followed: list[UnderWay] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def follow(self, under_way: UnderWay) -> None:
        """Goes on with tasks until they are over."""
        with self._changed:
            if under_way not in self._followed:
                self._followed.append(under_way)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), name="exchange", daemon=True)
                self._thread.start()

    @torch.no_grad()
    def _run(self, num_threads: int) -> None:
        # A new thread would take as many as the machine has cores.
        torch.set_num_threads(num_threads)
        while True:
            with self._changed:
                if not self._followed and not self._changed.wait_for(lambda: self._followed, _LINGER_S):
                    self._thread = None
                    return
                followed = list(self._followed)
            for under_way in followed:
                under_way.go_on()
            with self._changed:
                self._followed = [under_way for under_way in self._followed if under_way.needs_thread]
            time.sleep(_PAUSE_S)
