"""Strategy ``sync`` over real ranks equals one rank at the same global batch, whatever the shares."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pairs import half
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, Session
from hvd_adaptive.algorithm.ledger import epoch_order
from hvd_adaptive.algorithm.shares import integer_shares
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.engine.flat_model import model_hash

GLOBAL_BATCH = 26
# The last global batch of an epoch has two samples: fewer than ranks.
NUM_SAMPLES = 10 * GLOBAL_BATCH + 2
_generator = torch.Generator().manual_seed(3)
X = torch.randint(0, 50, (NUM_SAMPLES, 5), generator=_generator)
Y = torch.randint(0, 3, (NUM_SAMPLES,), generator=_generator)
# Half of the targets do not count, the others differently; some parts of a batch have none.
SOME = torch.where(torch.rand(NUM_SAMPLES, generator=_generator) < 0.5, Y, -100)
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 7.0], dtype=torch.float64)


class Bag(nn.Module):
    """Sparse or dense embeddings, a frozen layer, a tied one, and a parameter without gradient."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 6, mode="sum", sparse=sparse, dtype=torch.float64)
        self.frozen = nn.Linear(6, 6).double().requires_grad_(False)
        self.inner = nn.Linear(6, 6, bias=False).double()
        self.again = nn.Linear(6, 6, bias=False).double()
        self.again.weight = self.inner.weight
        self.out = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.inner(self.frozen(self.bag(x)))))))


def make_session(
    *, make: Callable[[Any], Any], sparse: bool = False, transport: Transport | None = None, **options: Any
) -> Session:
    torch.manual_seed(0)
    model = Bag(sparse=sparse)
    config = Config(
        strategy="sync", global_batch_size=GLOBAL_BATCH, mega_batch=3 * GLOBAL_BATCH, hash_interval=1, seed=7, **options
    )
    session = Session(model, make(model.parameters()), config, transport=transport)
    force_odd_shares(session)
    return session


def force_odd_shares(session: Session) -> None:
    """Other shares after every second step, as uneven as they can be, the same on every rank."""
    strategy: Any = session._strategy
    shares, generator = strategy._shares, np.random.default_rng(1)

    def choose(*_: Any, step: int = -2) -> None:
        targets = generator.exponential(size=session.world_size) ** 2
        shares.whole = np.array(integer_shares(targets.tolist(), GLOBAL_BATCH, lower=shares.lower), dtype=float)
        shares._changes.append((step + 2, shares.whole.astype(int).tolist()))

    choose()
    shares._due = 2 if session.world_size > 1 else 0
    shares.observe = choose


def reference(
    step: Callable[[nn.Module, Any, Tensor, Tensor], None], make: Callable[[Any], Any], *, sparse: bool, num_epochs: int,
    data: tuple[Tensor, Tensor] = (X, Y),
) -> nn.Module:  # fmt: skip
    """One rank's plain loop over the same global batches."""
    torch.manual_seed(0)
    model = Bag(sparse=sparse)
    optimizer = make(model.parameters())
    for epoch in range(num_epochs):
        order = epoch_order(NUM_SAMPLES, seed=7, epoch=epoch)
        for first in range(0, NUM_SAMPLES, GLOBAL_BATCH):
            rows = order[first : first + GLOBAL_BATCH]
            step(model, optimizer, data[0][rows], data[1][rows])
    return model


