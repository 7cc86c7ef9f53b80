"""Merges of one optimizer's model, ranks as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.algorithm import round_control
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.engine import merge_codec
from hvd_adaptive.wrap.merging import Merger, Trained
from hvd_adaptive.wrap.run_options import RunConfig

SIZE = 3


class Rank:
    """A model with BatchNorm, an optimizer and its merger; steps by gradients of ones times the rank plus one."""

    def __init__(self, world: LocalTransport, make: Any = torch.optim.SGD, **options: Any) -> None:
        torch.manual_seed(world.rank)
        self.rank = world.rank
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        self.optimizer = make(self.model.parameters(), lr=0.1)
        named = list(self.model.named_parameters())
        self.merger = Merger(
            self.optimizer, named, [self.model], RunConfig(strategy="local", **options), world  # type: ignore[arg-type]
        )

    def step(self, num_samples: int = 8, seconds: float = 0.01) -> None:
        self.merger.begin_step(num_samples=num_samples, global_samples=8 * SIZE, epoch_samples=80_000)
        self.merger.timed(seconds)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, self.rank + 1.0)
        self.optimizer.step()
        self.merger.end_step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def on_ranks(body: Callable[[Rank], Any], **options: Any) -> list[Any]:
    return LocalWorld(SIZE).run(lambda world: body(Rank(world, **options)))


def test_all_start_from_rank_0_and_move_by_the_mean() -> None:
    def body(rank: Rank) -> tuple[Tensor, Tensor, Tensor]:
        start = rank.weights()
        # The first merge finds out how long a period is.
        rank.step()
        rank.merger.merge()
        once = rank.weights()
        assert rank.merger.log.steps_per_merge == 17
        for step in range(2):
            # Twice the equal share: twice the learning rate.
            rank.step(16 if rank.rank == 2 else 4)
            assert not rank.merger.is_due, step
        rank.merger.merge()
        return start, once, rank.weights()

    results = on_ranks(body, hash_interval=1)
    for start, once, twice in results:
        assert all(torch.equal(a, b) for a, b in zip((start, once, twice), results[0], strict=True))
        assert torch.allclose(start - once, torch.full_like(start, 0.1 * (1 + 2 + 3) / 3))
        assert torch.allclose(once - twice, torch.full_like(start, 2 * 0.1 * (0.5 * 1 + 0.5 * 2 + 2 * 3) / 3))


def test_a_rank_that_is_not_finite_contributes_nothing_and_starts_again() -> None:
    def body(rank: Rank) -> Tensor:
        start = rank.weights()
        rank.step()
        if rank.rank == 1:
            rank.model[0].weight.data[0, 0] = float("nan")  # type: ignore[index,union-attr]
        rank.merger.merge()
        return start - rank.weights()

    assert all(torch.allclose(moved, torch.full_like(moved, 0.1 * (1 + 3) / 2)) for moved in on_ranks(body))


@pytest.mark.parametrize("change", ["resize", "register"])
def test_a_buffer_that_changes_its_shape_or_comes_later_is_named(change: str) -> None:
    def body(rank: Rank) -> None:
        rank.step()
        if change == "resize":
            rank.model[1].running_mean.resize_(5)  # type: ignore[operator,union-attr]
        else:
            rank.model[0].register_buffer("late", torch.ones(2))
        with pytest.raises(RuntimeError, match=r"buffer (1\.running_mean|0\.late) of the model was .* when merges began"):
            rank.merger.merge()

    on_ranks(body)


def test_buffers_of_several_modules_are_each_there_once() -> None:
    norm = nn.BatchNorm1d(3)
    trained = Trained(list(norm.named_parameters()), [norm, nn.Sequential(norm, nn.BatchNorm1d(2))])
    names = ["running_mean", "running_var", "num_batches_tracked"]
    assert [name for name, _ in trained.named_buffers()] == [f"{place}.{name}" for place in ("0", "1.1") for name in names]
    assert [id(b) for b in trained.buffers()] == [id(b) for _, b in trained.named_buffers()]


def test_all_not_finite_is_an_error() -> None:
    def body(rank: Rank) -> None:
        rank.step()
        rank.model[0].weight.data.fill_(float("inf"))  # type: ignore[operator,union-attr]
        with pytest.raises(RuntimeError, match="ALL ranks hold NaN or Inf"):
            rank.merger.merge()

    on_ranks(body)


def test_an_error_that_is_not_of_nan_is_not_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    def body(rank: Rank) -> None:
        rank.step()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            rank.merger.merge()

    monkeypatch.setattr(round_control, "merge_weights", fail)
    on_ranks(body)


def test_steps_of_broken_ranks_only_leave_all_where_they_started(caplog: pytest.LogCaptureFixture) -> None:
    """The others made none, as where a GradScaler left theirs out."""

    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        start = rank.weights()
        if rank.rank == 1:
            rank.step()
            rank.model[0].weight.data.fill_(float("inf"))  # type: ignore[operator,union-attr]
        rank.merger.merge()
        return start, rank.weights()

    for start, merged in on_ranks(body):
        assert torch.equal(start, merged)
    assert "ranks [1] had NaN or Inf in their parameters" in caplog.text


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)])
def test_loaded_weights_are_where_steps_start_from(ranks: tuple[int, ...]) -> None:
    """Also where one rank has loaded and the others have got them by a broadcast."""

    def body(rank: Rank) -> Tensor:
        rank.step()
        rank.merger.merge()
        rank.step()
        for parameter in rank.model.parameters():
            # In other memory than before, as module.to(device) has it.
            parameter.data = torch.full_like(parameter, 7.0)
        if rank.rank in ranks:
            rank.merger.loaded(rank.model)
        rank.step()
        rank.merger.merge()
        return rank.weights()

    for weights in on_ranks(body, outer_step="momentum", outer_momentum=0.9):
        assert torch.allclose(weights, torch.full_like(weights, 7.0 - 0.2))


def test_one_rank_has_loaded_and_all_merge_before_it_broadcasts() -> None:
    """As where all ranks call state_dict() for the broadcast."""

    def body(rank: Rank) -> Tensor:
        rank.step()
        rank.merger.merge()
        rank.step()
        if rank.rank == 1:
            with torch.no_grad():
                for parameter in rank.model.parameters():
                    parameter.fill_(7.0)
            rank.merger.loaded(rank.model)
        rank.merger.merge()
        return rank.weights()

    for weights in on_ranks(body):
        assert torch.equal(weights, torch.full_like(weights, 7.0))


def test_weights_that_are_loaded_into_a_part_are_no_steps() -> None:
    def body(rank: Rank) -> tuple[Tensor, Tensor, Tensor]:
        rank.step()
        rank.merger.merge()
        before, part = rank.weights(), rank.model[0]
        rank.step()
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.fill_(7.0)
        rank.merger.loaded(part)
        rank.merger.merge()
        once = rank.weights()
        rank.step()
        rank.merger.merge()
        return before, once, rank.weights()

    num_loaded = 4 * 3 + 3
    for before, once, twice in on_ranks(body, outer_step="momentum", outer_momentum=0.9):
        assert torch.equal(once[:num_loaded], torch.full((num_loaded,), 7.0).double())
        assert torch.allclose(before[num_loaded:] - once[num_loaded:], torch.full((6,), 0.2).double())
        # The outer step has begun anew.
        assert torch.allclose(once[:num_loaded] - twice[:num_loaded], torch.full((num_loaded,), 0.2).double())


def test_adam_gets_an_outer_step_after_100_updates() -> None:
    """All its steps are as long as its learning rate here, as all gradients of a rank are the same."""

    def body(rank: Rank) -> list[float]:
        assert rank.merger.log.outer_step == "cautious"
        moved = []
        for _ in range(130):
            before = rank.weights()
            rank.step()
            rank.merger.merge()
            moved.append(float((before - rank.weights()).mean()))
        return moved

    for moved in on_ranks(body, make=torch.optim.Adam, optimizer_state="keep"):
        assert np.allclose(moved[:99], 0.1)
        # By then momentum has grown to its most. v = 0.95 v + d in 31 merges; each moves the model by sqrt(0.05) (d + 0.95 v).
        velocity = 0.1 * (1 - 0.95**31) / (1 - 0.95)
        assert np.allclose(moved[-1], 0.05**0.5 * (0.1 + 0.95 * velocity), rtol=1e-3)


def test_others_get_no_outer_step_unless_it_is_set() -> None:
    def refused(world: LocalTransport) -> None:
        with pytest.raises(AgreedError, match=r"outer_momentum .*with SGD there is no outer step unless outer_step is set"):
            Rank(world, outer_momentum=0.5)

    assert on_ranks(lambda rank: rank.merger.log.outer_step) == ["none"] * SIZE
    assert on_ranks(lambda rank: rank.merger.log.outer_step, outer_step="nesterov") == ["nesterov"] * SIZE
    assert on_ranks(lambda rank: rank.merger.log.outer_step, make=torch.optim.Adam, outer_step="none") == ["none"] * SIZE
    LocalWorld(SIZE).run(refused)


def test_a_rank_that_missed_merges_takes_over_their_base() -> None:
    """As after hvd.join(), in which a rank misses the others' merges."""

    def body(rank: Rank) -> Tensor:
        rank.step()
        rank.merger.merge()
        if rank.rank == 0:
            # What it knows is of before the merge.
            rank.merger._generation -= 1
            for group in rank.merger._flat.groups:
                group.weights.zero_()
        base = rank.weights()
        rank.step()
        rank.merger.merge()
        return base - rank.weights()

    assert all(torch.allclose(moved, torch.full_like(moved, 0.2)) for moved in on_ranks(body))


