"""Gradients that cross the wire encoded, over simulated ranks: strategy ``sync``, and what it stands on."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.shares import integer_shares
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.exchange.gradients import GradientExchange
from hvd_adaptive.session.session import Session
from hvd_adaptive.state.nested import check_like

GLOBAL_BATCH = 26
NUM_SAMPLES = 5 * GLOBAL_BATCH + 2
_generator = torch.Generator().manual_seed(3)
X = torch.randint(0, 50, (NUM_SAMPLES, 5), generator=_generator)
Y = (X < 25).sum(dim=1).clamp(1, 3) - 1
# All machinery, and nothing lost.
EXACT = "maxmin:4; *=none"
# Of the fp64 gradients' bytes, at most; biases and the last layer are exempt.
CODECS = {"fp16": 0.3, "maxmin:8": 0.17, "maxmin:4": 0.11, "normal:2": 0.08, "topk:0.05": 0.11, "powersgd:2": 0.13}


class Bag(nn.Module):
    """Sparse or dense embeddings, a frozen layer, a tied one, and one that no step uses."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 32, mode="sum", sparse=sparse)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.inner = nn.Linear(32, 32, bias=False)
        self.again = nn.Linear(32, 32, bias=False)
        self.again.weight = self.inner.weight
        self.unused = nn.Linear(32, 32)
        self.out = nn.Linear(32, 3)
        self.double()
        # Simulated ranks are threads of one process, whose random generator they share.
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / p.shape[-1] ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.inner(self.frozen(self.bag(x)))))))


def train(
    transport: LocalTransport, *, sparse: bool = False, clip: float | None = None, num_epochs: int = 2, state: Any = None,
    spoil: Callable[[Session, Any], float] = lambda *_: 1.0, odd: bool = True, **options: Any
) -> dict[str, Any]:  # fmt: skip
    model = Bag(sparse=sparse)
    settings = {"compression": EXACT, "global_batch_size": GLOBAL_BATCH, "mega_batch": 3 * GLOBAL_BATCH, "hash_interval": 1}
    config = Config(strategy="sync", **{**settings, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.0 if sparse else 0.5)
    session = Session(model, optimizer, config, transport=transport)
    strategy: Any = session._strategy
    shares, generator = strategy._shares, np.random.default_rng(1)

    def choose(*_: Any, step: int = -2) -> None:
        """Other shares after every second step, as uneven as they can be, the same on every rank."""
        targets = (generator.exponential(size=session.world_size) ** 2).tolist()
        shares.whole = np.array(integer_shares(targets, GLOBAL_BATCH, lower=shares.lower), dtype=float)
        shares._changes.append((step + 2, shares.whole.astype(int).tolist()))

    if odd:
        choose()
        shares._due, shares.observe = 2 if session.world_size > 1 else 0, choose
    if state is not None:
        session.load_state_dict(state[transport.rank])
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(TensorDataset(X, Y), num_epochs=num_epochs):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            (batch.loss * spoil(session, batch)).backward()
            if clip and session.synchronize():
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            session.optimizer.step()
    saved = session.state_dict()
    session.close()
    return {"model": model, "hash": model_hash(model), "records": records, "state": saved, "session": session}


def has_learned(result: dict[str, Any]) -> bool:
    # At this learning rate lossy codecs make the loss jump.
    first, *later = (record.loss for record in result["records"])
    return bool(min(later) < 0.8 * first)


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({}, 2),
        ({"accumulation_steps": 3, "clip": 0.05}, 3),
        ({"sparse": True}, 3),
        ({"sparse": True, "accumulation_steps": 2}, 2),
    ],
)
def test_exempt_gradients_make_one_ranks_step(options: dict[str, Any], world_size: int) -> None:
    one = LocalWorld(1).run(lambda t: train(t, **options))[0]
    ours = LocalWorld(world_size).run(lambda t: train(t, **options))
    assert len({result["hash"] for result in ours}) == 1
    assert_close(ours[0]["model"], one["model"])
    assert ours[0]["session"].inexact == []
    # The hooks are off.
    assert not ours[0]["session"]._strategy._compressed._handles


