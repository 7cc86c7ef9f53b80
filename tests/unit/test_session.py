"""The Session over simulated ranks: exactly-once, equality with plain SGD, agreement, failures that all ranks share."""

from __future__ import annotations

import copy
import itertools
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.ledger import epoch_order
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine import optimizer_state
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.optimizer_state import average_, reset_
from hvd_adaptive.engine.optimizers import LazyAdam, LazyMomentum, RowwiseAdagrad
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.session.session import Session
from hvd_adaptive.session.strategy_names import make_strategy
from hvd_adaptive.strategies.local import LocalStrategy

NUM_SAMPLES = 500
_generator = torch.Generator().manual_seed(0)
X = torch.randn(NUM_SAMPLES, 6, dtype=torch.float64, generator=_generator)
Y = (X.sum(dim=1) > 0).long()
DATA = TensorDataset(X, Y)


def make_model(seed: int = 0) -> nn.Module:
    # Batch normalization has float and integer buffers; the last layer shares its weight with the first.
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()


def train(
    transport: LocalTransport,
    config: Config,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    num_epochs: float = 2,
    on_batch: Callable[[Session, Any], None] = lambda session, batch: None,
    work: np.ndarray | None = None,
    data: TensorDataset = DATA,
) -> dict[str, Any]:
    model = model if model is not None else make_model()
    session = Session(model, optimizer(model.parameters()), config, transport=transport)
    records: list[Any] = []
    hashes: list[str] = []
    session.records += [records.append, lambda _: hashes.append(model_hash(model))]
    rows = []
    for batch in session.batches(data, num_epochs=num_epochs, work=work):
        rows.append(batch.rows)
        on_batch(session, batch)
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    session.close()
    return {"model": model, "records": records, "hashes": hashes, "rows": rows, "session": session}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("work", ["samples", "nonzeros"])
def test_every_sample_of_an_epoch_is_consumed_once(world_size: int, work: str) -> None:
    cost = np.random.default_rng(0).integers(0, 50, NUM_SAMPLES) if work == "nonzeros" else None
    model = lambda: nn.Sequential(nn.Linear(6, 2)).double()  # noqa: E731
    results = LocalWorld(world_size).run(
        lambda t: train(
            t, Config(batch_size=16, mega_batch=150, work=work), work=cost, num_epochs=3, model=model()
        )
    )
    consumed = np.concatenate([rows for result in results for rows in result["rows"]])
    assert np.array_equal(np.bincount(consumed, minlength=NUM_SAMPLES), np.full(NUM_SAMPLES, 3))
    assert results[0]["session"].ledger.epoch == 3 and results[0]["session"].num_samples == 3 * NUM_SAMPLES


@pytest.mark.parametrize(
    ("options", "claims"),
    [
        ({}, True), ({"work": "nonzeros"}, True), ({"dispatch": "equal"}, False), ({"logical_ranks": 3}, False),
        ({"strategy": "sync"}, False), ({"strategy": "sync", "accumulation_steps": 2}, False),
    ],
)  # fmt: skip
def test_schedules_can_follow_the_samples_of_all_ranks(options: dict[str, Any], claims: bool) -> None:
    cost = np.random.default_rng(0).integers(1, 50, NUM_SAMPLES) if "work" in options else None
    seen: list[list[tuple[int, int]]] = [[], []]
    LocalWorld(2).run(
        lambda t: train(
            t, Config(batch_size=16, mega_batch=150, **options), work=cost, num_epochs=2,
            model=nn.Sequential(nn.Linear(6, 2)).double(),
            on_batch=lambda _, batch: seen[t.rank].append((batch.num_samples_before, batch.num_samples)),
        )
    )  # fmt: skip
    if claims:
        # Each claim begins where another one ends.
        given = sorted(seen[0] + seen[1])
        assert [before for before, _ in given] + [2 * NUM_SAMPLES] == [0] + [before + num for before, num in given]
    elif options.get("strategy") == "sync":
        # One rate for each step of all ranks.
        assert [before for before, _ in seen[0]] == [before for before, _ in seen[1]]
    for begun in seen:
        places = [before for before, _ in begun]
        # Who claims may leave the last samples to the other rank.
        assert claims or (min(places) < 64 and 2 * NUM_SAMPLES - 64 <= max(places) < 2 * NUM_SAMPLES)
        assert places == sorted(places) or "logical_ranks" in options


def test_samples_given_before_count_those_of_other_data_sets() -> None:
    session = Session(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.1), Config(), transport=LocalTransport())
    places = []
    for epoch, num_samples in enumerate((100, 300, 100), start=1):
        data = TensorDataset(*(tensor[:num_samples] for tensor in DATA.tensors))
        for number, batch in enumerate(session.batches(data, num_epochs=epoch)):
            if not number:
                places.append(batch.num_samples_before)
            with session.step(batch):
                pass
    assert places == [0, 100, 400]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_hold_the_same_bits_after_every_merge(world_size: int) -> None:
    config = Config(batch_size=16, mega_batch=100, slowdown=",".join("421"[:world_size]), hash_interval=1)
    results = LocalWorld(world_size).run(lambda t: train(t, config, model=make_model(seed=t.rank)))
    for other in results[1:]:
        assert other["hashes"] == results[0]["hashes"]
    assert len(set(results[0]["hashes"])) == len(results[0]["hashes"]) == 10


def test_a_parameter_changed_on_one_rank_outside_a_step_is_found() -> None:
    def break_rank_1(session: Session, batch: Any) -> None:
        if session.rank == 1 and session.round == 1:
            # The delta is exchanged, but this rank's global copy is not what the others have.
            session._strategy.flat_model.parameter_groups[0].weights[0] += 1

    # With a shared cursor, the other rank might take a whole round.
    config = Config(batch_size=16, mega_batch=100, hash_interval=1, dispatch="equal")
    named = r"after round 1 the models of ranks \[1\] differ from rank 0's \(\S+\); did some ranks change them"
    with pytest.raises(AgreedError, match=named):
        LocalWorld(2).run(lambda t: train(t, config, on_batch=break_rank_1))


@pytest.mark.parametrize(("changed_in", "found_after"), [(0, 0), (2, 3)])
def test_with_sync_a_change_on_one_rank_is_found_before_the_interval_is_over(changed_in: int, found_after: int) -> None:
    def go_back(session: Session, batch: Any) -> None:
        if session.rank == 1 and session.round == changed_in:
            session.model.load_state_dict(make_model(seed=9).state_dict())

    config = Config(strategy="sync", global_batch_size=20, mega_batch=100)
    named = rf"after round {found_after} the models .* on all ranks, in session.records"
    with pytest.raises(AgreedError, match=named):
        LocalWorld(2).run(lambda t: train(t, config, on_batch=go_back))


