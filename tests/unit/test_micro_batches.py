"""Micro-batches of one size: exact for any number of samples, in both strategies, and refused where they cannot be."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.ledger import ClaimRule, epoch_order, own_parts
from hvd_adaptive.algorithm.micro_batches import micro_batches, stand_in
from hvd_adaptive.algorithm.share_control import ShareControl
from hvd_adaptive.algorithm.shares import cut_round, stub_shares
from hvd_adaptive.algorithm.world_scale import scaled_config
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource
from hvd_adaptive.engine.start_speeds import StepProbe
from hvd_adaptive.session.session import Session

NUM_SAMPLES = 203
_generator = torch.Generator().manual_seed(0)
X = torch.randn(NUM_SAMPLES, 6, dtype=torch.float64, generator=_generator)
Y = (X.sum(dim=1) > 0).long()
DATA = TensorDataset(X, Y)
# A few targets do not count, most of them in the first samples.
SOME = torch.where(torch.rand(NUM_SAMPLES, generator=_generator) * NUM_SAMPLES < torch.arange(NUM_SAMPLES), Y, -100)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 64, 101])
def test_micro_batches_count_every_sample_once(size: int) -> None:
    for num_samples in range(1, 2 * size + 3):
        rows = np.arange(100, 100 + num_samples)
        parts = micro_batches(rows, size)
        assert all(part.shape == (size,) for part, _ in parts)
        counted = np.zeros(num_samples)
        for part, count in parts:
            np.add.at(counted, part - 100, count / size)
            assert abs(count) <= size
        assert np.allclose(counted, 1.0, rtol=1e-12)
        assert len(parts) <= num_samples // size + 1 + 2 * np.log2(size + 1)


def test_who_has_no_samples_counts_nothing() -> None:
    ((rows, count),) = stand_in(np.array([7, 3]), 5)
    assert rows.tolist() == [7, 3, 7, 3, 7] and count == 0


@pytest.mark.parametrize("unit", [4, 5, 16])
def test_parts_of_a_round_are_whole_micro_batches_but_one(unit: int) -> None:
    shares = [2 * unit, unit, 3 * unit]
    for num_rows in (6 * unit, 7 * unit, 18 * unit + 1, 6 * unit + unit // 2):
        ranks = [
            list(cut_round(num_rows, total=6 * unit, shares_at=lambda _: shares, rank=rank, unit=unit)) for rank in range(3)
        ]
        covered = [row for parts in ranks for part in parts for row in range(part.start, part.stop)]
        assert sorted(covered) == list(range(num_rows))
        odd = [part for parts in ranks for part in parts if (part.stop - part.start) % unit]
        assert len(odd) == (num_rows % unit > 0)
    assert stub_shares([8, 8, 4], 5, lower=4, unit=4) == [4, 1, 0]


def test_claims_are_whole_micro_batches_but_the_last() -> None:
    generator = np.random.default_rng(0)
    for sizes, total in itertools.product(([8.0, 8.0], [32.0] * 5), (8, 400, 403, 1001)):
        rules = [
            ClaimRule.of_round(
                rank, batch_sizes=np.array(sizes), speed_shares=np.full(len(sizes), 1 / len(sizes)), work_per_sample=1.0,
                dynamic=True, unit=8,
            ) for rank in range(len(sizes))
        ]  # fmt: skip
        position, claims = 0, []
        while position < total:
            rule = rules[generator.integers(len(rules))]
            claims.append(rule.size(total - position, pending=float(generator.integers(0, 5) * 8)))
            position += claims[-1]
        assert position == total and all(claim % 8 == 0 and claim > 0 for claim in claims[:-1])
        assert max(claims) <= sizes[0] + 8 * max(1, sizes[0] / 8 / 16)
    edges = own_parts(np.array([1.0, 2.0, 1.3]), 1003, unit=8)
    assert edges[0] == 0 and edges[-1] == 1003 and all(edge % 8 == 0 for edge in edges[:-1])


def test_shares_are_whole_micro_batches_that_follow_speeds() -> None:
    config = Config(strategy="sync", global_batch_size=96, micro_batch_size=8, batch_size=48)
    control = ShareControl(config, 2, global_batch_size=96, smallest=1)
    assert control.whole.tolist() == [48, 48]
    for step in range(40):
        sizes = control.whole
        window = control.count(sizes, sizes * np.array([1e-3, 2e-3]))
        if window is not None:
            control.observe(window, step=step)
    assert control.whole.tolist() == [64, 32]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def train(
    transport: Any, *, num_epochs: float = 2, second: bool = False, clip: bool = False, y: torch.Tensor = Y, **options: Any
) -> dict[str, Any]:
    """``second``: another optimizer has the biases."""
    model = make_model()
    biases = [p for p in model.parameters() if second and p.dim() == 1]
    optimizer = torch.optim.SGD([p for p in model.parameters() if not second or p.dim() > 1], lr=0.1, momentum=0.9)
    other = torch.optim.SGD([{"params": biases}], lr=0.1, momentum=0.9)
    session = Session(model, optimizer, Config(**options), transport=transport)
    shapes, rows, records = set(), [], []
    session.records.append(records.append)
    for batch in session.batches(TensorDataset(X, y), num_epochs=num_epochs):
        with session.step(batch):
            rows.append(batch.rows)
            model.zero_grad()
            for micro in batch.micro_batches():
                shapes.add(tuple(micro.x.shape))
                if session.config.loss_reduction == "targets":
                    micro.num_targets = (micro.y >= 0).sum()
                micro.loss = nn.functional.cross_entropy(model(micro.x), micro.y)
                micro.loss.backward()
            if clip:
                session.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            session.optimizer.step()
            other.step()
    session.close()
    return {"model": model, "rows": np.concatenate(rows), "shapes": shapes, "records": records}


def plain(
    batch_size: int, *, num_epochs: int = 2, clip: bool = False, y: torch.Tensor = Y
) -> tuple[nn.Module, list[float]]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(num_epochs):
        order = epoch_order(NUM_SAMPLES, seed=0, epoch=epoch)
        for first in range(0, NUM_SAMPLES, batch_size):
            rows = order[first : first + batch_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
            loss.backward()
            losses.append(loss.item() * int((y[rows] >= 0).sum()))
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return model, losses


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["local", "sync"])
@pytest.mark.parametrize("size", [5, 20])
def test_one_rank_is_plain_training(strategy: str, size: int) -> None:
    """The last batch of an epoch has three samples, which fill no micro-batch."""
    # Rounds of `local` are whole numbers of micro-batches, not of batches.
    options = {"outer_step": "none", "lr_rule": "none", "mega_batch": NUM_SAMPLES} if strategy == "local" else {"mega_batch": 60}
    result = train(LocalTransport(), strategy=strategy, batch_size=20, micro_batch_size=size, **options)
    model, losses = plain(20)
    assert_equal(result["model"], model)
    assert result["shapes"] == {(size, 6)}
    reported = sum(record.stats["loss_sum"].sum() for record in result["records"])
    assert np.isclose(reported, sum(losses), rtol=1e-9)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_targets_count_as_in_the_whole_batch(strategy: str, clip: bool) -> None:
    options = {"outer_step": "none", "lr_rule": "none", "mega_batch": NUM_SAMPLES} if strategy == "local" else {"mega_batch": 60}
    given = {"strategy": strategy, "batch_size": 20, "micro_batch_size": 5, "clip": clip, "y": SOME, **options}
    result = train(LocalTransport(), loss_reduction="targets", **given)
    model, losses = plain(20, clip=clip, y=SOME)
    assert_equal(result["model"], model)
    reported = sum(record.stats["loss_sum"].sum() for record in result["records"])
    assert np.isclose(reported, sum(losses), rtol=1e-9)
    with pytest.raises(AssertionError):
        assert_equal(train(LocalTransport(), **given)["model"], model)


def step_of_targets(go_through: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of `local` by targets; returns the weights after it and the learning rate's worth of the whole batch's gradient."""
    config = Config(batch_size=20, micro_batch_size=5, loss_reduction="targets", lr_rule="none")
    model = make_model()
    weight = next(model.parameters())
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1.0), config, transport=LocalTransport())
    batches = session.batches(TensorDataset(X, SOME), num_epochs=2)
    batch = next(batches)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(X[batch.rows]), SOME[batch.rows]).backward()
    expected = weight.detach() - next(plain.parameters()).grad

    def backward() -> None:
        for micro in batch.micro_batches():
            micro.num_targets = (micro.y >= 0).sum()
            nn.functional.cross_entropy(model(micro.x), micro.y).backward()

    with session.step(batch):
        go_through(session, batches, backward)
    return weight.detach(), expected