def loss_of(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    if reduction == "targets":
        return nn.functional.cross_entropy(logits, y, CLASS_WEIGHTS)
    return nn.functional.cross_entropy(logits, y, reduction=reduction)


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def sgd_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


CASES = {
    "momentum": (sgd_momentum, False, 1, None, "mean"),
    "accumulated, clipped": (sgd_momentum, False, 3, 0.05, "mean"),
    "sparse": (sgd, True, 1, None, "mean"),
    # The last global batch leaves ranks without samples, where this is no number.
    "divided by num_samples": (sgd, True, 1, None, "mean"),
    "sparse, accumulated, sum": (sgd, True, 2, None, "sum"),
    "adam, accumulated, clipped, sum": (adam, False, 2, 0.05, "sum"),
    "targets": (sgd_momentum, False, 1, None, "targets"),
    "targets, sparse, accumulated": (sgd, True, 3, None, "targets"),
    "targets, accumulated, clipped": (sgd_momentum, False, 2, 0.05, "targets"),
    # Two ranks' rounds are as long as one's twice; a rate may not follow them.
    "warm-up and decay, accumulated": (sgd_momentum, False, 2, None, "mean"),
}
SCHEDULE = {"warmup_epochs": 0.7, "lr_decay": 0.4}


@pytest.mark.mpi(1, 2, 3, 4, timeout=300)
def test_any_number_of_ranks_equals_one(num_ranks: int, backend: str) -> None:
    # All in one job: starting one takes longer than a case.
    transport = connect(stall_limit_s=60, backend=backend)
    for name, case in half(CASES.items(), num_ranks, backend):
        check_equality(name, *case, transport=transport)
    transport.close()


def check_equality(
    name: str, make: Any, sparse: bool, steps: int, clip: float | None, reduction: str, *, transport: Transport
) -> None:
    def scaled(parameters: Any) -> Any:
        optimizer = make(parameters)
        if reduction == "sum" and make is not adam:
            optimizer.param_groups[0]["lr"] /= GLOBAL_BATCH
        return optimizer

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(x), y, reduction).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if schedule:
            epoch, step = divmod(next(numbers), 11)
            now = epoch + step * GLOBAL_BATCH / NUM_SAMPLES
            rate = max(now, 0.007) / 0.7 if now < 0.7 else 1 / (1 + 0.4 * (now - 0.7))
            optimizer.param_groups[0]["lr"] = 0.1 * rate
        optimizer.step()

    schedule = SCHEDULE if "decay" in name else {}
    data = (X, SOME if reduction == "targets" else Y)
    numbers = itertools.count()
    session = make_session(
        sparse=sparse, make=scaled, accumulation_steps=steps, loss_reduction=reduction, transport=transport, **schedule
    )
    records: list[Any] = []
    session.records.append(records.append)
    rows, sizes, num_tokens = [], [], 0
    for batch in session.batches(TensorDataset(*data), num_epochs=2):
        rows.append(batch.rows)
        sizes.append(len(batch.x))
        num_tokens += len(batch.x.unique())
        with session.step(batch):
            session.optimizer.zero_grad()
            if reduction == "targets":
                # Where a rank has no samples, these are others'.
                batch.num_targets = CLASS_WEIGHTS[batch.y[batch.y >= 0]].sum()
            loss = loss_of(session.model(batch.x), batch.y, reduction)
            if name == "divided by num_samples":
                loss = nn.functional.cross_entropy(session.model(batch.x), batch.y, reduction="sum") / batch.num_samples
            batch.loss = loss.detach()
            loss.backward()
            if clip and session.synchronize():
                nn.utils.clip_grad_norm_(session.model.parameters(), clip)
            session.optimizer.step()
    session._hooks.remove()

    one = reference(step, scaled, sparse=sparse, num_epochs=2, data=data)
    for (parameter, ours), theirs in zip(session.model.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12), (name, parameter)
    consumed = np.concatenate([part for other in transport.allgather_object(rows) for part in other])
    assert np.array_equal(np.bincount(consumed, minlength=NUM_SAMPLES), np.full(NUM_SAMPLES, 2)), name
    # A collective a step: all ranks make as many, and none of them is without samples to compute.
    assert set(transport.allgather_object(len(rows))) == {2 * 11 * steps} and min(sizes) >= 1, name
    assert len({model_hash(session.model), *transport.allgather_object(model_hash(session.model))}) == 1, name
    assert all(record.weight.sum() == pytest.approx(1) for record in records), name
    if reduction == "targets":
        counted = sum(record.stats["loss_samples"].sum() for record in records)
        assert counted == pytest.approx(2 * float(CLASS_WEIGHTS[SOME[SOME >= 0]].sum())), name
    assert all(record.stats["batch_size"].sum() == GLOBAL_BATCH for record in records), name
    payload_bytes = sum(record.stats["payload_bytes"][transport.rank] for record in records)
    if transport.world_size == 1:
        assert payload_bytes == 0, name
        return
    assert len({tuple(record.stats["batch_size"]) for record in records}) > 3, name
    # fp64: all gradients once a step; of the sparse one a row and an index for each token, however often it occurs.
    dense_bytes = sum(p.nbytes for n, p in session.model.named_parameters() if p.requires_grad and not (sparse and "bag" in n))
    sparse_bytes = sparse * num_tokens * (6 * 8 + 8)
    if transport.backend == "torch":
        sparse_bytes += sparse * 2 * 11 * 8  # our own exchange says how many rows follow
    # Accumulated gradients may share rows.
    assert payload_bytes <= 2 * 11 * dense_bytes + sparse_bytes, name
    assert payload_bytes >= 2 * 11 * dense_bytes + sparse_bytes * (1 if steps == 1 else 0.5), name