def test_statistics_moved_by_an_evaluation_in_training_mode_are_named() -> None:
    def train_and_look(transport: LocalTransport) -> None:
        model = make_model()
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=50), transport=transport)
        for batch in session.batches(DATA, num_epochs=1):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
        model(X[transport.rank :: 2])
        session.close()

    named = r"differ from rank 0's in buffers \(1.running_mean, 1.running_var\). A pass in training mode .* model.eval\(\)"
    with pytest.raises(AgreedError, match=named):
        LocalWorld(2).run(train_and_look)


def test_one_rank_without_outer_step_is_plain_sgd() -> None:
    config = Config(batch_size=20, mega_batch=100, outer_step="none", seed=5)
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3)  # noqa: E731
    ours = LocalWorld(1).run(lambda t: train(t, config, optimizer=make))[0]["model"]
    plain = make_model()
    sgd = make(plain.parameters())
    for epoch in range(2):
        for rows in np.split(epoch_order(NUM_SAMPLES, seed=5, epoch=epoch), 25):
            sgd.zero_grad()
            nn.functional.cross_entropy(plain(X[rows]), Y[rows]).backward()
            sgd.step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, rtol=1e-9), name


def test_the_learning_rate_follows_the_batch_and_the_users_own_writes_survive() -> None:
    seen: list[tuple[int, float]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append((self.current, self.param_groups[0]["lr"]))
            return super().step(closure)

    def write(session: Session, batch: Any) -> None:
        session.optimizer.current = batch.num_samples
        assert session.optimizer.param_groups[0]["lr"] in (0.1, 0.2)
        session.optimizer.param_groups[0]["lr"] = 0.2

    config = Config(batch_size=20, reference_batch_size=10, mega_batch=90)
    LocalWorld(1).run(lambda t: train(t, config, optimizer=lambda p: Watched(p, lr=0.1), on_batch=write))
    assert {size for size, _ in seen} > {20}
    for size, lr in seen:
        assert lr == pytest.approx(0.2 * size / 10)


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (torch.optim.SGD, {}, "linear"),
        (LazyMomentum, {}, "linear"),
        (torch.optim.Adagrad, {}, "none"),
        (RowwiseAdagrad, {}, "none"),
        (torch.optim.Adam, {}, "none"),
        (LazyAdam, {"outer_step": "none"}, "none"),
        (torch.optim.AdamW, {}, "none"),
        (torch.optim.AdamW, {"lr_rule": "sqrt"}, "sqrt"),
        (torch.optim.SGD, {"lr_rule": "none"}, "none"),
    ],
)
def test_the_learning_rates_rule_follows_the_optimizer(make: Any, options: dict[str, Any], expected: str) -> None:
    seen: set[tuple[int, float]] = set()
    config = Config(batch_size=16, mega_batch=90, **options)
    LocalWorld(1).run(
        lambda t: train(
            t, config, optimizer=lambda p: make(p, lr=0.01), on_batch=lambda s, b: seen.add((b.num_samples, s._lr.value))
        )
    )
    assert len({size for size, _ in seen}) > 1
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[expected]
    for size, factor in seen:
        assert factor == pytest.approx((size / 16) ** power)


def test_frozen_tied_and_half_precision_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6, bias=False).double()
            self.again = nn.Linear(6, 6, bias=False).double()
            self.again.weight = self.inner.weight
            self.frozen = nn.Linear(6, 6).double().requires_grad_(False)
            self.head = nn.Linear(6, 2, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.frozen(self.again(torch.relu(self.inner(x)))).bfloat16()).double()

    def run(transport: LocalTransport) -> dict[str, Any]:
        torch.manual_seed(transport.rank)
        model = Tied()
        before = copy.deepcopy(model.frozen.state_dict())
        result = train(transport, Config(batch_size=16, mega_batch=100, hash_interval=1), model=model)
        return {**result, "before": before}

    results = LocalWorld(2).run(run)
    for rank, result in enumerate(results):
        model = result["model"]
        assert model.again.weight is model.inner.weight
        assert result["session"]._strategy.flat_model.num_parameters == 36 + 14
        for name, value in results[0]["before"].items():
            assert torch.equal(model.frozen.state_dict()[name], value), rank


def test_buffers_merge_by_weight_and_integers_by_maximum() -> None:
    config = Config(batch_size=16, mega_batch=500, outer_step="nesterov", merge_weights="samples")
    local: list[Any] = [None, None]
    both, met = threading.Barrier(2), [False, False]

    def meet(session: Session, batch: Any) -> None:
        # Neither takes all batches before the other has one.
        if not met[session.rank]:
            met[session.rank] = True
            both.wait(60)

    def run(transport: LocalTransport) -> dict[str, Any]:
        model = make_model()
        count = {"mean": None, "samples": 0, "batches": 0}
        running = model[1].register_forward_hook(
            lambda module, *_: count.update(mean=module.running_mean.clone(), batches=count["batches"] + 1)
        )
        result = train(transport, config, model=model, num_epochs=1, on_batch=meet)
        running.remove()
        local[transport.rank] = (count, sum(len(rows) for rows in result["rows"]))
        return result

    results = LocalWorld(2).run(run)
    total = sum(samples for _, samples in local)
    expected = sum(count["mean"] * samples / total for count, samples in local)
    for result in results:
        norm = result["model"][1]
        assert torch.allclose(norm.running_mean, expected)
        assert norm.num_batches_tracked == max(count["batches"] for count, _ in local)
        assert (norm.running_var > 0).all()


def test_a_rank_that_is_not_finite_contributes_nothing_and_starts_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def poison(session: Session, batch: Any) -> None:
        if session.rank == 1 and session.round == 1:
            with torch.no_grad():
                session.model[0].weight[0, 0] = float("nan")

    results = LocalWorld(2).run(
        lambda t: train(
            t,
            # So that each rank has samples in each round.
            Config(batch_size=16, mega_batch=100, hash_interval=1, dispatch="equal"),
            on_batch=poison,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        )
    )
    assert results[0]["hashes"] == results[1]["hashes"]
    weights = [record.weight for record in results[0]["records"]]
    assert weights[1].tolist() == [1.0, 0.0] and all(w[1] > 0 for w in weights[:1] + weights[2:])
    assert all(torch.isfinite(p).all() for p in results[1]["model"].parameters())
    assert "ranks [1] had NaN or Inf" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {}, {"merge_weights": "dual-averaging"}, {"merge_weights": "fisher-rows"}, {"compression": "maxmin:8"},
        {"outer_step": "nesterov", "clip_delta": 1.0},
    ],
)  # fmt: skip
def test_a_rank_that_breaks_where_no_other_had_batches_ends_the_job_only_after_ten_rounds(options: dict[str, Any]) -> None:
    def run(transport: LocalTransport) -> None:
        model = make_model()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        strategy = LocalStrategy(model, optimizer, Config(batch_size=8, **options), transport)
        before = copy.deepcopy(model.state_dict())
        for number in range(10):
            if transport.rank == 1:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float("nan"))
                optimizer.step()
            stats = RoundStats(batch_size=8, num_updates=transport.rank, num_samples=8 * transport.rank)
            if number == 9:
                with pytest.raises(AgreedError, match=r"ranks \[1\] had NaN or Inf in their parameters in 10 rounds in a row"):
                    strategy.end_round(stats)
                return
            _, weights, _ = strategy.end_round(stats)
            assert weights.tolist() == [1.0, 0.0]
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    LocalWorld(2).run(run)


