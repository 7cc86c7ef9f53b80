"""Strategy ``sync`` in one process: the optimizer's face, what breaks equality, and the warning about it."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.ledger import epoch_order, round_size
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.config import Config
from hvd_adaptive.engine.weighted_gradient import LARGE, GradientWeight
from hvd_adaptive.session.session import Session
from hvd_adaptive.strategies.exactness import what_breaks_equality
from hvd_adaptive.strategies.sync_optimizer import SyncOptimizer

_generator = torch.Generator().manual_seed(0)
X = torch.randn(130, 6, dtype=torch.float64, generator=_generator)
Y = (X.sum(dim=1) > 0).long()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def make_session(model: nn.Module, optimizer: Any, **options: Any) -> Session:
    config = Config(strategy="sync", **{"batch_size": 20, "mega_batch": 60, **options})
    return Session(model, optimizer, config, transport=LocalTransport())


@pytest.mark.parametrize("steps", [1, 3])
def test_one_rank_without_mpi_is_plain_training(steps: int) -> None:
    """With a scheduler and clipping, in the loop that also runs over many ranks."""
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = make_session(model, optimizer, accumulation_steps=steps)
    scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, step_size=5, gamma=0.5)
    for batch in session.batches(TensorDataset(X, Y), num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            due = session.synchronize()
            if due:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            session.optimizer.step()
            if due:
                scheduler.step()
    session.close()

    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=5, gamma=0.5)
    for epoch in range(2):
        order = epoch_order(len(X), seed=0, epoch=epoch)
        for first in range(0, len(X), 20):
            rows = order[first : first + 20]
            sgd.zero_grad()
            nn.functional.cross_entropy(plain(X[rows]), Y[rows]).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            sgd.step()
            scheduler.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_rounds_are_whole_numbers_of_global_batches() -> None:
    for unit in (1, 7, 64, 1000):
        for mega_batch in (1, 100, 640, 5000):
            cursor, sizes = 0, []
            while cursor < 2345:
                sizes.append(round_size(cursor, dataset_size=2345, mega_batch=mega_batch, unit=unit))
                cursor += sizes[-1]
            assert cursor == 2345 and all(size % unit == 0 for size in sizes[:-1])
            assert max(sizes) - min(sizes[:-1] or sizes) <= max(unit, mega_batch)


def test_a_round_of_whole_batches_leaves_no_single_sample_for_the_next() -> None:
    sizes, cursor = [], 0
    while cursor < 99:
        sizes.append(round_size(cursor, dataset_size=99, mega_batch=7, unit=14))
        cursor += sizes[-1]
    assert cursor == 99 and sizes[-1] == 15 and set(sizes[:-1]) == {14}


def test_hooks_are_off_the_model_after_the_session() -> None:
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=4)
    for batch in session.batches(TensorDataset(X, Y)):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    other = copy.deepcopy(model)
    for m in (model, other):
        m.zero_grad()
        nn.functional.cross_entropy(m(X), Y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("taken", [False, True], ids=["ours alone", "taken by another hook"])
def test_each_gradient_of_a_step_has_its_own_weight(size: int, taken: bool) -> None:
    parameter = nn.Parameter(torch.ones(size))
    seen: list[float] = []
    if taken:
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad[0].item()))  # type: ignore[index]
    weight = GradientWeight(nn.ParameterList([parameter]), torch.optim.SGD([parameter], lr=0.1))
    for _ in range(2):
        for weight.value, expected in ((0.5, 1.0), (0.25, 1.5), (1.0, 3.5)):
            # Used twice: one gradient, the sum of both uses'.
            (parameter + parameter).sum().backward()
            assert parameter.grad is not None and parameter.grad.eq(expected).all()
        parameter.grad = None
    assert seen == [1.0, 1.5, 3.5] * 2 * taken
    # Gradients that are not accumulated have their weight, and leave nothing behind.
    weight.value = 0.5
    assert torch.autograd.grad((2 * parameter).sum(), parameter)[0].eq(1).all()
    squares = (parameter**2).sum()
    (slope,) = torch.autograd.grad(squares, parameter, create_graph=True)
    assert slope.eq(1).all()
    slope.sum().backward()
    assert parameter.grad is not None and parameter.grad.eq(0.5).all()
    (2 * parameter).sum().backward()
    assert parameter.grad.eq(1.5).all()
    parameter.grad = None
    (2 * parameter).sum().backward(inputs=[parameter])
    assert parameter.grad is not None and parameter.grad.eq(1).all()
    parameter.grad = None
    (parameter**2).sum().backward(create_graph=True)
    assert torch.autograd.grad(parameter.grad.sum(), parameter)[0].eq(0.5).all()  # type: ignore[attr-defined]
    # Nor does one of a backward pass that fails.
    parameter.grad = None
    broken = parameter.register_hook(lambda gradient: gradient[:1])
    with pytest.raises(RuntimeError, match="changed the size"):
        (2 * parameter).sum().backward()
    broken.remove()
    parameter.grad = torch.ones(size)
    (2 * parameter).sum().backward()
    assert parameter.grad.eq(2).all()
    weight.remove()


def test_the_first_gradient_of_a_step_is_weighted_where_it_lies_and_a_copy_of_the_parameter_has_none() -> None:
    parameter, gradient = nn.Parameter(torch.ones(LARGE)), torch.ones(LARGE)
    weight = GradientWeight(nn.ParameterList([parameter]), torch.optim.SGD([parameter], lr=0.1))
    weight.value = 0.5
    other, loaded = copy.deepcopy(parameter), io.BytesIO()
    torch.save(parameter, loaded)
    loaded.seek(0)
    for one in (other, torch.load(loaded, weights_only=False)):
        one.sum().backward()
        assert one.grad.eq(1).all()

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
            nonlocal gradient
            address.append(gradient.data_ptr())
            given, gradient = gradient, None  # type: ignore[assignment]
            return given

    address: list[int] = []
    Given.apply(parameter).backward()
    assert parameter.grad is not None and parameter.grad.eq(0.5).all() and parameter.grad.data_ptr() == address[0]
    weight.remove()


def test_a_large_sparse_gradient_is_weighted_with_several_values_for_a_row() -> None:
    table = nn.Embedding(LARGE, 1, sparse=True)
    weight = GradientWeight(table, torch.optim.SGD(table.parameters(), lr=0.1))
    weight.value = 0.5
    for expected in ([0.5, 1.0], [1.0, 2.0]):
        table(torch.tensor([3, 1, 3])).sum().backward()
        gradient = table.weight.grad
        assert gradient is not None and gradient.to_dense()[[1, 3], 0].tolist() == expected
    weight.remove()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("num_rows", [4, LARGE])
def test_gradients_of_weight_zero_are_zero_even_if_they_are_no_numbers(num_rows: int, sparse: bool) -> None:
    table = nn.Embedding(num_rows, 2, sparse=sparse)
    weight = GradientWeight(table, torch.optim.SGD(table.parameters(), lr=0.1), list(table.parameters()) if sparse else ())
    weight.value = 0.0
    (table(torch.tensor([3, 1, 3])).sum() / 0).backward()
    gradient = table.weight.grad
    assert gradient is not None and gradient.is_sparse == sparse and gradient.to_dense().eq(0).all()



def test_the_values_for_a_row_are_added_up_before_they_are_exchanged() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    weight = GradientWeight(table, torch.optim.SGD(table.parameters(), lr=0.1), [table.weight])
    for factor in (1.0, 0.5):
        weight.value, table.weight.grad = factor, None
        table(torch.tensor([3, 1, 3])).sum().backward()
        gradient = table.weight.grad
        assert gradient is not None and gradient._indices().tolist() == [[1, 3]]
        assert gradient._values().tolist() == [[factor] * 2, [2 * factor] * 2]
    table.weight.grad = None
    (table(torch.tensor([3])).sum() + table.weight.sum()).backward()
    assert table.weight.grad is not None and not table.weight.grad.is_sparse
    weight.remove()
    table.weight.grad = None
    table(torch.tensor([3, 3])).sum().backward()
    assert table.weight.grad is not None and table.weight.grad._nnz() == 2


def test_a_window_begins_and_ends_on_its_borders_only() -> None:
    p = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([p], lr=1.0)
    optimizer = SyncOptimizer(inner)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(p.detach().clone()))
    for position in range(3):
        optimizer.begin(opens_window=position == 0, step_due=position == 2)
        optimizer.zero_grad()
        (p.sum() * (position + 1)).backward()
        optimizer.step()
    assert len(calls) == 1 and p.tolist() == [-5.0, -5.0]
    optimizer.begin(opens_window=True, step_due=True)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is not None and p.grad.tolist() == [0.0, 0.0]
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="must come before the Session"):
        optimizer.add_param_group({"params": []})


def test_state_goes_through_the_optimizer() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = SyncOptimizer(torch.optim.Adam([p], lr=0.1))
    p.sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    fresh = SyncOptimizer(torch.optim.Adam([p], lr=0.1))
    fresh.load_state_dict(state)
    assert torch.equal(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    # Its sum overflows in half precision, and it is finite.
    large = torch.full((4000,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(large, torch.zeros(0))
    broken = large.clone()
    broken[1234] = value
    assert not all_finite(large, broken)
    sparse = torch.sparse_coo_tensor([[0, 3, 3]], [1.0, value, -value], (5,), dtype=dtype, check_invariants=False)
    assert not all_finite(large, sparse)


def test_a_step_with_nan_changes_nothing_and_ten_of_them_stop_the_run() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    with pytest.raises(AgreedError, match="all of the last 11 steps held NaN or Inf"):  # noqa: PT012
        for batch in session.batches(TensorDataset(X, Y), num_epochs=3):
            with session.step(batch):
                session.optimizer.zero_grad()
                (nn.functional.cross_entropy(model(batch.x), batch.y) * float("nan")).backward()
                session.optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("in_a_row", [9, 10])
def test_rounds_of_one_step_with_nan_stop_the_run_after_ten_in_a_row(in_a_row: int) -> None:
    """On few data a round may be one step: one bad batch is no divergence."""
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1), mega_batch=20)
    stopped = ""
    try:
        for number, batch in enumerate(session.batches(TensorDataset(X[:120], Y[:120]), num_epochs=4)):
            with session.step(batch):
                session.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch.x), batch.y)
                (loss * (1.0 if number % (in_a_row + 1) == 0 else float("nan"))).backward()
                session.optimizer.step()
    except AgreedError as error:
        stopped = str(error)
    assert ("the last 10 steps held NaN or Inf" in stopped) == (in_a_row == 10), stopped


def test_some_steps_with_nan_are_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    records: list[Any] = []
    session.records.append(records.append)
    for number, batch in enumerate(session.batches(TensorDataset(X, Y))):
        with session.step(batch):
            session.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            (loss * (float("inf") if number == 1 else 1.0)).backward()
            session.optimizer.step()
    assert [record.stats["skipped_steps"].tolist() for record in records] == [[1.0], [0.0]]
    assert records[0].to_json()["ranks"]["skipped_steps"] == [1.0]
    assert caplog.text.count("1 of 4 steps were left out") == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_layers_that_break_equality_are_named() -> None:
    class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
        """Stands for Horovod's, which this room may not import."""

    model = nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(3),
            "norms": nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(4))),
            "drop": nn.Dropout(0.5),
            "off": nn.Dropout2d(0.0),
            "rnn": nn.LSTM(3, 3, num_layers=2, dropout=0.1),
            "attention": nn.MultiheadAttention(4, 2, dropout=0.2),
            "layer": nn.LayerNorm(3),
            "sync": SyncBatchNorm(3),
        }
    )
    batch_norm, dropout, mixed = what_breaks_equality(model, loss_reduction="mean")
    assert "BatchNorm" in batch_norm and "(norm, norms.0, norms.1 and 2 more)" in batch_norm
    assert "dropout" in dropout and "(drop, rnn, attention)" in dropout
    assert "SyncBatchNorm" in mixed
    assert len(what_breaks_equality(model, loss_reduction="sum")) == 2
    assert what_breaks_equality(make_model(), loss_reduction="mean") == []