def test_adagrads_accumulators_are_added_up_also_after_missed_merges() -> None:
    def body(rank: Rank) -> tuple[list[Tensor], Tensor, str]:
        found = []
        for number in range(3):
            if number == 2 and rank.rank == 0:
                # As after hvd.join(): what it knows is of before the last merge.
                rank.merger._generation -= 1
                for state in rank.optimizer.state.values():
                    state["sum"].fill_(0.25)
            rank.step()
            rank.merger.merge()
            found.append(rank.optimizer.state[rank.model[0].weight]["sum"][0, 0].clone())  # type: ignore[index,union-attr]
        return found, rank.weights(), rank.merger.log.optimizer_state

    results = on_ranks(body, make=torch.optim.Adagrad, merge_weights="dual-averaging")
    for sums, weights, state in results:
        assert state == "sum"
        assert torch.equal(weights, results[0][1])
        # Squares of 1, 2 and 3 a round. In the last one rank 0 went from its own 0.25 to 1.25, which is below the others' 28.
        assert torch.allclose(torch.stack(sums), torch.tensor([14.0, 28.0, 28.0 + 4 + 9]).double())


def test_models_that_differ_are_noticed() -> None:
    def body(rank: Rank) -> None:
        rank.step()
        rank.merger.merge()
        rank.merger._checksum += rank.rank
        rank.step()
        with pytest.raises(RuntimeError, match="merged models differ"):
            rank.merger.merge()

    on_ranks(body, hash_interval=1)