def test_all_ranks_not_finite_stops_the_run_on_all() -> None:
    def poison(session: Session, batch: Any) -> None:
        with torch.no_grad():
            session.model[0].weight.fill_(float("inf"))

    with pytest.raises(RuntimeError, match="ALL ranks hold NaN or Inf"):
        LocalWorld(2).run(lambda t: train(t, Config(batch_size=16, mega_batch=100), on_batch=poison))


@pytest.mark.parametrize("state", ["keep", "reset", "average"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_optimizer_state_after_a_merge(state: str, kind: Any) -> None:
    momenta: list[Any] = [{}, {}]

    def run(transport: LocalTransport) -> None:
        def look(session: Session, batch: Any) -> None:
            values = [
                v for s in session.optimizer.state.values() for n, v in s.items() if n in ("exp_avg", "sum")
            ]
            momenta[session.rank].setdefault(session.round, [v.clone() for v in values])

        train(
            transport,
            # So that each rank has samples in each round.
            Config(batch_size=16, mega_batch=250, optimizer_state=state, dispatch="equal"),
            optimizer=lambda p: kind(p, lr=0.01),
            on_batch=look,
        )

    LocalWorld(2).run(run)
    ours, other = momenta[0][1], momenta[1][1]
    same = len(ours) == len(other) and all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))
    fresh = not ours or all((v == 0).all() for v in ours)
    assert same == (state != "keep")
    assert fresh == (state == "reset")


def test_every_reset_gives_the_initial_state() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adagrad([parameter], lr=0.1)
    initial = copy.deepcopy(optimizer.state_dict()["state"])
    for _ in range(3):
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert (optimizer.state[parameter]["sum"] == 1).all()
        reset_(optimizer, initial)
        assert (optimizer.state[parameter]["sum"] == 0).all()


def test_different_configurations_are_named_on_all_ranks() -> None:
    with pytest.raises(AgreedError, match="configuration batch_size is 16 on rank 0 and 32 on rank 1"):
        LocalWorld(2).run(lambda t: train(t, Config(batch_size=16 * (1 + t.rank))))


def test_different_models_are_named_on_all_ranks() -> None:
    with pytest.raises(AgreedError, match=r"model 0\.weight is \(\(2, 6\)"):
        LocalWorld(2).run(
            lambda t: train(t, Config(), model=nn.Sequential(nn.Linear(6, 2 + t.rank)).double())
        )


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    # Where none was set, few data have eight merges an epoch, and four where the period is measured.
    [
        (torch.optim.AdamW, {}, 160), (torch.optim.Adam, {"compression": "maxmin:4"}, 160), (torch.optim.SGD, {}, 800),
        (torch.optim.Adagrad, {}, 800), (torch.optim.AdamW, {"mega_batch": 320}, 320),
        (torch.optim.AdamW, {"merge_fragments": 2}, 800),
    ],
)  # fmt: skip
def test_the_period_follows_the_optimizer_where_it_is_not_set(make: Any, options: dict[str, Any], expected: int) -> None:
    def mega_batch(transport: LocalTransport) -> int:
        model = make_model()
        strategy = LocalStrategy(model, make(model.parameters(), lr=0.1), Config(batch_size=16, **options), transport)
        few = 800 // 8 if expected == 800 else expected
        assert strategy.mega_batch_of(800) == few
        return strategy.mega_batch_of(10**6)

    assert LocalWorld(2).run(mega_batch) == [expected] * 2


def test_one_ranks_wish_to_stop_ends_all() -> None:
    def wish(session: Session, batch: Any) -> None:
        if session.rank == 1 and session.round == 2:
            session.stop()

    # So that it has samples in that round.
    config = Config(batch_size=16, mega_batch=100, dispatch="equal")
    results = LocalWorld(2).run(lambda t: train(t, config, num_epochs=9, on_batch=wish))
    assert [len(result["records"]) for result in results] == [3, 3]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_wish_to_stop_during_a_merge_is_not_lost(is_late: bool) -> None:
    """It ends this round; one that comes when the ranks have just told each other, the next one."""

    def run(transport: LocalTransport) -> int:
        gather, wishes = transport.allgather_stats, []

        def wish(session: Session, batch: Any) -> None:
            if session.rank == 1 and not session.before_gather:
                session.before_gather.append(lambda _: wishes.append(session) if session.round == 1 else None)
                if not is_late:
                    session.before_gather.append(lambda _: wishes.pop().stop() if wishes else None)

        def gather_and_wish(values: Any) -> Any:
            gathered = gather(values)
            if wishes:
                wishes.pop().stop()
            return gathered

        transport.allgather_stats = gather_and_wish  # type: ignore[method-assign]
        config = Config(batch_size=16, mega_batch=100, dispatch="equal")
        return len(train(transport, config, num_epochs=9, on_batch=wish)["records"])

    assert LocalWorld(2).run(run) == [3 if is_late else 2] * 2


@pytest.mark.parametrize("num_samples", [65, 73])
def test_batchnorm_gets_no_single_sample_where_merges_go_beside_steps(num_samples: int) -> None:
    data = TensorDataset(X[:num_samples], Y[:num_samples])
    results = LocalWorld(2).run(lambda t: train(t, Config(batch_size=8, merges_per_round=2), data=data, num_epochs=1))
    assert sum(len(rows) for result in results for rows in result["rows"]) == num_samples


@pytest.mark.parametrize("agreed", [False, True])
def test_a_loop_after_one_that_was_stopped_goes_on_where_it_ended(agreed: bool) -> None:
    def run(transport: LocalTransport) -> tuple[list[int], list[bool]]:
        model = make_model()
        config = Config(batch_size=16, mega_batch=100, dispatch="equal")
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        rounds: list[int] = []
        session.records.append(lambda record: session.stop(agreed=True) if agreed and record.round == 1 else None)
        taken, stopped = [], []

        def loop(stops: bool = False) -> None:
            for batch in session.batches(DATA):
                taken.extend(batch.rows.tolist())
                with session.step(batch):
                    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                    session.optimizer.step()
                if stops and not agreed and transport.rank == 1 and session.round == 1:
                    session.stop()
            rounds.append(session.round)
            stopped.append(session.stopped)

        loop(stops=True)
        loop()
        session.close()
        assert rounds == [2, 5] and stopped == [True, False]
        return taken

    taken = LocalWorld(2).run(run)
    assert sorted(taken[0] + taken[1]) == list(range(len(DATA)))