def test_the_session_says_what_breaks_equality_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2)).double()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert caplog.text.count("is not equal to one rank at the same global batch") == 1
    assert len(session.inexact) == 2
    caplog.clear()
    plain = make_model()
    assert make_session(plain, torch.optim.SGD(plain.parameters(), lr=0.1)).inexact == [] and not caplog.text


def test_a_step_of_the_scripts_own_optimizer_is_refused_until_the_session_is_closed() -> None:
    model = make_model()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    session = make_session(model, own)
    for batch in session.batches(TensorDataset(X, Y)):
        with session.step(batch):
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            with pytest.raises(RuntimeError, match=r"call session\.optimizer\.step"):
                own.step()
            session.optimizer.step()
    # With a rate of 0, as torch.distributed.checkpoint steps to make a state, it changes nothing.
    own.param_groups[0]["lr"] = 0.0
    own.step()
    own.param_groups[0]["lr"] = 0.1
    # The first one is not closed, as in a notebook whose cell is run again.
    session = make_session(model, own)
    for batch in session.batches(TensorDataset(X, Y)):
        with session.step(batch):
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    own.step()


def test_a_second_step_of_a_batch_is_refused() -> None:
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in session.batches(TensorDataset(X, Y)):
        with session.step(batch):
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
            with pytest.raises(RuntimeError, match="one step a batch"):
                session.optimizer.step()
    session.close()


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_layers_that_change_parameters_in_forward_are_refused_over_several_ranks(make: Any) -> None:
    def run(transport: LocalTransport) -> None:
        model = nn.Sequential(make(9, 4, max_norm=1.0))
        config = Config(strategy="sync", compression="none")
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)

    LocalWorld(1).run(run)
    with pytest.raises(AgreedError, match=r"max_norm of 0 rescales, in forward, .*\(torch\.renorm\)"):
        LocalWorld(2).run(run)


