"""Ranks that die, freeze, hang or leave: the job must end, non-zero and in time, and name who and how."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time

import pytest

LIMIT_S = 6.0  # a busy machine may hold up a rank for seconds, and no alarm must come of that
END_S = 30.0  # of a job that is told to end, on a busy machine

RANK = """
import atexit, os, signal, socket, sys, threading, time
from mpi4py import MPI
import numpy as np
from hvd_adaptive.comm.heartbeat import Heartbeat
from hvd_adaptive.comm.side_channel import SideChannel

comm = MPI.COMM_WORLD
rank, size, limit_s = comm.rank, comm.size, float(os.environ["LIMIT_S"])
side = SideChannel(rank=rank, world_size=size, gather=comm.allgather, same_host=True, stall_limit_s=limit_s)
beat = Heartbeat(side, rank=rank, host=socket.gethostname(), pid=os.getpid(), limit_s=limit_s,
                 abort=lambda: comm.Abort(14))
beat.start()
atexit.register(beat.leave)

def say(text):
    os.write(1, (text + "\\n").encode())  # one write: other ranks' lines must not come between

def work(seconds, what="working"):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))
        beat.progress(what)
        time.sleep(0.002)

def meet():
    with beat.waiting("the merge"):
        comm.allreduce(rank)

def hold_gil(seconds):
    import ctypes
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps Python's lock during the call

work(0.5)
while None in beat._beats:  # only of whom it has seen can a rank say more than that he is silent
    work(0.05)
meet()
say(f"PID {rank} {os.getpid()} at {time.time()}")
BEHAVIOUR
for _ in range(3):
    work(0.2)
    meet()