def test_a_stop_between_two_loops_ends_the_next_one_and_a_signal_every_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    config = Config(batch_size=16, mega_batch=100)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=LocalTransport())

    def rounds_of_a_loop() -> int:
        before = session.round
        for batch in session.batches(DATA):
            with session.step(batch):
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
            if session.round == 3:
                monkeypatch.setattr(session.preemption, "signal_number", 15)
        return session.round - before

    session.stop(agreed=True)
    assert rounds_of_a_loop() == 0 and session.stopped
    session.stop()
    assert rounds_of_a_loop() == 1 and session.stopped
    assert rounds_of_a_loop() == 3 and session.stopped
    assert rounds_of_a_loop() == 0 and session.stopped and session.preempted == 15
    session.close()


def test_unfreezing_during_a_session_is_refused() -> None:
    def unfreeze(session: Session, batch: Any) -> None:
        session.model[0].bias.requires_grad_(False)

    with pytest.raises(RuntimeError, match="added, removed, frozen or unfrozen"):
        LocalWorld(1).run(lambda t: train(t, Config(), on_batch=unfreeze))


def test_a_stream_is_refused() -> None:
    model = make_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1), transport=LocalTransport())
    with pytest.raises(TypeError, match="own DataLoader"), warnings.catch_warnings():
        next(session.batches(iter([1, 2])))
    with pytest.raises(TypeError, match="got a DataLoader: pass its `dataset`"):
        next(session.batches(torch.utils.data.DataLoader(DATA)))


def train_some(transport: LocalTransport, config: Config, is_bad: Callable[[Session, Any], bool]) -> dict[str, Any]:
    """As `train`, but for batches that the loop leaves out."""
    torch.manual_seed(0)
    model = make_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
    records: list[Any] = []
    session.records.append(records.append)
    given, left = [], []
    for batch in session.batches(DATA, num_epochs=2):
        given.append(batch.rows)
        if is_bad(session, batch):
            left.append(batch.rows)
            continue
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    return {"records": records, "given": given, "left": left, "hash": model_hash(model), "session": session}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"dispatch": "equal"}, {"batch_size_rule": "proportional"}, {"merge_fragments": 2}, {"logical_ranks": 3},
        {"record": True},
    ],
)
def test_a_batch_that_the_loop_leaves_out_counts_as_used(
    world_size: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(batch_size=16, mega_batch=100, hash_interval=1, **options)
    results = LocalWorld(world_size).run(
        lambda t: train_some(t, config, lambda session, batch: session.round == 1 and batch.rows.sum() % 2 == 1)
    )
    given = np.concatenate([rows for result in results for rows in result["given"]])
    assert np.array_equal(np.bincount(given, minlength=NUM_SAMPLES), np.full(NUM_SAMPLES, 2))
    assert results[0]["session"].num_samples == 2 * NUM_SAMPLES and len({result["hash"] for result in results}) == 1
    num_left = [sum(len(rows) for rows in result["left"]) for result in results]
    stats = results[0]["records"][1].stats
    assert sum(num_left) > 0 and (stats["handed_samples"] - stats["num_samples"]).tolist() == num_left
    for rank, result in enumerate(results):
        if result["left"]:
            first = ", ".join(map(str, result["left"][0][:8]))
            assert f"rank {rank}: the loop left out {len(result['left'])} batch" in caplog.text
            assert f"of round 1 with {num_left[rank]} samples (rows {first}" in caplog.text
    assert "If the loop has stepped the optimizer for them, the model has moved, but merge weights" in caplog.text


@pytest.mark.parametrize(
    "options", [{}, {"batch_size_rule": "proportional"}, {"merge_weights": "uniform", "merge_period": "auto"}]
)
def test_a_round_of_which_nothing_was_trained_moves_nothing(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config = Config(batch_size=16, mega_batch=100, hash_interval=1, outer_step="none", **options)
    results = LocalWorld(2).run(lambda t: train_some(t, config, lambda session, batch: session.round in (0, 2, 3, 4, 5)))
    hashes = [record.model_hash for record in results[0]["records"]]
    assert len(set(hashes[1:6])) == 1 and hashes[0] != hashes[1] and hashes[5] != hashes[6]
    assert results[0]["hash"] == results[1]["hash"] and caplog.text.count("From now on the records count them") == 2


def test_with_steps_that_all_make_together_it_is_named_at_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bool] = []

    def every_third(session: Session, batch: Any) -> bool:
        seen.append("the loop left out 1 batch with" in caplog.text)
        return len(seen) % 3 == 1

    result = LocalWorld(1).run(lambda t: train_some(t, Config(batch_size=16, mega_batch=100, strategy="sync"), every_third))[0]
    assert seen[:2] == [False, True] and result["session"].num_samples == 2 * NUM_SAMPLES
    assert "the other ranks wait for its gradients" in caplog.text


def test_batches_may_be_computed_later(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = make_model()
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=20, mega_batch=100), transport=LocalTransport()
    )
    waiting = []
    for batch in session.batches(DATA, num_epochs=1):
        waiting.append(batch)
        if len(waiting) == 5:
            for later in waiting:
                with session.step(later):
                    session.optimizer.zero_grad()
                    nn.functional.cross_entropy(model(later.x), later.y).backward()
                    session.optimizer.step()
            waiting.clear()
    session.close()
    assert session.num_samples == NUM_SAMPLES and "left out" not in caplog.text


@pytest.mark.parametrize(
    ("strategy", "late"), [("local", "its round was over"), ("sync", "the loop asked for the next batch")]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_that_is_computed_too_late_is_an_error(world_size: int, strategy: str, late: str) -> None:
    """As by a prefetcher."""

    def train(transport: LocalTransport) -> None:
        model = make_model()
        # Each rank has a batch in the first round, however slow it is.
        shared = {"dispatch": "equal"} if strategy == "local" else {}
        config = Config(batch_size=20, mega_batch=100, strategy=strategy, **shared)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        before = None
        with pytest.raises(RuntimeError, match=f"rank {session.rank}: the step of batch .* began after {late}.*session.loader"):  # noqa: PT012
            for batch in itertools.chain(session.batches(DATA), [None]):
                if before is not None:
                    with session.step(before):
                        pass
                before = batch
        assert session.round == (strategy == "local")

    LocalWorld(world_size).run(train)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("strategy", ["local", "sync", "horovod"])
def test_one_rank_may_leave_its_loop_but_not_begin_again(strategy: str, held: bool) -> None:
    model = make_model()
    config = Config(strategy=strategy, mega_batch=200)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=LocalTransport())
    batches = session.batches(DATA)
    for batch in batches:
        with session.step(batch):
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
        break
    if not held:
        del batches
        session.gather(1)
    said = "this was called within round 0" if held else "the loop .* was left within round 0, by break"
    with pytest.raises(RuntimeError, match=rf"rank 0: {said}.* session.stop\(\)"):
        next(session.batches(DATA))
    session.close()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("next_call", ["batches", "gather", "close", "save"])
