"""What a run does for the supervisor of ``--elastic``: a checkpoint in memory at every merge, and how long its start took."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hvd_adaptive.cluster.last_checkpoint import find_checkpoints, number_of
from hvd_adaptive.comm.protocols import Collectives, from_rank_0
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.state.folder_owner import FolderLostError

if TYPE_CHECKING:
    from hvd_adaptive.session.session import Session

log = logging.getLogger(__name__)

# What is left of the file system for others, who end by SIGBUS where it is full: MPI, and DataLoaders.
_SPARED = 1 / 16


@dataclass(slots=True)
class Supervised:
    """A run that a supervisor has started.

    Attributes:
        launch: which start of the job this is, from 1.
        memory: folder for the checkpoints in memory, on a file system that is none; None: not to be written.
        parts_s: seconds that the parts of this start took, by name, in their order; "imports" begins with the process.
    """

    launch: int
    memory: Path | None
    parts_s: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=lambda: time.monotonic() - process_age_s())

    def mark(self, part: str) -> None:
        """Ends a part of the start."""
        now_s = time.monotonic()
        self.parts_s[part] = round(now_s - self._since_s, 3)
        self._since_s = now_s

    def to_json(self) -> dict[str, Any]:
        """Returns what the first round's line in rounds.jsonl says."""
        return {"launch": self.launch, "seconds": self.parts_s}


def process_age_s() -> float:
    """Returns how many seconds ago this process was started; 0 where the system does not say."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


class MemoryCheckpointer(Checkpointer):
    """A checkpoint in memory after every merge, as long as there is room for it. Construction is COLLECTIVE.

    Args:
        session: what to save.
        folder: the supervisor's, with its lock in it.
        options: further ones of Checkpointer.

    Attributes:
        readable: every rank can read what is there.
        refusal: why no more are made, in words; None while they are. The same on every rank.
        beside: the run's checkpoints on the disk, which are written after every merge from a refusal on.
    """

    def __init__(self, session: Session, folder: Path, **options: Any) -> None:
        self.beside: Checkpointer | None = None
        self.refusal = why_not_in_memory(folder, session.transport)
        self.readable = self.refusal is None
        # Of those that are refused none is due.
        interval = 0 if self.refusal else 1
        super().__init__(session, folder, interval=interval, keep=1, background=False, **options)
        if self.refusal:
            self._say()
        else:
            self._has_room(session.state_dict())

    def _has_room(self, state: dict[str, Any]) -> bool:
        # Asked each time: momentum, residuals and the best model come only with the first steps and merges.
        if self.refusal is None:
            transport = self._session.transport
            own = num_bytes(state["own"])
            if transport.rank == 0:
                own += num_bytes(state["shared"])
                # The checkpoint says what is wrong with them.
                with contextlib.suppress(OSError, FolderLostError):
                    own += sum(file.stat().st_size for file in self._files())
            needed = sum(transport.allgather_object(own))
            # For what is needed there is to be room beside the checkpoint that is there.
            self.refusal = from_rank_0(transport, lambda: lack_of_room(self.folder, needed))
            if self.refusal:
                self._say()
        return self.refusal is None

    def _check_folder(self) -> None:
        # The folder is the job's own: what is newer was refused at this launch, or the loop has gone back.
        for path in find_checkpoints(self.folder) if self._session.rank == 0 else ():
            if number_of(path) > self._session.round:
                shutil.rmtree(path, ignore_errors=True)

    def _say(self) -> None:
        self._interval = sys.maxsize
        if self.beside is not None:
            self.beside._interval = 1
        if self._session.rank == 0:
            log.warning(
                "state for a restart cannot be kept in memory: %s. It is written to the disk after every merge instead, and read "
                "from there.", self.refusal,
            )  # fmt: skip


def why_not_in_memory(folder: Path, transport: Collectives) -> str | None:
    """Returns why checkpoints cannot be kept in memory, however small. COLLECTIVE.

    Args:
        folder: the supervisor's, with its lock in it.
        transport: the world.
    """
    if not all(transport.allgather_object(transport.local_size == transport.world_size)):
        return "the ranks are on several hosts, which do not share memory"
    why = f"{folder} is not the supervisor's, which is on another host than {transport.host}"
    return from_rank_0(transport, lambda: None if (folder / "lock").exists() else why)


def lack_of_room(folder: Path, needed: int) -> str | None:
    """Returns why so many bytes more find no room in a folder in memory; None if they do."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError as failure:
        return str(failure)
    if disk.free < needed + _SPARED * disk.total:
        return f"{folder} has {disk.free >> 20} of {disk.total >> 20} MiB free, and the next takes {needed >> 20} MiB"
    return None


def num_bytes(state: Any) -> int:
    """Returns the bytes of the tensors and arrays in a nested state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(num_bytes, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(num_bytes, state))
    return int(getattr(state, "nbytes", 0))
