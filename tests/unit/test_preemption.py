"""Closing a round early: all ranks find the same end, and the ledger stays exact; and what a caught signal does to a process."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_adaptive.algorithm.ledger import ClaimRule
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.claim_pool import open_claims
from hvd_adaptive.engine.claims import EqualClaims, SharedCursor, StepFrontier
from hvd_adaptive.session.session import Session
from hvd_adaptive.state.preemption import PREEMPTION, Preemption

NUM_SAMPLES = 300
X = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())


@pytest.mark.parametrize("seed", range(20))
def test_a_closed_cursor_has_given_its_first_part_exactly_once(seed: int) -> None:
    # More than the others can take however long the rank that closes it is held up; so below.
    total, closer = 10**9, random.Random(seed).randrange(4)

    def run(transport: LocalTransport) -> Any:
        cursor, own = SharedCursor(transport, "claim", total_work=total), random.Random(f"{seed} {transport.rank}")
        taken: list[tuple[int, ...]] = []
        while (claim := cursor.claim(lambda remaining: min(remaining, own.randrange(1, 20)))) is not None:
            taken.append(claim)
            time.sleep(own.random() * 1e-4)
            if transport.rank == closer and len(taken) >= seed % 10:
                cursor.close()
        return taken, cursor.end

    taken, ends = zip(*LocalWorld(4).run(run), strict=True)
    assert len(set(ends)) == 1
    claims = sorted(claim for rank in taken for claim in rank)
    edges = [0, *(stop for _, stop in claims)]
    assert [start for start, _ in claims] == edges[:-1]
    assert edges[-1] == ends[0] < total


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_make_the_same_steps_of_a_closed_round(seed: int) -> None:
    def run(transport: LocalTransport) -> Any:
        frontier = StepFrontier(transport, "steps", num_steps=10**9, num_prefetched=1)
        own = random.Random(f"{seed} {transport.rank}")
        step = 0
        # Ranks of very different speeds promise different numbers of steps at once.
        while step < 10**9 and frontier.begin(step):
            step += 1
            time.sleep(own.random() * (1e-4 if transport.rank % 2 else 2e-2 / (1 + seed)))
            if transport.rank == seed % 4 and step == 1 + seed:
                frontier.close()
        return step, frontier.end

    results = LocalWorld(4).run(run)
    assert len(set(results)) == 1
    (num_steps, end), *_ = results
    assert end is not None and num_steps == end + 1 and seed < num_steps < 10**9


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("closes", [True, False])
def test_ranks_with_equally_many_batches_take_the_first_part_of_a_closed_round(closes: bool, seed: int) -> None:
    total, start, unit = (10**7, 17, 1) if closes else (1003 + 13 * seed, 3, 6 if seed % 2 else 1)

    def run(transport: LocalTransport) -> Any:
        own = random.Random(f"{seed} {transport.rank}")
        frontier = StepFrontier(transport, "steps", num_steps=total)
        claims = EqualClaims(
            frontier, rank=transport.rank, world_size=3, size=6, total_work=total, start=start, unit=unit, stretch=1 + seed
        )
        taken: list[tuple[int, ...]] = []
        while (claim := claims.claim(lambda remaining: 1 // 0)) is not None:
            taken.append(claim)
            time.sleep(own.random() * 2e-3 / (1 + seed))
            if closes and transport.rank == seed % 3 and len(taken) == 2 * seed + 1:
                claims.close()
        assert claims.claim(lambda remaining: 1 // 0) is None
        return taken, claims.end

    taken, ends = zip(*LocalWorld(3).run(run), strict=True)
    assert len(set(ends)) == 1 and (ends[0] is not None) == closes
    claims = sorted(claim for rank in taken for claim in rank)
    edges = [start, *(stop for _, stop in claims)]
    assert [first for first, _ in claims] == edges[:-1] and edges[-1] == (ends[0] or total)
    whole = [sum(stop - first == 6 for first, stop in rank) for rank in taken]
    assert max(whole) - min(whole) <= 1 and (not closes or 2 * seed < whole[0])


def rule_of(batch_size: int) -> Any:
    ones = np.ones(1)
    return functools.partial(
        ClaimRule.of_round, batch_sizes=batch_size * ones, speed_shares=ones, work_per_sample=1.0, dynamic=True
    )


@pytest.mark.parametrize(("stretch", "prefetched"), [(1, 4), (2, 8), (4, 8)])
def test_batches_that_workers_take_at_once_promise_no_more_of_a_round(stretch: int, prefetched: int) -> None:
    equal = (6, 1, stretch)
    claims, forget = open_claims(LocalTransport(), 1, total_work=10**6, start=0, rule_of=rule_of(6), equal=equal)
    for _ in range(prefetched):
        assert claims.claim(lambda remaining: 1 // 0) is not None
    for _ in range(50):
        assert claims.claim(lambda remaining: 1 // 0) is not None
        time.sleep(1e-4)
    claims.close()
    more = 0
    while claims.claim(lambda remaining: 1 // 0) is not None:
        more += 1
    forget()
    assert more < stretch and claims.end == 6 * (prefetched + 50 + more)


def test_batches_of_one_sample_end_with_their_round() -> None:
    """Such a round has as many stretches as samples; a rank that asked for one more waited for ever."""

    def run(transport: LocalTransport) -> list[Any]:
        claims, _ = open_claims(transport, 1, total_work=5, start=0, rule_of=rule_of(1), equal=(1, 1, 1))
        taken = list(iter(lambda: claims.claim(lambda remaining: 1 // 0), None))
        assert claims.end is None
        return taken

    assert LocalWorld(1).run(run, timeout_s=20) == [[(start, start + 1) for start in range(5)]]


@pytest.mark.parametrize(("step_s", "most_s"), [(0.002, 0.064), (0.02, 0.2), (0.5, 0.5)])
def test_steps_of_a_fifth_of_a_second_are_promised_at_once(step_s: float, most_s: float) -> None:
    """And so many, and the one that is prefetched, come after a close."""
    transport, now, asked = LocalTransport(), 0.0, []
    frontier = StepFrontier(transport, "steps", num_steps=1000, num_prefetched=1, clock=lambda: now)
    compare_set = transport.compare_set
    transport.compare_set = lambda *values: (asked.append(values[2]), compare_set(*values))[1]  # type: ignore[method-assign]
    for step in range(500):
        assert frontier.begin(step)
        # One step is prefetched.
        now += step_s if step else 1e-5
    assert len(asked) <= 3 + 500 * step_s / (0.9 * most_s)
    frontier.close()
    more = 0
    while frontier.begin(500 + more):
        more += 1
    assert more * step_s <= most_s and frontier.end == 499 + more


def test_a_round_cannot_be_closed_before_its_promised_end() -> None:
    world = LocalTransport()
    one, two = (StepFrontier(world, "steps", num_steps=10, num_prefetched=1, clock=lambda: 0.0) for _ in range(2))
    # Steps that take no time: all the rest is promised.
    assert one.begin(0) and one.begin(1) and one.begin(2)
    two.close()
    assert two.end is None and all(two.begin(step) for step in range(10)) and all(one.begin(step) for step in range(10))


CASES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"work": "nonzeros"}, True),
    ({"strategy": "sma", "batch_size": 1}, True),
    ({"record": True}, True),
    # Batches in turns, of which a claim is of many, once it is known how long they take.
    ({"merges_per_round": 2, "mega_batch": None, "merge_period": "auto", "batch_size": 1}, True),
    ({"dispatch": "equal"}, False),
    ({"logical_ranks": 4}, False),
]


@pytest.mark.parametrize(("options", "closes"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_signal_on_one_rank_ends_all_ranks_with_an_exact_ledger(options: dict[str, Any], closes: bool) -> None:
    config = Config(**{"batch_size": 8, "mega_batch": 150, **options})
    work = np.arange(NUM_SAMPLES) % 7 if config.work == "nonzeros" else None
    is_closed = threading.Event()

    def part(transport: LocalTransport, state: Any, signalled: int, num_epochs: float) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        session.preemption = Preemption()
        close_round = session._strategy.close_round
        session._strategy.close_round = lambda: (close_round(), is_closed.set())  # type: ignore[method-assign]
        if state is not None:
            session.load_state_dict(state)
        pending: list[int] = []
        committed: list[int] = []
        sizes: list[int] = []

        def commit(record: Any) -> None:
            committed.extend(pending)
            pending.clear()
            sizes.append(record.num_samples)

        session.records.append(commit)
        for number, batch in enumerate(session.batches(DATA, num_epochs=num_epochs, work=work)):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
            pending.extend(batch.rows.tolist())
            if transport.rank == signalled and number == 1:
                session.preemption.signal_number = int(signal.SIGUSR1)
            elif number == 1:
                # The others must not be through before it comes.
                assert is_closed.wait(60)
        assert not pending
        return committed, session.state_dict(), session.preempted, session.ledger, sizes

    first = LocalWorld(3).run(lambda transport: part(transport, None, 1, 2))
    assert {result[2] for result in first} == {int(signal.SIGUSR1)}
    samples = first[0][4]
    if closes:
        assert len(samples) == 1 and samples[0] < 150 and samples[0] == first[0][3].cursor
    else:
        assert samples == [150]
    second = LocalWorld(3).run(lambda transport: part(transport, first[transport.rank][1], -1, 2))
    assert {result[2] for result in second} == {0}
    # A rank may have got no batch.
    rows = np.concatenate([np.array(result[0], dtype=np.int64) for result in (*first, *second)])
    counts = np.bincount(rows, minlength=NUM_SAMPLES)
    if config.strategy == "sma":
        # The last step of a round is padded, so that all ranks make it.
        assert counts.min() >= 2
    else:
        assert (counts == 2).all()
    assert second[0][4][-1] == 2 * NUM_SAMPLES


@pytest.fixture
def caught() -> Any:
    PREEMPTION.catch_signals()
    yield PREEMPTION
    PREEMPTION.stop()


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_signal_is_known_while_the_main_thread_stands_in_c(caught: Preemption) -> None:
    seen: list[int] = []

    def watch() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: caught.signal_number)
        seen.append(caught.signal_number)

    thread = threading.Thread(target=watch)
    lock = threading.Lock()
    lock.acquire()
    thread.start()
    # Like a collective: no handler of Python runs in here. (It does not return early, either.)
    assert not lock.acquire(timeout=0.5)
    thread.join()
    assert seen == [signal.SIGTERM]


class Slow(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


@pytest.mark.slow
def test_workers_of_a_loader_do_not_react(caught: Preemption) -> None:
    """Nor does a signal for them count as one for the rank."""
    loader = DataLoader(Slow(*DATA.tensors), batch_size=20, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    # Of each worker one: before that a worker may not be one yet.
    next(batches), next(batches)
    workers = [child.pid for child in multiprocessing.active_children()]
    assert len(workers) == 2
    for pid in workers:
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        # Whoever ends the whole step is not their parent.
        subprocess.run(["kill", "-TERM", str(pid)], check=True)
    assert len(list(batches)) == 13 and caught.signal_number == 0


WORKER = """
from hvd_adaptive.state.preemption import catch_signals
catch_signals()
import functools
import multiprocessing
from torch.utils.data import DataLoader
loader = DataLoader(range(8), num_workers=1, persistent_workers=True)
assert len(list(loader)) == 8
(worker,) = multiprocessing.active_children()
# What multiprocessing does when Python ends.
worker.terminate()
worker.join()
print(worker.exitcode)
"""


def test_a_parent_ends_a_loaders_worker_as_torch_would() -> None:
    """Else torch takes it for a failure, in the midst of the end of a job that went well."""
    ended = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("0\n", "", 0)


def test_a_parent_ends_its_child(caught: Preemption) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.2)
    child.terminate()
    child.join(50)
    assert child.exitcode == -signal.SIGTERM
    # A program that is started is none of multiprocessing's.
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    assert program.wait(50) == -signal.SIGTERM


WORKERS = """
from hvd_adaptive.state.preemption import PREEMPTION, catch_signals
catch_signals()
import multiprocessing, os, sys, time

