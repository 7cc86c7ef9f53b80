from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types

import pytest
from waiting import wait_until

from hvd_adaptive.comm import failures
from hvd_adaptive.comm.failures import Beat, Fault, Sighting, describe, find_fault, process_state
from hvd_adaptive.comm.heartbeat import Heartbeat


def make_beat(phase="working", phase_s=0.0, what="batch 3"):
    return Beat(count=1, phase=phase, phase_s=phase_s, what=what, host="node7", pid=4242)


def judge(*ranks, limit_s=10.0):
    """Judges ranks given as (phase, seconds in it) or (phase, seconds, seconds of silence)."""
    sightings = [
        Sighting(rank=rank, beat=make_beat(phase, phase_s), silent_s=silent[0] if silent else 0.0)
        for rank, (phase, phase_s, *silent) in enumerate(ranks)
    ]
    fault = find_fault(sightings, limit_s)
    return None if fault is None else (fault.kind, fault.rank)


def test_a_beat_survives_the_wire():
    assert Beat.decode(make_beat().encode()) == make_beat()
    assert Beat.decode(b"") is None


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([("working", 9), ("waiting", 9)], None),
        ([("working", 99), ("working", 99)], None),
        ([("working", 9), ("waiting", 99)], None),
        ([("working", 99), ("waiting", 9)], None),
        ([("working", 11), ("waiting", 11), ("working", 12)], ("stuck", 2)),
        ([("working", 0, 11), ("waiting", 50), ("working", 50)], ("silent", 0)),
        ([("working", 0, 11), ("working", 0, 12)], ("silent", 1)),
        ([("left", 0, 11), ("working", 0)], ("silent", 0)),
        ([("left", 6), ("waiting", 4)], None),
        ([("left", 4), ("waiting", 6)], None),
        ([("working", 0), ("left", 6), ("waiting", 6)], ("left early", 1)),
        ([("left", 0, 6), ("waiting", 6)], ("left early", 0)),
        ([("left", 0, 4), ("waiting", 6)], None),
        ([("left", 99), ("left", 99)], None),
        ([("left", 99), ("working", 200)], None),
        ([("left", 101), ("working", 99)], None),
        ([("left", 101), ("working", 101)], ("stuck", 1)),
        ([("waiting", 99), ("waiting", 101)], None),
        ([("waiting", 101), ("waiting", 101)], ("deadlocked", 0)),
    ],
)
def test_verdicts(ranks, verdict):
    assert judge(*ranks) == verdict


@pytest.mark.parametrize(
    ("places", "for_s", "verdict"),
    [
        (("gathering", "round", "round"), 21, (0, 1)),
        (("", "gathering", "round"), 21, (1, 2)),
        (("gathering", "round"), 19, None),
        # Some of the ranks only, as in an island, or in the same collective: a large model on a slow link looks the same.
        (("", "round"), 99, None),
        (("round", "round"), 99, None),
    ],
)
def test_ranks_that_wait_in_different_collectives(places, for_s, verdict):
    beats = [dataclasses.replace(make_beat("waiting", for_s), place=place) for place in places]
    fault = find_fault([Sighting(rank=rank, beat=beat, silent_s=0.0) for rank, beat in enumerate(beats)], 10.0)
    assert (fault and (fault.kind, fault.rank, fault.apart[0])) == (verdict and ("deadlocked", *verdict))
    if fault:
        text = describe(fault, reporter=0, host="a", limit_s=10, state=None)
        assert f"rank {verdict[0]} on node7 (pid 4242) has waited in 'gathering' for 21.0 s or more" in text
        assert f"rank {verdict[1]} on node7 (pid 4242) in 'round'" in text