@pytest.mark.parametrize("strategy", ["sync", "horovod"])
def test_freezing_during_a_session_is_refused(strategy: str) -> None:
    model = make_model()
    config = Config(strategy=strategy, batch_size=8)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=LocalTransport())
    with pytest.raises(RuntimeError, match="added, removed, frozen or unfrozen"):  # noqa: PT012
        for batch in session.batches(TensorDataset(X, Y)):
            model[0].bias.requires_grad_(False)
            with session.step(batch):
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()


@pytest.mark.parametrize(
    "options", [{"max_batch_size": 20, "global_batch_size": 21}, {"accumulation_steps": 30, "global_batch_size": 29}]
)
def test_a_global_batch_that_does_not_fit_the_ranks_is_refused(options: dict[str, Any]) -> None:
    model = make_model()
    with pytest.raises(AgreedError, match="global_batch_size must hold a share for every rank"):
        make_session(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_shares_survive_a_restart_with_as_many_ranks() -> None:
    model = make_model()
    strategy: Any = make_session(model, torch.optim.SGD(model.parameters(), lr=1))._strategy
    shared = copy.deepcopy(strategy.state_dict()["shared"])
    strategy.load_state_dict(shared, dict, world_size=1)
    assert strategy.batch_sizes.tolist() == [20]
    strategy.load_state_dict({**shared, "sizes": np.array([10.0, 30.0])}, dict, world_size=2)
    assert strategy.batch_sizes.tolist() == [20]


def padded_session(**options: Any) -> tuple[Session, TensorDataset]:
    """Six samples with 1 to 6 targets each; the loss of a target is its number times the model's one parameter."""
    model = nn.Linear(1, 1, bias=False).double()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    return session, TensorDataset(torch.arange(48.0).double().view(6, 8), torch.arange(8) <= torch.arange(6)[:, None])


def train_padded(session: Session, data: TensorDataset, *, num_targets: Any = torch.sum) -> Any:
    """Makes an epoch; returns the record of its only round."""
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(data):
        with session.step(batch):
            session.optimizer.zero_grad()
            for micro in batch.micro_batches():
                if num_targets is not None:
                    micro.num_targets = num_targets(micro.y)
                micro.loss = session.model(micro.x[micro.y][:, None]).sum() / (micro.num_targets or 0)
                micro.loss.backward()
            session.optimizer.step()
    return records[0]


@pytest.mark.parametrize("options", [{"accumulation_steps": 3}, {"micro_batch_size": 5, "global_batch_size": 10}, {}], ids=str)
def test_micro_batches_with_other_numbers_of_targets_add_up_to_the_mean_over_all(options: dict[str, int]) -> None:
    """The epoch is one step; micro-batches of five repeat some samples and take others off again."""
    session, data = padded_session(loss_reduction="targets", **options)
    record = train_padded(session, data)
    x, mask = data.tensors
    (weight,) = session.model.parameters()
    assert weight.grad.item() == pytest.approx(x[mask].mean().item())
    assert record.loss == pytest.approx(weight.item() * x[mask].mean().item())
    assert record.stats["loss_samples"].sum() == mask.sum()


def test_targets_that_are_not_counted_are_refused() -> None:
    session, data = padded_session(loss_reduction="targets")
    with pytest.raises(RuntimeError, match=r"set batch\.num_targets before backward"):
        train_padded(session, data, num_targets=None)


def test_counted_targets_without_the_reduction_are_refused() -> None:
    session, data = padded_session()
    with pytest.raises(ValueError, match=r"Config\(loss_reduction='targets'\), got it with loss_reduction 'mean'"):
        train_padded(session, data)


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), "12", torch.ones(1), 10**400, None], ids=str)
def test_numbers_of_targets_that_are_none_are_refused(number: Any) -> None:
    session, data = padded_session(loss_reduction="targets")
    with pytest.raises(ValueError, match=r"batch\.num_targets must be a number >= 0, or a 0-dim tensor, got"):
        next(iter(session.batches(data))).num_targets = number