def test_a_rank_whose_loop_was_left_is_told_so_at_its_next_call(next_call: str, held: bool, tmp_path: Path) -> None:
    """The other one waits for it at the round's end, and would for minutes."""

    def leave(transport: LocalTransport) -> None:
        model = make_model()
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Config(mega_batch=200), transport=transport)
        checkpoints = Checkpointer(session, tmp_path / "checkpoints", interval=100)
        kept = []
        for _ in range(2):
            batches = session.batches(DATA)
            if held:
                kept.append(batches)
            for batch in batches:
                if transport.rank == 1:
                    break
                with session.step(batch):
                    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                    session.optimizer.step()
            del batches
            calls = {"gather": lambda: session.gather(1), "close": session.close, "save": checkpoints.close}
            if next_call != "batches":
                calls[next_call]()

    # Nobody knows what will become of one that is kept.
    said = "this was called within round 0 of the loop over the batches, or after a break" if held else "the loop .* was left"
    with pytest.raises(RuntimeError, match=rf"rank 1: {said}.* session.stop\(\)"):
        LocalWorld(2).run(leave)


def test_a_loop_without_an_optimizer_step_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, Config(mega_batch=200, batch_size=4), transport=LocalTransport())
    for batch in session.batches(DATA):
        with session.step(batch):
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    session.close()
    told = [r.getMessage() for r in caplog.records if "learns nothing" in r.getMessage()]
    assert len(told) == 1 and re.search(r"no optimizer.step\(\) in the first \d+ batches", told[0])


def test_a_model_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(ValueError, match=r"on the meta device .* the first is 0\.weight: .*to_empty"):
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=LocalTransport())


@pytest.mark.parametrize("strategy", ["local", "sync", "horovod", "sma"])
def test_a_model_that_no_strategy_can_train_is_refused(strategy: str) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Linear(2, 2)
            self.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    for model, said in (
        (Complex(), r"real parameters, got 1 complex, the first is w: .*view_as_real"),
        (make_model().requires_grad_(False), "requires_grad=True, got none"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=said):
            Session(model, optimizer, Config(strategy=strategy), transport=LocalTransport())


def test_an_elastic_batch_for_no_number_of_ranks_is_refused() -> None:
    model = make_model()
    with pytest.raises(AgreedError, match="elastic_batch 'fixed-per-rank' needs reference_ranks"):
        Session(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Config(elastic_batch="fixed-per-rank"), transport=LocalTransport()
        )


@pytest.mark.parametrize("strategy", ["local", "sync", "horovod", "sma"])
def test_an_optimizer_that_does_not_train_the_model_is_refused(strategy: str) -> None:
    model, other = make_model(), make_model()
    both = torch.optim.SGD([*model.parameters(), *other[0].parameters()], lr=0.1)
    num_own = len(list(model.parameters()))

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.param_groups, self.state = base, base.param_groups, base.state

    ahead = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    for optimizer, error, said in (
        (ahead, TypeError, "Lookahead has not called torch.optim.Optimizer.__init__"),
        (None, TypeError, "optimizer must be a torch optimizer, such as .*, got NoneType"),
        (model.parameters(), TypeError, "optimizer must be a torch optimizer, such as .*, got generator"),
        (torch.optim.SGD(other.parameters(), lr=0.1), ValueError, f"{num_own} of its {num_own} are not, .*ModuleDict"),
        (both, ValueError, rf"2 of its {num_own + 2} are not, the first has shape \(8, 6\)"),
    ):
        with pytest.raises(error, match=said):
            Session(model, optimizer, Config(strategy=strategy), transport=LocalTransport())  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_complex_buffers_keep_both_parts_over_merges(strategy: str) -> None:
    """Such as a rotary embedding's table; what forward passes change meets as the mean."""

    def run(transport: LocalTransport) -> tuple[list[torch.Tensor], int]:
        model = make_model()
        table = torch.view_as_complex(torch.rand(5, 2, generator=torch.Generator().manual_seed(transport.rank)))
        model.register_buffer("table", table.clone())
        model.register_buffer("seen", torch.tensor(0j, dtype=torch.complex128))

        def count(session: Session, batch: Any) -> None:
            model.seen += 1 + 2j

        train(transport, Config(strategy=strategy, batch_size=50, mega_batch=100), model=model, on_batch=count)
        return [model.table, model.seen], transport.rank

    results = LocalWorld(2).run(run) if strategy == "local" else [run(LocalTransport())]
    expected = torch.view_as_complex(torch.rand(5, 2, generator=torch.Generator().manual_seed(0)))
    for (table, seen), _ in results:
        assert torch.equal(table, expected)
        assert seen.real > 0 and abs(seen.imag - 2 * seen.real) < 1e-6 * seen.real


def test_lazy_modules_are_told_to_run_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"lazy modules have no shape yet, the first is 0\.weight: run one forward pass"):
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Config())


@pytest.mark.parametrize("strategy", ["local", "sma", "sync"])
@pytest.mark.parametrize(("elastic_batch", "growth"), [("fixed-global", 1.0), ("fixed-per-rank", 0.5)])
def test_rounds_that_were_not_set_are_as_long_for_fewer_ranks_than_the_reference(
    strategy: str, elastic_batch: str, growth: float
) -> None:
    """So a job that loses ranks merges as often as before."""
    config = Config(strategy=strategy, batch_size=16, reference_ranks=4, elastic_batch=elastic_batch)

    def mega_batches(transport: LocalTransport, make: Any) -> tuple[list[int], int]:
        model = make_model()
        made = make_strategy(model, make(model.parameters(), lr=0.1), config, transport)
        return [made.mega_batch_of(size) for size in (0, 800, 10**6)], made.round_unit

    for make in (torch.optim.SGD, torch.optim.AdamW):
        whole, fewer = (LocalWorld(count).run(lambda t: mega_batches(t, make))[0] for count in (4, 2))  # noqa: B023
        assert whole[0] == ([64, 100, 800] if make is torch.optim.SGD or strategy != "local" else [320] * 3)
        # However long they are, few data have eight of them.
        expected = [100 if size == 100 else growth * size for size in whole[0]]
        assert fewer == (expected, growth * whole[1]) and whole[1] == 64


