"""Which rank has failed, judged from the heartbeats alone: pure functions, no threads and no clock."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hvd_adaptive.validation import parse_json

Phase = Literal["working", "waiting", "left"]
FaultKind = Literal["silent", "stuck", "left early", "deadlocked"]

# A rank that has ended properly never comes back: others that wait for it need no whole stall limit.
LEFT_EARLY_S = 5.0
# What `process_state` tells of a process that has ended.
ENDED = ("", "Z", "X")
# All ranks inside one collective may also be a large model on a slow link, so give that ten times as long.
PATIENT_LIMITS = 10
# In different ones they wait for ever; one that has just got the last bytes of the first may be in the next, so not at once.
APART_LIMITS = 2


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One rank's sign of life.

    Attributes:
        count: goes up with every beat.
        phase: "working", "waiting" (inside a collective or a rendezvous) or "left" (ended properly).
        phase_s: seconds in this phase without progress, by the rank's own clock.
        what: what it works on or waits for, in a few words; may be empty.
        host: its host's name.
        pid: its process id on that host.
        space: where that id means this process, see `process_space`; empty where unknown.
        place: the collective that it waits in; empty where it has no name, and where it does not wait.
    """

    count: int
    phase: Phase
    phase_s: float
    what: str
    host: str
    pid: int
    space: str = ""
    place: str = ""

    def encode(self) -> bytes:
        """Returns the beat as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Beat | None:
        """Reads `encode`'s result; None for the empty value of a rank that has not started beating.

        Raises:
            ValueError: for anything else.
        """
        if not data:
            return None
        values = parse_json(data)
        kinds: dict[str, Any] = {
            "count": int, "phase": str, "phase_s": (int, float), "what": str, "host": str, "pid": int, "space": str,
            "place": str,
        }  # fmt: skip
        if not isinstance(values, dict) or values.keys() != kinds.keys():
            raise ValueError(f"not a heartbeat: {data[:200]!r}")
        if not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ValueError(f"not a heartbeat: {data[:200]!r}")
        return Beat(**values)


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What one rank knows of another: its newest beat, None if it never beat, and seconds since it came."""

    rank: int
    beat: Beat | None
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failed rank (of "deadlocked": the first of all), and for how many seconds it has been so.

    Attributes:
        apart: of "deadlocked": another rank, which waits in another collective; None if none is known to.
    """

    kind: FaultKind
    rank: int
    for_s: float
    beat: Beat | None
    apart: tuple[int, Beat] | None = None


def find_fault(sightings: Sequence[Sighting], limit_s: float) -> Fault | None:
    """Judges all ranks; None while nothing is wrong.

    Silence comes first, as whoever waits for a silent rank looks stuck as well; of several the longest
    silent. A rank without progress is only stuck while another one waits for it: a long computation that
    holds up nobody is nobody's business.

    Args:
        sightings: of every rank that is watched, in rank order; at least one.
        limit_s: the stall limit in seconds, > 0.
    """
    silent = [s for s in sightings if s.silent_s >= limit_s]
    if silent:
        worst = max(silent, key=lambda s: s.silent_s)
        return Fault(kind="silent", rank=worst.rank, for_s=worst.silent_s, beat=worst.beat)
    beats = [(s.rank, s.beat) for s in sightings if s.beat is not None]
    waits = [beat.phase_s for _, beat in beats if beat.phase == "waiting"]
    # One that ends in failure beats no more.
    left = [(s.beat.phase_s + s.silent_s, s.rank, s.beat) for s in sightings if s.beat is not None and s.beat.phase == "left"]
    for left_s, rank, beat in left:
        if min(left_s, max(waits, default=0.0)) >= LEFT_EARLY_S:
            return Fault(kind="left early", rank=rank, for_s=left_s, beat=beat)
    # Ranks that have left wait for the last one too, but that may still write a large model.
    longest_wait_s = max([*waits, *(left_s / PATIENT_LIMITS for left_s, *_ in left)], default=0.0)
    working = [(beat.phase_s, rank, beat) for rank, beat in beats if beat.phase == "working"]
    if working and longest_wait_s >= limit_s:
        idle_s, rank, beat = max(working, key=lambda item: item[0])
        if idle_s >= (limit_s if waits else PATIENT_LIMITS * limit_s):
            return Fault(kind="stuck", rank=rank, for_s=idle_s, beat=beat)
    if len(waits) == len(sightings):
        named = [(rank, beat) for rank, beat in beats if beat.place]
        apart = next(((rank, beat) for rank, beat in named if beat.place != named[0][1].place), None)
        first = beats[0] if apart is None else named[0]
        if min(waits) >= (PATIENT_LIMITS if apart is None else APART_LIMITS) * limit_s:
            return Fault(kind="deadlocked", rank=first[0], for_s=min(waits), beat=first[1], apart=apart)
    return None


def process_space() -> str:
    """Returns what processes have in common to which a process id means the same: the system's start and the namespace. Empty
    where /proc is not that of this process's namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_state(pid: int) -> str | None:
    """Returns a local process's state letter as ps shows it, "" if there is none, None where unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
    except OSError:
        return None


def has_ended(pid: int) -> bool:
    """Returns whether a local process has ended; also where /proc hides those of others."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return process_state(pid) in ("Z", "X")


