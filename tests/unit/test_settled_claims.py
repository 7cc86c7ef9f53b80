"""Claims that are settled before their round: every rank has the same, no sample is lost, and workers read them early."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from hvd_adaptive.algorithm.ledger import MegaBatch, first_claims
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.claims import SharedCursor
from hvd_adaptive.engine.settled_claims import SettledClaims
from hvd_adaptive.engine.worker_batches import WorkerSource
from hvd_adaptive.session.session import Session

READ_S = 0.03


class SlowRows(Dataset[Any]):
    """Samples of a row's number, of which each takes a while to read."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, row: int) -> torch.Tensor:
        time.sleep(READ_S)
        return torch.tensor([float(row)])


def make_source() -> WorkerSource:
    return WorkerSource(SlowRows(), torch.device("cpu"), num_workers=2, seed=lambda: (0,))


@given(
    sizes=st.lists(st.floats(0.3, 300), min_size=1, max_size=9), total=st.integers(1, 5000), unit=st.sampled_from([1, 8]),
    most=st.integers(1, 16), data=st.data(),
)  # fmt: skip
def test_settled_claims_leave_a_quarter_of_a_round_to_speeds(
    sizes: list[float], total: int, unit: int, most: int, data: st.DataObject
) -> None:
    speeds = np.array(data.draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes))))
    shares = speeds / speeds.sum()
    counts, work = first_claims(np.array(sizes), shares, total, most=most, unit=unit)
    assert (counts >= 0).all() and (counts <= most).all() and (work % unit == 0).all() and (work > 0).all()
    assert (counts * work <= shares * total * 0.75 + 1e-9).all()


@given(
    world_size=st.integers(1, 9), size=st.integers(1, 40), rounds=st.integers(0, 12), rest=st.integers(0, 400),
    most=st.integers(1, 16),
)  # fmt: skip
def test_ranks_with_equally_many_batches_have_all_of_them_settled(
    world_size: int, size: int, rounds: int, rest: int, most: int
) -> None:
    rest %= size * world_size
    shares = np.arange(1.0, world_size + 1)
    total = rounds * size * world_size + rest
    counts, work = first_claims(
        np.full(world_size, float(size)), shares / shares.sum(), total, most=most, unit=size, equally_many=True
    )
    # One sample that would be left joins a batch that is claimed.
    expected = max(0, min(rounds, most) - (total - min(rounds, most) * size * world_size == 1))
    assert (work == size).all() and (counts == expected).all()


def test_nothing_is_claimed_of_a_round_that_is_settled() -> None:
    cursor = SharedCursor(LocalTransport(), "c", total_work=40, start=40, least=2)
    assert cursor.claim(lambda remaining: 1 / 0) is None and cursor.end is None
    cursor.close()
    assert SharedCursor(LocalTransport(), "c", total_work=40, start=40).claim(lambda remaining: 1 / 0) is None


@pytest.mark.parametrize("by_work", [False, True])
def test_the_ranks_claims_follow_each_other(by_work: bool) -> None:
    source, order = make_source(), np.random.default_rng(1).permutation(96)
    work = np.random.default_rng(2).integers(1, 9, 96) if by_work else None
    source.following = (order[40:], work if work is None else work[order[40:]])
    mega_batch = MegaBatch(order[:40])
    settled = SettledClaims.after(
        mega_batch, source, batch_sizes=np.array([4.0, 8.0]), shares=np.array([0.5, 0.5]), unit=1
    )
    assert settled is not None
    claims = settled.of_rank(0) + settled.of_rank(1)
    assert [start for start, *_ in claims] == [0, *(stop for _, stop, *_ in claims[:-1])] and claims[-1][1] == settled.total_work
    rows = np.concatenate([rows for rank in (0, 1) for rows in settled.rows_of_rank(rank, source.following[1])])
    assert np.array_equal(rows, order[40 : 40 + len(rows)]) and len(rows) >= 8
    following = MegaBatch(order[40:80], work if work is None else work[order[40:80]])
    assert settled.fit(source, following)
    # Only where ranks have equally many batches they are all of it.
    assert dataclasses.replace(settled, most_part=1.0).fit(source, MegaBatch(order[40 : 40 + len(rows)])) == (not by_work)
    # Another loader; a round that begins elsewhere; one that became too short.
    assert not settled.fit(make_source(), following) and not settled.fit(source, MegaBatch(order[41:81]))
    assert not settled.fit(source, MegaBatch(order[40 : 40 + len(rows)]))


def test_the_last_round_of_an_epoch_settles_nothing() -> None:
    source = make_source()
    settled = SettledClaims.after(
        MegaBatch(np.arange(40)), source, batch_sizes=np.array([4.0]), shares=np.array([1.0]), unit=1
    )
    assert settled is None


def test_workers_read_a_rounds_first_batch_before_it_begins() -> None:
    model = nn.Linear(1, 1)
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=1e-6), Config(batch_size=4, mega_batch=24), transport=LocalTransport()
    )
    waits: list[float] = []
    session.records.append(lambda record: waits.append(float(record.stats["first_batch_s"][0])))
    rows: list[int] = []
    for batch in session.loader(SlowRows(), num_workers=3):
        with session.step(batch):
            session.optimizer.zero_grad()
            model(batch.x).sum().backward()
            session.optimizer.step()
            rows += batch.x[:, 0].int().tolist()
            # As long as three workers need for a batch of four.
            time.sleep(4 * READ_S / 3)
    assert sorted(rows) == list(range(96)) and len(waits) == 4
    # A batch takes four readings.
    assert waits[0] > 4 * READ_S and max(waits[1:]) < 3 * READ_S
