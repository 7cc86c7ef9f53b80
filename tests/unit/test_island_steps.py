"""Islands of simulated ranks: what their steps refuse, how their optimizers start, and whose seconds are whose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session.session import Session

_lock = threading.Lock()
# With batches of 16 and micro-batches of 8: at the end 5 are left, which take three micro-batches.
X = torch.randn(69, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())


def make_model() -> nn.Sequential:
    # Simulated ranks are threads with one random generator.
    with _lock:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).double()


def make_session(transport: LocalTransport, *, adam: bool = False, **options: Any) -> Session:
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = Config(**{"batch_size": 16, "island": "2", "mega_batch": 69, **options})
    return Session(model, optimizer, config, transport=transport)


def learn(session: Session, batches: Any, before_step: Callable[[Session, Any], Any] = lambda session, batch: None) -> None:
    for batch in batches:
        with session.step(batch):
            session.optimizer.zero_grad()
            for micro in batch.micro_batches():
                nn.functional.cross_entropy(session.model(micro.x), micro.y).backward()
            before_step(session, batch)
            session.optimizer.step()
        inside: Any = session._strategy._inside  # type: ignore[attr-defined]
        assert len(set(inside.allgather_object(model_hash(session.model)))) == 1


def test_the_last_samples_of_an_epoch_stop_nobody_whose_workers_read() -> None:
    """A rank with fewer micro-batches than the island's first one would wait for a claim that comes after this step."""

    def run(transport: LocalTransport) -> set[int]:
        session = make_session(transport, micro_batch_size=8)
        rows: set[int] = set()
        for batch in session.loader(DATA, num_workers=1):
            rows |= set(batch.rows.tolist())
            learn(session, [batch])
        session.close()
        return rows

    first, second = LocalWorld(2).run(run, 60)
    assert not first & second and first | second == set(range(len(X)))


def clip(session: Session, batch: Any) -> None:
    nn.utils.clip_grad_norm_(session.model.parameters(), 0.1)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 8}])
def test_gradients_that_are_changed_before_their_exchange_are_an_error(options: dict[str, Any], first: int) -> None:
    """The first step's are exchanged after backward, those of later ones beside it."""

    def run(transport: LocalTransport, too_early: Callable[[int], bool]) -> None:
        def change(session: Session, batch: Any) -> None:
            if not too_early(batch.number):
                session.synchronize()
            clip(session, batch)

        session = make_session(transport, **options)
        learn(session, session.batches(DATA), change)
        session.close()

    LocalWorld(2).run(lambda t: run(t, lambda _: False))
    with pytest.raises(RuntimeError, match=r"rank \d: the gradients of .* were changed after backward\(\)"):
        LocalWorld(2).run(lambda t: run(t, lambda number: number >= first))


def test_a_closed_session_looks_at_no_gradient() -> None:
    def run(transport: LocalTransport) -> None:
        session = make_session(transport)
        learn(session, session.batches(DATA))
        session.close()
        nn.functional.cross_entropy(session.model(X), DATA.tensors[1]).backward()
        assert not session._strategy._gradients._untouched._seen  # type: ignore[attr-defined]

    LocalWorld(2).run(run)


def test_an_island_begins_with_the_optimizer_state_of_its_first_rank() -> None:
    """Which alone may have loaded one. Other ranks' steps had other moments, and the island's models drifted apart."""

    def run(transport: LocalTransport) -> list[Any]:
        with _lock:
            torch.manual_seed(transport.rank)
            model = nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 4, (2, 1)), nn.Flatten(), nn.Linear(4, 2)).double()
        # A momentum lies in memory as its parameter does.
        model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if transport.rank != 1:
            for number in range(3 + transport.rank):
                model(X[number : number + 4]).sum().backward()
                optimizer.step()
        config = Config(batch_size=16, mega_batch=69, island="2", optimizer_state="reset")
        session = Session(model, optimizer, config, transport=transport)
        state = [{name: value.clone() for name, value in optimizer.state[p].items()} for p in model.parameters()]
        learn(session, session.batches(DATA))
        again = [{name: value.clone() for name, value in optimizer.state[p].items()} for p in model.parameters()]
        for before, after in zip(state, again, strict=True):
            # A reset goes back to it.
            assert all(torch.equal(before[name], after[name]) for name in before)
        session.close()
        return state

    first, second, third, fourth = LocalWorld(4).run(run)
    assert first[0]["step"] == 3 and third[0]["step"] == 5
    for one, other in zip([*first, *third], [*second, *fourth], strict=True):
        assert one.keys() == other.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_rank_says_that_an_island_is_not_finite_where_fragments_are_merged(caplog: pytest.LogCaptureFixture) -> None:
    def run(transport: LocalTransport) -> None:
        session = make_session(transport, merge_fragments=2, mega_batch=34)
        rank = transport.rank

        def poison(session: Session, batch: Any) -> None:
            if rank >= 2 and session.round == 0:
                next(session.model.parameters()).data.fill_(float("nan"))

        learn(session, session.batches(DATA), poison)
        session.close()

    LocalWorld(4).run(run)
    assert len({record.thread for record in caplog.records if "had NaN or Inf" in record.getMessage()}) == 1


def test_the_exchange_inside_an_island_is_no_work_of_a_rank() -> None:
    """Nor does an emulated slowdown stretch it. To other islands, this one is as fast as its steps."""

    def run(transport: LocalTransport) -> Any:
        session = make_session(transport, slowdown="2,1")
        exchange: Any = session._strategy._gradients._exchange  # type: ignore[attr-defined]
        synchronize, foreign_s, records = exchange.synchronize, [], []
        session.records.append(records.append)

        def poll() -> None:
            start = time.thread_time()
            while time.thread_time() < start + 0.05:
                pass
            synchronize()

        def look(session: Session, batch: Any) -> None:
            session.synchronize()
            foreign_s.append(session._strategy.take_foreign_seconds())

        exchange.synchronize = poll
        learn(session, session.batches(DATA), look)
        step_s = session._strategy._step_s  # type: ignore[attr-defined]
        session.close()
        return foreign_s, records[0].stats, step_s

    foreign_s, stats, step_s = LocalWorld(2).run(run)[0]
    assert min(foreign_s) > 0.04 and stats["num_steps"].tolist() == [5, 5]
    assert stats["wait_s"].min() > 0.25 and (stats["busy_s"] + 0.25 < step_s).all()
    assert step_s.shape == (1,)
