"""Runs exchanges step by step, so that one is on the wire while the next is encoded.

A task is a generator: it starts a collective, yields it, gets its result sent in, and goes on. It yields None where other
ranks' tasks have a collective and it has none, so that all ranks' tasks have the same steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

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


class UnderWay:
    """Tasks that go on whenever their collectives have arrived, beside other work.

    Which step comes first may differ between ranks. No rank waits for ever: of all steps on which ranks wait, the one of
    least depth, and then of the earliest task, has been begun by every rank.
    """

    def __init__(self) -> None:
        self._tasks: list[_Begun] = []

    def begin(self, task: Task) -> None:
        """Runs a task up to its first collective. All ranks begin the same tasks in the same order."""
        self._tasks.append(_Begun(task))

    def poll(self) -> None:
        """Runs tasks as far as they go without waiting."""
        for task in self._tasks:
            while not task.is_over and task.arrived():
                task.step()
        self._tasks = [task for task in self._tasks if not task.is_over]

    def finish(self) -> None:
        """Runs all tasks to their end. COLLECTIVE: every rank has begun the same tasks."""
        while self._tasks:
            depth = min(task.depth for task in self._tasks)
            for task in self._tasks:
                if task.depth == depth:
                    task.step()
            self._tasks = [task for task in self._tasks if not task.is_over]
