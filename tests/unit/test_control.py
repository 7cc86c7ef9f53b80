"""Adaptation between rounds over simulated ranks: batch sizes by speed, memory ceilings, merge periods, fixed dispatch."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import re
import resource
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.batch_sizes import speed_shares
from hvd_adaptive.algorithm.ledger import epoch_order, own_parts
from hvd_adaptive.algorithm.round_control import RoundControl
from hvd_adaptive.algorithm.statistics import Gathered
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import BatchSource
from hvd_adaptive.engine.out_of_memory import cut, even_sizes, is_out_of_memory
from hvd_adaptive.engine.records import RoundRecord, RoundStats
from hvd_adaptive.engine.start_speeds import measure_speeds
from hvd_adaptive.session.session import Session

NUM_SAMPLES = 600
X = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Simulated ranks are threads already; torch's own would only spin beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(
    transport: LocalTransport,
    config: Config,
    *,
    num_epochs: float = 2,
    before_step: Callable[[Session, Any], None] = lambda session, batch: None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    work: np.ndarray | None = None,
) -> dict[str, Any]:
    """Trains; ``before_step`` runs between backward and step. Returns what was computed: a failed try is not."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    session = Session(model, optimizer(model.parameters()), config, transport=transport)
    records: list[RoundRecord] = []
    session.records.append(records.append)
    done, tried = [], []
    for batch in session.batches(DATA, num_epochs=num_epochs, work=work):
        tried.append(batch.num_samples)
        rows, finished = batch.rows, False
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            before_step(session, batch)
            session.optimizer.step()
            finished = True
        if finished:
            done.append(rows)
    session.close()
    return {"records": records, "done": done, "tried": tried, "session": session, "model": model}


def assert_consumed_once(results: list[dict[str, Any]], num_epochs: int = 2) -> None:
    rows = np.concatenate([rows for result in results for rows in result["done"]])
    assert np.array_equal(np.bincount(rows, minlength=NUM_SAMPLES), np.full(NUM_SAMPLES, num_epochs))
    for record in results[0]["records"]:
        assert np.isfinite(record.stats["num_samples"]).all()
    counted = sum(record.stats["num_samples"].sum() for record in results[0]["records"])
    assert counted == num_epochs * NUM_SAMPLES


# Memory


def small_memory(limit: int, rank: int) -> Callable[[Session, Any], None]:
    def fail(session: Session, batch: Any) -> None:
        if session.rank == rank and batch.num_samples > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return fail