@pytest.mark.mpi(2)
def test_parameters_that_are_not_contiguous_equal_one_rank(backend: str) -> None:
    """Horovod itself takes none. The fused step reads a parameter and its gradient by one index."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 8, 3, dtype=torch.float64)
        return nn.Sequential(conv, nn.Flatten(), nn.Linear(8 * 9, 3).double()).to(memory_format=torch.channels_last)

    def adam_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    x = torch.randn(NUM_SAMPLES, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    transport = connect(stall_limit_s=60, backend=backend)
    model = make_model()
    assert not next(model.parameters()).is_contiguous()
    config = Config(strategy="sync", global_batch_size=GLOBAL_BATCH, seed=7)
    session = Session(model, adam_of(model), config, transport=transport)
    for batch in session.batches(TensorDataset(x, Y), num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    one = make_model()
    optimizer = adam_of(one)
    for epoch in range(2):
        order = epoch_order(NUM_SAMPLES, seed=7, epoch=epoch)
        for first in range(0, NUM_SAMPLES, GLOBAL_BATCH):
            rows = order[first : first + GLOBAL_BATCH]
            optimizer.zero_grad()
            nn.functional.cross_entropy(one(x[rows]), Y[rows]).backward()
            optimizer.step()
    assert_equal(model, one)


def two_losses(model: nn.Module, x: Tensor, y: Tensor, *, passes: int = 2) -> None:
    """The gradient of both, in as many backward passes; the second one goes to a part of the parameters."""
    first, second = nn.functional.cross_entropy(model(x), y), model.bag(x).square().mean(1).mean()
    if passes == 1:
        (first + second).backward()
        return
    first.backward()
    second.backward()


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    "options", [{}, {"accumulation_steps": 2}, {"sparse": True}, {"compression": "maxmin:4; *=none"}], ids=str
)
def test_several_backward_passes_in_a_step_equal_one_rank(options: dict[str, Any], backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    make = sgd if options.get("sparse") else sgd_momentum
    session = make_session(make=make, transport=transport, **options)
    for number, batch in enumerate(session.batches(TensorDataset(X, Y), num_epochs=2)):
        with session.step(batch):
            session.optimizer.zero_grad()
            two_losses(session.model, batch.x, batch.y, passes=1 if 10 < number < 15 else 2)
            session.optimizer.step()
    session.close()

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        two_losses(model, x, y)
        optimizer.step()

    assert_equal(session.model, reference(step, make, sparse=options.get("sparse", False), num_epochs=2))


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", ["sync", "horovod"])
def test_a_backward_pass_too_many_says_what_to_do(strategy: str, num_ranks: int) -> None:
    model = Bag(sparse=False)
    session = Session(model, sgd(model.parameters()), Config(strategy=strategy, batch_size=8))
    with pytest.raises(RuntimeError, match=r"computed again while .* Add up the losses and call backward\(\) once"):  # noqa: PT012
        for number, batch in enumerate(session.batches(TensorDataset(X, Y))):
            with session.step(batch):
                session.optimizer.zero_grad()
                two_losses(model, batch.x, batch.y, passes=1 + (number == 1))
                session.optimizer.step()
    session.transport.close()


def clip(session: Session) -> None:
    nn.utils.clip_grad_norm_(session.model.parameters(), 1e-3)


def clamp_data(session: Session) -> None:
    for p in session.model.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-1e-3, 1e-3)


def replace(session: Session) -> None:
    session.model.out.weight.grad = session.model.out.weight.grad * 2  # type: ignore[union-attr, operator]


def unscale(session: Session) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(session.optimizer)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("change", "at"), [(clip, 0), (clip, 5), (clamp_data, 0), (replace, 5), (unscale, 0)], ids=lambda v: getattr(v, "__name__", v)
)
def test_gradients_that_are_changed_before_all_ranks_have_added_them_up_are_an_error(
    change: Callable[[Session], None], at: int, backend: str
) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    session = make_session(make=sgd, transport=transport, accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"out\.weight.* were changed after backward.* call session\.synchronize\(\) before"):  # noqa: PT012
        for number, batch in enumerate(session.batches(TensorDataset(X, Y))):
            with session.step(batch):
                session.optimizer.zero_grad(set_to_none=number < 4)
                two_losses(session.model, batch.x, batch.y)
                assert sum(float(p.grad.norm()) for p in session.model.parameters() if p.grad is not None)
                if number >= at or (number % 4 == 3 and session.synchronize()):
                    change(session)
                session.optimizer.step()
    assert number == (1 if at == 0 else 5)
    session.transport.close()


@pytest.mark.mpi(1, 3)
def test_amp_in_one_loop_for_any_number_of_ranks(num_ranks: int) -> None:
    """Loss scaling with accumulation, and a sample that overflows on one rank: all leave out the steps that one rank does."""
    weights = torch.ones(NUM_SAMPLES, dtype=torch.float64)
    weights[17] = float("inf")
    scales: dict[str, list[float]] = {"ours": [], "theirs": []}

    def new_scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    def finish(who: str, scaler: Any, model: nn.Module, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales[who].append(scaler.get_scale())

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (w * nn.functional.cross_entropy(model(x), y, reduction="none")).mean()

    scaler = new_scaler()
    session = make_session(make=sgd_momentum, accumulation_steps=2)
    for batch in session.batches(TensorDataset(X, torch.arange(NUM_SAMPLES)), num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            loss = loss_of(session.model, batch.x, Y[batch.y], weights[batch.y])
            scaler.scale(loss).backward()
            if session.synchronize():
                finish("ours", scaler, session.model, session.optimizer)
    session.close()

    plain_scaler = new_scaler()

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        plain_scaler.scale(loss_of(model, x, Y[y], weights[y])).backward()
        finish("theirs", plain_scaler, model, optimizer)

    one = reference(step, sgd_momentum, sparse=False, num_epochs=2, data=(X, torch.arange(NUM_SAMPLES)))
    assert scales["ours"] == scales["theirs"] and len(set(scales["ours"])) > 2
    assert_equal(session.model, one)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(sparse: bool, num_ranks: int) -> None:
    weights = torch.ones(NUM_SAMPLES, dtype=torch.float64)
    weights[17] = float("nan")

    def loss_of(model: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
        return (weights[rows] * nn.functional.cross_entropy(model(x), Y[rows], reduction="none")).mean()

    make = sgd if sparse else sgd_momentum
    session = make_session(make=make, sparse=sparse)
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(TensorDataset(X, torch.arange(NUM_SAMPLES)), num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            loss_of(session.model, batch.x, batch.y).backward()
            session.optimizer.step()
    session.close()

    def step(model: nn.Module, optimizer: Any, x: Tensor, rows: Tensor) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, x, rows)
        if loss.isfinite():
            loss.backward()
            optimizer.step()

    one = reference(step, make, sparse=sparse, num_epochs=2, data=(X, torch.arange(NUM_SAMPLES)))
    assert_equal(session.model, one)
    assert sum(record.stats["skipped_steps"] for record in records).tolist() == [2.0] * num_ranks


@pytest.mark.mpi(2)
def test_rounds_without_a_finite_step_stop_the_run_on_all_ranks(num_ranks: int) -> None:
    session = make_session(make=sgd)
    with pytest.raises(AgreedError, match=r"all of the last 1\d steps held NaN or Inf"):  # noqa: PT012
        for batch in session.batches(TensorDataset(X, Y), num_epochs=2):
            with session.step(batch):
                loss = nn.functional.cross_entropy(session.model(batch.x), batch.y)
                # On one rank only.
                (loss * (float("inf") if session.rank == 1 else 1.0)).backward()
                session.optimizer.step()
    session.close()


class Powered(torch.optim.SGD):
    """An optimizer with a required argument and a setting outside its groups."""

    def __init__(self, params: Any, power: float) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.power = power


@pytest.mark.mpi(2)
def test_the_scripts_own_optimizer_makes_the_steps(num_ranks: int) -> None:
    model = nn.Linear(4, 3)
    own = Powered(model.parameters(), power=2.0)
    calls: list[str] = []
    own.register_step_pre_hook(lambda *_: calls.append("own"))
    session = Session(model, own, Config(strategy="sync", global_batch_size=10, mega_batch=20))
    session.optimizer.register_step_post_hook(lambda *_: calls.append("session's"))
    data = TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)
    for number, batch in enumerate(session.batches(data, num_epochs=1)):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            if number == 1:
                with pytest.raises(RuntimeError, match=r"between backward.* and session.optimizer.step.*SAM"):
                    session.optimizer.zero_grad()
            session.optimizer.step()
        assert session.optimizer.power == 2.0 and len(own.state_dict()["state"]) == 2
    assert calls == ["own", "session's"] * 4
    with pytest.raises(TypeError, match=r"take session.optimizer.state_dict\(\)"):
        copy.deepcopy(session.optimizer)
    session.close()
    own.step()
    transport = connect(stall_limit_s=60)
    with pytest.raises(AgreedError, match="Horovod makes Powered anew from its parameter groups alone, and fails"):
        Session(model, own, Config(strategy="horovod"), transport=transport)
    transport.close()


@pytest.mark.mpi(3)
def test_buffers_agree_after_every_round(num_ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.BatchNorm1d(20), nn.Linear(20, 3)).double()
    session = Session(
        model,
        sgd(model.parameters()),
        Config(strategy="sync", global_batch_size=GLOBAL_BATCH, mega_batch=3 * GLOBAL_BATCH, hash_interval=1),
    )
    assert len(session.inexact) == 1
    norm = model[2]
    merged = []
    session.records.append(lambda record: merged.append((norm.running_mean.clone(), int(norm.num_batches_tracked))))
    for batch in session.batches(TensorDataset(X, Y), num_epochs=2):
        assert len(batch.x) >= 2
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
            if session.rank == 1 and session.round == 2:
                norm.running_mean.fill_(float("nan"))
    # The hash across ranks includes the buffers.
    session.close()
    assert all(mean.isfinite().all() and mean.abs().sum() > 0 for mean, _ in merged)
    assert merged[-1][1] == 22


@pytest.mark.mpi(2)
def test_shares_follow_the_ranks_speeds_while_they_change(num_ranks: int) -> None:
    """Seconds a sample are mostly slept, so that a busy machine matters little; a look that it disturbs moves nothing, and the
    next one counts. Were waiting taken for computing, the ranks would seem equal."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(2000, 4)
    session = Session(model, sgd(model.parameters()), Config(strategy="sync", global_batch_size=100, mega_batch=200))
    records: list[Any] = []
    slow = 0

    def follow(record: Any) -> None:
        """The same on all ranks: the other one is slow from when the shares have followed, and then they follow that."""
        nonlocal slow
        records.append(record)
        first = record.stats["batch_size"][0]
        if slow == 0 and first < 30:
            slow = 1
        elif (slow == 1 and first > 70) or record.round == 150:
            session.stop(agreed=True)

    session.records.append(follow)
    for batch in session.batches(TensorDataset(x, (x.sum(1) > 0).long()), num_epochs=None):
        with session.step(batch):
            session.optimizer.zero_grad()
            time.sleep(len(batch.x) * (1.6e-3 if session.rank == slow else 4e-4))
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    sizes = np.array([record.stats["batch_size"] for record in records])
    assert (sizes.sum(axis=1) == 100).all() and sizes[0].tolist() == [50, 50]
    assert sizes[:, 0].min() < 30 and sizes[-1][0] > 70, sizes.tolist()