@pytest.fixture(scope="module")
def exact() -> list[dict[str, Any]]:
    return LocalWorld(3).run(lambda t: train(t, num_epochs=6))


@pytest.mark.parametrize("codec", list(CODECS))
def test_fewer_bytes_and_equal_models(codec: str, exact: list[dict[str, Any]]) -> None:
    reducer = "allreduce" if codec == "fp16" else "sra"
    ours = LocalWorld(3).run(lambda t: train(t, num_epochs=6, compression=codec, reducer=reducer))
    assert len({result["hash"] for result in ours}) == 1
    assert ours[0]["hash"] != exact[0]["hash"], "nothing was encoded"
    assert ours[0]["session"].inexact == [f"compression {codec!r} loses a part of the gradients"]
    share = ours[0]["records"][0].payload_bytes / exact[0]["records"][0].payload_bytes
    assert 0.01 < share < CODECS[codec]
    assert ours[0]["records"][-1].loss < exact[0]["records"][-1].loss + 0.1
    assert has_learned(ours[0])


@pytest.fixture
def doubles_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("codec", list(CODECS))
def test_torchs_default_type_changes_nothing(codec: str, request: pytest.FixtureRequest) -> None:
    expected = LocalWorld(2).run(lambda t: train(t, compression=codec))
    request.getfixturevalue("doubles_by_default")
    found = LocalWorld(2).run(lambda t: train(t, compression=codec))
    assert [result["hash"] for result in found] == [result["hash"] for result in expected]


def test_sparse_gradients_are_exempt_and_others_are_encoded() -> None:
    ours = LocalWorld(2).run(lambda t: train(t, sparse=True, compression="maxmin:4", num_epochs=6))
    assert len({result["hash"] for result in ours}) == 1
    model = ours[0]["model"]
    assert model.bag.weight.grad.is_sparse and model.bag.weight.grad.is_coalesced() and not model.inner.weight.grad.is_sparse
    assert has_learned(ours[0])


def test_what_a_codec_loses_comes_later() -> None:
    exact, fed, unfed = (
        LocalWorld(2).run(lambda t: train(t, **o))[0]["model"]  # noqa: B023
        for o in ({}, {"compression": "topk:0.02"}, {"compression": "topk:0.02", "error_feedback": False})
    )

    def distance(model: nn.Module) -> float:
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return sum(float((a - b).detach().square().sum()) for a, b in pairs)

    assert distance(fed) < distance(unfed)


@pytest.mark.parametrize("codec", ["maxmin:2", "powersgd:2", "topk:0.1"])
def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(codec: str) -> None:
    """One rank's gradient overflows once: no rank steps, and what was lost before is forgotten, not kept as NaN."""
    count = [0, 0]

    def spoil(session: Session, _: Any) -> float:
        count[session.rank] += 1
        return float("inf") if session.rank == 1 and count[1] == 5 else 1.0

    ours = LocalWorld(2).run(lambda t: train(t, compression=codec, num_epochs=6, spoil=spoil))
    assert len({result["hash"] for result in ours}) == 1
    assert sum(record.stats["skipped_steps"][0] for record in ours[0]["records"]) == 1
    assert has_learned(ours[0])
    state = ours[0]["state"]["own"]["strategy"]["compressed"]["sum"]["exchange"]["residuals"]
    assert state and all(value.isfinite().all() for value in state.values())