def test_a_rank_that_never_beat():
    sightings = [Sighting(rank=0, beat=make_beat(), silent_s=0.0), Sighting(rank=1, beat=None, silent_s=10.0)]
    fault = find_fault(sightings, 10.0)
    assert fault == Fault(kind="silent", rank=1, for_s=10.0, beat=None)
    text = describe(fault, reporter=0, host="a", limit_s=10, state="")
    assert "rank 1 (no heartbeat of it has come) is dead: no heartbeat for 10.0 s. Its process has ended" in text


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("", "is dead:"),
        ("Z", "is dead:"),
        ("T", "is frozen:"),
        ("R", "Python does not run"),
        (None, "dead, frozen or cut off"),
    ],
)
def test_the_message_names_rank_host_pid_and_what_to_do(state, kind):
    fault = Fault(kind="silent", rank=5, for_s=61.25, beat=make_beat())
    text = describe(fault, reporter=0, host="node0", limit_s=60, state=state)
    for part in ("rank 5 on node7 (pid 4242)", kind, "61.2 s", "working 'batch 3'", "Rank 0 on node0"):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize("kind", ["stuck", "left early", "deadlocked"])
def test_the_other_kinds(kind):
    fault = Fault(kind=kind, rank=5, for_s=61.25, beat=make_beat())
    text = describe(fault, reporter=0, host="node0", limit_s=60, state=None)
    assert kind in text
    assert "rank 5 on node7 (pid 4242)" in text


def test_process_state():
    assert process_state(os.getpid()) == "R"
    assert process_state(2**22 + 1) == ""


WORKERS = """
import os, subprocess
from hvd_adaptive.comm.job_end import _dead_worker
well, worker = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"])
if KILL:
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
os.waitid(os.P_PID, well.pid, os.WEXITED | os.WNOWAIT)
print(worker.pid, _dead_worker(EOFError()))
worker.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_a_killed_worker_is_found_behind_a_child_that_ended_well(run_job, kill):
    script = WORKERS.replace("KILL", str(kill))
    answer = run_job([sys.executable, "-c", script], timeout=200, alone=True)
    pid, _, said = answer.stdout.partition(" ")
    assert said.strip() == (f"A worker (pid {pid}) was killed by signal: Killed" if kill else ""), answer


def see(heartbeat: Heartbeat, *beats: Beat, is_seen: bool) -> None:
    """Has rank 0 look twice, with three seconds between."""
    heartbeat._beats, heartbeat._awake_s = list(beats), heartbeat._awake_s + 10
    heartbeat._ended_s.clear()
    heartbeat._seen_s = [heartbeat._awake_s] * len(beats)
    assert heartbeat._judge() is None
    heartbeat._awake_s += 3
    fault = heartbeat._judge()
    assert (fault is not None and (fault.kind, fault.rank) == ("silent", 1)) == is_seen, beats[1]


def test_rank_0_sees_the_end_of_a_process_on_its_host_and_of_no_other() -> None:
    channel = types.SimpleNamespace(world_size=2)
    heartbeat = Heartbeat(channel, rank=0, host="node7", pid=os.getpid(), limit_s=60, abort=lambda: None)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    own = failures.process_space()
    here = Beat(count=1, phase="working", phase_s=0.0, what="", host="node7", pid=process.pid, space=own)
    mine = dataclasses.replace(here, pid=os.getpid())
    heartbeat._beats = [mine, here]
    assert heartbeat._judge() is None and process.stdin is not None
    process.stdin.close()
    wait_until(lambda: failures.process_state(process.pid) == "Z")  # not waited for: a zombie
    with heartbeat.waiting():
        see(heartbeat, mine, here, is_seen=True)
        for other in (mine, *(dataclasses.replace(here, **{name: "other"}) for name in ("host", "space"))):
            see(heartbeat, mine, other, is_seen=False)
        see(heartbeat, mine, dataclasses.replace(here, phase="left"), is_seen=False)
    # Nobody waits for it: rank 0 may still write what the others need not wait for.
    see(heartbeat, mine, dataclasses.replace(here, phase="waiting"), is_seen=False)
    process.wait()
    with heartbeat.waiting():
        see(heartbeat, mine, here, is_seen=True)