@pytest.mark.parametrize("synchronizes", [False, True])
def test_a_second_pass_over_micro_batches_counts_their_targets_anew(synchronizes: bool) -> None:
    """As by SAM, whose first pass only finds where to take the gradient."""

    def go_through(session: Session, _: Any, backward: Any) -> None:
        backward()
        if synchronizes:
            session.synchronize()
        session.optimizer.zero_grad()
        backward()
        session.optimizer.step()

    assert torch.allclose(*step_of_targets(go_through), rtol=1e-12)


def test_a_batch_that_is_fetched_before_the_step_leaves_the_targets_alone() -> None:
    def go_through(session: Session, batches: Any, backward: Any) -> None:
        backward()
        next(batches)
        session.optimizer.step(None)

    assert torch.allclose(*step_of_targets(go_through), rtol=1e-12)


def test_gradients_that_targets_cannot_divide_are_refused() -> None:
    def closure(session: Session, _: Any, backward: Any) -> None:
        session.optimizer.step(backward)

    with pytest.raises(ValueError, match="step\\(\\) takes no closure with loss_reduction 'targets'"):
        step_of_targets(closure)

    def early(session: Session, batches: Any, backward: Any) -> None:
        for micro in next(batches).micro_batches():
            micro.num_targets = 5
            session.model(micro.x).mean().backward()
            session.synchronize()

    with pytest.raises(RuntimeError, match="call it once, after the last micro-batch"):
        step_of_targets(early)


