"""A session that was never closed, as in a notebook whose cell is run again: the next one trains as if it had been."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.config import Config
from hvd_adaptive.session.session import Session

_generator = torch.Generator().manual_seed(0)
X = torch.randn(103, 6, dtype=torch.float64, generator=_generator)
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def make_session(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Session:
    return Session(model, optimizer, Config(**{"batch_size": 12, **options}), transport=LocalTransport())


def train(session: Session) -> list[float]:
    """Trains an epoch; returns the learning rates of its steps."""
    rates = []
    handle = session.optimizer.register_step_post_hook(lambda *_: rates.append(session._lr.applied_lr))
    for batch in session.batches(DATA):
        with session.step(batch):
            session.optimizer.zero_grad()
            for micro in batch.micro_batches():
                nn.functional.cross_entropy(session.model(micro.x), micro.y).backward()
            session.optimizer.step()
    handle.remove()
    return rates


def num_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    of_tensors = sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) + of_tensors


@pytest.mark.parametrize("again", ["both", "model", "layers"])
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"micro_batch_size": 4}, {"merge_weights": "fisher-rows"}, {"strategy": "sync", "micro_batch_size": 4},
        {"strategy": "sync", "warmup_epochs": 0.5, "lr_decay": 0.5}, {"strategy": "sma", "warmup_epochs": 0.5},
    ],
)  # fmt: skip
def test_the_next_session_trains_as_after_close(
    options: dict[str, Any], is_kept: bool, again: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for closes in (True, False):
        caplog.clear()
        model = make_model()
        first = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept, rates = [], []
        for _ in range(3):
            session = make_session(model, optimizer, **options)
            rates.append(train(session))
            if closes:
                session.close()
            elif is_kept:
                kept.append(session)
            else:
                session_ref = weakref.ref(session)
                del session
                gc.collect()
                assert session_ref() is None
            if again != "both":
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if again == "layers":
                model = nn.Sequential(*model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = [r for r in caplog.records if r.levelno == logging.WARNING and "was not closed" in r.message]
        assert len(told) == (0 if closes else 2)
        make_session(model, optimizer, **options).close()
        assert num_hooks(model, optimizer) == num_hooks(model, first) == 0
        assert optimizer.param_groups[0]["lr"] == first.param_groups[0]["lr"] == 0.1
        found.append(([p.detach().clone() for p in model.parameters()], rates))
    (closed, closed_rates), (unclosed, unclosed_rates) = found
    assert closed_rates == unclosed_rates
    assert all(torch.equal(a, b) for a, b in zip(closed, unclosed, strict=True))


@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_a_session_whose_model_another_one_has_taken_over_is_refused(strategy: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    older = make_session(model, optimizer, strategy=strategy)
    loop = older.batches(DATA)
    batch = next(loop)
    session = make_session(model, optimizer, strategy=strategy)
    for use in (
        lambda: next(loop), lambda: next(older.batches(DATA)), lambda: older.loader(DATA), lambda: older.gather(1),
        lambda: older.step(batch).__enter__(), lambda: older.state_dict(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="not closed before another one was made"):
            use()
    older.close()
    train(session)
    session.close()
    assert num_hooks(model, optimizer) == 0


def test_sessions_of_models_that_share_nothing_do_not_touch_each_other(caplog: pytest.LogCaptureFixture) -> None:
    models = [make_model(), make_model()]
    sessions = [make_session(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    assert train(sessions[0]) == train(sessions[1])
    for session in sessions:
        session.close()
    assert not caplog.records


@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_what_was_never_closed_is_not_kept_alive(strategy: str) -> None:
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    train(session)
    model_ref, hooks_ref = weakref.ref(model), weakref.ref(session._hooks)
    del model, session
    gc.collect()
    assert model_ref() is None
    other = make_model()
    make_session(other, torch.optim.SGD(other.parameters(), lr=0.1)).close()
    assert hooks_ref() is None