@pytest.mark.mpi(2)
def test_too_small_a_global_batch_is_refused_on_all_ranks(num_ranks: int) -> None:
    model = nn.Linear(2, 2)
    config = Config(strategy="sync", global_batch_size=5, accumulation_steps=3)
    transport = connect(stall_limit_s=60)
    with pytest.raises(AgreedError, match="5 samples cannot be split over 2 ranks with at least 3 samples each"):
        Session(model, sgd(model.parameters()), config, transport=transport)
    transport.close()


@pytest.mark.mpi(2)
def test_the_baseline_takes_the_same_loop_and_exchanges_gradients_once(num_ranks: int) -> None:
    """``session.synchronize`` before the step, as for clipping: still plain Horovod."""
    torch.manual_seed(0)
    model = Bag(sparse=False)
    session = Session(model, sgd_momentum(model.parameters()), Config(strategy="horovod", batch_size=8))
    records: list[Any] = []
    session.records.append(records.append)
    num_exchanges = 0
    exchange = session.optimizer._allreduce_grad_async  # type: ignore[attr-defined]

    def counted(p: Any) -> Any:
        nonlocal num_exchanges
        num_exchanges += 1
        return exchange(p)

    session.optimizer._allreduce_grad_async = counted  # type: ignore[attr-defined]
    for number, batch in enumerate(session.batches(TensorDataset(X, Y), num_epochs=1), 1):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            if number % 2:
                assert session.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            session.optimizer.step()
        assert num_exchanges == 4 * number
    # Without the frozen layer's.
    expected = number * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert sum(record.payload_bytes for record in records) == expected
    session.close()


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("strategy", "name"), [("sync", "horovod"), ("sync", "torch"), ("horovod", "horovod")])
def test_a_second_session_goes_on_with_the_optimizers_state(strategy: str, name: str, use_backend: Any) -> None:
    """Rank 0's, as the model is: ranks that have trained by themselves have states of their own."""
    backend = use_backend(name)
    torch.manual_seed(0)
    model = nn.Linear(6, 2).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(2):
        session = Session(model, optimizer, Config(strategy=strategy, batch_size=10, backend=backend, hash_interval=1))
        state = list(session.optimizer.state_dict()["state"].values())
        assert [float(entries["step"]) for entries in state] == [13.0, 13.0] * number
        moments = session.gather([entries[key] for entries in state for key in ("exp_avg", "exp_avg_sq")])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*moments, strict=True))
        for batch in session.batches(TensorDataset(torch.ones(200, 6).double(), torch.zeros(200).long())):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
        session.close()
        for _ in range(3 if session.rank == 0 else 1):
            optimizer.zero_grad()
            (model(torch.ones(2, 6).double()) * (session.rank + 1)).sum().backward()
            optimizer.step()