def test_loss_scaling_leaves_out_the_steps_that_one_rank_leaves_out() -> None:
    weights = torch.ones(NUM_SAMPLES, dtype=torch.float64)
    weights[17] = float("inf")

    def amp(transport: LocalTransport, compression: str) -> tuple[nn.Module, list[float], str]:
        model = Bag(sparse=False)
        config = Config(
            strategy="sync", compression=compression, global_batch_size=GLOBAL_BATCH, mega_batch=3 * GLOBAL_BATCH,
            accumulation_steps=2, hash_interval=1,
        )  # fmt: skip
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.5), config, transport=transport)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        scales = []
        for batch in session.batches(TensorDataset(X, torch.arange(NUM_SAMPLES)), num_epochs=3):
            with session.step(batch):
                session.optimizer.zero_grad()
                losses = nn.functional.cross_entropy(model(batch.x), Y[batch.y], reduction="none")
                scaler.scale((weights[batch.y] * losses).mean()).backward()
                if session.synchronize():
                    scaler.unscale_(session.optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(session.optimizer)
                    scaler.update()
                    scales.append(scaler.get_scale())
        session.close()
        return model, scales, model_hash(model)

    one, scales, _ = LocalWorld(1).run(lambda t: amp(t, EXACT))[0]
    ours = LocalWorld(2).run(lambda t: amp(t, EXACT))
    assert_close(ours[0][0], one)
    assert ours[0][1] == scales and len(set(scales)) > 2
    coded = LocalWorld(2).run(lambda t: amp(t, "maxmin:4"))
    assert coded[0][1] == scales and coded[0][2] == coded[1][2]
    assert all(p.isfinite().all() for p in coded[0][0].parameters())


@pytest.mark.parametrize("codec", ["maxmin:2", "powersgd:2"])
def test_a_resume_goes_on_with_the_residuals(codec: str) -> None:
    options: dict[str, Any] = {"compression": codec, "batch_size_rule": "fixed", "odd": False}
    whole = LocalWorld(2).run(lambda t: train(t, num_epochs=2, **options))
    first = LocalWorld(2).run(lambda t: train(t, num_epochs=1, **options))
    states = [result["state"] for result in first]
    second = LocalWorld(2).run(lambda t: train(t, num_epochs=2, state=states, **options))
    for a, b in zip(whole[0]["model"].parameters(), second[0]["model"].parameters(), strict=True):
        assert torch.equal(a, b)


# -- the exchange by itself


def options_for(compression: str, **others: Any) -> Any:
    return types.SimpleNamespace(**{"compression": compression, "reducer": "sra", "error_feedback": True, "seed": 0, **others})


def exchange_for(transport: LocalTransport, compression: str = EXACT, **others: Any) -> tuple[nn.Module, GradientExchange]:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    exchange = GradientExchange(model.named_parameters(), options_for(compression), transport, bucket_elements=2000, **others)
    return model, exchange


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]


def test_a_gradient_lies_in_memory_as_its_parameter_does() -> None:
    """An optimizer's fused step reads both by one index."""

    def body(transport: LocalTransport) -> list[Tensor]:
        model = nn.Module()
        generator = torch.Generator().manual_seed(1)
        model.wide = nn.Parameter(torch.randn(3, 2, generator=generator).t())
        # The ranks may hold it differently.
        conv = torch.randn(4, 3, 2, 2, generator=generator)
        model.conv = nn.Parameter(conv.to(memory_format=torch.channels_last) if transport.rank else conv)
        exchange = GradientExchange(model.named_parameters(), options_for("none"), transport)
        for set_to_none in (True, False):
            model.zero_grad(set_to_none=set_to_none)
            factors = [torch.arange(p.numel(), dtype=torch.float32).view(p.shape) + transport.rank for p in model.parameters()]
            sum((p * f).sum() for p, f in zip(model.parameters(), factors, strict=True)).backward()
            exchange.synchronize()
            for p in model.parameters():
                assert p.grad is not None and p.grad.stride() == p.stride()
                assert torch.equal(p.grad, 2 * torch.arange(p.numel(), dtype=torch.float32).view(p.shape) + 1)
        return [p.grad for p in model.parameters() if p.grad is not None]

    for ours, theirs in zip(*LocalWorld(2).run(body), strict=True):
        assert torch.equal(ours, theirs)


