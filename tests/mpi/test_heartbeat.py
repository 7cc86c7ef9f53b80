"""Ranks that die, freeze, hang or leave: the job must end, non-zero and in time, and name who and how."""

from __future__ import annotations

import os
import re
import sys
import time

import pytest

LIMIT_S = 3.0
STARTUP_S = 20.0  # importing torch on every rank of a busy machine

RANK = """
import atexit, os, signal, socket, sys, threading, time
from mpi4py import MPI
import numpy as np
from hvd_adaptive.transport.heartbeat import Heartbeat
from hvd_adaptive.transport.side_channel import SideChannel

comm = MPI.COMM_WORLD
rank, size, limit_s = comm.rank, comm.size, float(os.environ["LIMIT_S"])
side = SideChannel(rank=rank, world_size=size, broadcast=comm.bcast, same_host=True, stall_limit_s=limit_s)
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

def meet():
    with beat.waiting("the merge"):
        comm.allreduce(rank)

def hold_gil(seconds):
    import ctypes
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps Python's lock during the call

work(0.5)
meet()
say(f"PID {rank} {os.getpid()}")
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
    def run(behaviour, *, np=2, limit_s=LIMIT_S, timeout=90.0, **options):
        script = RANK.replace("BEHAVIOUR", behaviour)
        env = {"LIMIT_S": str(limit_s), **options.pop("env", {})}
        return run_job([sys.executable, "-c", script], np=np, env=env, timeout=timeout, **options)

    return run


def assert_named(result, kind, rank):
    """One message, with that kind and rank, that rank's pid, and an end in time."""
    assert not result.timed_out, result.describe()
    assert result.returncode != 0, result.describe()
    assert result.wall_s < STARTUP_S + LIMIT_S + 10, result.describe()
    messages = [line for line in result.stderr.splitlines() if line.startswith("hvd_adaptive: ")]
    assert len(messages) == 1, result.describe()
    pid = re.search(rf"PID {rank} (\d+)", result.stdout)
    assert pid is not None, result.describe()
    assert re.search(rf"rank {rank} on \S+ \(pid {pid[1]}\) {kind}", messages[0]), messages[0]
    assert not result.leftover
    return messages[0]


@pytest.mark.parametrize("np", [1, 4])
def test_a_healthy_run_says_nothing(run_ranks, np):
    result = run_ranks("", np=np)
    assert result.returncode == 0, result.describe()
    assert result.stdout.count("DONE") == np
    assert result.stderr == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank(run_ranks, rank):
    result = run_ranks(f"if rank == {rank}: os.kill(os.getpid(), signal.SIGSTOP)", np=3)
    message = assert_named(result, "is frozen: no heartbeat for", rank)
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


def test_ranks_that_wait_for_each_other(run_ranks):
    behaviour = "with beat.waiting(f'stage {rank}'): comm.recv(source=1 - rank)"
    result = run_ranks(behaviour, limit_s=1.0)
    assert "all ranks are deadlocked" in result.stderr, result.describe()
    assert result.returncode != 0
    assert not result.timed_out


def test_slow_ranks_that_hold_up_nobody_or_get_on(run_ranks):
    # Rank 1 sleeps too long while the other works, then the other waits too long while rank 1 gets on.
    behaviour = "work(5) if rank == 0 else time.sleep(5)\nif rank == 1: work(5)\nmeet()"
    result = run_ranks(behaviour)
    assert result.returncode == 0, result.describe()
    assert result.stderr == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_no_alarm_when_a_rank_holds_pythons_lock_for_a_while(run_ranks, rank):
    result = run_ranks(f"if rank == {rank}: hold_gil(1.8)\nmeet()")
    assert result.returncode == 0, result.describe()
    assert result.stderr == ""


def test_no_alarm_on_an_overloaded_machine(run_ranks):
    burn = "threads = [threading.Thread(target=work, args=(6,)) for _ in range(3)]\n"
    burn += "for t in threads: t.start()\n"
    result = run_ranks(burn + "for t in threads: t.join()\nmeet()", np=4, env={"OMP_NUM_THREADS": "2"})
    assert result.returncode == 0, result.describe()
    assert result.stderr == ""


def freeze(seconds, *, everyone):
    """Stops one rank, or all of them, for some seconds after they have begun."""
    signal_all = "for p in map(int, sys.argv[1:]): os.kill(p, signal.{})\n"
    pause = f"import os, signal, sys, time\n{signal_all.format('SIGSTOP')}time.sleep({seconds})\n"
    pause += signal_all.format("SIGCONT")
    pids = "comm.allgather(os.getpid())" if everyone else "[os.getpid()]"
    return (
        f"import subprocess\npids = {pids}\n"
        f"if rank == 1: subprocess.Popen([sys.executable, '-c', {pause!r}, *map(str, pids)])\n"
        f"work({seconds} + 2)\nmeet()"
    )


@pytest.mark.parametrize(("seconds", "everyone"), [(1.5, False), (5.0, True)])
def test_no_alarm_after_a_pause(run_ranks, seconds, everyone):
    # A pause within the limit; and one beyond it of the whole job, as a scheduler's suspension is.
    result = run_ranks(freeze(seconds, everyone=everyone))
    assert result.returncode == 0, result.describe()
    assert result.stderr == ""


def test_abort_that_does_not_work_has_a_way_out(run_ranks):
    stubborn = "beat._abort = lambda: hold_gil(1000)\nif rank == 1: beat.progress(); time.sleep(1000)"
    result = run_ranks(stubborn, limit_s=1.0, timeout=60)
    assert "is stuck" in result.stderr
    assert not result.timed_out, result.describe()
    assert result.returncode != 0


@pytest.mark.mpi(2)
def test_beats_go_on_while_horovod_waits():
    # Horovod's synchronize polls; Python's other threads must get their turn meanwhile.
    from mpi4py import MPI

    hvd = pytest.importorskip("horovod.torch")
    import torch

    from hvd_adaptive.transport.heartbeat import Heartbeat
    from hvd_adaptive.transport.side_channel import SideChannel

    comm = MPI.COMM_WORLD
    hvd.init()
    side = SideChannel(rank=comm.rank, world_size=2, broadcast=comm.bcast, same_host=True, stall_limit_s=10)
    failed = []
    beat = Heartbeat(
        side,
        rank=comm.rank,
        host="here",
        pid=os.getpid(),
        limit_s=1.0,
        abort=lambda: failed.append(comm.Abort(14)),
    )
    beat.start()
    count = beat._num_beats
    if comm.rank == 1:
        for _ in range(30):
            time.sleep(0.1)
            beat.progress()
    with beat.waiting("allreduce"):
        total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
    assert total.tolist() == [2.0] * 4
    assert beat._num_beats - count >= 5
    assert not failed
    beat.leave()
    side.close()
