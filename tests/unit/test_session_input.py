"""What a Session is given: optimizers of other kinds, and errors for what it cannot take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import take_steps
from torch import nn

from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.session.sameness import agree_on_data
from hvd_adaptive.session.session import Session

X = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, (X.sum(dim=1) > 0).long())


def train(model: nn.Module, optimizer: Any, config: Config, transport: LocalTransport | None = None) -> Session:
    session = Session(model, optimizer, config, transport=transport or LocalTransport())
    take_steps(session, model, DATA)
    return session


class NoRate(torch.optim.Optimizer):
    """Finds its steps itself, as transformers' Adafactor does with lr=None."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize("defaults", [{"lr": None}, {}], ids=str)
@pytest.mark.parametrize("strategy", ["local", "sync", "horovod", "sma"])
def test_an_optimizer_without_a_learning_rate(strategy: str, defaults: dict[str, Any]) -> None:
    def run(transport: LocalTransport) -> None:
        model = nn.Linear(6, 2)
        before = model.weight.clone()
        optimizer = NoRate(model.parameters(), defaults)
        train(model, optimizer, Config(batch_size=16, mega_batch=80, strategy=strategy), transport)
        assert not torch.equal(model.weight, before)
        assert optimizer.param_groups[0].get("lr", "none") == defaults.get("lr", "none")

    LocalWorld(2 if strategy == "local" else 1).run(run)


@pytest.mark.parametrize("defaults", [{"lr": None}, {}], ids=str)
@pytest.mark.parametrize("options", [{"warmup_epochs": 1}, {"lr_decay": 0.1}, {"lr_rule": "linear", "reference_batch_size": 64}])
def test_a_learning_rate_that_is_none_is_not_multiplied(options: dict[str, Any], defaults: dict[str, Any]) -> None:
    model = nn.Linear(6, 2)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    said = r"NoRate has no learning rate \('lr'\) that could be multiplied by .*, as lr_rule, warmup_epochs or lr_decay demand"
    optimizer = NoRate(groups, defaults)
    with pytest.raises(ValueError, match=said):
        train(model, optimizer, Config(batch_size=16, **options))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("strategy", ["local", "horovod"])
def test_complex_tensors_are_part_of_checkpoints(strategy: str, tmp_path: Any) -> None:
    class Own:
        def __init__(self) -> None:
            self.phase = torch.tensor([1j, 2.0])

        def state_dict(self) -> dict[str, Any]:
            return {"phase": self.phase}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.phase = state["phase"]

    def run(value: complex) -> tuple[nn.Module, Own]:
        model, own = nn.Linear(6, 2), Own()
        model.register_buffer("table", torch.full((2,), value))
        own.phase *= value
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = Session(model, optimizer, Config(batch_size=16, strategy=strategy), transport=LocalTransport())
        session.register_state("own", own)
        checkpointer = Checkpointer(session, tmp_path)
        if value == 1j:
            assert checkpointer.save()
        else:
            checkpointer.resume()
        session.close()
        return model, own

    (first, mine), (second, other) = run(1j), run(2j)
    assert torch.equal(first.table, second.table) and torch.equal(mine.phase, other.phase)


def test_what_a_session_cannot_take_is_named(tmp_path: Any) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make: Any = lambda *given: Session(*given, transport=LocalTransport())  # noqa: E731
    order = r"Session takes \(model, optimizer, config\), in this order"
    for given, said in (
        ((optimizer, model), f"model must be a torch.nn.Module, got SGD: {order}"),
        ((model, nn.Linear(2, 2)), f"optimizer must be a torch optimizer, got Linear: {order}"),
        ((nn.Linear, optimizer), f"model must be a torch.nn.Module, got the class Linear: {order}"),
        ((model, optimizer, {}), r"config must be a hvd_adaptive.Config, got dict: .* hvd_adaptive.Config\(batch_size=64\)"),
        ((model, optimizer, Config), "config must be a hvd_adaptive.Config, got the class Config: "),
    ):
        with pytest.raises(TypeError, match=said):
            make(*given)
    session = make(model, optimizer, Config())
    for epochs in ("3", [3], float("nan")):
        with pytest.raises(TypeError, match=r"num_epochs must be a number, or None for a loop until session.stop\(\), got"):
            next(session.batches(DATA, num_epochs=epochs))
    batch = next(session.batches(DATA, num_epochs=np.float32(1)))
    with pytest.raises(TypeError, match=r"takes a batch as session.batches yields it, got Tensor: .*, not batch.x"):
        session.step(batch.x).__enter__()
    for options, error, said in (
        ({"interval": 1.5}, TypeError, "interval must be a whole number of rounds, got 1.5"),
        ({"interval": -1}, ValueError, "interval must be >= 0 rounds, got -1"),
        ({"keep": 0}, ValueError, "keep must be >= 1 checkpoint, got 0"),
    ):
        with pytest.raises(error, match=said):
            Checkpointer(session, tmp_path, **options)