def test_buckets_are_on_their_way_before_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = LocalTransport.allgather_bytes_async

    def watched(self: LocalTransport, tensor: Tensor, **options: Any) -> Any:
        if self.rank == 0:
            sent.append(options["name"])
        return send(self, tensor, **options)

    monkeypatch.setattr(LocalTransport, "allgather_bytes_async", watched)

    def body(transport: LocalTransport) -> list[int]:
        model, exchange = exchange_for(transport, "maxmin:4")
        counts = []
        for step in range(3):
            # The first layer's gradients come last; theirs are not there yet.
            handle = model[0].weight.register_hook(lambda _: counts.append(len(sent)))
            backward(model, 10 * step + transport.rank)
            exchange.synchronize()
            handle.remove()
            model.zero_grad()
            if transport.rank == 0:
                # Its own: the other thread may come here when this one is in the next step.
                sent.clear()
        return counts

    counts = LocalWorld(2).run(body)[0]
    assert counts[0] == 0 and counts[1] >= 2 and counts[2] >= 2


@pytest.mark.parametrize(("num_layers", "num_buckets"), [(1, 1), (4, 4), (32, 16), (64, 16)])
def test_a_model_has_as_many_buckets_as_its_size_allows(num_layers: int, num_buckets: int) -> None:
    """Each has 65,536 gradients or more: those of one layer here."""
    sent: list[set[str]] = [set(), set()]

    def body(transport: LocalTransport, state: Any = None) -> Any:
        sent[transport.rank].clear()
        send = transport.allgather_bytes_async

        def watched(tensor: Tensor, **options: Any) -> Any:
            sent[transport.rank].add(options["name"])
            return send(tensor, **options)

        transport.allgather_bytes_async = watched  # type: ignore[method-assign]
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(num_layers)))
        exchange = GradientExchange(model.named_parameters(), options_for("maxmin:4"), transport)
        if state is not None:
            exchange.load_state_dict(state)
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(2, 256)).square().mean().backward()
            exchange.synchronize()
        return exchange.state_dict()

    states = LocalWorld(2).run(body)
    assert len(sent[0]) == len(sent[1]) == num_buckets
    # A run goes on with the buckets whose residuals it has; older states do not say how large these are.
    new = GradientExchange(nn.Linear(1, 1).named_parameters(), options_for("maxmin:4"), LocalTransport()).state_dict()
    older = {"sum": new["sum"], "order": states[0]["order"], "sparse": {}}
    check_like(older, new, "the state")
    check_like(states[0], new, "the state")
    LocalWorld(2).run(lambda transport: body(transport, older))
    assert len(sent[0]) == -(-num_layers // 16)


def test_parameters_that_are_frozen_for_a_while() -> None:
    """Zeros while they are frozen, the sum over ranks as soon as they are not."""

    def body(transport: LocalTransport) -> list[list[Tensor]]:
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        model[0].requires_grad_(False)
        exchange = GradientExchange(model.named_parameters(), options_for("none"), transport, with_frozen=True)
        assert not model[0].weight.requires_grad
        found = []
        for step, is_trained in enumerate((False, True, True, False)):
            model.zero_grad()
            model[0].requires_grad_(is_trained)
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + transport.rank))
            loss = model(x).square().mean()
            own = torch.autograd.grad(loss, [model[0].weight], retain_graph=True)[0] if is_trained else torch.zeros(40, 40)
            loss.backward()
            exchange.synchronize()
            assert model[0].weight.grad is not None
            found.append([own, model[0].weight.grad.clone()])
        return found

    for (own, total), (other, same) in zip(*LocalWorld(2).run(body), strict=True):
        assert torch.equal(total, same) and torch.allclose(total, own + other)


def test_average_sum_and_views_with_and_without_set_to_none() -> None:
    def body(transport: LocalTransport) -> list[Tensor]:
        results = []
        for average in (False, True):
            for set_to_none in (True, False):
                model, exchange = exchange_for(transport, average=average, backward_passes=2)
                for step in range(2):
                    model.zero_grad(set_to_none=set_to_none)
                    for micro in range(2):
                        backward(model, 100 * step + 10 * micro + transport.rank)
                    exchange.synchronize()
                results.append(gradients(model))
        return results

    results = LocalWorld(2).run(body)
    model, _ = exchange_for(LocalTransport())
    for seed in (100, 101, 110, 111):
        backward(model, seed)
    for ours in results:
        for flat, factor in zip(ours, (1.0, 1.0, 0.5, 0.5), strict=True):
            assert float((flat - factor * gradients(model)).norm() / flat.norm()) < 1e-6