def test_the_period_grows_where_merges_take_long_and_is_rank_0s_everywhere() -> None:
    def body(rank: Rank) -> list[int]:
        periods = []
        for _ in range(6):
            rank.step(seconds=1e-4)
            rank.merger._last_merge_s = 0.05 * (rank.rank + 1)
            rank.merger.merge()
            # As of a rank that has missed merges.
            rank.merger._period.mega_batch += 48 * rank.rank  # type: ignore[union-attr]
            periods.append(rank.merger.log.steps_per_merge)
        return periods

    results = on_ranks(body, merge_period="auto", mega_batch=48)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == 2 and results[0][-1] >= 16
    assert all(after <= 2 * before for before, after in zip(results[0], results[0][1:], strict=False))


def test_without_a_loader_the_period_grows_and_a_validation_between_steps_does_not_count_as_one() -> None:
    def body(rank: Rank) -> list[int]:
        periods = []
        for number in range(14):
            for step in range(rank.merger.log.steps_per_merge):
                rank.merger.begin_step(num_samples=0, global_samples=0, epoch_samples=0)
                rank.merger.timed(10.0 if step == 3 else 1e-3)
            rank.merger._last_merge_s = 0.01 if number < 8 else 100.0
            rank.merger.merge()
            periods.append(rank.merger.log.steps_per_merge)
        return periods

    periods = on_ranks(body, make=torch.optim.Adam)[0]
    # Merges take a tenth of the time; then so long that only the limit of an epoch that nobody knows holds.
    assert periods[0] == 5 and 70 < periods[7] < 110, periods
    assert periods[-1] == 500, periods


def test_fewer_bits_on_a_narrow_link_also_for_a_rank_that_had_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_codec, "chosen_codec", lambda codec, *_, **__: codec)
    meeting = threading.Barrier(SIZE)

    def codec(rank: Rank) -> str:
        compressed = rank.merger._flat.compressed
        assert compressed is not None
        return compressed.policy.spec.split(",")[0]

    def body(rank: Rank) -> tuple[list[str], bool, str, Tensor]:
        found = []
        for number in range(8):
            if rank.rank == 2:
                # As of one that knows nothing of what the others have found: their word counts.
                rank.merger._is_narrow = False
            rank.step(seconds=1e-3)
            rank.merger._last_merge_s = 0.05 if number > 2 else 1e-5
            rank.merger.merge()
            found.append(codec(rank))
            meeting.wait()
        return found, rank.merger._engine.codec.can_narrow, rank.merger.log.compression, rank.weights()

    results = on_ranks(body, make=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr))
    for found, can_narrow, told, weights in results:
        assert found[:4] == ["maxmin:4"] * 4 and found[-1] == "normal:2" and found == results[0][0]
        assert not can_narrow and told == "normal:2" and torch.equal(weights, results[0][3])


def test_running_statistics_are_merged() -> None:
    def body(rank: Rank) -> list[Tensor]:
        norm = rank.model[1]
        rank.step()
        norm.running_mean.fill_(rank.rank)  # type: ignore[operator,union-attr]
        norm.num_batches_tracked.fill_(rank.rank)  # type: ignore[operator,union-attr]
        rank.merger.merge()
        return [norm.running_mean.clone(), norm.num_batches_tracked.clone()]  # type: ignore[operator,union-attr]

    for mean, tracked in on_ranks(body):
        assert torch.allclose(mean, torch.ones_like(mean)) and int(tracked) == 2
