"""``Session.loader`` in one process: what worker processes read is what was claimed, in every pass, and no further."""

from __future__ import annotations

import heapq
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hvd_adaptive.algorithm.ledger import ClaimRule
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.config import Config
from hvd_adaptive.session.session import Session

NUM_SAMPLES = 101


class Rows(Dataset[Any]):
    """Samples of a row's number and the process that read it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(row), 1.0], dtype=torch.float64), os.getpid()


class ByBatch:
    """The same, read by batches."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def get_batch(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        assert rows.dtype == np.int64
        return torch.tensor(np.stack([rows, rows**0], axis=1), dtype=torch.float64), torch.full((len(rows),), os.getpid())


class Broken(Rows):
    """One sample cannot be read."""

    def __getitem__(self, row: int) -> Any:
        if row == 17:
            raise OSError("shard 17 is damaged")
        return super().__getitem__(row)


class Stream(IterableDataset[Any]):
    """Has no rows."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def make_session(**options: Any) -> Session:
    torch.manual_seed(0)
    model = nn.Linear(2, 2).double()
    config = Config(**{"batch_size": 8, "mega_batch": 30, **options})
    return Session(model, torch.optim.SGD(model.parameters(), lr=1e-4), config, transport=LocalTransport())


def read(session: Session, batches: Any) -> tuple[list[int], set[int]]:
    """Trains; returns the rows that came, in order, and the processes that read them."""
    rows, pids = [], set()
    for batch in batches:
        with session.step(batch):
            session.optimizer.zero_grad()
            for micro in batch.micro_batches():
                assert micro.x[:, 0].tolist() == micro.rows.tolist()
                pids |= set(micro.y.tolist())
                session.model(micro.x).sum().backward()
            rows += batch.rows.tolist()
            session.optimizer.step()
    return rows, pids


@pytest.mark.parametrize("dataset", [Rows(), ByBatch()], ids=["samples", "batches"])
@pytest.mark.parametrize("options", [{}, {"strategy": "sync"}, {"micro_batch_size": 4}, {"strategy": "horovod"}])
def test_workers_read_what_a_thread_would(dataset: Any, options: dict[str, Any]) -> None:
    session = make_session(**options)
    rows, pids = read(session, session.loader(dataset, num_workers=2))
    assert len(pids) == 2 and os.getpid() not in pids
    assert session.round > 1, "one round: passes of the loader are not tested"
    plain = make_session(**options)
    expected, readers = read(plain, plain.batches(dataset))
    assert rows == expected and readers == {os.getpid()}
    assert options.get("strategy") == "horovod" or sorted(rows) == list(range(NUM_SAMPLES))
    for ours, theirs in zip(session.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_stay_over_rounds_and_only_if_asked_over_loops(persistent: bool) -> None:
    session = make_session()
    loader = session.loader(Rows(), num_workers=2, persistent_workers=persistent)
    (first, before), (second, after) = read(session, loader), read(session, loader)
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES)) and first != second
    assert len(before) == 2 and (before == after) == persistent
    session.stop(agreed=True)
    assert read(session, loader) == ([], set())
    session.close()
    assert not multiprocessing.active_children()


def test_a_resumed_loader_reads_what_is_left() -> None:
    session = make_session()
    seen: list[int] = []
    state: dict[str, Any] = {}

    def save(record: Any) -> None:
        if record.round == 1:
            state.update(session.state_dict())
            session.stop()

    session.records.append(save)
    rows, _ = read(session, session.loader(Rows(), num_workers=1))
    seen += rows[: state["shared"]["ledger"]["cursor"]]
    assert 0 < len(seen) < NUM_SAMPLES
    resumed = make_session()
    resumed.load_state_dict(state)
    rest, _ = read(resumed, resumed.loader(Rows(), num_workers=2))
    assert sorted(seen + rest) == list(range(NUM_SAMPLES)) and resumed.ledger.epoch == 1


class Drawn(Rows):
    """Samples of random numbers that the worker draws."""

    def __getitem__(self, row: int) -> Any:
        return torch.rand(2, dtype=torch.float64), 0


def test_workers_of_a_resumed_run_draw_other_numbers_than_those_of_its_start() -> None:
    def drawn(state: dict[str, Any] | None) -> tuple[set[float], dict[str, Any]]:
        session, found = make_session(), set()
        if state is not None:
            session.load_state_dict(state)
        for batch in session.loader(Drawn(), num_workers=1):
            found |= set(batch.x.flatten().tolist())
            with session.step(batch):
                session.optimizer.zero_grad()
                session.model(batch.x).sum().backward()
                session.optimizer.step()
        return found, session.state_dict()

    first, state = drawn(None)
    again, _ = drawn(None)
    resumed, _ = drawn(state)
    assert len(first) == 2 * NUM_SAMPLES and first == again and not first & resumed


@pytest.mark.parametrize("pairs", [True, False])
def test_collate_fn_decides_what_a_batch_is(pairs: bool) -> None:
    def collate(samples: list[Any]) -> Any:
        xs = torch.stack([x for x, _ in samples])
        return (xs, torch.zeros(len(xs))) if pairs else {"x": xs}

    session = make_session()
    for batch in session.loader(Rows(), num_workers=1, collate_fn=collate):
        with session.step(batch):
            x = batch.x if pairs else batch.x["x"]
            assert (batch.y is None) != pairs and x.shape == (batch.num_samples, 2)


def test_what_a_worker_raises_comes_with_its_words() -> None:
    session = make_session()
    with pytest.raises(OSError, match="shard 17 is damaged"):
        read(session, session.loader(Broken(), num_workers=2))


def test_a_batch_that_does_not_fit_into_memory_comes_again_in_parts() -> None:
    session = make_session()
    rows, sizes = [], []
    for batch in session.loader(Rows(), num_workers=2):
        with session.step(batch):
            assert batch.x[:, 0].tolist() == batch.rows.tolist()
            if len(sizes) < 3 and batch.num_samples > 4:
                sizes.append(batch.num_samples)
                raise torch.OutOfMemoryError("CUDA out of memory")
            rows += batch.rows.tolist()
    assert sizes and sorted(rows) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": Stream(), "num_workers": 2}, TypeError, "got the IterableDataset Stream.*own shard"),
        ({"dataset": Stream()}, TypeError, "IterableDataset"),
        ({"num_workers": -1}, ValueError, "num_workers must be >= 0"),
        ({"num_workers": 1, "prefetch_factor": 0}, ValueError, "prefetch_factor must be >= 1"),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor 2 needs num_workers"),
        ({"persistent_workers": True}, ValueError, "persistent_workers True needs num_workers"),
        ({"timeout": 5}, ValueError, "timeout 5 needs num_workers"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, ValueError, "multiprocessing_context"),
        ({"batch_size": 32, "shuffle": True}, TypeError, "session.loader takes no batch_size: it is Config's batch_size"),
        ({"num_workers": 1, "shuffle": True}, TypeError, "takes no shuffle: the session shuffles each epoch"),
        ({"in_order": False}, TypeError, "takes no in_order: there is no such option"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    session = make_session()
    with pytest.raises(error, match=message):
        next(iter(session.loader(**{"dataset": Rows(), **options})))


class Opened(Rows):
    """Samples that can be read once a worker has opened them."""

    offset: int | None = None
    seconds = 0.0

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        assert self.offset is not None
        time.sleep(self.seconds)
        return super().__getitem__(row)[0], self.offset


def open_rows(worker: int) -> None:
    get_worker_info().dataset.offset = 100 + worker  # type: ignore[union-attr]


@pytest.mark.parametrize("context", [None, "forkserver"])
def test_workers_start_as_they_are_told(context: str | None) -> None:
    session = make_session()
    options: dict[str, Any] = {"worker_init_fn": open_rows, "timeout": 60, "multiprocessing_context": context}
    rows, offsets = read(session, session.loader(Opened(), num_workers=2, **options))
    assert sorted(rows) == list(range(NUM_SAMPLES)) and offsets == {100, 101}


def test_a_worker_that_hangs_is_an_error_after_the_timeout() -> None:
    session, data = make_session(), Opened()
    data.seconds = 5.0
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        read(session, session.loader(data, num_workers=1, worker_init_fn=open_rows, timeout=0.2))


def test_a_loader_without_length_says_what_to_count() -> None:
    session = make_session()
    loader = session.loader(Rows())
    with pytest.raises(TypeError, match=r"has no length: .* bar\.update\(record\.num_samples - bar\.n\)"):
        len(loader)
    counted = [0]
    session.records.append(lambda record: counted.append(record.num_samples - sum(counted)))
    read(session, loader)
    # Nor does this ask for a length.
    assert list(loader) and sum(counted) == 2 * NUM_SAMPLES


def test_logical_ranks_read_by_themselves() -> None:
    with pytest.raises(ValueError, match="needs no logical_ranks"):
        make_session(logical_ranks=2).loader(Rows(), num_workers=1)


def test_without_workers_a_thread_reads() -> None:
    session = make_session()
    rows, readers = read(session, session.loader(Rows()))
    assert sorted(rows) == list(range(NUM_SAMPLES)) and readers == {os.getpid()}


def play(speeds: list[float], *, depth: int, leaves: bool, total: int = 1000, batch: float = 10.0) -> float:
    """Plays a round in virtual time, each rank with so many batches on their way; returns how long others wait for the last."""
    count = len(speeds)
    sizes, shares = np.full(count, batch), np.array(speeds) / sum(speeds)
    rules = [
        ClaimRule.of_round(rank, batch_sizes=sizes, speed_shares=shares, work_per_sample=1.0, dynamic=True)
        for rank in range(count)
    ]
    taken, left = [0] * count, [False] * count
    position, held, ends = 0, [list[int]() for _ in speeds], [0.0] * count
    events = [(0.0, rank) for rank in range(count)]
    while events:
        now, rank = heapq.heappop(events)
        # The next one is delivered, and then the claims are made that may be on their way beside it.
        work = held[rank].pop(0) if held[rank] else 0
        left[rank] = left[rank] and work > 0
        while len(held[rank]) < depth and position < total and not left[rank]:
            pending = work + sum(held[rank])
            others = position - taken[rank]
            if leaves and pending and rules[rank].leaves(total - position, pending=pending, others_claimed=others):
                # Until all that is on its way is computed.
                left[rank] = True
                break
            size = rules[rank].size(total - position, pending=pending, others_claimed=others)
            position += size
            taken[rank] += size
            held[rank].append(size)
        ends[rank] = now
        if work or held[rank]:
            heapq.heappush(events, (now + work / speeds[rank], rank))
    assert position == total
    return max(ends) - min(ends)


@pytest.mark.parametrize("speeds", [[8.0, 1.0], [1.0, 1.0, 2.0, 4.0], [10.0, 10.0, 10.0, 1.0], [1.0, 1.0]])
@pytest.mark.parametrize("total", [200, 1000])
def test_a_slow_rank_leaves_the_rest_of_a_round_to_others(speeds: list[float], total: int) -> None:
    """Whatever is on its way for it, of what it could compute the others wait for less than a batch, with 4 or 2 ahead."""
    step_s = 10.0 / min(speeds)
    for depth in (1, 2, 4):
        assert play(speeds, depth=depth, leaves=True, total=total) < 0.9 * step_s
    assert play(speeds, depth=8, leaves=True, total=total) < 1.6 * step_s


def test_it_would_keep_them_waiting() -> None:
    assert play([8.0, 1.0], depth=8, leaves=True) < 3.0 < 10.0 < play([8.0, 1.0], depth=8, leaves=False)


def test_ranks_that_are_equally_fast_leave_nothing_before_the_end() -> None:
    rule = ClaimRule.of_round(
        0, batch_sizes=np.full(2, 10.0), speed_shares=np.full(2, 0.5), work_per_sample=1.0, dynamic=True
    )
    assert not any(rule.leaves(remaining, pending=40.0, others_claimed=500.0) for remaining in range(5, 200))