def test_a_layer_that_only_some_ranks_or_steps_use() -> None:
    def body(transport: LocalTransport) -> tuple[Tensor, Tensor]:
        model, exchange = exchange_for(transport)
        found = []
        for used in (transport.rank == 0, False, True):
            model.zero_grad()
            x = torch.ones(2, 40)
            (model[2](model[1](x)) if used else model[2](x)).sum().backward()
            exchange.synchronize()
            assert all(p.grad is not None for p in model.parameters())
            assert not model[0].weight.grad.any()
            found.append(float(model[1].bias.grad.abs().sum()))
        return torch.tensor(found), gradients(model)

    (ours, flat), (theirs, other) = LocalWorld(2).run(body)
    assert torch.equal(ours, theirs) and torch.equal(flat, other)
    assert ours[0] > 0 and ours[1] == 0 and torch.allclose(ours[2], 2 * ours[0])


def test_a_step_has_as_many_backward_passes_as_the_first_one_or_fewer() -> None:
    def body(transport: LocalTransport) -> None:
        (model, exchange), (plain, _) = exchange_for(transport), exchange_for(LocalTransport())
        for passes in (2, 2, 1, 2):
            for m in (model, plain):
                m.zero_grad()
            for number in range(passes):
                backward(model, number)
                for _ in range(2):
                    backward(plain, number)
            exchange.synchronize()
            assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=1e-7)
        model.zero_grad()
        backward(model, 0)
        backward(model, 1)
        with pytest.raises(RuntimeError, match=r"gradient of 2\.(weight|bias) was computed again while .* backward\(\) once"):
            backward(model, 2)

    LocalWorld(2).run(body)


def test_a_gradient_that_becomes_sparse_is_refused_with_the_reason() -> None:
    def body(transport: LocalTransport) -> None:
        model = nn.ModuleDict({"bag": nn.Embedding(9, 4, sparse=True), "out": nn.Linear(4, 4)})
        exchange = GradientExchange(model.named_parameters(), options_for("maxmin:4"), transport)
        model["out"](torch.ones(2, 4)).sum().backward()
        exchange.synchronize()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"gradient of bag\.weight is sparse, but was not on any rank in the first step"):
            model["out"](model["bag"](torch.tensor([1]))).sum().backward()

    LocalWorld(2).run(body)


def test_rows_of_sparse_gradients_from_unequal_ranks() -> None:
    """No rows on one rank, a row twice on another, a dense gradient in place of a sparse one, and half precision."""

    def body(transport: LocalTransport) -> tuple[Tensor, Tensor]:
        bag = nn.Embedding(9, 3, sparse=True).to(torch.bfloat16)
        with torch.no_grad():
            bag.weight.zero_()
        exchange = GradientExchange(bag.named_parameters(), options_for("maxmin:4"), transport, average=True)
        rows = torch.tensor([[1, 1, 4], [], [8]][transport.rank], dtype=torch.int64)
        if len(rows):
            bag(rows).sum().backward()
        exchange.synchronize()
        first = bag.weight.grad.to_dense()
        bag.weight.grad = torch.ones(9, 3, dtype=torch.bfloat16) if transport.rank == 0 else None
        exchange.synchronize()
        return first, bag.weight.grad.to_dense()

    results = LocalWorld(3).run(body)
    expected = torch.zeros(9, 3)
    expected[[1, 4, 8]] = torch.tensor([[2.0], [1.0], [1.0]]) / 3
    for first, second in results:
        assert torch.allclose(first.float(), expected, atol=1e-2)
        assert torch.allclose(second.float(), torch.full((9, 3), 1 / 3), atol=1e-2)