def describe(fault: Fault, *, reporter: int, host: str, limit_s: float, state: str | None) -> str:
    """Writes the one message that ends a job.

    Args:
        fault: what was found.
        reporter: the rank that found it.
        host: the reporter's host.
        limit_s: the stall limit in seconds.
        state: `process_state` of the failed rank, None if it is on another host or unknown.
    """
    beat = fault.beat
    where = f"rank {fault.rank}" + (
        f" on {beat.host} (pid {beat.pid})" if beat else " (no heartbeat of it has come)"
    )
    phase = f"; its last sign of life: {beat.phase} {beat.what!r} for {beat.phase_s:.1f} s" if beat else ""
    stack = (
        f"`py-spy dump --pid {beat.pid}` on {beat.host} shows where it is" if beat else "look at its output"
    )
    longer = f"if it may be quiet for so long, raise stall_limit_s (now {limit_s:g} s)"
    if fault.kind == "silent":
        verdict, remedy = _describe_silence(state, f"{stack}; {longer}")
        text = f"{where} {verdict}: no heartbeat for {fault.for_s:.1f} s{phase}. {remedy}"
    elif fault.kind == "stuck":
        text = (
            f"{where} is stuck: alive, but no progress for {fault.for_s:.1f} s while others wait{phase}. "
            f"{stack}; {longer}"
        )
    elif fault.kind == "left early":
        text = (
            f"{where} left early: it ended {fault.for_s:.1f} s ago while others wait for it; look at its "
            "output for the reason: all ranks must take the same number of rounds and leave together"
        )
    elif fault.apart is not None and beat is not None:
        other, there = fault.apart
        text = (
            f"all ranks are deadlocked: {where} has waited in {beat.place!r} for {fault.for_s:.1f} s or more, and rank {other} "
            f"on {there.host} (pid {there.pid}) in {there.place!r}. Every rank must call the same collectives in the same order: "
            f"look for one that only some ranks call, as under `if rank == 0`, or in a loop that one of them left; {stack}"
        )
    else:
        text = (
            f"all ranks are deadlocked: each has waited for the others for {fault.for_s:.1f} s or more; "
            f"{where}{phase}. They called different collectives, or the network between them is down; "
            f"{stack}; {longer}"
        )
    return f"hvd_adaptive: {text}. Rank {reporter} on {host} found this and ends the job."


def _describe_silence(state: str | None, otherwise: str) -> tuple[str, str]:
    if state in ENDED:
        return (
            "is dead",
            "Its process has ended: look for its last output, and for the out-of-memory killer (`dmesg`)",
        )
    if state in ("T", "t"):
        return "is frozen", "Its process is stopped (SIGSTOP, Ctrl-Z or a debugger): find out who stopped it"
    if state is None:
        return (
            "is dead, frozen or cut off",
            f"Look whether its host can be reached and its process still runs; {otherwise}",
        )
    return "is frozen", f"Its process exists (state {state}), but Python does not run in it; {otherwise}"
