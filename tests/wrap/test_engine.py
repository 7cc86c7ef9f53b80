"""What stays of an optimizer or a model that the script has replaced, and of the watching of a batch."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.wrap.follow import Follower
from hvd_adaptive.wrap.loaders import IndexStream, Loader
from hvd_adaptive.wrap.local_steps import LocalSteps
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.wrap.share_weights import GradientWeights
from hvd_adaptive.wrap.wrapped_run import Engine


class Wrapped(torch.optim.SGD):
    """As much as is looked at of what hvd.DistributedOptimizer makes."""

    op, backward_passes_per_step = 0, 1

    def __init__(self, model: nn.Module, op: int = 0) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.op = op
        self._parameter_names = {parameter: name for name, parameter in model.named_parameters()}


def make_engine(**options: Any) -> Engine:
    engine = Engine(RunConfig(**options))
    engine.world_size = 2
    return engine


def register(engine: Engine, optimizer: Wrapped) -> None:
    engine.registered(optimizer, [p for group in optimizer.param_groups for p in group["params"]])


def test_gradients_are_weighted_from_the_first_unequal_batch_on_those_of_frozen_parameters_once_they_are_trained() -> None:
    weights = GradientWeights(lambda optimizer, local_weight: 3.0 if optimizer is last else -1.0)
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    for last in (Wrapped(model), Wrapped(model)):
        weights.registered(last, [model.weight, model.bias], local_weight=1.0)
    expected = {False: (1.0, 1.0), True: (3.0, 3.0)}
    for needed in (False, True):
        if needed:
            weights.need()
            weights.need()
        model.bias.requires_grad_(False)
        model(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad is None and not model.bias.requires_grad
        model.zero_grad()
        model.bias.requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()
        assert (model.weight.grad[0, 0].item(), model.bias.grad.item()) == expected[needed]  # type: ignore[union-attr]
        model.zero_grad()
    # A copy of the model, as for a moving average, is its own.
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 2)).sum().backward()
    assert copied.bias.grad.item() == 1.0


@pytest.mark.parametrize("strategy", ["sync", "local"])
def test_a_replaced_optimizer_is_free_to_go_and_its_successor_counts(strategy: str) -> None:
    engine, model = make_engine(strategy=strategy), nn.Linear(2, 1, bias=False)
    first = Wrapped(model)
    register(engine, first)
    engine._weights.need()
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None
    second = Wrapped(model, op=1)
    register(engine, second)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    # Local steps use the rank's own gradient, which op=Sum takes for one of two parts; and it is weighted once.
    assert model.weight.grad.tolist() == ([[2.0, 2.0]] if strategy == "local" else [[1.0, 1.0]])


def test_local_steps_hold_no_model_and_look_at_forwards_only_until_each_optimizer_has_begun() -> None:
    num_hooks = len(torch_module._global_forward_pre_hooks)
    steps = LocalSteps(RunConfig(strategy="local"), make_world=lambda: pytest.fail("no world"), note=lambda text: None)
    model, other = nn.Sequential(nn.Linear(2, 1)), nn.Linear(2, 1)
    optimizers = [Wrapped(model), Wrapped(other)]
    for optimizer in optimizers:
        steps.registered(optimizer)
    alive = weakref.ref(model)
    for called in (model, model[0], other):
        called(torch.ones(1, 2))
    assert [type(module) for module, is_called in steps._modules.items() if is_called] == [nn.Sequential, nn.Linear]
    for left, optimizer in enumerate(reversed(optimizers), -1):
        assert len(torch_module._global_forward_pre_hooks) == num_hooks + 1, left
        assert not steps.begin_step(optimizer, None, [], refused=lambda: True)
    assert len(torch_module._global_forward_pre_hooks) == num_hooks
    del model, called, optimizer, optimizers
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("fed", [[[0, 1], []], [[0], [1]], [[0, 1], [1]]], ids=["one backward", "two", "a GAN's"])
def test_every_optimizer_that_steps_on_a_batch_knows_its_samples(fed: list[list[int]]) -> None:
    """Also the second one. Fed: which optimizers get gradients before each of the two steps."""

    def body(world: LocalTransport) -> list[tuple[float, int]]:
        steps = LocalSteps(RunConfig(strategy="local"), make_world=lambda: world, note=lambda text: None)
        optimizers = [Wrapped(nn.Linear(2, 1)) for _ in range(2)]
        for optimizer in optimizers:
            steps.registered(optimizer)
        data = TensorDataset(torch.arange(64.0)[:, None])
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=world.rank))
        stream = IndexStream(Loader(loader, 1), loader.batch_sampler, world_size=2, rank=world.rank, upper=None)
        stream.owner = weakref.ref(loader)
        stream.change_fractions((0.25, 0.75), first=0)
        follower = Follower(lambda module: [], lambda text: None, weighs=False)
        follower.opened(stream)
        next(stream)
        # No batch is followed, as ranks are threads here.
        stream.loader.num_traces = 10
        follower.delivered(stream, None)
        found = []
        for optimizer, numbers in zip(optimizers, fed, strict=True):
            for number in numbers:
                follower.backward()
                steps.accumulated(optimizers[number], follower.stream)
            assert steps.begin_step(optimizer, *follower.take_step(optimizer), refused=lambda: False)
            merger = optimizer._hvd_adaptive_local.merger
            multiplier = merger._multiplier.value
            steps.merge(steps.due())
            found.append((multiplier, merger.log.steps_per_merge))
        # One without gradients is of no known batch.
        assert steps.begin_step(optimizer, *follower.take_step(optimizer), refused=lambda: False)
        assert merger._multiplier.value == 1.0
        follower.end()
        return found

    for multiplier, found in zip((0.5, 1.5), LocalWorld(2).run(body), strict=True):
        assert found[0] == found[1] and found[0][0] == multiplier and found[0][1] > 1


def test_the_report_names_the_optimizers_that_local_steps_rules_are_of() -> None:
    class Adam(torch.optim.Adam):
        op, backward_passes_per_step = 0, 1

    def body(world: LocalTransport) -> list[str]:
        steps = LocalSteps(RunConfig(strategy="local"), make_world=lambda: world, note=lambda text: None)
        model = nn.Linear(2, 1)
        adam = Adam(model.parameters())
        adam._parameter_names = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in (adam, Wrapped(nn.Linear(2, 1)), Wrapped(nn.Linear(2, 1))):
            steps.registered(optimizer)
            steps.begin_step(optimizer, None, [], refused=lambda: False)
        return steps.lines()

    for lines in LocalWorld(2).run(body):
        merges = [line.split(":")[0] for line in lines if " merges, " in line]
        assert merges == ["  local steps of Adam", *["  local steps of Wrapped"] * 2]
        assert [line for line in lines if "outer step" in line] == [
            "    Adam: optimizer state after a merge: average; outer step: cautious; compression: none",
            "    Wrapped: optimizer state after a merge: keep; outer step: none; compression: none",
        ]


def test_a_loader_that_is_made_anew_in_each_epoch_keeps_the_speeds_and_is_told_of_once() -> None:
    engine = make_engine()
    engine.report.started(2)
    data = TensorDataset(torch.arange(12.0))

    def open_loader(batch_size: int) -> Any:
        loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, num_replicas=2, rank=0))
        stream = engine.open_stream(loader, loader.batch_sampler)
        assert stream is not None
        return loader, stream.loader

    controllers = []
    for _ in range(3):
        train, known = open_loader(2)
        known.num_steps, known.is_traced = 3, True
        controllers.append(engine._shares.controller(known))
        validation, left_alone = open_loader(3)
        assert left_alone.controller is None and not known.is_gone
        del train, validation
        assert known.is_gone
    assert controllers[0] is controllers[1] is controllers[2]
    told = "\n".join(engine.report.lines())
    assert told.count("adaptive yet: DataLoader") == told.count("left alone: DataLoader") == 1
    assert told.count("made anew 2 times; 9 steps in all") == told.count("made anew 2 times; 0 steps in all") == 1


def test_an_optimizer_may_have_no_learning_rate_yet() -> None:
    """As transformers' Adafactor with relative_step."""
    engine, optimizer = make_engine(), Wrapped(nn.Linear(2, 1))
    checksums = set()
    for rate in (0.1, 0.2, None):
        optimizer.param_groups[0]["lr"] = rate
        engine.follower.take_step(optimizer)
        checksums.add(engine.follower.rates)
    assert len(checksums) == 3


