"""Merging only touched rows: the dense merge's bits, found writes, the choice between both ways."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.algorithm.row_choice import RowChoice
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy

NUM_ROWS = 400
ROUNDS = 6


class Net(nn.Module):
    """Two sparse parameters with dense ones around them, in different dtypes."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3))
        self.bag = nn.EmbeddingBag(NUM_ROWS, 6, mode="sum", sparse=sparse)
        self.between = nn.Linear(6, 5)
        self.table = nn.Embedding(NUM_ROWS, 5, sparse=sparse)
        self.fine = nn.Embedding(NUM_ROWS, 5, sparse=sparse, dtype=torch.float64)
        self.coarse = nn.Embedding(NUM_ROWS, 5, sparse=sparse, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(torch.relu(self.bag(x))) * self.first.sum()
        tables = self.table(x[:, 0]) + self.fine(x[:, 1]).float() + self.coarse(x[:, 2]).float()
        return self.norm(hidden + tables).square().sum()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(
    transport: LocalTransport,
    *,
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.01),
    on_round: Callable[[int, int, Net], None] = lambda rank, number, model: None,
    after_merge: Callable[[int, LocalStrategy], None] = lambda number, strategy: None,
    rows: int = 30,
    sparse: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Trains rounds of a few steps on batches that depend on rank and round only."""
    model = Net(sparse=sparse)
    # Threads share torch's own generator.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = make(model.parameters())
    # Averaged, the state of rows that nobody touched rounds where all rows are merged, and stays where only touched ones are.
    config = Config(**{"hash_interval": 0, "merge_weights": "updates", "optimizer_state": "keep", **options})
    strategy = LocalStrategy(model, optimizer, config, transport)
    states, payloads, merged = [], [], []
    for number in range(ROUNDS):
        generator = torch.Generator().manual_seed(100 * number + transport.rank)
        strategy._round = number
        num_steps = 1 + transport.rank
        for _ in range(num_steps):
            # Other rows become popular as time goes on, and some never appear.
            x = torch.randint(0, rows, (8, 4), generator=generator) + 10 * number
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        on_round(transport.rank, number, model)
        stats = RoundStats(batch_size=8, num_updates=num_steps, num_samples=8 * num_steps, num_steps=num_steps)
        _, _, payload = strategy.end_round(stats)
        after_merge(number, strategy)
        states.append(state(model))
        payloads.append(payload)
        merged.append(stats.merge_rows)
    return {"states": states, "payloads": payloads, "merged": merged, "strategy": strategy, "model": model}


def assert_equal_states(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in a:
            assert torch.equal(a[name], b[name]), (number, name)


OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.01), "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1)}
# Every number of ranks with every outer step and rule of weights; of all five, every pair of values.
CASES = [
    (world_size, outer_step, weights, list(OPTIMIZERS)[(world_size + outer + rule) % 2], (30, 300)[(world_size + outer // 2) % 2])
    for world_size in (1, 2, 3)
    for outer, outer_step in enumerate(("none", "momentum", "nesterov", "cautious"))
    for rule, weights in enumerate(("updates", "fisher-rows"))
]


@pytest.mark.parametrize(("world_size", "outer_step", "weights", "optimizer", "rows"), CASES)
def test_touched_rows_give_the_dense_merges_bits(
    world_size: int, outer_step: str, weights: str, optimizer: str, rows: int
) -> None:
    make = OPTIMIZERS[optimizer]
    results = {
        mode: LocalWorld(world_size).run(
            lambda t: train(
                t, make=make, rows=rows, outer_step=outer_step, sparse_merge=mode, merge_weights=weights  # noqa: B023
            )
        )
        for mode in ("never", "always")
    }
    for rank in range(world_size):
        dense, sparse = results["never"][rank], results["always"][rank]
        assert_equal_states(sparse["states"], dense["states"])
        assert_equal_states(sparse["states"], results["always"][0]["states"])
        flat = dense["strategy"].flat_model.parameter_groups
        for ours, theirs in zip(sparse["strategy"].flat_model.parameter_groups, flat, strict=True):
            assert torch.equal(ours.weights, theirs.weights)
        if rows == 30:
            assert max(sparse["payloads"]) < 0.5 * min(dense["payloads"])
    assert all(0 < n < 4 * NUM_ROWS for n in results["always"][0]["merged"])


def test_going_back_and_forth_between_both_ways_keeps_the_bits() -> None:
    def alternate(number: int, strategy: LocalStrategy) -> None:
        strategy.merge.rows._choice._mode = ["always", "never"][number // 2 % 2]

    mixed = LocalWorld(2).run(lambda t: train(t, sparse_merge="always", after_merge=alternate))
    dense = LocalWorld(2).run(lambda t: train(t, sparse_merge="never"))
    merged = mixed[0]["merged"]
    assert max(merged) == 4 * NUM_ROWS and sorted(set(merged))[1] < 4 * NUM_ROWS
    for ours, theirs in zip(mixed, dense, strict=True):
        assert_equal_states(ours["states"], theirs["states"])


def test_a_velocity_from_elsewhere_moves_its_rows() -> None:
    def load(number: int, strategy: LocalStrategy) -> None:
        if number == 1:
            for dtype, velocity in strategy.merge.outer.velocity.items():
                strategy.merge.outer.velocity[dtype] = torch.full_like(velocity, 0.25)

    results = [
        LocalWorld(2).run(lambda t: train(t, sparse_merge=mode, after_merge=load))  # noqa: B023
        for mode in ("always", "never")
    ]
    assert_equal_states(results[0][0]["states"], results[1][0]["states"])


def write_open(rank: int, number: int, model: Net) -> None:
    if rank == 1 and number == 2:
        with torch.no_grad():
            model.bag.weight[390] += 1


def write_hidden(rank: int, number: int, model: Net) -> None:
    if rank == 1 and number == 2:
        model.bag.weight.data[390] += 1


def renormalize(rank: int, number: int, model: Net) -> None:
    with torch.no_grad():
        model.table.weight.mul_(0.9)


@pytest.mark.parametrize("write", [write_open, renormalize])
def test_a_write_outside_steps_is_merged_at_once(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    results = [
        LocalWorld(2).run(lambda t: train(t, sparse_merge=mode, on_round=write))  # noqa: B023
        for mode in ("always", "never")
    ]
    assert_equal_states(results[0][0]["states"], results[1][0]["states"])
    assert_equal_states(results[0][0]["states"], results[0][1]["states"])
    assert "was written outside optimizer.step" in caplog.text


def test_a_write_that_leaves_no_trace_is_found(caplog: pytest.LogCaptureFixture) -> None:
    sparse, dense = (
        LocalWorld(2).run(
            lambda t: train(t, sparse_merge=mode, on_round=write_hidden, hash_interval=4, outer_step="none")  # noqa: B023
        )
        for mode in ("always", "never")
    )
    # In round 2 it happened, in round 3 it was found and merged: with another rank's weight, the same on both.
    assert not torch.equal(sparse[0]["states"][2]["bag.weight"], sparse[1]["states"][2]["bag.weight"])
    assert_equal_states(sparse[0]["states"][3:], sparse[1]["states"][3:])
    assert torch.allclose(sparse[0]["states"][3]["bag.weight"], dense[0]["states"][3]["bag.weight"])
    assert "bag.weight changed on ranks [1] in rows without a gradient" in caplog.text
    assert sparse[0]["merged"][2] < NUM_ROWS < sparse[0]["merged"][3]
    assert caplog.text.count("leaves no trace") == 1


def test_a_step_that_changes_other_rows_touches_all(caplog: pytest.LogCaptureFixture) -> None:
    def decay(number: int, strategy: LocalStrategy) -> None:
        # Adagrad with a weight decay refuses sparse gradients, a momentum is SGD's way to change other rows.
        strategy.optimizer.param_groups[0]["momentum"] = 0.5

    results = [
        LocalWorld(2).run(lambda t: train(t, sparse_merge=mode, after_merge=decay))  # noqa: B023
        for mode in ("always", "never")
    ]
    assert_equal_states(results[0][0]["states"], results[1][0]["states"])
    assert "SGD with momentum, which changes all rows" in caplog.text
    assert results[0][0]["merged"][0] < NUM_ROWS and results[0][0]["merged"][1] == 4 * NUM_ROWS


def test_a_rank_that_is_not_finite_is_reset(caplog: pytest.LogCaptureFixture) -> None:
    def poison(rank: int, number: int, model: Net) -> None:
        if rank == 1 and number == 2:
            # Through the touched rows, as a diverging step does.
            row = int(torch.nonzero(model.bag.weight.grad.coalesce().to_dense().abs().sum(1))[0])
            model.bag.weight.data[row] = float("nan")

    results = LocalWorld(2).run(lambda t: train(t, sparse_merge="always", on_round=poison))
    assert "ranks [1] had NaN or Inf" in caplog.text
    assert_equal_states(results[0]["states"], results[1]["states"])
    assert all(value.isfinite().all() for value in results[0]["states"][-1].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make": lambda p: torch.optim.AdamW(p)}, "bag.weight is stepped by AdamW"),
        ({"make": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}, "SGD with momentum"),
        ({"sparse": False}, "got a model without sparse gradients"),
    ],
)
def test_always_needs_sparse_gradients(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalWorld(1).run(lambda t: train(t, **{"sparse_merge": "always", **options}))


def test_auto_merges_such_models_densely_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Own(torch.optim.SGD):
        pass

    result = LocalWorld(1).run(lambda t: train(t, make=lambda p: Own(p, lr=0.01)))[0]
    assert result["merged"] == [0] * ROUNDS
    assert "bag.weight is stepped by Own, which is not known" in caplog.text


def test_the_choice_is_taken_together_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    results = LocalWorld(3).run(lambda t: train(t, sparse_merge="auto"))
    assert results[0]["merged"] == results[1]["merged"] == results[2]["merged"]
    assert "merges exchange only the touched rows of sparse parameters" in caplog.text


def play(choice: RowChoice, *, share: float, dense_s: float, sparse_s: float, rounds: int) -> list[bool]:
    taken = []
    for _ in range(rounds):
        sparse_bytes = int(share * 1000)
        sparse = choice.choose(
            sparse_bytes=sparse_bytes, dense_bytes=1000, measured=np.stack([choice.measured()] * 2)
        )
        choice.observe(sparse, seconds=sparse_s if sparse else dense_s, num_bytes=sparse_bytes if sparse else 1000)
        taken.append(sparse)
    return taken


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("sparse_s", [0.5, 3.0])
def test_the_cheaper_way_wins_after_both_were_tried(share: float, sparse_s: float) -> None:
    taken = play(RowChoice("auto"), share=share, dense_s=1.0, sparse_s=sparse_s, rounds=60)
    assert taken[:4] == ([True, True, False, False] if share < 0.5 else [False, False, True, True])
    assert all(way == (sparse_s < 1.0) for way in taken[4:40])


def test_an_old_measurement_is_repeated_where_it_was_close() -> None:
    choice = RowChoice("auto")
    assert play(choice, share=0.3, dense_s=1.5, sparse_s=1.0, rounds=60).count(False) == 3
    # The link became slower for rows only: dense wins once it was measured again.
    assert not any(play(choice, share=0.3, dense_s=0.5, sparse_s=1.0, rounds=300)[-5:])


def test_where_it_is_obvious_nothing_is_tried() -> None:
    assert all(play(RowChoice("auto"), share=0.05, dense_s=1.0, sparse_s=9.0, rounds=20))
    assert not any(play(RowChoice("auto"), share=0.95, dense_s=9.0, sparse_s=1.0, rounds=20))
    assert all(play(RowChoice("always"), share=1.0, dense_s=1.0, sparse_s=9.0, rounds=5))
    assert not any(play(RowChoice("never"), share=0.0, dense_s=1.0, sparse_s=0.1, rounds=5))