def test_lbfgs_forgets_what_it_knew_of_another_model() -> None:
    def run(transport: LocalTransport) -> list[int]:
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        session = Session(model, optimizer, Config(batch_size=25, mega_batch=200), transport=transport)
        iterations: list[int] = []
        session.records.append(lambda record: iterations.append(sum(s.get("n_iter", 0) for s in optimizer.state.values())))
        for batch in session.batches(DATA):
            with session.step(batch):

                def closure(batch: Any = batch) -> Any:
                    session.optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(batch.x), batch.y)
                    loss.backward()
                    return loss

                session.optimizer.step(closure)
        session.close()
        return iterations

    for iterations in LocalWorld(2).run(run):
        assert iterations and not any(iterations)


def test_a_frozen_copy_that_steps_move_is_named_with_a_way_out() -> None:
    def run(transport: LocalTransport) -> None:
        model = make_model()
        model[0].copy = nn.Parameter(torch.ones(2), requires_grad=False)

        def follow(session: Session, batch: Any) -> None:
            model[0].copy.data.mul_(0.9 + 0.01 * transport.rank)

        train(transport, Config(batch_size=50, mega_batch=100, hash_interval=1), model=model, on_batch=follow)

    with pytest.raises(AgreedError, match=r"in frozen parameters \(0.copy\), .* in session.records, after the merge"):
        LocalWorld(2).run(run)


def test_a_loop_over_epochs_that_would_do_nothing_is_an_error() -> None:
    model = make_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=50))

    def samples(num_epochs: float) -> int:
        total = 0
        for batch in session.batches(DATA, num_epochs=num_epochs):
            with session.step(batch):
                pass
            total += len(batch.rows)
        return total

    assert [samples(epoch + 1) for epoch in range(3)] == [len(DATA)] * 3
    with pytest.raises(ValueError, match=r"num_epochs 3 counts from the session's beginning, and 3 are done: .*epoch \+ 1"):
        samples(3)
    # As after a resume: there is a loop for each epoch, and the first ones are done.
    session._handed_out._end_of_loops = 0.0
    assert [samples(epoch + 1) for epoch in range(4)] == [0, 0, 0, len(DATA)]
    session.close()


def test_a_buffer_of_infinities_is_no_divergence() -> None:
    """Such as a causal mask. One that becomes NaN on a rank is."""
    mask = nn.Transformer.generate_square_subsequent_mask(4)

    def run(transport: LocalTransport) -> nn.Module:
        model = make_model()
        model.register_buffer("mask", mask.clone(), persistent=False)
        model.register_buffer("seen", torch.zeros(1))

        def count(session: Session, batch: Any) -> None:
            model.seen += 1

        train(transport, Config(batch_size=50, mega_batch=100), model=model, on_batch=count)
        return model

    for model in LocalWorld(2).run(run):
        assert torch.equal(model.mask, mask) and 0 < float(model.seen) < torch.inf


@pytest.mark.parametrize("options", [{}, {"merges_per_round": 2}, {"merge_fragments": 2}])
def test_tensors_that_a_step_replaces_are_merged(options: dict[str, Any]) -> None:
    """``p.data = ...`` and ``self.buffer = ...`` put other memory in the place of what was there."""

    def run(transport: LocalTransport) -> nn.Module:
        model = make_model()
        model.register_buffer("mean", torch.zeros(1))

        def replace(session: Session, batch: Any) -> None:
            for parameter in model.parameters():
                parameter.data = parameter.data.clamp(-2, 2)
            model.mean = 0.9 * model.mean + 0.1 * session.rank

        train(transport, Config(batch_size=10, mega_batch=100, hash_interval=1, **options), model=model, on_batch=replace)
        return model

    first, second = LocalWorld(2).run(run)
    assert 0 < float(first.mean) < 1
    for one, other in zip([*first.parameters(), *first.buffers()], [*second.parameters(), *second.buffers()], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_a_state_is_loaded_into_the_memory_that_tensors_have_now(strategy: str) -> None:
    """A script may give them other memory between Session(...) and its resume."""

    def run(transport: LocalTransport) -> None:
        done = train(transport, Config(batch_size=10, mega_batch=100, strategy=strategy), num_epochs=1)
        model = make_model(1)
        session = Session(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=10, strategy=strategy), transport=transport
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        norm: Any = model[1]
        norm.running_mean, norm.num_batches_tracked = norm.running_mean.clone(), norm.num_batches_tracked.clone()
        session.load_state_dict(done["session"].state_dict())
        assert model_hash(model) == model_hash(done["model"])
        session.close()

    LocalWorld(1).run(run)


@pytest.mark.parametrize("sparse_merge", ["auto", "always", "never"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sparse_parameter_that_a_step_replaces_is_merged(world_size: int, sparse_merge: str) -> None:
    rows = torch.arange(300) % 40

    def run(transport: LocalTransport, replaces: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 4, sparse=True, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.3)
        with torch.no_grad():
            model[1].weight += torch.arange(8.0).view(2, 4)

        def replace(session: Session, batch: Any) -> None:
            if replaces and session.round % 3 == 1:
                model[0].weight.data = model[0].weight.data.clone()

        config = Config(batch_size=10, mega_batch=100, hash_interval=1, sparse_merge=sparse_merge, dispatch="equal")
        train(transport, config, model=model, data=TensorDataset(rows, rows % 2), num_epochs=3, on_batch=replace)
        return model

    plain, ours = (LocalWorld(world_size).run(lambda t: run(t, replaces)) for replaces in (False, True))  # noqa: B023
    for expected, model in zip(plain, ours, strict=True):
        assert float((expected[0].weight.detach()[:40] - 0.3).abs().min()) > 1e-5
        for a, b in zip(expected.parameters(), model.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"merge_weights": "fisher-rows"}, {"micro_batch_size": 5}])
def test_a_closed_session_leaves_no_hook_behind(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.arange(100) % 40

    def num_hooks() -> int:
        of_tensors = sum(len(p._backward_hooks or ()) for p in model.parameters())
        return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) + of_tensors

    for _ in range(2):
        session = Session(model, optimizer, Config(batch_size=10, mega_batch=50, **options), transport=LocalTransport())
        for batch in session.batches(TensorDataset(rows, rows % 2)):
            with session.step(batch):
                optimizer.zero_grad()
                for micro in batch.micro_batches():
                    nn.functional.cross_entropy(model(micro.x), micro.y).backward()
                optimizer.step()
        session.close()
        assert num_hooks() == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closed_session_gives_nothing_more_and_closes_once(world_size: int) -> None:
    def body(transport: LocalTransport) -> None:
        model = make_model()
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=50), transport=transport)
        for batch in session.batches(DATA):
            with session.step(batch):
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
        session.close()
        session.close()
        for use in (
            lambda: next(session.batches(DATA)), lambda: session.loader(DATA), lambda: session.gather(1),
            lambda: session.step(batch).__enter__(),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="this Session is closed"):
                use()
        # A last save needs nobody else.
        assert session.state_dict()["world_size"] == world_size

    LocalWorld(world_size).run(body)