def test_nothing_is_merged_timed_or_followed_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = make_engine(strategy="local"), nn.Linear(1, 1)
    register(engine, Wrapped(model))
    engine.report.started(2)
    merged: list[int] = []
    monkeypatch.setattr(engine._local, "due", lambda over: [engine])
    monkeypatch.setattr(engine._local, "merge", lambda mergers: merged.append(threading.get_ident()))
    monkeypatch.setattr(engine._shares, "begin", lambda *_: lambda: None)
    data = TensorDataset(torch.arange(24.0)[:, None])
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    stream = engine.open_stream(loader, loader.batch_sampler)
    assert stream is not None
    stream.owner = weakref.ref(loader)
    stream.loader.ends_together, stream.loader.num_steps = True, 3

    def read() -> None:
        for indices in stream:
            engine.fetching(stream)
            engine.delivered(stream, [data[index][0] for index in indices])
        engine.exhausted(stream)
        engine.looked_at("state_dict()", model)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert not merged and not engine.follower.is_tracing and engine._watch.stop() is None
    assert stream.is_beside and stream.num_delivered == 2
    # The script is still at the pass, also if the thread has let go of it.
    del loader
    assert stream.is_open
    for _ in range(2):
        engine.accumulated(engine.report)
        fed_by, batches = engine.follower.take_step()
        assert fed_by is stream and [handed.num_samples for handed in batches] == [6]
    assert stream.loader.reasons == {Reason.FETCHED_AHEAD}
    # The next place of the thread that trains.
    engine.waited(lambda: None)
    assert merged == [threading.get_ident()]
