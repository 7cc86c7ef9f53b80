"""Streams of index lists, and the following of batches to their backward, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_adaptive.wrap.closing_report import Report
from hvd_adaptive.wrap.follow import Follower
from hvd_adaptive.wrap.loaders import IndexStream, Loader
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.wrap.share_exchange import Shares
from hvd_adaptive.wrap.share_rules import Window


def make_loader(rank: int = 0, world_size: int = 2, num_rows: int = 60) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(float(num_rows))[:, None])
    sampler: Any = DistributedSampler(data, num_replicas=world_size, rank=rank)
    return DataLoader(data, batch_size=6, sampler=sampler)


def make_stream(loader: DataLoader[Any], known: Loader, rank: int = 0, upper: int | None = None) -> IndexStream:
    return IndexStream(known, loader.batch_sampler, world_size=2, rank=rank, upper=upper)


def streams(**options: Any) -> list[IndexStream]:
    loaders = [make_loader(rank) for rank in range(2)]
    return [make_stream(loader, Loader(loader, 1), rank, **options) for rank, loader in enumerate(loaders)]


def test_two_ranks_together_get_every_global_batch_while_shares_change() -> None:
    expected = list(zip(*[list(stream) for stream in streams()], strict=True))
    ranks = streams()
    # Rank 1 has handed out more than rank 0 when each change is agreed, and the second one comes before the first is reached.
    for number, batches in enumerate(expected):
        if number == 1:
            for stream in ranks:
                stream.change_fractions((0.25, 0.75), first=2)
                stream.change_fractions((0.5, 0.5), first=4)
        got = [next(stream) for stream in ranks]
        assert [*got[0], *got[1]] == [*batches[0], *batches[1]]
        assert [len(part) for part in got] == ([3, 9] if number in (2, 3) else [6, 6])
    for stream in ranks:
        weights = []
        for _ in expected:
            stream.deliver()
            weights.append(stream.current.weight)
        assert weights == [1.0, 1.0, 0.5 if stream is ranks[0] else 1.5, weights[2], 1.0]


def test_bounds_of_a_share_are_kept() -> None:
    for upper, smallest, expected in ((None, 1, [2, 10]), (8, 1, [4, 8]), (None, 3, [3, 9]), (3, 1, [6, 6])):
        ranks = streams(upper=upper)
        for stream in ranks:
            stream.loader.smallest = smallest
            stream.change_fractions((0.01, 0.99), first=0)
        assert [len(next(stream)) for stream in ranks] == expected


class OwnBatches:
    """A batch sampler that holds its rank, and gives its lists of 6 in a kind of its own."""

    def __init__(self, kind: Any, rank: int) -> None:
        self.kind, self.num_replicas, self.rank = kind, 2, rank

    def __iter__(self) -> Iterator[Any]:
        for first in range(self.rank, 60, 12):
            yield self.kind(range(first, first + 12, 2))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_batch_sampler_may_give_any_kind_of_list(follower: Follower, kind: Any) -> None:
    data, model = TensorDataset(torch.arange(60.0)[:, None]), nn.Linear(1, 1)
    follower.trains(list(model.parameters()))
    samplers: list[Any] = [OwnBatches(kind, rank) for rank in range(2)]
    loaders = [DataLoader(data, batch_sampler=sampler) for sampler in samplers]
    ranks = [make_stream(loader, Loader(loader, 1), rank) for rank, loader in enumerate(loaders)]
    ranks[0].owner = lambda: ranks  # type: ignore[assignment,return-value]
    follower.opened(ranks[0])
    for stream in ranks:
        stream.change_fractions((0.25, 0.75), first=3)
    for number, given in enumerate(zip(*ranks, strict=True)):
        # A data set may take the whole of it.
        assert all(type(part) is type(kind([])) for part in given)
        assert [len(part) for part in given] == ([6, 6] if number < 3 else [3, 9])
        expected = [index for sampler in samplers for index in list(sampler)[number]]
        assert [int(index) for part in given for index in part] == expected
        batch = data[[int(index) for index in given[0]]]
        follower.delivered(ranks[0], batch)
        loss = model(batch[0]).mean()
        follower.losses([loss])
        loss.backward()
        assert follower.backward() == (1.0 if number < 3 else 0.5)
        assert ranks[0].last_checksum() is not None
    follower.end()
    assert ranks[0].loader.is_traced and not ranks[0].loader.reasons


def test_what_a_batch_sampler_gives_that_is_no_list_is_a_reason() -> None:
    sampler: Any = OwnBatches(lambda numbers: slice(numbers[0], numbers[-1]), 0)
    loader = DataLoader(TensorDataset(torch.zeros(60, 1)), batch_sampler=sampler)
    stream = make_stream(loader, Loader(loader, 1))
    assert next(stream) == slice(0, 10) and stream.loader.reasons == {Reason.NO_LISTS}


def test_a_smallest_share_changes_at_the_same_batch_on_ranks_that_have_handed_out_other_numbers() -> None:
    """As workers fetch ahead. Else the shares of a batch would not add up."""
    expected, ranks = list(zip(*[list(stream) for stream in streams()], strict=True)), streams()
    all_shares = []
    for rank, stream in enumerate(ranks):
        shares = Shares(RunConfig(), Report())
        shares.started(2, rank)
        all_shares.append(shares)
        stream.loader.fractions = (0.1, 0.9)
    handed = [[next(ranks[0])], [next(ranks[1]) for _ in range(3)]]
    rows = [Window(num_handed=len(lists), smallest=4).table(rank=rank, world_size=2) for rank, lists in enumerate(handed)]
    gathered = Window.by_name(rows[0] + rows[1])
    for stream, shares in zip(ranks, all_shares, strict=True):
        shares._change(stream, gathered, set(), np.array([0.1, 0.9]))
    for stream, lists in zip(ranks, handed, strict=True):
        lists.extend(stream)
    assert [len(part) for part in handed[0]] == [2, 2, 2, 4, 4]
    for first, second, batches in zip(*handed, expected, strict=True):
        assert [*first, *second] == [*batches[0], *batches[1]]


class Iteration:
    """What torch's loader iterator does with a stream, and the script with its batches."""

    def __init__(self, follower: Follower, loader: DataLoader[Any], known: Loader) -> None:
        import weakref

        self.stream = make_stream(loader, known)
        self.stream.owner = weakref.ref(self)
        self.follower = follower
        follower.opened(self.stream)

    def next(self) -> None:
        next(self.stream)
        self.follower.delivered(self.stream, torch.zeros(6, 1))