class Held:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["seen"]


def test_state_that_cannot_be_saved_is_refused_when_it_is_registered() -> None:
    session = Session(
        model := make_model(), torch.optim.SGD(model.parameters(), lr=1), transport=LocalTransport()
    )
    for state, got in (({1, 2}, "set"), (torch.float32, "dtype"), (np.array(["a"]), "ndarray")):
        with pytest.raises(TypeError, match=rf"register_state: state mine\.seen cannot be saved, got {got}"):
            session.register_state("mine", Held(state))
    for value in (object(), [1], {"state_dict": 1}):
        with pytest.raises(TypeError, match=r"register_state: 'mine' must have state_dict\(\) and load_state_dict\(state\), got"):
            session.register_state("mine", value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must be a string, got 3"):
        session.register_state(3, Held(1))  # type: ignore[arg-type]
    # Nothing of these is kept; a name that was refused is free.
    session.register_state("mine", Held((1, None, torch.ones(2))))
    session.register_state("scheduler", torch.optim.lr_scheduler.StepLR(session.optimizer, 3))
    assert set(session.state_dict()["own"]["registered"]) == {"mine", "scheduler"}


def test_memory_beyond_the_model_is_two_copies_and_one_for_the_outer_step() -> None:
    for outer_step, copies in (("none", 2), ("nesterov", 3)):
        session = LocalWorld(1).run(lambda t: train(t, Config(outer_step=outer_step)))[0]["session"]  # noqa: B023
        strategy = session._strategy
        held = [t for g in strategy.flat_model.parameter_groups for t in (g.weights, g.delta)]
        held += strategy.merge.outer.velocity.values()
        assert sum(t.numel() for t in held) == copies * sum(p.numel() for p in session.model.parameters())


def test_averaged_optimizer_state_is_the_weighted_mean_of_the_ranks_that_have_it() -> None:
    weights = [0.25, 0.75, 0.0]

    def run(transport: LocalTransport) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.Adagrad([parameter], lr=0.1)
        optimizer.state[parameter]["sum"] = torch.full((3,), 1.0 + transport.rank)
        average_(optimizer, transport, weights[transport.rank])
        return optimizer.state[parameter]["sum"]

    for state in LocalWorld(3).run(run):
        assert torch.allclose(state, torch.full((3,), 0.25 * 1 + 0.75 * 2))


def test_infinite_moments_of_one_rank_stay_its_own_and_lost_ones_go() -> None:
    def run(transport: LocalTransport) -> tuple[Any, Any, Any]:
        shared, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([shared, own, other := nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer.state[shared]["exp_avg_sq"] = torch.tensor([1.0, 1.0 if transport.rank else torch.inf])
        optimizer.state[shared]["exp_avg"] = torch.full((2,), float(transport.rank))
        optimizer.state[other]["exp_avg"] = torch.full((1,), float(transport.rank))
        assert [id(p) for p in average_(optimizer, transport, 0.5)] == [id(shared)]
        assert optimizer.state[shared].pop("exp_avg").tolist() == [transport.rank] * 2
        assert optimizer.state.pop(other)["exp_avg"].tolist() == [0.5]
        infinite = optimizer.state[shared]["exp_avg_sq"].tolist()
        # Rank 1 has lost its steps, and state of a parameter that no other rank has.
        optimizer.state[shared]["exp_avg_sq"] = torch.full((2,), torch.nan if transport.rank else 3.0)
        if transport.rank:
            optimizer.state[own]["exp_avg_sq"] = torch.full((2,), torch.nan)
        average_(optimizer, transport, 1.0 - transport.rank, is_lost=transport.rank == 1)
        return infinite, optimizer.state[shared]["exp_avg_sq"].tolist(), dict(optimizer.state[own])

    assert LocalWorld(2).run(run) == [([1.0, torch.inf], [3.0, 3.0], {}), ([1.0, 1.0], [3.0, 3.0], {})]


def test_moments_that_are_infinite_on_one_rank_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def run(transport: LocalTransport) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        optimizer = torch.optim.Adam(model.parameters())
        session = Session(model, optimizer, Config(batch_size=2, mega_batch=8, dispatch="equal"), transport=transport)
        for batch in session.batches(TensorDataset(torch.ones(8, 2)), num_epochs=3):
            with session.step(batch):
                model(torch.full((len(batch.rows), 2), 1.0 + transport.rank)).sum().backward()
                session.optimizer.step()
                if transport.rank:
                    optimizer.state[model[0].bias]["exp_avg_sq"].fill_(torch.inf)
        session.close()
        return [optimizer.state[p]["exp_avg_sq"].sum().item() for p in (model[0].bias, model[1].bias)]  # type: ignore[return-value]

    (own, shared), (infinite, same) = LocalWorld(2).run(run)
    assert own < torch.inf == infinite and shared == same
    (message,) = [r.message for r in caplog.records if "NaN or Inf on a rank" in r.message]
    assert message.startswith("the optimizer's state of 0.bias has NaN")


def test_a_large_state_is_averaged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 5, 2, 7, 1]
    monkeypatch.setattr(optimizer_state, "_ELEMENTS_AT_ONCE", 8)

    def run(transport: LocalTransport) -> tuple[list[torch.Tensor], list[int]]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        optimizer = torch.optim.Adagrad(parameters, lr=0.1)
        for number, parameter in enumerate(parameters):
            optimizer.state[parameter] = {"sum": torch.full_like(parameter, float(number + transport.rank)), "step": 3 + number}
        sums: list[int] = []
        plain = transport.allreduce_sum_
        monkeypatch.setattr(transport, "allreduce_sum_", lambda flat, **o: (sums.append(flat.numel()), plain(flat, **o)))
        average_(optimizer, transport, (0.25, 0.75)[transport.rank])
        return [optimizer.state[p]["sum"] for p in parameters], sums

    for sums, numbers in LocalWorld(2).run(run):
        assert all(torch.equal(mean, torch.full((sizes[number],), number + 0.75)) for number, mean in enumerate(sums))
        # Numbers of Python are of their own precision.
        assert sum(numbers) == sum(sizes) + len(sizes) and len(numbers) > 2 and max(numbers) < 8 + max(sizes)


@pytest.mark.parametrize(
    ("make", "options", "averages"),
    [
        (torch.optim.Adam, {}, True),
        (torch.optim.NAdam, {}, True),
        (torch.optim.AdamW, {"compression": "maxmin:8"}, False),
        (torch.optim.AdamW, {"merge_fragments": 2}, False),
        (torch.optim.RMSprop, {}, False),
    ],
)
def test_moments_of_adam_are_averaged_unless_merges_are_compressed(make: Any, options: dict[str, Any], averages: bool) -> None:
    def run(transport: LocalTransport) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        config = Config(batch_size=4, mega_batch=24, dispatch="equal", **options)
        session = Session(model, make(model.parameters(), lr=0.01), config, transport=transport)
        data = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(1)))
        for batch in session.batches(data):
            with session.step(batch):
                session.optimizer.zero_grad()
                session.model(batch.x[0]).square().mean().backward()
                session.optimizer.step()
        name = "square_avg" if make is torch.optim.RMSprop else "exp_avg_sq"
        return session.optimizer.state[model[0].weight][name]

    one, other = LocalWorld(2).run(run)
    assert torch.equal(one, other) == averages