beat.leave()
side.close()
say(f"DONE {rank}")
"""


@pytest.fixture
def run_ranks(run_job):
    def run(behaviour, *, np=2, limit_s=LIMIT_S, timeout=200.0, **options):
        script = RANK.replace("BEHAVIOUR", behaviour)
        env = {"LIMIT_S": str(limit_s), **options.pop("env", {})}
        return run_job([sys.executable, "-c", script], np=np, env=env, timeout=timeout, **options)

    return run


def assert_named(result, kind, rank, *, num_reporters=1):
    """One message, with that kind and rank, that rank's pid, and an end in time. Each further reporter has its turn half a second
    after the one before, which may not have ended the job by then."""
    ended_s = time.time() - result.outlived_s
    assert not result.timed_out, result.describe()
    assert result.returncode != 0, result.describe()
    assert ended_s - float(re.search(r"at ([\d.]+)", result.stdout)[1]) < LIMIT_S + END_S, result.describe()
    lines = [line for line in result.stderr.splitlines() if line.startswith("hvd_adaptive: ")]
    # What a rank says that wakes when the launcher ends it.
    messages = [line for line in lines if "was itself stopped for" not in line]
    pid = re.search(rf"PID {rank} (\d+)", result.stdout)
    assert pid is not None, result.describe()
    named = [message for message in messages if re.search(rf"rank {rank} on \S+ \(pid {pid[1]}\) {kind}", message)]
    assert 1 <= len(named) <= num_reporters, result.describe()
    # Where the launcher is held up, a rank that has reported ends by itself after 5 s, and others miss that one.
    reporters = {found[1] for message in named for found in re.finditer(r"Rank (\d+) on \S+ found this", message)}
    missed = [re.match(r"hvd_adaptive: rank (\d+) on", message) for message in messages if message not in named]
    assert all(found is not None and found[1] in reporters for found in missed), result.describe()
    assert not result.leftover
    return named[0]


def test_a_healthy_run_says_nothing(run_ranks):
    result = run_ranks("", limit_s=30.0)
    assert result.returncode == 0, result.describe()
    assert result.stdout.count("DONE") == 2
    assert result.stderr == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank(run_ranks, rank):
    result = run_ranks(f"if rank == {rank}: os.kill(os.getpid(), signal.SIGSTOP)", np=3)
    # All others watch rank 0.
    message = assert_named(result, "is frozen: no heartbeat for", rank, num_reporters=1 if rank else 2)
    assert "SIGSTOP" in message
    assert "its last sign of life: w" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(run_ranks, rank):
    # mpirun may be the one to notice; whoever does, the rank or its pid is on stderr.
    result = run_ranks(f"if rank == {rank}: os.kill(os.getpid(), signal.SIGKILL)")
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert re.search(rf"rank {rank} .*(is dead|exited on signal 9)", result.stderr), result.describe()
    assert not result.leftover


def test_a_stuck_rank(run_ranks):
    result = run_ranks("if rank == 1:\n    beat.progress('batch 17'); time.sleep(1000)")
    assert "working 'batch 17'" in assert_named(result, "is stuck: alive, but no progress for", 1)


def test_stuck_rank_0(run_ranks):
    result = run_ranks("if rank == 0:\n    while True: pass")
    assert_named(result, "is stuck", 0)


def test_a_rank_that_holds_pythons_lock_for_ever(run_ranks):
    result = run_ranks("if rank == 0: hold_gil(1000)")
    assert "Python does not run in it" in assert_named(result, "is frozen", 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_early(run_ranks, rank):
    result = run_ranks(f"if rank == {rank}: sys.exit()")
    assert_named(result, "left early", rank)


@pytest.mark.parametrize(("place", "where"), [("stage {rank}", "in 'stage 0' for"), ("stage", "waiting 'stage' for")])
def test_ranks_that_wait_for_each_other(run_ranks, place, where):
    # Two limits and not ten in one place, so that a longer one takes no longer.
    patience = "from hvd_adaptive.comm import failures; failures.PATIENT_LIMITS = 2"
    behaviour = f"{patience}\nwith beat.waiting(f'{place}'): comm.recv(source=1 - rank)"
    result = run_ranks(behaviour, limit_s=5.0)
    assert "all ranks are deadlocked" in result.stderr and where in result.stderr, result.describe()
    assert result.returncode != 0
    assert not result.timed_out


def test_abort_that_does_not_work_has_a_way_out(run_ranks):
    stubborn = "beat._abort = lambda: hold_gil(1000)\nif rank == 1: beat.progress(); time.sleep(1000)"
    result = run_ranks(stubborn)
    assert "is stuck" in result.stderr
    assert not result.timed_out, result.describe()
    assert result.returncode != 0


class Rank:
    """This rank with a heartbeat of its own; an alarm ends the world, and so fails the test."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        from mpi4py import MPI

        from hvd_adaptive.comm.heartbeat import Heartbeat
        from hvd_adaptive.comm.side_channel import SideChannel

        self.comm = comm = MPI.COMM_WORLD.Dup()
        self.rank = comm.rank
        side = {"rank": comm.rank, "world_size": comm.size, "gather": comm.allgather, "same_host": True}
        self.side = SideChannel(**side, stall_limit_s=max(limit_s, 10.0))
        self.beat = Heartbeat(
            self.side, rank=comm.rank, host="here", pid=os.getpid(), limit_s=limit_s, abort=lambda: comm.Abort(14)
        )
        self.beat.start()

    def work(self, seconds: float, *, is_busy: bool = False) -> None:
        """Gets on for so many seconds, in which other tests may have the cores unless it is to be busy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10000))
            self.beat.progress("working")
            if not is_busy:
                time.sleep(0.002)

    def meet(self) -> None:
        with self.beat.waiting("the merge"):
            self.comm.allreduce(self.rank)

    def close(self) -> None:
        for _ in range(3):
            self.work(0.2)
            self.meet()
        self.beat.leave()
        self.side.close()
        self.comm.Free()


@pytest.fixture
def rank(capfd):
    rank = Rank()
    rank.work(0.5)
    rank.meet()
    yield rank
    rank.close()
    assert capfd.readouterr().err == ""


@pytest.mark.mpi(1, 4)
def test_healthy_ranks_raise_no_alarm(rank, num_ranks):
    assert rank.comm.size == num_ranks


@pytest.mark.mpi(2)
def test_slow_ranks_that_hold_up_nobody_or_get_on(rank):
    # Rank 1 sleeps too long while the other works, then the other waits too long while rank 1 gets on.
    seconds = LIMIT_S + 1.5
    if rank.rank == 0:
        rank.work(seconds)
    else:
        time.sleep(seconds)
        rank.work(seconds)
    rank.meet()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("holder", [0, 1])
def test_no_alarm_when_a_rank_holds_pythons_lock_for_a_while(rank, holder):
    if rank.rank == holder:
        ctypes.PyDLL(None).usleep(int(1e6 * LIMIT_S / 2))  # PyDLL keeps Python's lock during the call
    rank.meet()


@pytest.mark.mpi(4)
def test_no_alarm_on_an_overloaded_machine(rank):
    threads = [threading.Thread(target=rank.work, args=(LIMIT_S + 1,), kwargs={"is_busy": True}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rank.meet()


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("seconds", "everyone"), [(LIMIT_S / 2, False), (LIMIT_S + 2, True)])
def test_no_alarm_after_a_pause(rank, seconds, everyone):
    # A pause within the limit; and one beyond it of the whole job, as a scheduler's suspension is.
    pids = rank.comm.allgather(os.getpid()) if everyone else [os.getpid()]
    if rank.rank == 1:
        shell = f"kill -STOP {' '.join(map(str, pids))}; sleep {seconds}; kill -CONT {' '.join(map(str, pids))}"
        with subprocess.Popen(["/bin/sh", "-c", shell]):
            pass
    rank.work(2)
    rank.meet()


@pytest.mark.mpi(2)
def test_beats_go_on_while_horovod_waits():
    # Horovod's synchronize polls; Python's other threads must get their turn meanwhile.
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank = Rank(limit_s=10.0)
    if rank.rank == 1:
        # It comes when it has seen rank 0 beat in its wait again and again; else the alarm ends the world.
        counts = set()
        while len(counts) < 5:
            time.sleep(0.05)
            rank.beat.progress()
            beat = rank.beat._beats[0]
            if beat is not None and beat.phase == "waiting":
                counts.add(beat.count)
    with rank.beat.waiting("allreduce"):
        total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
    assert total.tolist() == [2.0] * 4
    rank.close()
    hvd.shutdown()