def test_a_batch_without_targets_has_no_gradient_and_no_loss() -> None:
    session, data = padded_session(loss_reduction="targets")
    record = train_padded(session, data, num_targets=lambda mask: torch.zeros(()))
    assert session.model.weight.grad.item() == 0
    assert record.loss is None and record.stats["skipped_steps"].sum() == 0


def test_a_number_of_targets_that_changes_after_its_backward_is_refused() -> None:
    session, data = padded_session(loss_reduction="targets")

    def train() -> None:
        for batch in session.batches(data):
            with session.step(batch):
                batch.num_targets = 4
                session.model(batch.x[:, :1]).mean().backward()
                batch.num_targets = 1
                session.optimizer.step()

    with pytest.raises(RuntimeError, match=r"num_targets was 4 in backward\(\) and is 1\.0 now"):
        train()


def test_micro_batches_whose_targets_were_counted_do_not_stay() -> None:
    session, data = padded_session(loss_reduction="targets", accumulation_steps=3, global_batch_size=3)
    losses: list[Any] = []
    for batch in session.batches(data):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.num_targets = batch.y.sum()
            batch.loss = session.model(batch.x[batch.y][:, None]).mean()
            batch.loss.backward()
            losses.append(weakref.ref(batch.loss))
            session.optimizer.step()
        del batch
        assert sum(loss() is not None for loss in losses) <= 1


def test_float16_parameters_cannot_hold_gradients_times_targets() -> None:
    model = nn.Linear(2, 2).half()
    with pytest.raises(AgreedError, match="keep the model in float32"):
        make_session(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_reduction="targets")


@pytest.mark.parametrize("reduction", ["mean", "targets"])
def test_a_step_whose_first_micro_batch_is_left_out_begins_with_no_gradients(reduction: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    session = make_session(
        model, torch.optim.SGD(model.parameters(), lr=0.0), global_batch_size=2, accumulation_steps=2, loss_reduction=reduction
    )
    gradients = []
    for number, batch in enumerate(session.batches(TensorDataset(torch.ones(6, 1)))):
        if reduction == "targets":
            batch.num_targets = 3
        if number == 2:
            continue
        with session.step(batch):
            session.optimizer.zero_grad()
            model(batch.x[0]).mean().backward()
            session.optimizer.step()
        if number % 2:
            gradients.append(model.weight.grad.item())
    # What was left out counts nothing, and no longer as a target.
    assert gradients == ([1.0, 0.5, 1.0] if reduction == "mean" else [1.0, 1.0, 1.0])
