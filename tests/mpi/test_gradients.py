"""Encoded gradients over Horovod and torch.distributed: the same bits on every rank, whichever bucket arrives first where."""

from __future__ import annotations

import time
import types
from typing import Any

import pytest
import torch
from pairs import half
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hvd_adaptive
from hvd_adaptive import Config, Session
from hvd_adaptive.comm import connect
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.exchange.gradients import GradientExchange

_generator = torch.Generator().manual_seed(3)
# All words of a row say its class: four epochs learn it.
Y = torch.randint(0, 3, (260,), generator=_generator)
X = 3 * torch.randint(0, 16, (260, 5), generator=_generator) + Y[:, None]


class Bag(nn.Module):
    """Sparse embeddings and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(50, 40, mode="sum", sparse=True)
        self.layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)), nn.Linear(40, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.tanh(self.bag(x)))


def train(transport: Any, *, num_epochs: int = 4, **options: Any) -> tuple[nn.Module, list[Any]]:
    model = Bag()
    if options.get("strategy") != "local":
        options |= {"strategy": "sync", "global_batch_size": 26}
    config = Config(mega_batch=78, hash_interval=1, **options)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.3), config, transport=transport)
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(TensorDataset(X, Y), num_epochs=num_epochs):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            if session.synchronize():
                nn.utils.clip_grad_norm_(model.layers.parameters(), 1.0)
            session.optimizer.step()
    session._hooks.remove()
    return model, records


def check_compressors(transport: Any) -> None:
    """Horovod's own optimizer takes ours."""
    import horovod.torch as hvd

    def gradients(compression: Any, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(5, 3).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        # Sums that are exact in any order: which tensors Horovod fuses, and so in which order it adds, depends on the moment. In
        # half precision the fraction is lost.
        wanted = [(torch.arange(p.numel()).view_as(p) % 7 + 64 + transport.rank + 2**-7).to(dtype) for p in model.parameters()]
        sum((p * g).sum() for p, g in zip(model.parameters(), wanted, strict=True)).backward()
        optimizer.synchronize()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]

    ours, theirs = hvd_adaptive.Compression, hvd.Compression
    for dtype in (torch.float32, torch.float64, torch.float16):
        for name in ("none", "fp16"):
            assert torch.equal(gradients(getattr(ours, name), dtype), gradients(getattr(theirs, name), dtype))
    # Horovod by itself refuses these.
    for name in ("none", "fp16"):
        flat = gradients(getattr(ours, name), torch.bfloat16)
        assert flat.dtype == torch.bfloat16
        assert torch.allclose(flat.float(), gradients(theirs.none, torch.float32), rtol=2e-2)


def check_two_at_once(transport: Any) -> None:
    """Two exchanges are under way together, begun in another order on each rank: neither takes the other's values."""
    options = types.SimpleNamespace(compression="maxmin:4; *=none", reducer="sra", error_feedback=True, seed=0)
    models = [nn.Linear(40, 30).double(), nn.Linear(40, 30).double()]
    exchanges = [
        GradientExchange(model.named_parameters(), options, transport, name=f"gradients{number}")
        for number, model in enumerate(models)
    ]
    for step in range(3):
        for number in (0, 1) if transport.rank % 2 else (1, 0):
            models[number].zero_grad()
            models[number](torch.full((1, 40), 1.0 + number + 10 * transport.rank).double()).sum().backward()
        # From the second step on, what is exchanged begins beside the backward pass.
        if transport.backend == "torch" and step:
            # Which has no names that tell them apart: an error on every rank, and not the other one's values.
            with pytest.raises(RuntimeError, match="must start collectives in one order"):
                exchanges[0].synchronize()
            break
        for number, exchange in enumerate(exchanges):
            exchange.synchronize()
            total = sum(1.0 + number + 10 * rank for rank in range(transport.world_size))
            gradient = models[number].weight.grad
            assert gradient is not None and torch.allclose(gradient, torch.full_like(gradient, total))
    for exchange in exchanges:
        exchange.remove()


@pytest.mark.mpi(3)
def test_strategy_sync_with_encoded_gradients(num_ranks: int, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    _, records = train(transport)
    assert records[0].loss > 1 and records[-1].loss < 0.1
    plain, _ = train(transport, num_epochs=1)
    exact, _ = train(transport, num_epochs=1, compression="maxmin:4; *=none", accumulation_steps=2)
    for (name, a), b in zip(exact.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name
    codecs = [("maxmin:4", "by-host"), ("topk:0.1", "sra"), ("powersgd:2", "sra"), ("fp16", "allreduce")]
    for codec, reducer in half(codecs, backend):
        model, records = train(transport, compression=codec, reducer=reducer)
        hashes = transport.allgather_object(model_hash(model))
        assert len(set(hashes)) == 1, codec
        # The last round's loss by itself goes up and down.
        assert min(record.loss for record in records[-3:]) < 0.1, codec
    # In this job, as starting one takes longer.
    options = {"strategy": "local", "merge_fragments": 2, "outer_step": "none", "batch_size": 6}
    model, records = train(transport, compression="maxmin:4; layers.1*=powersgd:2", **options)
    assert len(set(transport.allgather_object(model_hash(model)))) == 1
    assert min(record.loss for record in records[-3:]) < 0.1
    if backend == "horovod":
        check_compressors(transport)
    check_two_at_once(transport)
    transport.close()


def exchanged(transport: Any, reducer: str, compression: str) -> Tensor:
    """Several steps of many buckets, whose gradients come at other times on each rank; all ranks' bits are compared."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    options = types.SimpleNamespace(compression=compression, reducer=reducer, error_feedback=True, seed=0)
    exchange = GradientExchange(model.named_parameters(), options, transport, bucket_elements=4096)
    random = torch.Generator().manual_seed(transport.rank)
    for p in model.parameters():
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 8)
        p.register_hook(lambda _: time.sleep(0.01 * float(torch.rand(1, generator=random))))
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randn(4, 64, generator=random)).square().sum()
        # Not from p.grad: sums may be there as soon as backward() ends.
        own = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
        loss.backward()
        exchange.synchronize()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
        others = transport.allgather_object(flat.numpy().tobytes())
        assert all(other == others[0] for other in others)
    assert not torch.equal(own, flat)
    exchange.remove()
    return flat


@pytest.mark.mpi(4)
def test_buckets_that_arrive_in_any_order_over_two_hosts(num_ranks: int, backend: str, pretend_host: Any) -> None:
    from mpi4py import MPI

    pretend_host(f"host{MPI.COMM_WORLD.Get_rank() // 2}")
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    assert transport.local_size == 2
    for reducer in ("sra", "hierarchical"):
        exact = exchanged(transport, reducer, "none")
        coded = exchanged(transport, reducer, "maxmin:4")
        assert 1e-3 < float((coded - exact).norm() / exact.norm()) < 0.5
        exchanged(transport, reducer, "powersgd:2; 3.*=maxmin:2; 5.*=topk:0.1; 6.*=none")
    transport.close()