def test_bits_follow_what_each_layer_loses() -> None:
    """The middle layer's gradient is a thousand times larger: it gets more bits, the others fewer, at no more error."""

    def body(transport: LocalTransport) -> tuple[list[int], list[float], str, Any]:
        torch.manual_seed(0)
        sizes, errors = [], []
        parameters = [nn.Parameter(torch.zeros(64, 64)) for _ in range(8)]
        named = [(f"{i}.weight", p) for i, p in enumerate(parameters)]
        exchange = GradientExchange(named, options_for("maxmin:5", error_feedback=False), transport, auto_bits=2)
        for step in range(6):
            values = [
                [torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + 10 * i + rank)) for rank in range(2)]
                for i in range(8)
            ]
            scale = [1000.0 if i == 3 else 1.0 for i in range(8)]
            for i, p in enumerate(parameters):
                p.grad = None
                (p * values[i][transport.rank] * scale[i]).sum().backward()
            exchange.synchronize()
            lost = [p.grad - scale[i] * sum(values[i]) for i, p in enumerate(parameters)]
            errors.append(float(torch.cat(lost).norm()))
            sizes.append(exchange.payload_bytes)
            exchange.payload_bytes = 0
        return sizes, errors, exchange._sum.policy.spec, exchange.state_dict()

    (sizes, errors, spec, state), other = LocalWorld(2).run(body)
    assert (sizes, errors, spec) == other[:3]
    # Steps 0 to 2 have five bits everywhere; what step 2 has shown holds from step 3 on, and so on.
    assert sizes[0] == sizes[2] > 1.2 * sizes[3] and max(errors[3:]) < 1.1 * max(errors[:3])
    assert "3.weight=" not in spec or "3.weight=maxmin:6" in spec
    assert "0.weight=maxmin:2" in spec

    def resumed(transport: LocalTransport) -> str:
        named = [(f"{i}.weight", nn.Parameter(torch.zeros(64, 64))) for i in range(8)]
        exchange = GradientExchange(named, options_for("maxmin:5"), transport, auto_bits=2)
        exchange.load_state_dict(state)
        return exchange._sum.policy.spec

    assert LocalWorld(2).run(resumed) == [spec, spec]


@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_bits_are_chosen_while_training(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def body(transport: LocalTransport) -> tuple[str, list[int]]:
        model = Bag(sparse=False)
        config = Config(
            strategy=strategy, compression="maxmin:5", auto_bits=3, mega_batch=GLOBAL_BATCH, batch_size=13, hash_interval=1,
            **({"dispatch": "equal"} if strategy == "local" else {}),
        )  # fmt: skip
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        sizes: list[int] = []
        session.records.append(lambda record: sizes.append(record.payload_bytes))
        for batch in session.batches(TensorDataset(X, Y), num_epochs=2):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
        session.close()
        return model_hash(model), sizes

    (ours, sizes), (theirs, _) = LocalWorld(2).run(body)
    assert ours == theirs and sizes[-1] < sizes[0]
    assert "bits for each layer: " in caplog.text and "fewer than 5 on all" in caplog.text


@pytest.mark.parametrize("compression", ["none", "normal:2", "topk:0.1; *=maxmin:4", "maxmin:1"])
def test_auto_bits_needs_widths_to_choose_from(compression: str) -> None:
    def body(transport: LocalTransport) -> None:
        with pytest.raises((ValueError, AgreedError), match="auto_bits"):
            train(transport, compression=compression, auto_bits=5)

    LocalWorld(2).run(body)


@pytest.mark.parametrize(
    ("compression", "reducer", "message"),
    [("maxmin:9", "sra", "compression: .*bits"), ("normal:2", "allreduce", r"0\.weight: codec normal.* is not linear"),
     ("maxmin:4; x*=none", "sra", "no tensor's name matches")],
)  # fmt: skip
def test_bad_options_are_refused_on_all_ranks(compression: str, reducer: str, message: str) -> None:
    def body(transport: LocalTransport) -> None:
        with pytest.raises(AgreedError, match=message):
            GradientExchange(
                nn.Sequential(nn.Linear(40, 40)).named_parameters(), options_for(compression, reducer=reducer), transport
            )

    LocalWorld(2).run(body)


def test_a_state_of_another_model_is_refused() -> None:
    _, exchange = exchange_for(LocalTransport())
    state = exchange.state_dict()
    with pytest.raises(ValueError, match=r"other parameters: 9\.weight differ"):
        exchange.load_state_dict({**state, "order": [*(slot.info.name for slot in exchange._slots), "9.weight"]})
