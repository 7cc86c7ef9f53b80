"""Runs a rank's child process, watches its time, and says how far it came. Imports neither torch nor MPI."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hvd_adaptive.cluster import signals
from hvd_adaptive.cluster.relaunch import python_module

_TAIL_CHARACTERS = 2000


class Ended(BaseException):
    """A signal, the first argument, ends this process: of the launcher, or by Ctrl-C."""


@dataclass(slots=True)
class Outcome:
    """What a child said until it ended.

    Attributes:
        facts: of each stage that ended.
        ranks: the facts of all ranks, where this is rank 0 and the ranks met; else None.
        stage: where it stopped; None: it came to its end.
        kind: "error" (a stage said what is wrong), "crash", "hang" or "ended" (by the launcher), with ``stage``.
        text: the error's words, or what the child wrote last.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] | None = None
    stage: str | None = None
    kind: str = ""
    text: str = ""


def supervise(arguments: dict[str, Any], *, limit_s: float, on_stage: Callable[[str], None] = lambda stage: None) -> Outcome:
    """Runs `hvd_adaptive.doctor.child`; each stage may take so long, then the child is killed. From the main thread.

    Args:
        arguments: of the child, without the pipe.
        limit_s: seconds that a stage may take.
        on_stage: called when a stage begins.
    """
    outcome = Outcome(facts={"machine": arguments["machine"]}, stage="start")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    text = json.dumps({**arguments, "pipe": writing})
    with tempfile.TemporaryFile() as errors, os.fdopen(reading, "rb", buffering=0) as pipe, ending_signals():
        child: subprocess.Popen[bytes] | None = None
        try:
            # Launchers may talk to their ranks through descriptors that they leave open.
            child = subprocess.Popen(
                [*python_module("hvd_adaptive.doctor.child"), text],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                close_fds=False,
            )
            os.close(writing)
            _listen(pipe, outcome, child, limit_s, on_stage)
        except Ended:
            outcome.kind = "ended"
            outcome.stage = outcome.stage or "end"
        finally:
            if child is not None and child.poll() is None:
                child.kill()
                child.wait()
        if outcome.kind != "error" and outcome.stage is not None:
            errors.seek(0)
            outcome.text = errors.read().decode(errors="replace").strip()[-_TAIL_CHARACTERS:]
            if outcome.kind == "crash" and child is not None:
                outcome.text = f"{how_it_ended(child.returncode)}\n{outcome.text}".strip()
    return outcome


def _listen(
    pipe: Any, outcome: Outcome, child: subprocess.Popen[bytes], limit_s: float, on_stage: Callable[[str], None]
) -> None:
    """Takes in the child's lines until it ends or is out of time."""
    buffer, deadline_s = b"", time.monotonic() + limit_s
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
            outcome.stage, outcome.kind = outcome.stage or "end", "hang"
            return
        chunk = pipe.read(1 << 16)
        if not chunk:
            break
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            _take(json.loads(line), outcome, on_stage)
        deadline_s = time.monotonic() + limit_s
    # MPI's end, which the launcher must see, comes after the child's last word.
    try:
        code: int | None = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    if outcome.stage is None and code != 0:
        outcome.stage = "end"
    if outcome.stage is not None and not outcome.kind:
        outcome.kind = "hang" if code is None else "crash"


def _take(line: dict[str, Any], outcome: Outcome, on_stage: Callable[[str], None]) -> None:
    if "begin" in line:
        outcome.stage, outcome.kind, outcome.text = line["begin"], "", ""
        on_stage(line["begin"])
    elif "end" in line:
        found = line["facts"]
        if line["end"] != "report":
            outcome.facts[line["end"]] = found
        if isinstance(found, dict) and "error" in found:
            outcome.kind, outcome.text = "error", found["error"]
    elif "ranks" in line:
        outcome.ranks = line["ranks"]
    elif "done" in line:
        outcome.stage, outcome.kind, outcome.text = None, "", ""


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Makes SIGTERM, SIGINT and SIGHUP (unless it is ignored, as by nohup) raise `Ended` in this block. From the main thread."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    with signals.handled(signals.ending_signals(), end):
        yield


def how_it_ended(code: int | None) -> str:
    """Returns a process's exit code, or the signal that ended it, as text."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"ended by {signal.Signals(-code).name}"
