"""What becomes of a model's buffers at merges, over simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_loop import take_steps
from torch import nn

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.device_copies import host_bytes, memory_of
from hvd_adaptive.engine.flat_buffers import FlatBuffers
from hvd_adaptive.engine.flat_model import FlatModel
from hvd_adaptive.session.session import Session

INF = float("inf")
X = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, (X.sum(dim=1) > 0).long())
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Observed(nn.Module):
    """Has the range of its inputs in buffers, as observers of quantization do, and values that its forward pass sets."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 2)
        self.register_buffer("least", torch.tensor(INF, dtype=dtype))
        self.register_buffer("greatest", torch.tensor(-INF, dtype=dtype))
        self.register_buffer("set", torch.tensor(1e4, dtype=dtype))
        self.register_buffer("mask", torch.ones(4, dtype=dtype))
        self.register_buffer("never", torch.tensor([-INF, torch.nan, 1.0], dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.least.copy_(torch.minimum(self.least, x.min()))
        self.greatest.copy_(torch.maximum(self.greatest, x.max()))
        self.set.fill_(0.0123)
        self.mask[:2] = 0
        return self.inner(x)


def train(transport: LocalTransport, model: nn.Module, **options: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config(batch_size=10, mega_batch=80, hash_interval=1, **options)
    session = Session(model, optimizer, config, transport=transport)
    take_steps(session, model, DATA)
    return model


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}), (2, {}), (3, {"merge_weights": "samples"}), (1, {"strategy": "sync"}), (2, {"merges_per_round": 2}),
        (2, {"logical_ranks": 3}), (1, {"strategy": "sma"}),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_ranks_share_are_kept(world_size: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    for model in LocalWorld(world_size).run(lambda t: train(t, Observed(dtype), **options)):
        assert -5 < float(model.least) < 0 < float(model.greatest) < 5
        if dtype != torch.float64 or "logical_ranks" not in options:
            assert torch.equal(model.set, torch.full_like(model.set, 0.0123))
        assert model.mask.tolist() == [0, 0, 1, 1]
        assert torch.equal(model.never.isnan(), torch.tensor([False, True, False]))
        assert model.never[::2].tolist() == [-INF, 1]


def merge(values: list[list[float]], weights: list[float], *, start: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Merges one buffer of ranks, each of which holds other values; returns the ranks' results."""

    def run(transport: LocalTransport) -> torch.Tensor:
        model = nn.Module()
        model.register_buffer("b", torch.full((len(values[0]),), start, dtype=dtype))
        buffers = FlatBuffers(model, transport)
        model.b.copy_(torch.tensor(values[transport.rank]))
        buffers.compute_delta()
        buffers.start_(weights[transport.rank])
        buffers.finish_()
        return model.b

    return LocalWorld(len(values)).run(run)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("start", [0.0, 1e4, INF, torch.nan])
def test_a_merged_buffer_does_not_depend_on_what_it_was(dtype: torch.dtype, start: float) -> None:
    weights = [1 / 3, 1 / 3, 1 / 7, 1 - 2 / 3 - 1 / 7]
    values = [[0.1, -3.7, 0.0, 1.0 + rank] for rank in range(4)]
    expected = sum(weight * (1.0 + rank) for rank, weight in enumerate(weights))
    for merged in merge(values, weights, start=start, dtype=dtype):
        assert torch.equal(merged[:3], torch.tensor(values[0][:3]).to(dtype))
        assert float(merged[3]) == pytest.approx(expected, rel=1e-2 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_rank_that_is_left_out_spoils_nothing(dtype: torch.dtype) -> None:
    for merged in merge([[torch.nan, INF], [0.1, 7.0], [0.1, 7.0]], [0.0, 0.3, 0.7], start=2.0, dtype=dtype):
        assert torch.equal(merged, torch.tensor([0.1, 7.0]).to(dtype))


@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_a_buffer_that_becomes_infinite_on_all_ranks(strategy: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 2)
            self.register_buffer("mean", torch.tensor([0.1, -INF]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean[0] = INF
            return self.inner(x)

    if strategy == "local":
        with pytest.raises(RuntimeError, match="diverged"):
            train(LocalTransport(), Broken())
    else:
        # As steps with gradients that are not finite are left out, so is this.
        assert train(LocalTransport(), Broken(), strategy="sync").mean.tolist() == [pytest.approx(0.1), -INF]


@pytest.mark.parametrize("strategy", ["local", "sync"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_that_gets_another_shape_is_named(strategy: str, in_place: bool) -> None:
    """Such as the ranges of channels, which an observer makes in its first pass."""

    class Growing(Observed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if in_place:
                self.mask.resize_(5)
            else:
                self.mask = torch.ones(5)
            return super().forward(x)

    said = r"buffer mask of the model was a tensor \(float\) of shape \(4,\) when merges began, and is .* \(5,\) now: run a"
    with pytest.raises(RuntimeError, match=said):
        train(LocalTransport(), Growing(), strategy=strategy)


def test_a_parameter_that_gets_another_shape_is_named() -> None:
    class Growing(Observed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner.bias.data = self.inner.bias.data[:1]
            return super().forward(x)

    with pytest.raises(RuntimeError, match=r"parameter inner.bias of the model was .* \(2,\) .* is .* \(1,\) now"):
        train(LocalTransport(), Growing())


def test_tensors_in_another_order_are_named() -> None:
    """Merges would take them for each other, where they have as many elements."""
    model = Observed()
    flat = FlatModel(model, LocalTransport())
    flat.rebind()
    weight = model.inner.weight
    del model.inner.weight
    model.inner.weight = weight
    with pytest.raises(RuntimeError, match=r"parameters of the model are in another order .* the first is inner\.bias: do not"):
        flat.rebind()
    least = model.least
    del model.least
    model.register_buffer("least", least)
    with pytest.raises(RuntimeError, match=r"buffers of the model are in another order .* the first is greatest: do not"):
        flat.buffers.rebind()


def test_memory_is_read_on_the_cpu_alone() -> None:
    tensor = torch.arange(3, dtype=torch.int32)
    assert b"".join(bytes(memory_of(part)) for part in host_bytes([tensor])) == tensor.numpy().tobytes()
    with pytest.raises(ValueError, match="must be on the CPU, got a tensor on meta"):
        memory_of(torch.empty(3, dtype=torch.uint8, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        list(host_bytes([torch.empty(3, device="meta")]))


@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_the_memory_of_buffers_may_be_resized_as_observers_do(strategy: str) -> None:
    class Resizing(Observed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask.resize_(0)
            self.mask.resize_(4).fill_(1.0)
            return super().forward(x)

    for model in LocalWorld(2 if strategy == "local" else 1).run(lambda t: train(t, Resizing(), strategy=strategy)):
        assert model.mask.tolist() == [0, 0, 1, 1]