def test_gradients_for_a_second_optimizer_have_their_weights_and_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    options = {"outer_step": "none", "lr_rule": "none", "mega_batch": NUM_SAMPLES, "batch_size": 20, "micro_batch_size": 5}
    train(LocalTransport(), **options)
    assert "second optimizer" not in caplog.text
    assert_equal(train(LocalTransport(), second=True, **options)["model"], plain(20)[0])
    assert "has changed 0.bias, 2.bias. If that is a second optimizer" in caplog.text


@pytest.mark.parametrize("dispatch", ["dynamic", "equal", "proportional"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_sample_is_consumed_once_in_one_shape(dispatch: str, world_size: int) -> None:
    results = LocalWorld(world_size).run(
        lambda t: train(t, batch_size=16, micro_batch_size=8, mega_batch=70, dispatch=dispatch, num_epochs=1)
    )
    assert sorted(np.concatenate([r["rows"] for r in results]).tolist()) == list(range(NUM_SAMPLES))
    assert set.union(*(r["shapes"] for r in results)) == {(8, 6)}
    assert all(record.stats["num_samples"].sum() % 8 == 0 for record in results[0]["records"][:-1])


def test_a_loop_that_does_without_micro_batches_is_told_how() -> None:
    model = make_model()
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=16, micro_batch_size=8), transport=LocalTransport()
    )
    batches = session.batches(DATA)
    with pytest.raises(RuntimeError, match=r"batch\.micro_batches\(\)"), session.step(batch := next(batches)):
        model(batch.x)
    with pytest.raises(RuntimeError, match="after 1 of its 2 micro-batches"), session.step(batch := next(batches)):
        next(batch.micro_batches())