class Masters(torch.optim.SGD):
    """Keeps parameters in its state, and copies them back; ``slow``: every second step, and half of the way, as Lookahead."""

    slow = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                master = state.setdefault("master", p.detach().float().clone())
                state["step"] = state.get("step", 0) + 1
                if not self.slow:
                    p.copy_(master.add_(p.grad, alpha=-group["lr"]))
                    continue
                p.add_(p.grad, alpha=-group["lr"])
                if state["step"] % 2 == 0:
                    p.copy_(master.lerp_(p, 0.5))


class Slow(Masters):
    slow = True


@pytest.mark.parametrize(
    ("optimizer", "options", "warns"),
    [
        (Masters, {}, True), (Slow, {}, True), (Slow, {"optimizer_state": "average", "outer_step": "nesterov"}, True),
        (Masters, {"optimizer_state": "average"}, False), (Masters, {"optimizer_state": "reset"}, False),
        *((kind, {}, False) for kind in (torch.optim.Adam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adadelta)),
        (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), {}, False),
    ],
)  # fmt: skip
def test_optimizers_with_copies_of_parameters_are_warned_of(
    optimizer: Any, options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run(transport: LocalTransport) -> float:
        model = nn.Linear(6, 8)
        own = optimizer(model.parameters(), lr=0.05)
        session = Session(model, own, Config(batch_size=10, mega_batch=60, **options), transport=transport)
        moved = 0.0
        for batch in session.batches(DATA, num_epochs=2):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                if session.round > 3:
                    own.param_groups[0]["lr"] = 0.0
                before = model.weight.detach().clone()
                session.optimizer.step()
                if session.round > 5:
                    moved = max(moved, float((model.weight.detach() - before).abs().max()))
        session.close()
        return moved

    moved = LocalWorld(2).run(run)
    said = [r.message for r in caplog.records if "copy of the parameters" in r.message]
    assert len(said) == warns and all("(master)" in message for message in said)
    if isinstance(optimizer, type) and issubclass(optimizer, Masters):
        # What the warning is about, and that its remedy is one.
        assert (max(moved) > 1e-4) == warns


@pytest.mark.parametrize("kind", ["batches", "loader", "nested", "concat"])
def test_random_splits_with_a_seed_for_each_rank_are_refused(kind: str) -> None:
    def parts(seed: int) -> Any:
        part, rest = torch.utils.data.random_split(DATA, [200, 40], generator=torch.Generator().manual_seed(seed))
        if kind == "nested":
            return torch.utils.data.Subset(part, range(100))
        return torch.utils.data.ConcatDataset([rest, part]) if kind == "concat" else part

    def run(transport: LocalTransport, seed: int) -> int:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = Session(model, optimizer, Config(batch_size=16, mega_batch=80), transport=transport)
        data = parts(seed)
        # What else differs between ranks does not count.
        data.root = f"/scratch/{transport.rank}"
        num_samples = 0
        for batch in session.loader(data) if kind == "loader" else session.batches(data):
            with session.step(batch):
                num_samples += batch.num_samples
        return num_samples

    said = "checksum of the Subset's indices is .* split it with one seed on all ranks"
    with pytest.raises(AgreedError, match=said):
        LocalWorld(2).run(lambda t: run(t, seed=t.rank))
    assert sum(LocalWorld(2).run(lambda t: run(t, seed=7))) == len(parts(7))


def test_subsets_with_indices_of_any_kind_are_taken() -> None:
    rows = list(range(0, 240, 2))
    for indices in ([range(0, 240, 2), rows], [np.array(rows), torch.tensor(rows)], [rows, np.array(rows, dtype=np.int32)]):
        LocalWorld(2).run(lambda t, kinds=indices: agree_on_data(t, torch.utils.data.Subset(DATA, kinds[t.rank])))
    named = torch.utils.data.Subset({"a": 1}, ["a"])  # type: ignore[type-var]
    LocalWorld(2).run(lambda t: agree_on_data(t, named))


def test_tensors_with_other_values_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def made_by(seed: int, factor: float = 1.0) -> torch.utils.data.Dataset[Any]:
        x = torch.randn(100, 6, generator=torch.Generator().manual_seed(seed))
        return torch.utils.data.Subset(torch.utils.data.TensorDataset(factor * x, torch.arange(100) % 2), range(50))

    # Hosts round differently.
    LocalWorld(3).run(lambda t: agree_on_data(t, made_by(1, 1 + 1e-6 * t.rank)))
    assert not caplog.records
    LocalWorld(3).run(lambda t: agree_on_data(t, made_by(t.rank // 2)))
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "ranks [2] hold other values in their tensors of samples than rank 0"
    ]