def test_averaged_whole_numbers_are_rounded() -> None:
    """Equal ones stay what they are, though weights of 10:5:4 in floating point sum to a little less than 1."""
    weights = [10 / 19, 5 / 19, 4 / 19]

    def run(transport: LocalTransport) -> dict[str, Any]:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.Adagrad([parameter], lr=0.1)
        number = (5, 6, 8)[transport.rank]
        optimizer.state[parameter] = {
            "equal": 5, "unequal": number, "real": float(number), "flag": True, "count": torch.tensor(number),
            "counts": torch.full((3,), number),
        }  # fmt: skip
        average_(optimizer, transport, weights[transport.rank], unions={id(parameter): torch.tensor([0, 2])})
        return optimizer.state[parameter]

    for rank, state in enumerate(LocalWorld(3).run(run)):
        assert (state["equal"], state["unequal"], state["flag"], int(state["count"])) == (5, 6, True, 6)
        assert state["counts"].tolist() == [6, (5, 6, 8)[rank], 6]
        assert state["real"] == pytest.approx(112 / 19)


def test_the_outer_step_follows_the_optimizer_and_options_without_one_are_refused() -> None:
    Step = tuple[str, float | None, float | None]

    def of(num_ranks: int, make: Any, **options: Any) -> Step:
        def run(transport: LocalTransport) -> Step:
            model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
            outer = LocalStrategy(model, make(model.parameters()), Config(**options), transport).merge.outer
            return outer.kind, outer.lr, outer.momentum

        return LocalWorld(num_ranks).run(run)[0]

    sgd, adam, adagrad = torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad
    # One rank trains as without us.
    assert [of(1, make)[0] for make in (sgd, adam, adagrad)] == ["none", "none", "none"]
    assert of(2, adam) == ("cautious", None, None)
    # At SGD's best rates longer steps diverge.
    assert of(2, sgd)[0] == of(2, adagrad)[0] == "none"
    # The outer step comes on top of the optimizer's own momentum.
    with_momentum: Any = lambda parameters: sgd(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    assert of(2, with_momentum)[0] == "none" and of(2, with_momentum, outer_momentum=0.5) == ("nesterov", 0.7, 0.5)
    assert of(2, sgd, outer_step="nesterov") == ("nesterov", 0.7, 0.9)
    assert of(1, adam, outer_step="momentum") == ("momentum", 1.0, 0.9)
    assert of(1, adam, outer_momentum=0.6) == ("cautious", None, 0.6)
    assert of(1, adam, outer_lr=0.9, outer_momentum=0.6) == ("cautious", 0.9, 0.6)
    # It would grow with the momentum.
    with pytest.raises(AgreedError, match=r"outer_lr 0.9 needs outer_momentum with outer_step 'cautious', got none.* none$"):
        of(2, adam, outer_lr=0.9)
    with pytest.raises(ValueError, match=r"outer_lr 0.9 needs outer_momentum"):
        Config(outer_step="cautious", outer_lr=0.9)
    # Merges that are late, or follow no clock, have none unless it is set.
    assert of(2, adam, merge_fragments=2)[0] == of(2, adam, logical_ranks=4)[0] == "none"
    with pytest.raises(AgreedError, match=r"outer_momentum 0.5 needs outer_step momentum .* or cautious, got .* with Adagrad"):
        of(2, adagrad, outer_momentum=0.5)


@pytest.mark.parametrize("strategy", ["local", "sync", "horovod"])
def test_a_second_step_of_a_batch_is_refused(strategy: str) -> None:
    session = Session(
        model := make_model(), torch.optim.SGD(model.parameters(), lr=0.1), Config(strategy=strategy), transport=LocalTransport()
    )
    batch = next(session.batches(DATA))
    # A step that failed may be made again.
    with pytest.raises(OSError, match="no file"), session.step(batch):
        raise OSError("no file")
    refused = pytest.raises(RuntimeError, match=r"rank 0: the step of batch 1 \(rows .* has begun, got a second")
    with session.step(batch), refused, session.step(batch):
        pass
    with pytest.raises(RuntimeError, match=r"rank 0: the step of batch 1 \(rows .* is over"), session.step(batch):
        pass


class _Rows:
    """A data set of any length."""

    def __init__(self) -> None:
        self.length = 97

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> int:
        return row


@pytest.mark.parametrize("length", [40, 400])
def test_a_data_set_that_changes_within_a_loop_is_refused(length: int) -> None:
    rows = _Rows()
    session = Session(
        model := make_model(), torch.optim.SGD(model.parameters(), lr=0.1), Config(batch_size=8), transport=LocalTransport()
    )
    for epoch in range(2):
        for batch in session.batches(rows, num_epochs=epoch + 1):
            with session.step(batch):
                pass
        rows.length += 10  # between two loops it may

    def train_on() -> None:
        for batch in session.batches(rows, num_epochs=4):
            with session.step(batch):
                rows.length = length

    with pytest.raises(RuntimeError, match=rf"the data set has {length} samples now and had 117 when"):
        train_on()


def test_averages_of_moments_take_a_twentieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(optimizer_state.time, "perf_counter", lambda: now)
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    limit = optimizer_state.AverageLimit.of(Config(merge_period="auto"), adam)
    assert limit is not None and limit.is_due()
    assert limit.took(2.0) == 2.0 and not limit.is_due()
    now += 39.9
    assert not limit.is_due()
    now += 0.2
    assert limit.is_due()


@pytest.mark.parametrize(
    "options",
    [{}, {"merge_period": "auto", "optimizer_state": "average"}, {"merge_period": "auto", "record": True}],
)
def test_averages_have_no_limit_where_runs_repeat_or_they_are_set(options: dict[str, Any]) -> None:
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    assert optimizer_state.AverageLimit.of(Config(**options), adam) is None
