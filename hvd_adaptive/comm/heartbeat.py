"""A heartbeat per rank, outside MPI: a rank that is dead, frozen, stuck or gone is named, and the job ends.

Rank 0 watches every rank and every other rank watches rank 0, through the side channel. Two daemon threads a
rank: one talks to the store, which a frozen rank 0 makes it hang in; the other only looks at the time, and
judges.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined,unused-ignore]

from hvd_adaptive.comm import failures
from hvd_adaptive.comm.failures import Beat, Fault, Phase, Sighting
from hvd_adaptive.comm.job_end import end_job, said_by_rank_0
from hvd_adaptive.comm.launcher_end import GRACE_S, end_later, find_launcher_process
from hvd_adaptive.comm.seal import UnsealedError
from hvd_adaptive.comm.side_channel import SideChannel

log = logging.getLogger(__name__)

# When rank 0 fails, each other rank reports it later than the rank before: the first to do so ends the job.
_TURN_S = 0.5
_LAST_TURN_S = 5.0
_LEAVE_POLL_S = 0.02
# How long a rank that ends in failure waits for each of its own threads.
_ABANDON_S = 2.0
# So long after a rank of rank 0's host has ended, while others wait, that ends the job. A launcher that sees it says more of it.
_ENDED_S = 2.0
# A thread that wakes so much too late was stopped: SIGSTOP, a host that slept. So long after that it is why rank 0 has ended.
_STOPPED_S, _WAKING_S = 5.0, 10.0
_OVER = "over"


class _State(NamedTuple):
    phase: Phase
    what: str
    since_s: float
    place: str = ""


class Heartbeat:
    """This rank's heartbeat and its watch over the others.

    Seconds are those in which this process could run: while it is stopped itself its clock stands still, so
    that a job that was suspended as a whole finds no fault when it goes on.

    Args:
        side_channel: the open side channel of all ranks.
        rank: this rank.
        host: this host's name, for messages.
        pid: this process's id, for messages.
        limit_s: the stall limit in seconds, >= 1.
        abort: ends the whole job, as MPI_Abort does; called from a thread. If it has not ended this process
            after 5 s, the process ends itself.
        last_words: says what the job leaves behind, for the message of its end; called from a thread.

    Raises:
        ValueError: limit_s is too small for beats to be told from noise.
    """

    def __init__(
        self,
        side_channel: SideChannel,
        *,
        rank: int,
        host: str,
        pid: int,
        limit_s: float,
        abort: Callable[[], object],
        last_words: Callable[[], str] = lambda: "",
    ) -> None:
        if not limit_s >= 1:
            raise ValueError(
                f"stall_limit_s must be >= 1, got {limit_s}: a busy machine is quiet for shorter times"
            )
        self._side = side_channel
        self._rank = rank
        self._host = host
        self._pid = pid
        self._limit_s = limit_s
        self._abort = abort
        self._last_words = last_words
        self._has_complained = False
        self._interval_s = min(3.0, max(0.2, limit_s / 20))
        self._watched = range(side_channel.world_size) if rank == 0 else range(1)
        self._awake_s = 0.0
        self._state = _State("working", "starting", 0.0)
        self._num_beats = 0
        self._beats: list[Beat | None] = [None] * len(self._watched)
        self._seen_s = [0.0] * len(self._watched)
        self._space = failures.process_space()
        self._ended_s: dict[int, float] = {}
        self._cut_s: float | None = None
        # How long this process itself was stopped last, and when it went on.
        self._stopped_s, self._woke_s = 0.0, 0.0
        self._leaving = threading.Event()
        self._over = threading.Event()
        self._is_abandoned = False
        self._lifeline: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begins to beat and to watch. COLLECTIVE in that every rank must begin within the stall limit.

        Raises:
            RuntimeError: rank 0 cannot be reached.
        """
        if self._side.world_size == 1 or self._threads:
            return
        store = self._side.connect()
        if self._rank == 0:
            # Reading a key that nobody has set would wait for it.
            for rank in self._watched:
                store.compare_set(self._key(rank), "", "")
        else:
            self._lifeline = self._side.open_lifeline()
        for target, args in ((self._talk, (store,)), (self._watch, ())):
            thread = threading.Thread(
                target=target, args=args, name=f"heartbeat{target.__name__}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def progress(self, what: str = "") -> None:
        """Says that this rank has got on; cheap enough to call for every batch. From the main thread.

        Args:
            what: what it does now, in a few words; empty keeps the last words.
        """
        self._state = _State("working", what or self._state.what, self._awake_s)

    @contextlib.contextmanager
    def waiting(self, what: str = "", *, for_all: bool = True) -> Iterator[None]:
        """Marks a block in which this rank waits for others; leaving it is progress. May be nested.

        In other threads it does nothing: their waiting keeps the main thread from nothing.

        Args:
            what: what it waits for, in a few words; empty keeps the last words.
            for_all: for all ranks. Else others may properly wait elsewhere meanwhile.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer = self._state
        if outer.phase != "waiting":
            self._state = _State("waiting", what or outer.what, self._awake_s, what if for_all else "")
        try:
            yield
        finally:
            if outer.phase != "waiting":
                self._state = _State("working", outer.what, self._awake_s)

    def leave(self) -> None:
        """Says that this rank ends properly, and returns when all ranks have said so. COLLECTIVE.

        Until then this rank goes on watching: one that leaves too early ends the job while the others wait
        for it. Register it with atexit: else such a rank looks dead. Repeated calls, and calls in a forked
        child, do nothing.
        """
        if not self._threads or os.getpid() != self._pid:
            return
        self._state = _State("left", self._state.what, self._awake_s)
        self._end_threads()

    def abandon(self) -> bool:
        """Says that this rank ends, and ends its threads, for a rank that ends in failure and waits for no other. Ranks that have
        left do not wait for it; where others wait elsewhere, it has left early.

        Else a thread that comes back from the store, which is C++, while the interpreter ends would end the process by SIGABRT.
        One that hangs there is left after some seconds. Repeated calls, and calls in a forked child, do nothing.

        Returns:
            Whether the threads have ended.
        """
        if not self._threads or os.getpid() != self._pid:
            return False
        self._state = _State("left", self._state.what, self._awake_s)
        self._is_abandoned = True
        self._over.set()
        return self._end_threads(_ABANDON_S)

    def _end_threads(self, limit_s: float | None = None) -> bool:
        self._leaving.set()
        if self._lifeline is not None:
            # Wakes the thread that sleeps on it.
            with contextlib.suppress(OSError):
                self._lifeline.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(limit_s)
        have_ended = not any(thread.is_alive() for thread in self._threads)
        self._threads.clear()
        if self._lifeline is not None:
            self._lifeline.close()
        return have_ended

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"

    def _talk(self, store: TCPStore) -> None:
        keys = [self._key(rank) for rank in self._watched]
        try:
            while True:
                # Before the beat, which says so.
                leaving, is_last = self._leaving.is_set(), self._is_abandoned
                self._beat(store)
                all_left = self._look(store, keys)
                if is_last or (leaving and (all_left if self._rank == 0 else self._is_over(store))):
                    if self._rank == 0:
                        store.set(_OVER, self._side.seal.close(_OVER, b""))  # type: ignore[arg-type]
                    break
                self._sleep()
        except (DistError, ConnectionError):
            self._cut_s = self._awake_s
            return
        except Exception:
            # Else the others, or this rank's own watch, would call a healthy rank frozen for want of its beats.
            if not self._over.is_set():
                self._report_own_end(traceback.format_exc())
            return
        self._over.set()

    def _beat(self, store: TCPStore) -> None:
        phase, what, since_s, place = self._state
        self._num_beats += 1
        beat = Beat(
            count=self._num_beats,
            phase=phase,
            phase_s=round(self._awake_s - since_s, 3),
            what=what[:200],
            host=self._host,
            pid=self._pid,
            space=self._space,
            place=place[:200],
        )
        key = self._key(self._rank)
        store.set(key, self._side.seal.close(key, beat.encode()))  # type: ignore[arg-type]

    def _look(self, store: TCPStore, keys: list[str]) -> bool:
        """Takes in the watched ranks' beats; returns whether they all have left."""
        found = zip(keys, store.multi_get(keys), self._beats, strict=True)
        beats = [self._read_beat(key, value, old) for key, value, old in found]
        for index, (old, new) in enumerate(zip(self._beats, beats, strict=True)):
            if new != old:
                self._seen_s[index] = self._awake_s
        self._beats = beats
        return all(beat is not None and beat.phase == "left" for beat in beats)

    def _read_beat(self, key: str, value: bytes, old: Beat | None) -> Beat | None:
        """Returns a rank's newest beat; what no rank of this job has sent is no sign of life."""
        if not value:
            return old
        try:
            return Beat.decode(self._side.seal.open(key, bytes(value)))
        except (UnsealedError, ValueError) as error:
            if not self._has_complained:
                log.error("heartbeat: %s", error)
            self._has_complained = True
            return old

    def _is_over(self, store: TCPStore) -> bool:
        if not store.check([_OVER]):
            return False
        with contextlib.suppress(UnsealedError):
            self._side.seal.open(_OVER, bytes(store.get(_OVER)))
            return True
        return False

    def _sleep(self) -> None:
        """Sleeps until the next beat is due, less when leaving.

        Raises:
            ConnectionError: rank 0's process has ended.
        """
        if self._leaving.is_set():
            # Many ranks asking one store: together at most about 10,000 questions a second.
            time.sleep(max(_LEAVE_POLL_S, 1e-4 * self._side.world_size))
        elif self._lifeline is None:
            self._leaving.wait(self._interval_s)
        elif self._ends_within(self._interval_s) and not self._leaving.is_set():
            raise ConnectionError("rank 0 closed its end")

    def _ends_within(self, seconds: float) -> bool:
        """Sleeps until rank 0's process ends, or this rank leaves, for at most so many seconds."""
        # Not select, which knows no descriptors from 1024 on: a rank may have so many shards of its data open.
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)  # type: ignore[arg-type]
        return bool(poll.poll(1e3 * seconds))

    def _watch(self) -> None:
        tick_s = min(self._interval_s, 0.5)
        last_s = time.monotonic()
        while not self._over.wait(tick_s):
            now_s = time.monotonic()
            self._awake_s += min(now_s - last_s, 2 * tick_s)
            if now_s - last_s > max(_STOPPED_S, self._limit_s / 2):
                self._stopped_s, self._woke_s = now_s - last_s, self._awake_s
            last_s = now_s
            fault = self._judge()
            if fault is not None and not self._over.is_set() and not said_by_rank_0.is_set():
                self._report(fault)
                return

    def _judge(self) -> Fault | None:
        sightings = [
            Sighting(rank=rank, beat=beat, silent_s=self._awake_s - seen_s)
            for rank, beat, seen_s in zip(self._watched, self._beats, self._seen_s, strict=True)
        ]
        if self._rank == 0:
            return self._find_ended(sightings) or failures.find_fault(sightings, self._limit_s)
        host = sightings[0]
        turn_s = min(_TURN_S * (self._rank - 1), _LAST_TURN_S)
        cut = self._cut_s is not None and self._awake_s - self._cut_s >= turn_s
        if cut or host.silent_s >= self._limit_s + turn_s:
            return Fault(kind="silent", rank=0, for_s=host.silent_s, beat=host.beat)
        return None

    def _find_ended(self, sightings: Sequence[Sighting]) -> Fault | None:
        """Looks at the processes on this host, as under torchrun nobody else ends a job whose other ranks wait."""
        waiting = {s.rank for s in sightings if s.beat is not None and s.beat.phase == "waiting"}
        waiting |= {0} if self._state.phase == "waiting" else set()
        for rank, beat, silent_s in ((s.rank, s.beat, s.silent_s) for s in sightings):
            if beat is None or beat.phase == "left" or (beat.host, beat.space) != (self._host, self._space) or not beat.space:
                continue
            if not failures.has_ended(beat.pid):
                self._ended_s.pop(rank, None)
            elif waiting - {rank} and self._awake_s - self._ended_s.setdefault(rank, self._awake_s) >= _ENDED_S:
                return Fault(kind="silent", rank=rank, for_s=silent_s, beat=beat)
        return None

    def _report(self, fault: Fault) -> None:
        same_host = fault.beat is not None and fault.beat.host == self._host
        state = failures.process_state(fault.beat.pid) if fault.beat is not None and same_host else None
        if self._cut_s is not None:
            state = ""  # the connection ended, so the process has
        text = failures.describe(fault, reporter=self._rank, host=self._host, limit_s=self._limit_s, state=state)
        has_just_woken = self._stopped_s and self._awake_s - self._woke_s < _WAKING_S
        if has_just_woken and fault.kind == "silent" and fault.rank == 0:
            # Rank 0 has found this rank silent, said so, and ended the job.
            text = (
                f"hvd_adaptive: rank {self._rank} on {self._host} (pid {self._pid}) was itself stopped for {self._stopped_s:.0f} "
                "s, and rank 0 has ended meanwhile: look at what rank 0 said."
            )
        if fault.kind == "silent" and not same_host:
            # If the network between the hosts is down, the launcher cannot end the job either. Of a rank that was never heard,
            # nobody knows the host.
            launcher = find_launcher_process(self._pid)
            if launcher is not None:
                end_later(launcher)
                text += f" If {launcher.name} (pid {launcher.pid}) still runs {GRACE_S} s later, it is ended, too."
        end_job(f"{text} {self._last_words()}".rstrip(), self._abort)

    def _report_own_end(self, reason: str) -> None:
        text = (
            f"hvd_adaptive: the heartbeat of rank {self._rank} on {self._host} (pid {self._pid}) has failed, so nobody could "
            "tell any more whether it is alive, and it ends the job. This is no fault of your script: report it with these lines."
        )
        end_job(f"{text}\n{reason}{self._last_words()}".rstrip(), self._abort)
