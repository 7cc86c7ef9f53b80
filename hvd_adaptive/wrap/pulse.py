"""The heartbeat beside a wrapped script: a rank that is dead or frozen is named and the job ends; slow ones are left alone."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import ExitStack
from typing import Any

from hvd_adaptive.comm.protocols import Store, long_task
from hvd_adaptive.comm.watched_world import WatchedWorld

log = logging.getLogger(__name__)


class Pulse:
    """Starts with the script's hvd.init() and ends after Horovod's shutdown.

    A script may be silent for as long as it likes, so a thread reports progress for it: what is noticed is a process that
    does not run at all.

    Args:
        comm: a communicator of all ranks.
        limit_s: seconds without a sign of life after which the job ends, >= 1.

    Attributes:
        store: what the ranks share beside MPI, while it beats; None before and after, and where it could not be opened.
    """

    def __init__(self, comm: Any, limit_s: float) -> None:
        self._comm = comm
        self._limit_s = limit_s
        self._running = ExitStack()
        self._is_started = self._is_failed = False
        self._pid = os.getpid()
        self.store: Store | None = None

    def start(self) -> None:
        """Begins to beat; a second call does nothing. COLLECTIVE."""
        if self._is_started or self._comm.Get_size() == 1:
            return
        self._is_started = True
        hosts = self._comm.allgather(socket.gethostname())
        error = None
        try:
            world = WatchedWorld(
                rank=self._comm.Get_rank(),
                hosts=hosts,
                gather=self._comm.allgather,
                end=self._comm.Abort,
                stall_limit_s=self._limit_s,
            )
        except RuntimeError as failure:
            error = str(failure)
        errors = [text for text in self._comm.allgather(error) if text is not None]
        if errors:
            # The script runs without it as it would without us.
            if self._comm.Get_rank() == 0:
                log.warning("no heartbeats, so a frozen rank will not be noticed: %s", errors[0])
            return
        world.start()
        self.store = world.side.store
        self._running.callback(self._end, world)
        self._running.enter_context(long_task(world, "the script"))

    def stop(self) -> None:
        """Ends when all ranks have come here, COLLECTIVE; at once on a rank that has failed. Does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._running.close()

    def abandon(self) -> None:
        """Takes note that this rank ends in failure, and shall not wait for the others. It beats until `stop`."""
        self._is_failed = True

    def _end(self, world: WatchedWorld) -> None:
        if self._is_failed:
            world.abandon()
        else:
            world.leave()