def work(pipe):
    while True:
        pipe.send(pipe.recv() + 1)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    here, there = context.Pipe()
    child = context.Process(target=work, args=(there,))
    child.start()
    here.send(1)
    assert here.recv() == 2
    print("ready", flush=True)
    while not PREEMPTION.signal_number:
        time.sleep(0.01)
    time.sleep(0.5)
    here.send(2)
    assert here.recv() == 3 and child.is_alive()
    # Nor is the server of such workers lost.
    other = context.Process(target=work, args=(there,))
    other.start()
    for process in (child, other):
        process.terminate()
        process.join(60)
        print(process.exitcode, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_with_an_interpreter_of_their_own(method: str, number: signal.Signals, tmp_path: Path) -> None:
    """A signal for all processes of the job takes none of them from their rank, which can still end them."""
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    process = subprocess.Popen([sys.executable, script, method], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and output == "-15\n-15\n"


SCRIPT = """
import sys, threading, time
from hvd_adaptive.state.preemption import PREEMPTION, catch_signals
PREEMPTION.drain_limit_s = float(sys.argv[1])
catch_signals()

def tell():
    while not PREEMPTION.signal_number:
        time.sleep(0.01)
    print("noticed", flush=True)

threading.Thread(target=tell, daemon=True).start()
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("drain_limit_s", "signals", "message"),
    [
        (1.0, [signal.SIGTERM], "not ready to end 1 s (drain_limit_s) after SIGTERM"),
        (100.0, [signal.SIGUSR1, signal.SIGTERM], "a second signal came while the ranks got ready to end"),
    ],
    ids=["limit", "second"],
)
def test_nothing_outlasts_the_limit_or_a_second_signal(drain_limit_s: float, signals: Any, message: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(drain_limit_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for place, number in enumerate(signals):
        if place:
            # As another signal counts what comes two seconds after the first was noticed.
            assert process.stdout.readline() == "noticed\n"
            time.sleep(2.5)
        process.send_signal(number)
        # Delivered twice by the launcher: still the same.
        process.send_signal(number)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 75 and time.monotonic() - begin < 50
    assert message in errors and "nothing was saved" in errors


INTERRUPTED = """
import signal, time
from hvd_adaptive.state.preemption import PREEMPTION, SIGNALS
PREEMPTION.catch_signals((*SIGNALS, signal.SIGINT))
print("ready", flush=True)
while not PREEMPTION.signal_number:
    time.sleep(0.01)
print(PREEMPTION.exit_code, flush=True)
time.sleep(100)
"""


def test_a_second_ctrl_c_ends_at_once() -> None:
    # Without a session its number is the launcher's.
    rank = {**os.environ, "OMPI_COMM_WORLD_RANK": "2"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=rank
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    # A launcher may send one twice.
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "130\n"
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == 130 and "rank 2: a second signal came" in errors


def test_a_session_keeps_what_was_saved_before_it(caught: Preemption) -> None:
    caught.saved_at_first = lambda: "the last checkpoint is round-00000003"
    # As a calibration does, before there is a checkpointer.
    LocalWorld(1).run(lambda transport: caught.watch_over(transport, 60.0))
    assert caught.saved() == "the last checkpoint is round-00000003"
    caught.stop()
    assert caught.saved() == "nothing was saved by this process"


ENDING = """
import ctypes, sys
from hvd_adaptive.state.preemption import catch_signals
catch_signals()
# As MPI's end, which comes when Python is gone.
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.sleep, ctypes.c_void_p(3), None)
print("ending", flush=True)
sys.exit(75)
"""


def test_a_late_signal_does_not_end_what_has_ended_well() -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ending\n"
    time.sleep(1)
    process.terminate()
    assert process.wait(60) == 75


NOTED = """
import os, signal, time
from hvd_adaptive.cluster import signals
from hvd_adaptive.state import preemption
signals._SAME_SIGNAL_S, preemption.PREEMPTION.drain_limit_s = 0.0, 0.01
preemption.PREEMPTION.catch_signals((signal.SIGUSR1,), ends_late=False)
for _ in range(2):
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.3)
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert preemption.PREEMPTION.signal_number == signal.SIGUSR1
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_a_signal_that_is_only_noted_ends_nothing_and_the_other_one_is_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", NOTED], capture_output=True, text=True, timeout=90)
    assert done.returncode == -signal.SIGTERM, done.stderr