@pytest.mark.parametrize(
    ("world_size", "rule"), [(1, "heterogpu"), (2, "fixed"), (2, "proportional"), (3, "heterogpu"), (3, "proportional")]
)
def test_a_batch_that_does_not_fit_is_computed_in_parts_and_the_ceiling_is_kept(
    world_size: int, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(
        batch_size=32, min_batch_size=2, max_batch_size=64, mega_batch=200, batch_size_rule=rule,
        batch_size_step=4 if rule == "heterogpu" else None, hash_interval=1,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        results = LocalWorld(world_size).run(
            lambda t: train(t, config, before_step=small_memory(10, rank=world_size - 1))
        )
    assert_consumed_once(results)
    poor = results[-1]
    failed = [size for size in poor["tried"] if size > 10]
    # What failed halves the next try, also of the batch that was claimed meanwhile.
    assert failed and all(after <= before // 2 for before, after in itertools.pairwise(failed))
    messages = [r.message for r in caplog.records if "did not fit into memory" in r.message]
    # Two where the rank's first batch was a short one, cut at the end of a round: the second half of it failed again.
    assert len(messages) in (1, 2)
    found = re.search(rf"ranks \[{world_size - 1}\] take at most (\d+) samples .* Set max_batch_size to \1 ", messages[-1])
    # Half of what failed last: 8, where the rank's first batch came in the first round, with the size that all begin with.
    assert found is not None and int(found[1]) == failed[-1] // 2 <= 10
    known = np.inf
    for record in results[0]["records"]:
        assert record.stats["batch_size"][-1] <= known
        known = min(known, record.stats["ceiling"][-1] or np.inf)
        assert (record.stats["ceiling"][:-1] == 0).all()
    assert known == int(found[1])
    for result in results[:-1]:
        assert max(result["tried"]) > 10


def test_claims_of_the_same_round_already_obey_the_ceiling() -> None:
    loads: list[int] = []

    class Counted:
        def __len__(self) -> int:
            return 400

        def get_batch(self, rows: np.ndarray) -> Any:
            loads.append(len(rows))
            return X[rows], DATA.tensors[1][rows]

    model = nn.Linear(4, 2).double()
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=32, mega_batch=400), transport=LocalTransport()
    )
    for batch in session.batches(Counted(), num_epochs=1):
        with session.step(batch):
            small_memory(20, rank=0)(session, batch)
    # The one that failed, and perhaps the one claimed meanwhile; later ones would load their samples twice as well.
    large = [size for size in loads if size > 16]
    assert len(large) <= 2 and sum(loads) == 400 + sum(large)


def test_a_failed_try_leaves_no_gradient_no_loss_and_no_step() -> None:
    calls: list[int] = []

    def fail_once(session: Session, batch: Any) -> None:
        calls.append(batch.num_samples)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no")

    def run(transport: LocalTransport) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        session = Session(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Config(batch_size=20, mega_batch=100, outer_step="none"),
            transport=transport,
        )
        records: list[RoundRecord] = []
        session.records.append(records.append)
        plain = nn.Linear(4, 2).double()
        plain.load_state_dict(model.state_dict())
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        for batch in session.batches(DATA, num_epochs=1):
            assert all(p.grad is None for p in model.parameters())
            rows, finished = batch.rows, False
            with session.step(batch):
                # Gradients of a failed try would add up here.
                batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
                batch.loss.backward()
                fail_once(session, batch)
                session.optimizer.step()
                finished = True
            if finished:
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(plain(X[rows]), DATA.tensors[1][rows]).backward()
                for group in sgd.param_groups:
                    group["lr"] = 0.1 * len(rows) / 20
                sgd.step()
                sgd.zero_grad()
        return {"model": model, "plain": plain, "records": records}

    result = LocalWorld(1).run(run)[0]
    assert calls[:3] == [20, 10, 10]
    for ours, theirs in zip(result["model"].parameters(), result["plain"].parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)
    first = result["records"][0].stats
    assert first["num_steps"][0] == len(calls[1 : 1 + int(first["num_steps"][0])])
    assert first["loss_samples"][0] == first["num_samples"][0] == 100


def test_what_the_failed_step_held_is_free_before_its_samples_come_again() -> None:
    held: list[Any] = []

    def fail(session: Session, batch: Any) -> None:
        if not held:
            activations = torch.zeros(1000)
            held.extend((weakref.ref(activations), weakref.ref(batch.x), weakref.ref(batch.loss)))
            raise torch.OutOfMemoryError("no")
        if len(held) == 3:
            held.append([reference() for reference in held])

    LocalWorld(1).run(lambda t: train(t, Config(batch_size=20, mega_batch=100), before_step=fail))
    assert held[3] == [None, None, None]


def test_a_single_sample_that_does_not_fit_raises() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        LocalWorld(2).run(lambda t: train(t, Config(batch_size=16), before_step=small_memory(0, rank=1)))


def test_memory_that_runs_out_inside_or_after_the_optimizers_step_ends_the_job() -> None:
    class Hungry(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError("no room for the state")

    with pytest.raises(RuntimeError, match=r"rank 0 ran out of memory .* 16 samples after optimizer.step had begun"):
        LocalWorld(1).run(
            lambda t: train(t, Config(batch_size=16), optimizer=lambda p: Hungry(p, lr=0.1))
        )


def test_other_errors_and_the_baselines_pass_through() -> None:
    tries = []

    def fail(session: Session, batch: Any) -> None:
        tries.append(batch.num_samples)
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        LocalWorld(1).run(lambda t: train(t, Config(), before_step=fail))
    assert len(tries) == 1
    with pytest.raises(torch.OutOfMemoryError):
        LocalWorld(1).run(
            lambda t: train(t, Config(strategy="horovod"), before_step=small_memory(1, rank=0))
        )


def test_out_of_memory_is_known_by_what_torch_and_numpy_raise() -> None:
    for allocate in (lambda: torch.empty(1 << 50), lambda: np.empty(1 << 50)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("out of range")) and not is_out_of_memory(KeyError("memory"))


def test_a_rank_without_the_memory_for_a_batch_measures_its_own_speed_with_smaller_ones() -> None:
    sizes: list[list[int]] = [[], []]

    def measure(transport: LocalTransport) -> tuple[Any, bool]:
        model = nn.Linear(4, 2).double()
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(batch: Any) -> None:
            if batch.num_samples not in sizes[transport.rank]:
                sizes[transport.rank].append(batch.num_samples)
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            if transport.rank == 1 and batch.num_samples > 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            optimizer.step()

        source = BatchSource(DATA, torch.device("cpu"))
        speeds = measure_speeds(model, optimizer, step, source, batch_size=64, seed=0, transport=transport)
        unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        return speeds, unchanged and not optimizer.state and all(p.grad is None for p in model.parameters())

    for speeds, unchanged in LocalWorld(2).run(measure):
        assert (speeds.compute > 0).all() and (speeds.wall > 0).all() and unchanged
    assert sizes == [[64], [64, 32, 16]]


def test_a_rank_with_several_threads_has_its_own_speed_by_the_clock() -> None:
    """Their CPU times add up to more than a step's length, and a rank that always computes would seem to do more than it can."""
    threads = torch.get_num_threads()
    model, factor = nn.Linear(4, 2), torch.ones(700, 700)
    source, optimizer = BatchSource(DATA, torch.device("cpu")), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        torch.mm(factor, factor)

    torch.set_num_threads(2)
    try:
        speeds = measure_speeds(model, optimizer, step, source, batch_size=8, seed=0, transport=LocalTransport())
    finally:
        torch.set_num_threads(threads)
    assert speeds.compute == pytest.approx(speeds.wall, rel=0.02)


def test_parts_of_a_batch_are_nearly_equal_and_complete() -> None:
    for length in range(1, 40):
        for most in range(1, length + 1):
            parts = cut(np.arange(length), 7 * length + 3, even_sizes(length, most=most))
            lengths = [len(rows) for rows, _ in parts]
            assert np.concatenate([rows for rows, _ in parts]).tolist() == list(range(length))
            assert sum(work for _, work in parts) == 7 * length + 3
            assert max(lengths) <= most and max(lengths) - min(lengths) <= 1
            assert len(parts) == -(-length // most)


REAL = """
import resource, torch
from torch import nn
from hvd_adaptive import Config, Session
from hvd_adaptive.comm.threads import LocalTransport

class Rows:
    def __len__(self): return 4096
    def get_batch(self, rows): return torch.zeros(len(rows), 1), torch.zeros(len(rows), dtype=torch.long)

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(1, 1 << 14), nn.ReLU(), nn.Linear(1 << 14, 2))
config = Config(batch_size=4096, mega_batch=4096)
session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=LocalTransport())
done = []
limited = False
for batch in session.batches(Rows(), num_epochs=1):
    rows = batch.rows
    if not limited:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (350 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        limited = True
    with session.step(batch):
        session.optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
        done += rows.tolist()
assert sorted(done) == list(range(4096)), len(done)
print("ceiling", session._strategy._memory.samples)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="needs RLIMIT_AS")
def test_a_real_allocation_that_fails_is_survived() -> None:
    # 4096 samples of 16384 fp32 activations are 256 MiB, and a step needs several such.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) in (2048, 1024, 512), done.stdout


# Batch sizes


def test_proportional_sizes_make_steps_equally_long_and_keep_the_sum() -> None:
    control = RoundControl(
        Config(batch_size=64, batch_size_rule="proportional"), world_size=4, speaks=False
    )
    sizes, seconds = np.full(4, 64.0), np.array([4.0, 4, 2, 1]) / 1000
    for _ in range(12):
        gathered = statistics(
            num_steps=np.full(4, 20.0), num_samples=20 * sizes, work=20 * sizes, busy_s=20 * (0.005 + seconds * sizes)
        )
        sizes = control.next_batch_sizes(sizes, gathered, warming_up=False)
        assert sizes.sum() == pytest.approx(256)
    step_s = 0.005 + seconds * sizes
    assert np.ptp(step_s) < 0.05 * step_s.mean()
    assert (np.diff(sizes) >= -0.05 * 64).all() and sizes[3] > 2 * sizes[0]


def test_proportional_sizes_count_work_in_its_own_unit() -> None:
    control = RoundControl(
        Config(batch_size=64, batch_size_rule="proportional", work="nonzeros"), world_size=2, speaks=False
    )
    sizes = np.full(2, 64.0)
    for _ in range(12):
        work = 20 * 75 * sizes
        gathered = statistics(
            num_steps=np.full(2, 20.0), num_samples=20 * sizes, work=work, busy_s=work * np.array([3e-6, 1e-6])
        )
        sizes = control.next_batch_sizes(sizes, gathered, warming_up=False)
    assert sizes == pytest.approx([32, 96], rel=0.05)


def test_saved_batch_sizes_are_scaled_to_this_batch_size_within_its_bounds() -> None:
    state = RoundControl(Config(batch_size=32, batch_size_rule="paper"), world_size=3, speaks=False).state_dict()
    sizes = np.array([4.0, 20.0, 32.0])
    same = RoundControl(Config(batch_size=32, batch_size_rule="paper"), world_size=3, speaks=False)
    assert same.resumed_batch_sizes(sizes, state).tolist() == [4, 20, 32]
    small = RoundControl(Config(batch_size=4, min_batch_size=1, batch_size_rule="paper"), world_size=3, speaks=False)
    assert small.resumed_batch_sizes(sizes, state).tolist() == [1, 2.5, 4]
    large = RoundControl(Config(batch_size=64, batch_size_rule="paper"), world_size=3, speaks=False)
    large.load_state_dict({**state, "ceilings": np.array([np.inf, np.inf, 48.0])})
    assert large.resumed_batch_sizes(sizes, state).tolist() == [8, 40, 48]
    whole = RoundControl(Config(batch_size=48, micro_batch_size=8), world_size=3, speaks=False)
    assert whole.resumed_batch_sizes(np.array([8.0, 24.0, 32.0]), state).tolist() == [16, 32, 48]


def test_a_ceiling_bounds_one_rank_and_the_others_take_what_it_leaves() -> None:
    control = RoundControl(Config(batch_size=64, batch_size_rule="proportional"), world_size=3, speaks=False)
    gathered = statistics(
        num_steps=np.full(3, 20.0), num_samples=np.full(3, 1280.0), work=np.full(3, 1280.0), busy_s=np.ones(3),
        ceiling=np.array([0.0, 10, 0]),
    )  # fmt: skip
    assert control.next_batch_sizes(np.full(3, 64.0), gathered, warming_up=False) == pytest.approx([91, 10, 91])
    low = RoundControl(Config(batch_size=64, batch_size_rule="proportional"), world_size=3, speaks=False)
    # Below the configured minimum, and in the warm-up.
    gathered["ceiling"][1] = 2
    assert low.next_batch_sizes(np.full(3, 64.0), gathered, warming_up=True).tolist() == [64, 2, 64]
    assert low.next_batch_sizes(np.full(3, 64.0), gathered, warming_up=False)[1] == 2


def test_the_warm_up_obeys_a_ceiling() -> None:
    # With a shared cursor, another rank might take the whole first round.
    config = Config(batch_size=64, min_batch_size=16, warmup_epochs=1, mega_batch=200, dispatch="equal")
    results = LocalWorld(2).run(lambda t: train(t, config, before_step=small_memory(5, rank=0)))
    assert_consumed_once(results)
    sizes = np.array([record.stats["batch_size"] for record in results[0]["records"]])
    assert sizes[0].tolist() == [16, 16] and (sizes[1:, 0] <= 4).all() and sizes[-1, 1] == 64


def test_emulated_speeds_move_real_sizes() -> None:
    config = Config(batch_size=32, batch_size_rule="proportional", mega_batch=600, slowdown="12,1")
    results = LocalWorld(2).run(lambda t: train(t, config, num_epochs=12))
    assert_consumed_once(results, num_epochs=12)
    slow, fast = results[0]["records"][-1].stats["batch_size"]
    assert slow < 26 and fast > 38


# Dispatch


DISPATCHES = ("dynamic", "equal", "proportional")


@pytest.mark.parametrize(
    # Of all three, every pair of values.
    ("dispatch", "world_size", "work"),
    [(name, size, ("samples", "nonzeros")[(place + size) % 2]) for place, name in enumerate(DISPATCHES) for size in (1, 2, 3)],
)
def test_any_dispatch_consumes_every_sample_once(dispatch: str, world_size: int, work: str) -> None:
    cost = np.random.default_rng(0).integers(0, 50, NUM_SAMPLES) if work == "nonzeros" else None
    config = Config(batch_size=16, mega_batch=150, dispatch=dispatch, work=work)
    results = LocalWorld(world_size).run(
        lambda t: train(t, config, work=cost, before_step=small_memory(12, rank=0))
    )
    assert_consumed_once(results)


def test_equal_parts_whatever_the_speeds_and_parts_by_speed() -> None:
    def rounds(dispatch: str) -> list[Gathered]:
        config = Config(batch_size=10, mega_batch=200, dispatch=dispatch, slowdown="8,1", merge_weights="uniform")
        return [r.stats for r in LocalWorld(2).run(lambda t: train(t, config, num_epochs=3))[0]["records"]]

    assert all((stats["num_samples"] == 100).all() for stats in rounds("equal"))
    by_speed = rounds("proportional")
    assert by_speed[0]["num_samples"].tolist() == [100, 100]
    for before, after in itertools.pairwise(by_speed):
        edges = own_parts(speed_shares(before["work"], before["busy_s"]), 200)
        assert after["num_samples"].tolist() == np.diff(edges).tolist()
    # A busy machine may hold the fast rank up in a round or two.
    assert np.median([stats["num_samples"][1] / stats["num_samples"][0] for stats in by_speed[1:]]) > 1.5


def test_equal_dispatch_gives_contiguous_parts_in_full_batches() -> None:
    config = Config(batch_size=16, mega_batch=200, dispatch="equal", seed=3)
    results = LocalWorld(2).run(lambda t: train(t, config, num_epochs=1 / 3))
    order = epoch_order(NUM_SAMPLES, seed=3, epoch=0)[:200]
    for rank, result in enumerate(results):
        assert np.concatenate(result["done"]).tolist() == order[100 * rank : 100 * (rank + 1)].tolist()
        assert result["tried"][:-1] == [16] * (len(result["tried"]) - 1)


# Merge period


def test_a_slow_merge_makes_rounds_longer_on_all_ranks() -> None:
    class Slow(LocalTransport):
        def allreduce_sum_(self, tensor: torch.Tensor, name: str) -> None:
            super().allreduce_sum_(tensor, name)
            # Long beside the steps, also where those have to wait for a core.
            time.sleep(0.05)

    def run(transport: LocalTransport) -> dict[str, Any]:
        slow = Slow(transport._world, transport.rank)
        config = Config(batch_size=4, mega_batch=20, merge_period="auto", merge_share=0.2, hash_interval=1)
        return train(slow, config, num_epochs=4)

    results = LocalWorld(2).run(run)
    assert_consumed_once(results, num_epochs=4)
    sizes = [record.stats["num_samples"].sum() for record in results[0]["records"]]
    assert sizes[0] == 20 and NUM_SAMPLES / 4 <= max(sizes) <= 1.5 * NUM_SAMPLES / 4
    first, second = (result["session"]._strategy.mega_batch_of(NUM_SAMPLES) for result in results)
    assert first == second


@pytest.mark.parametrize(("options", "shortens"), [({}, True), ({"mega_batch": 40, "merge_period": "auto"}, False)])
def test_adams_rounds_are_shorter_where_ranks_differ(options: dict[str, Any], shortens: bool) -> None:
    def run(transport: LocalTransport) -> dict[str, Any]:
        def wait(session: Session, batch: Any) -> None:
            time.sleep((0.02, 0.004)[transport.rank] * batch.num_samples / 4)

        # Merges of threads take long beside such steps, and that is not what this is about.
        config = Config(batch_size=4, merge_share=0.9, **{"merge_period": "auto", **options})
        return train(transport, config, num_epochs=3, before_step=wait, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))

    results = LocalWorld(2).run(run)
    assert_consumed_once(results, num_epochs=3)
    sizes = [record.stats["num_samples"].sum() for record in results[0]["records"]]
    # Five steps of the fast rank, and one of the slow one: 24 samples for 40.
    usual = np.median(sizes[len(sizes) // 2 :])
    assert sizes[0] == 40 and usual >= 20
    assert (usual < 34) == shortens


def test_ranks_that_are_alike_take_whole_batches_in_short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads are not alike on a busy machine.
    monkeypatch.setattr("hvd_adaptive.algorithm.round_control.are_alike", lambda shares: True)
    adam = lambda p: torch.optim.AdamW(p, lr=0.01)  # noqa: E731
    results = LocalWorld(2).run(lambda t: train(t, Config(batch_size=7), num_epochs=3, optimizer=adam))
    assert_consumed_once(results, num_epochs=3)
    # 42 rounds of batches for both, and 12 samples, are an epoch.
    odd = [size for result in results for size in result["tried"] if size != 7]
    assert odd == [5] * 3
    sizes = {record.stats["num_samples"].sum() for record in results[0]["records"]}
    assert all(size % 14 in (0, 12) for size in sizes)


@pytest.mark.parametrize(
    ("options", "short_rounds", "updates", "whole"),
    [
        ({}, True, [5, 5], True), ({}, True, [4.5, 5.5], True), ({}, True, [2, 8], False), ({}, False, [5, 5], True),
        ({}, False, [2, 8], False), ({"mega_batch": 80}, False, [5, 5], False),
        ({"dispatch": "equal"}, True, [5, 5], False), ({"work": "nonzeros"}, True, [5, 5], False),
        ({"record": True}, True, [5, 5], False), ({"island": "2"}, True, [5, 5], False),
    ],
)  # fmt: skip
def test_who_takes_whole_batches(options: dict[str, Any], short_rounds: bool, updates: list[float], whole: bool) -> None:
    control = RoundControl(Config(batch_size=8, **options), world_size=2, speaks=False, short_rounds=short_rounds)
    for number in range(1, 4):
        now = record(number, num_samples=80 * number, merge_s=0.01, round_s=1.0)
        now.stats["num_updates"] = np.array(updates, dtype=np.float64)
        control.after_round(now, dataset_size=10**6)
    assert control.takes_whole_batches == whole
    resumed = RoundControl(Config(batch_size=8, **options), world_size=2, speaks=False, short_rounds=short_rounds)
    state = control.state_dict()
    # Older states have none.
    resumed.load_state_dict({name: value for name, value in state.items() if name != "speed_shares"})
    resumed.load_state_dict(state)
    assert resumed.takes_whole_batches == whole


def test_a_rank_that_becomes_slow_does_not_stay_alike_by_being_given_as_much() -> None:
    control = RoundControl(Config(batch_size=8), world_size=2, speaks=False, short_rounds=True)
    found = []
    for number in range(1, 18):
        now = record(number, num_samples=80 * number, merge_s=0.01, round_s=1.0)
        # It computes longer at first, and later waits for its data; what a round's first batch takes is no speed.
        slow = 2.0 if 3 < number < 9 else 1.0
        seconds = {"busy_s": slow, "claim_s": 0.5} if number < 6 else {"busy_s": 1.0, "claim_s": slow - 0.5}
        now.stats |= {"num_updates": np.full(2, 5.0), "first_batch_s": np.full(2, 0.5)}
        now.stats |= {name: np.array([usual, value]) for (name, value), usual in zip(seconds.items(), (1.0, 0.5), strict=True)}
        control.after_round(now, dataset_size=10**6)
        found.append(control.takes_whole_batches)
    assert found == 4 * [True] + 6 * [False] + 7 * [True], found


@pytest.mark.parametrize(
    ("num_hosts", "norm", "merges"), [(2, nn.LayerNorm, 8), (1, nn.LayerNorm, None), (2, nn.BatchNorm1d, None)]
)
def test_merges_may_go_beside_steps_between_hosts_without_batch_norm(num_hosts: int, norm: Any, merges: int | None) -> None:
    def made(transport: LocalTransport) -> int | None:
        model = nn.Sequential(nn.Linear(4, 4), norm(4))
        session = Session(model, torch.optim.AdamW(model.parameters()), Config(batch_size=8), transport=transport)
        return session._strategy.merge.config.merges_per_round

    assert LocalWorld(2, num_hosts=num_hosts).run(made) == [merges] * 2


def test_merges_go_beside_steps_where_they_take_long_and_ranks_are_alike() -> None:
    config = Config(batch_size=8, merges_per_round=8, merge_period="auto", mega_batch=8 * 3 * 2 * 8)
    control = RoundControl(config, world_size=2, speaks=False, short_rounds=True, merges_from=100)
    sizes, seen = np.full(2, 8.0), []

    def rounds(first: int, updates: list[float], num_rounds: int, merge_s: float = 0.0) -> None:
        for number in range(first, first + num_rounds):
            now = record(number, num_samples=384 * number, merge_s=merge_s, round_s=1.0)
            now.stats["num_updates"] = np.array(updates)
            control.after_round(now, dataset_size=10**6)
            seen.append(control.merges)

    # Not in the first hundred updates.
    assert control.merges == control.merges_of(384, sizes) == 1 and control.mega_batch == 5 * 2 * 8
    rounds(1, [20, 20], 2)
    rounds(3, [20, 20], 2, merge_s=0.06)
    assert seen == [1] * 4 and control.mega_batch > 1.5 * 5 * 2 * 8
    # One slow round does not count.
    rounds(5, [18, 30], 1)
    assert seen[-1] == 8 and control.merges_of(384, sizes) == 8
    # The end of an epoch has fewer.
    assert control.merges_of(192, sizes) == 4 and control.merges_of(10, sizes) == 1
    rounds(6, [8, 16], 6)
    assert seen[-1] == 1 and control.mega_batch < 100
    later = RoundControl(config, world_size=2, speaks=False, short_rounds=True, merges_from=100)
    later.load_state_dict(control.state_dict())
    assert later.merges == 1
    rounds(12, [5, 5], 3)
    assert seen[-1] == 1
    rounds(15, [5, 5], 12, merge_s=0.3)
    assert seen[-1] == 8 and control.mega_batch >= 384
    # Who has set their number has them from the first round on.
    assert RoundControl(config, world_size=2, speaks=False, short_rounds=True).merges == 8


@pytest.mark.parametrize(("dataset_size", "merges"), [(10**6, 6), (2400, 2), (1600, 1)])
def test_no_more_merges_go_beside_steps_than_the_link_carries(dataset_size: int, merges: int) -> None:
    """A merge takes as long as 180 samples: rounds have ten times as many, and room for six, if an epoch lets them be so long."""
    config = Config(batch_size=8, merges_per_round=8, merge_period="auto", mega_batch=8 * 3 * 2 * 8)
    control = RoundControl(config, world_size=2, speaks=False, short_rounds=True, merges_from=20)
    train_s, done = 0.0, 0
    for number in range(1, 12):
        size, train_s = control.mega_batch, train_s + control.mega_batch * 0.001 + 0.18
        done += size
        now = record(number, num_samples=done, merge_s=0.18, round_s=train_s / number)
        now.stats["num_updates"] = np.full(2, size / 16)
        control.after_round(now, dataset_size=dataset_size)
    assert (control.merges > 1) == (merges > 1)
    assert control.merges_of(min(dataset_size // 4, 1620), np.full(2, 8.0)) == merges


@pytest.mark.parametrize(("merge_s", "can_narrow", "narrow"), [(0.18, True, True), (0.01, True, False), (0.18, False, False)])
def test_merges_that_take_long_get_fewer_bits_if_they_can(merge_s: float, can_narrow: bool, narrow: bool) -> None:
    """Short rounds have 80 samples of 1 ms."""
    config = Config(batch_size=8, merges_per_round=8, merge_period="auto", mega_batch=8 * 3 * 2 * 8)
    control = RoundControl(config, 2, speaks=False, short_rounds=True, merges_from=20, can_narrow=can_narrow)
    train_s, done, seen = 0.0, 0, []
    for number in range(1, 12):
        size, made = control.mega_batch, control.merges_of(control.mega_batch, np.full(2, 8.0))
        taken = 0.0 if made > 1 else merge_s * (0.5 if control.is_narrow else 1.0)
        train_s, done = train_s + size * 0.001 + taken, done + size
        now = record(number, num_samples=done, merge_s=taken, round_s=train_s / number)
        now.stats["num_updates"] = np.full(2, size / 16)
        control.after_round(now, dataset_size=10**6)
        seen.append(control.is_narrow)
    # The first round tells nothing.
    assert seen == [False] + 10 * [narrow]
    # Where the link carried six merges beside steps, it carries more of fewer bits.
    assert control._most_merges(1620) == (6 if merge_s > 0.1 and not narrow else 8)


def test_merges_beside_steps_for_which_all_ranks_wait_become_fewer() -> None:
    """One that waits alone waits for another rank, and not for the link."""
    config = Config(batch_size=8, merges_per_round=8, merge_period="auto", mega_batch=8 * 3 * 2 * 8)
    control = RoundControl(config, world_size=2, speaks=False, short_rounds=True, merges_from=20)
    made, found = 1, []
    for number in range(1, 16):
        now = record(number, num_samples=384 * number, merge_s=0.06 if made == 1 else 0.0, round_s=1.0)
        now.stats["num_updates"] = np.full(2, 24.0)
        if made > 1:
            now.stats["merge_s"] = np.array([0.3, 0.3 if made > 2 else 0.1])
        control.after_round(now, dataset_size=10**6)
        made = control.merges_of(384, np.full(2, 8.0))
        found.append(made)
    assert found[:8] == [1, 1, 8, 8, 4, 4, 2, 2] and set(found[8:]) == {2}, found


@pytest.mark.parametrize("waited", [0.05, 0.2])
def test_waiting_for_a_slower_rank_within_a_round_lengthens_none(waited: float) -> None:
    """Of two merges in a round the faster rank waits for the other one's sums, as long as they differ, however long the round."""
    config = Config(batch_size=8, merges_per_round=8, merge_period="auto", mega_batch=8 * 3 * 2 * 8)
    control = RoundControl(config, world_size=2, speaks=False, short_rounds=True, merges_from=20)
    done, train_s, sizes = 0, 0.0, []
    for number in range(1, 60):
        size = control.mega_batch
        made = control.merges_of(size, np.full(2, 8.0))
        merge_s = np.full(2, 0.18) if made == 1 else np.array([waited * size * 0.001, 0.02])
        done, train_s = done + size, train_s + size * 0.001 + float(merge_s.max())
        now = record(number, num_samples=done, merge_s=0.0, round_s=train_s / number)
        now.stats |= {"num_updates": np.full(2, size / 16), "merge_s": merge_s}
        control.after_round(now, dataset_size=10**6)
        sizes.append(size)
    assert made > 1 and sizes[-1] < 4000 and len(set(sizes[-20:])) == 1, sizes


def test_what_merges_beside_steps_took_is_not_what_one_takes() -> None:
    config = Config(batch_size=8, merges_per_round=8, merge_period="auto", mega_batch=8 * 3 * 2 * 8)
    control = RoundControl(config, world_size=2, speaks=False, short_rounds=True, merges_from=20)
    made, found = 1, []
    for number in range(1, 16):
        now = record(number, num_samples=384 * number, merge_s=0.06 if made == 1 else 0.0, round_s=1.0)
        # For one round a rank is slow, and the other one waits for it within the round.
        is_slow = number == 8
        now.stats["num_updates"] = np.array([24.0, 24.0])
        if is_slow:
            now.stats |= {"merge_s": np.array([27.0, 0.0]), "busy_s": np.array([1.0, 28.0])}
        control.after_round(now, dataset_size=10**6)
        made = control.merges_of(384, np.full(2, 8.0))
        found.append(made)
    assert list(control._merge_s) == pytest.approx([0.06] * len(control._merge_s)) and set(found[3:7]) == {8}, found


def test_short_merges_stay_at_the_end_of_a_round() -> None:
    config = Config(batch_size=8, merges_per_round=8, merge_period="auto", mega_batch=8 * 3 * 2 * 8)
    control = RoundControl(config, world_size=2, speaks=False, short_rounds=True, merges_from=100)
    for number in range(1, 30):
        now = record(number, num_samples=80 * number, merge_s=0.01, round_s=1.0)
        now.stats["num_updates"] = np.array([5.0, 5.0])
        control.after_round(now, dataset_size=10**6)
    assert control.merges == 1 and control.mega_batch == 80


def test_a_fixed_period_stays() -> None:
    records = LocalWorld(2).run(lambda t: train(t, Config(batch_size=4, mega_batch=100)))[0]["records"]
    assert {record.stats["num_samples"].sum() for record in records} == {100}


@pytest.mark.parametrize(
    ("world_size", "dataset_size", "told"),
    # A quarter of the data, or where the period starts. One rank has no link, and no round passes the end of an epoch.
    [(2, 1000, "a round has 250 of the 1000"), (2, 150, "a round has 100 of the 150"), (2, 100, ""), (1, 1000, "")],
)
def test_a_period_at_its_limit_says_so_once(
    world_size: int, dataset_size: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    control = RoundControl(Config(merge_period="auto", mega_batch=100), world_size=world_size, speaks=True)
    for number in range(1, 12):
        done = record(number, num_samples=250 * number, merge_s=1.0, round_s=2.0, world_size=world_size)
        control.after_round(done, dataset_size=dataset_size)
    assert control.mega_batch == max(100, dataset_size // 4)
    messages = [r.message for r in caplog.records if "of the time" in r.message]
    assert len(messages) == bool(told) and all("take 50% of the time" in m and told in m for m in messages)


# State


def test_the_state_survives_a_restart_and_another_number_of_ranks_keeps_the_period() -> None:
    config = Config(batch_size=64, batch_size_rule="proportional", merge_period="auto", mega_batch=100)
    one = RoundControl(config, world_size=2, speaks=False)
    gathered = statistics(
        num_steps=np.full(2, 20.0), num_samples=np.full(2, 1280.0), work=np.full(2, 1280.0), busy_s=np.array([1.0, 1.1]),
        ceiling=np.array([0.0, 50]),
    )  # fmt: skip
    sizes = np.full(2, 50.0)
    for number in range(1, 3):
        one.next_batch_sizes(sizes, gathered, warming_up=False)
        one.after_round(record(number, num_samples=100 * number, merge_s=1.0, round_s=2.0), dataset_size=10_000)
    same, other = RoundControl(config, world_size=2, speaks=False), RoundControl(config, world_size=3, speaks=False)
    same.load_state_dict(one.state_dict())
    # What is loaded binds this rank at once.
    model = nn.Linear(4, 2).double()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1), config, transport=LocalTransport())
    session._strategy._control.ceilings[0] = 5
    assert next(session.batches(DATA, num_epochs=1)).num_samples <= 5
    other.load_state_dict(one.state_dict())
    assert same.ceilings.tolist() == [np.inf, 50] and other.ceilings.tolist() == [np.inf] * 3
    assert same.mega_batch == other.mega_batch == one.mega_batch > 100
    for control in (one, same):
        control.after_round(record(3, num_samples=600, merge_s=0.5, round_s=2.0), dataset_size=10_000)
    assert same.mega_batch == one.mega_batch
    assert np.array_equal(
        same.next_batch_sizes(sizes, gathered, warming_up=False), one.next_batch_sizes(sizes, gathered, warming_up=False)
    )


def statistics(**columns: np.ndarray) -> Gathered:
    zeros = np.zeros((len(columns["work"]), len(RoundStats.names())))
    return {**RoundStats.by_name(zeros), **columns}


def record(number: int, *, num_samples: int, merge_s: float, round_s: float, world_size: int = 2) -> RoundRecord:
    ones = np.ones(world_size)
    return RoundRecord(
        round=number, epoch=0.1 * number, train_s=round_s * number, num_samples=num_samples, loss=None,
        weight=ones / world_size, payload_bytes=0, stats=statistics(work=ones, busy_s=ones, merge_s=merge_s * ones),
    )  # fmt: skip


def test_a_first_batch_that_takes_long_makes_rounds_longer() -> None:
    def mega_batch(first_batch_s: float) -> int:
        control = RoundControl(Config(batch_size=8, mega_batch=80, merge_period="auto", merge_share=0.1), 2, speaks=False)
        for number in range(1, 8):
            seconds = {"merge_s": 0.01, "control_s": 0.0, "first_batch_s": first_batch_s, "busy_s": 0.8, "claim_s": 0.0}
            seconds["num_updates"] = 5
            # Each round has 80 samples of a hundredth of a second.
            stats = {name: np.full(2, value) for name, value in seconds.items()}
            done = SimpleNamespace(train_s=number * (0.81 + first_batch_s), num_samples=number * 80, stats=stats)
            control.after_round(done, 10**6)
        return control.mega_batch

    assert mega_batch(0.0) == 80
    assert mega_batch(0.2) == pytest.approx(0.21 * 9 / 0.01, rel=0.02)
