"""What a rank tells the supervisor of ``run --elastic``: a line of JSON on standard error, which it keeps from people."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from hvd_adaptive.cluster.elastic_jobs import EVENT
from hvd_adaptive.session.supervised import Supervised

# Steps for so long are progress of a script that commits nothing.
STEADY_S = 60.0


class Launched(Supervised):
    """One launch of a supervised script, on this rank. Construct it when all is loaded and the script is to begin.

    Args:
        launch: which start of the job this is, from 1.
        memory: the supervisor's folder in memory; None where commits are not to go there.
        folder: the folder for commits elsewhere.
        job: the supervisor's name for the job where people chose that folder, which another job may have, too; else None.

    Attributes:
        rank: this rank, as soon as it is known.
        commit: the commit that this launch goes on from; 0 for none.
    """

    def __init__(self, launch: int, memory: Path | None, folder: Path, job: str | None = None) -> None:
        super().__init__(launch, memory)
        self.folder = folder
        self.job = job
        self.rank = 0
        self.commit = 0
        self.mark("imports")
        self._first_step_s: float | None = None
        self._is_steady = False

    def stepped(self) -> None:
        """Takes note of an optimizer step or of a commit."""
        now_s = time.monotonic()
        if self._first_step_s is None:
            self._first_step_s = now_s
            self.mark("first step")
            self.say("step", commit=self.commit, seconds=self.parts_s)
        elif not self._is_steady and now_s - self._first_step_s >= STEADY_S:
            self._is_steady = True
            self.say("steady")

    def say(self, event: str, *, any_rank: bool = False, **content: Any) -> None:
        """Tells the supervisor, from rank 0 or from any."""
        if self.rank == 0 or any_rank:
            sys.stderr.flush()
            # At once and whole, past whatever the script has made of sys.stderr.
            os.write(2, f"{EVENT}{json.dumps({'event': event, **content})}\n".encode())