@pytest.fixture
def follower() -> Iterator[Follower]:
    follower = Follower(lambda module: [], lambda text: None)
    yield follower
    follower.finish_trace()


LOSSES: dict[str, tuple[Any, set[Reason]]] = {
    "the same": (lambda model, x: model(x).mean(), set()),
    "of the whole batch": (lambda model, x: model(x - x.mean(0)).mean(), {Reason.MIXED}),
    "a sum": (lambda model, x: model(x).sum(), {Reason.SUM_LOSS, Reason.OTHER_LOSS}),
    "by number": (lambda model, x: (model(x).mean(), x[2].sum())[0], set()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_later_pass_begins_with_a_batch_that_is_followed_again(
    follower: Follower, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine it may have cost too much.
    monkeypatch.setattr("hvd_adaptive.wrap.follow._CHEAP_S", 60.0)
    loss_of, expected = LOSSES[name]
    model, loader = nn.Linear(1, 1), make_loader()
    follower.trains(list(model.parameters()))
    known = Loader(loader, 1)

    def step(iteration: Iteration, loss_of: Any, *, is_followed: bool) -> None:
        next(iteration.stream)
        batch = torch.ones(iteration.stream._queue[0][0].num_samples, 1)
        follower.delivered(iteration.stream, batch)
        assert follower.was_traced == is_followed
        loss = loss_of(model, batch)
        follower.losses([loss])
        loss.backward()
        follower.backward()
        follower.take_step()
        known.num_steps += 1

    first = Iteration(follower, loader, known)
    for number in range(4):
        step(first, LOSSES["the same"][0], is_followed=number < 2)
    follower.exhausted(first.stream)
    assert known.is_traced and not known.reasons
    known.fractions = (0.25, 0.75)
    for is_followed in (False, True, False, True):
        if known.reasons:
            break
        known.begins_followed = is_followed
        later = Iteration(follower, loader, known)
        for number in range(3):
            step(later, loss_of if is_followed else LOSSES["the same"][0], is_followed=is_followed and number == 0)
            # The followed one has the script's own size.
            assert later.stream.current.is_unequal == (number > 0 or not is_followed)
        follower.exhausted(later.stream)
    assert known.reasons == expected and known.num_traces == known.num_followed == 2
    # The ranks have not agreed on another one yet.
    assert known.smallest == 1 and known.smallest_seen == (3 if name == "by number" else 1)


def test_a_batch_is_not_followed_again_where_that_takes_long(follower: Follower) -> None:
    loader = make_loader()
    known = Loader(loader, 1)
    known.is_traced = known.begins_followed = True
    for cost_s, since_s, is_followed in ((0.05, 0.0, True), (2.0, 20.0, False), (2.0, 60.0, True)):
        follower._cost_s, follower._traced_at_s = cost_s, time.monotonic() - since_s
        iteration = Iteration(follower, loader, known)
        iteration.next()
        assert follower.is_tracing == is_followed
        follower.exhausted(iteration.stream)


def test_a_pass_without_gradients_is_not_judged(follower: Follower) -> None:
    model, loader = nn.Linear(1, 1), make_loader()
    follower.trains(list(model.parameters()))
    known = Loader(loader, 1)
    known.is_traced = known.begins_followed = True
    iteration = Iteration(follower, loader, known)
    for _ in range(3):
        iteration.next()
        with torch.no_grad():
            model(torch.ones(6, 1)).sum()
    follower.exhausted(iteration.stream)
    assert not known.reasons and known.followed_from == 20


def test_passes_are_followed_more_and_more_seldom() -> None:
    known = Loader(make_loader(), 1)
    known.num_steps = 30
    known.was_followed()
    assert known.followed_from == 70
    # Short ones, before the next exchange.
    for _ in range(3):
        known.num_steps += 5
        known.was_followed()
    assert known.followed_from == 190
    steps = []
    for _ in range(6):
        known.num_steps = known.followed_from
        known.was_followed()
        steps.append(known.followed_from - known.num_steps)
    assert steps == [80, 160, 320, 320, 320, 320]


def test_what_one_rank_counts_does_not_decide_how_a_pass_begins() -> None:
    ranks = streams()
    for rank, stream in enumerate(ranks):
        stream.loader.fractions = (0.25, 0.75)
        stream.loader.num_steps = 20 - rank
    assert [len(next(stream)) for stream in ranks] == [3, 9]
    # As the ranks have agreed, in every pass until the next exchange: one rank alone may have begun to evaluate.
    for stream in ranks:
        stream.loader.begins_followed = True
    for _ in range(2):
        again = [make_stream(make_loader(rank), stream.loader, rank) for rank, stream in enumerate(ranks)]
        assert [[len(next(stream)) for stream in again] for _ in range(2)] == [[6, 6], [3, 9]]


def test_a_step_without_a_backward_belongs_to_the_batch_that_the_script_is_at(follower: Follower) -> None:
    loader = make_loader()
    known = Loader(loader, 1)
    iteration = Iteration(follower, loader, known)
    iteration.stream.change_fractions((0.25, 0.75), first=0)
    iteration.next()
    # Before any step was seen that its batches led to, it may be a loader for validation.
    assert follower.take_step() == (None, []) and not known.reasons
    follower.backward()
    assert follower.take_step()[0] is iteration.stream
    known.num_steps, known.fractions = 1, (0.25, 0.75)
    follower.exhausted(iteration.stream)
    later = Iteration(follower, loader, known)
    later.next()
    assert follower.take_step() == (later.stream, []) and known.reasons == {Reason.FETCHED_AHEAD}
    # The other ranks go on with these shares until the next exchange, in which they learn of it.
    for _ in range(2):
        later.next()
        assert later.stream.current.is_unequal and follower.backward() == 0.5
        assert len(follower.take_step()[1]) == 1
    assert known.fractions == (0.25, 0.75) and not known.num_repeated


@pytest.mark.parametrize("ends", ["exhausted", "left early"])
def test_a_step_on_the_scripts_own_tensors_after_a_pass_is_not_weighted(follower: Follower, ends: str) -> None:
    loader, model = make_loader(), nn.Linear(1, 1)
    iteration = Iteration(follower, loader, Loader(loader, 1))
    iteration.stream.change_fractions((0.25, 0.75), first=0)

    def step() -> tuple[float, IndexStream | None]:
        follower.losses([model(torch.ones(3, 1)).mean()])
        return follower.backward(), follower.take_step()[0]

    iteration.next()
    stream = iteration.stream
    # Further losses of the batch have its weight.
    assert step() == step() == (0.5, stream)
    if ends == "exhausted":
        follower.exhausted(stream)
    else:
        del iteration
    assert step() == step() == (1.0, None)


def test_a_look_at_some_batches_by_one_rank_leaves_its_shares_as_the_others_have_them(follower: Follower) -> None:
    loader = make_loader()
    known = Loader(loader, 1)
    known.num_steps, known.fractions = 20, (0.25, 0.75)
    look = Iteration(follower, loader, known)
    for _ in range(3):
        look.next()
    # The looked-at pass is equal from here on; the others learn why in the next exchange.
    assert not look.stream.current.is_unequal and known.reasons == {Reason.SKIPPED}
    del look
    training = Iteration(follower, loader, known)
    training.next()
    assert training.stream.current.num_samples == 3 and follower.backward() == 0.5


def test_a_reason_of_one_rank_counts_from_the_next_exchange_on() -> None:
    """Else the ranks would disagree on the shares of the pass that begins before it."""
    ranks = streams()
    for stream in ranks:
        stream.loader.fractions = (0.25, 0.75)
    ranks[0].loader.reasons.add(Reason.OTHER_LOSS)
    assert [len(next(stream)) for stream in ranks] == [3, 9]


def test_a_step_belongs_to_the_loader_of_its_backward(follower: Follower) -> None:
    train, other = make_loader(), make_loader()
    known, validation = Loader(train, 1), Loader(other, 2)
    iteration = Iteration(follower, train, known)
    iteration.stream.change_fractions((0.25, 0.75), first=1)
    assert follower.take_step() == (None, [])
    for expected in (1.0, 0.5):
        iteration.next()
        loop = Iteration(follower, other, validation)
        loop.next()
        loop.next()
        follower.exhausted(loop.stream)
        left_early = Iteration(follower, other, validation)
        left_early.next()
        del left_early
        assert follower.backward() == expected
        stream, batches = follower.take_step()
        assert stream is iteration.stream and len(batches) == 1
        # Another optimizer steps on the same batch.
        assert follower.backward() == expected
        assert follower.take_step() == (iteration.stream, [])
    assert not known.reasons and not validation.reasons


def test_an_optimizer_that_is_made_in_the_first_step_has_missed_its_backward(follower: Follower) -> None:
    train = make_loader()
    known = Loader(train, 1)
    iteration = Iteration(follower, train, known)
    iteration.next()
    follower.trains([nn.Parameter(torch.zeros(1))])
    for _ in range(2):
        iteration.next()
        follower.backward()
        follower.take_step()
    assert not known.reasons
    iteration.next()
    iteration.next()
    follower.backward()
    assert known.reasons == {Reason.FETCHED_AHEAD}


def test_batches_of_two_loaders_in_one_step_are_noticed(follower: Follower) -> None:
    loaders = [make_loader(), make_loader()]
    known = [Loader(loader, number) for number, loader in enumerate(loaders)]
    iterations = [Iteration(follower, loader, k) for loader, k in zip(loaders, known, strict=True)]
    for _ in range(2):
        for iteration in iterations:
            iteration.next()
        follower.backward()
        follower.take_step()
    assert all(Reason.INTERLEAVED in k.reasons for k in known)


def test_batches_of_two_loaders_with_unequal_shares_are_an_error(follower: Follower) -> None:
    loaders = [make_loader(), make_loader()]
    iterations = [Iteration(follower, loader, Loader(loader, 1)) for loader in loaders]
    iterations[0].stream.change_fractions((0.25, 0.75), first=0)
    for number in range(2):
        for iteration in iterations:
            iteration.next()
        if number == 0:
            follower.backward()
            follower.take_step()
    with pytest.raises(RuntimeError, match="several loaders"):
        follower.backward()


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("comes", ["between steps", "before forward", "before backward"])
def test_an_iterator_for_validation_may_stay_alive(follower: Follower, comes: str, num_before: int) -> None:
    """Also where it is used several times before shares are unequal."""
    model = nn.Linear(1, 1)
    follower.trains(list(model.parameters()))
    train, validation = (Iteration(follower, loader, Loader(loader, 1)) for loader in (make_loader(), make_loader()))
    train.stream.change_fractions((0.25, 0.75), first=2)

    def validate(when: str) -> None:
        if when == comes and train.stream.num_handed > num_before:
            validation.next()
            model.eval()
            with torch.no_grad():
                model(torch.ones(6, 1))
            model.train()

    for expected in (1.0, 1.0, 0.5, 0.5, 0.5):
        validate("between steps")
        next(train.stream)
        batch = torch.ones(train.stream._queue[0][0].num_samples, 1)
        follower.delivered(train.stream, batch)
        validate("before forward")
        loss = model(batch).mean()
        validate("before backward")
        loss.backward()
        assert follower.backward() == expected
        assert follower.take_step()[0] is train.stream
    assert not train.stream.loader.reasons and not validation.stream.loader.reasons
    follower.end()


def test_a_batch_is_watched_until_an_optimizer_takes_its_second_step_on_it(follower: Follower) -> None:
    """A script that stays with one batch must not be watched for ever."""
    num_hooks = len(torch_module._global_forward_pre_hooks)
    iteration = Iteration(follower, make_loader(), Loader(make_loader(), 1))
    iteration.next()
    for optimizer in ("discriminator's", "generator's"):
        follower.backward()
        follower.take_step(optimizer)
        assert follower.was_traced
    assert _get_current_function_mode() is not None and len(torch_module._global_forward_pre_hooks) == num_hooks + 1
    follower.take_step("discriminator's")
    assert not follower.was_traced
    iteration.next()
    follower.backward()
    follower.take_step("discriminator's")
    iteration.next()
    assert follower.was_traced
    follower.finish_trace()
    # Of an accumulation's first batch: its step is still to come.
    assert follower.was_traced
    assert _get_current_function_mode() is None and len(torch_module._global_forward_pre_hooks) == num_hooks


def test_fetching_ahead_is_noticed(follower: Follower) -> None:
    loader = make_loader()
    known = Loader(loader, 1)
    iteration = Iteration(follower, loader, known)
    iteration.next()
    iteration.next()
    follower.backward()
    assert Reason.FETCHED_AHEAD in known.reasons


@pytest.mark.parametrize(
    ("layer", "smallest", "reasons"),
    [
        (nn.Identity(), 1, set()),
        (nn.BatchNorm1d(1), 2, set()),
        (nn.SyncBatchNorm(1), 2, {Reason.SYNC_BATCH_NORM}),
    ],
)
def test_layers_that_look_at_the_batch(follower: Follower, layer: Any, smallest: int, reasons: set[Reason]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(1, 1), layer

        def forward(self, x: Any) -> Any:
            return self.linear(x)

    model, loader = Model(), make_loader()
    known = Loader(loader, 1)
    follower.trains(list(model.parameters()))
    iteration = Iteration(follower, loader, known)
    for _ in range(2):
        next(iteration.stream)
        batch = torch.ones(6, 1)
        follower.delivered(iteration.stream, batch)
        model(batch).mean().backward()
        follower.backward()
        follower.finish_trace()
    assert known.is_traced and known.smallest_seen == smallest and known.reasons == reasons