def test_micro_batches_that_do_not_fit_into_memory_are_named() -> None:
    model = make_model()
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=16, micro_batch_size=8), transport=LocalTransport()
    )
    with pytest.raises(RuntimeError, match=r"micro-batches of 8 samples.* lower micro_batch_size"), session.step(
        next(session.batches(DATA))
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_without_micro_batches_the_batch_is_the_only_one() -> None:
    batch = Batch(1, 2, np.arange(3), 3)
    assert list(batch.micro_batches()) == [batch] and batch.num_micro_batches == 1


@pytest.mark.parametrize("size", [8, None])
def test_steps_that_calibrate_measures_are_compiled_once(size: int | None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model()
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        for micro in batch.micro_batches():
            nn.functional.cross_entropy(compiled(micro.x), micro.y).backward()
        optimizer.step()

    source = BatchSource(DATA, torch.device("cpu"), micro_batch_size=size)
    with StepProbe(model, optimizer, step, source, seed=0, rank=0) as probe:
        for num_samples in (8, 16, 64):
            probe.run(2, num_samples)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert num_graphs == 1 if size else num_graphs > 1


def test_another_number_of_ranks_has_whole_micro_batches() -> None:
    """Ranks times the batch that they are meant for stays, up to a micro-batch a rank; in `sync` exactly."""
    config = Config(batch_size=64, micro_batch_size=8, reference_ranks=4)
    assert scaled_config(config, 3).batch_size == 88
    synchronous = scaled_config(Config(strategy="sync", batch_size=64, micro_batch_size=8, reference_ranks=4), 3)
    assert synchronous.global_batch_size == 256
    assert config.batch_size_bounds == (8, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 10}, "batch_size must be a whole number of micro-batches of micro_batch_size 10, got 64"),
        ({"micro_batch_size": 8, "strategy": "sync", "global_batch_size": 100}, "global_batch_size must be a whole number"),
        ({"micro_batch_size": 8, "batch_size_rule": "proportional"}, "needs batch_size_rule fixed"),
        ({"micro_batch_size": 8, "strategy": "horovod"}, "needs strategy local or sync"),
        ({"micro_batch_size": 8, "strategy": "sync", "accumulation_steps": 2}, "needs accumulation_steps 1"),
        ({"micro_batch_size": 8, "work": "nonzeros"}, "needs work samples"),
        ({"micro_batch_size": 8, "logical_ranks": 2}, "needs no logical_ranks"),
        ({"micro_batch_size": 0}, "micro_batch_size must be > 0"),
        ({"loss_reduction": "targets"}, "needs micro_batch_size, got none: a whole batch's gradients are taken as they are"),
        ({"micro_batch_size": 8, "loss_reduction": "sum"}, "loss_reduction 'sum' needs strategy sync, got 'local'"),
        ({"micro_batch_size": 8, "loss_reduction": "targets", "island": "node"}, "needs no island, got 'node'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_parameters_that_the_optimizer_gets_later_are_weighted_as_well() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    first, _, last = model
    optimizer = torch.optim.SGD(last.parameters(), lr=0.1)
    session = Session(model, optimizer, Config(batch_size=20, micro_batch_size=5), transport=LocalTransport())
    trained: list[str] = []
    for batch in session.batches(DATA, num_epochs=0.5):
        if batch.number == 2:
            optimizer.add_param_group({"params": list(first.parameters())})
        with session.step(batch):
            model.zero_grad()
            plain = copy.deepcopy(model)
            nn.functional.cross_entropy(plain(X[batch.rows]), Y[batch.rows]).backward()
            for micro in batch.micro_batches():
                nn.functional.cross_entropy(model(micro.x), micro.y).backward()
            known = {p for group in optimizer.param_groups for p in group["params"]}
            trained = [name for name, p in model.named_parameters() if p in known]
            for name in trained:
                ours, theirs = (net.get_parameter(name).grad for net in (model, plain))
                assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12), (batch.number, name)
            session.optimizer.step()
    assert len(trained) == 4
    session.close()
