"""The optimizers that torch lacks: against plain formulas, lazy on rows without a gradient, as Horovod rebuilds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.engine.optimizers import OPTIMIZERS, LazyAdam, LazyMomentum, RowwiseAdagrad, make_optimizer


def gradients(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Rows with their gradients, of which some come twice."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(0, 9, (6,), generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(count)
    ]


def run(make: Any, steps: list[tuple[Tensor, Tensor]], *, sparse: bool) -> tuple[Tensor, Any]:
    weight = nn.Parameter(torch.linspace(-1, 1, 48).view(12, 4).clone())
    optimizer = make([weight])
    for rows, values in steps:
        gradient = torch.sparse_coo_tensor(rows.unsqueeze(0), values, weight.shape)
        weight.grad = gradient if sparse else gradient.to_dense()
        optimizer.step()
    return weight.detach(), optimizer


def test_rowwise_adagrad_is_its_formula() -> None:
    steps = gradients(5)
    found, optimizer = run(lambda p: RowwiseAdagrad(p, lr=0.1), steps, sparse=True)
    weight, total = torch.linspace(-1, 1, 48).view(12, 4).double(), torch.zeros(12, 1).double()
    for rows, values in steps:
        dense = torch.zeros(12, 4).double().index_add_(0, rows, values.double())
        total += dense.square().mean(1, keepdim=True)
        weight -= 0.1 * dense / (total.sqrt() + 1e-10)
    assert torch.allclose(found.double(), weight, atol=1e-6)
    state = next(iter(optimizer.state.values()))
    assert state["sum"].shape == (12, 1) and torch.allclose(state["sum"].double(), total, rtol=1e-5)
    # A dense gradient of the same values: the longest dimension is that of the rows, too.
    assert torch.allclose(run(lambda p: RowwiseAdagrad(p, lr=0.1), steps, sparse=False)[0], found, atol=1e-6)


def test_an_output_layer_has_one_accumulator_a_label_however_it_is_stored() -> None:
    labels_first, labels_last = nn.Parameter(torch.zeros(50, 8)), nn.Parameter(torch.zeros(8, 50))
    optimizer = RowwiseAdagrad([labels_first, labels_last], lr=0.5)
    for seed in range(3):
        labels_first.grad = torch.randn(50, 8, generator=torch.Generator().manual_seed(seed))
        labels_last.grad = labels_first.grad.t().contiguous()
        optimizer.step()
    assert torch.allclose(labels_first, labels_last.t(), atol=1e-6)
    assert optimizer.state[labels_last]["sum"].shape == (1, 50)


def test_one_dimension_is_plain_adagrad() -> None:
    ours, theirs = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    pair = (RowwiseAdagrad([ours], lr=0.1), torch.optim.Adagrad([theirs], lr=0.1))
    for seed in range(4):
        ours.grad = torch.randn(7, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        for optimizer in pair:
            optimizer.step()
    assert torch.allclose(ours, theirs)


def test_lazy_adam_is_torchs_sparse_adam_and_on_dense_gradients_its_adamw() -> None:
    steps = gradients(6)
    found, _ = run(lambda p: LazyAdam(p, lr=0.05), steps, sparse=True)
    assert torch.allclose(found, run(lambda p: torch.optim.SparseAdam(p, lr=0.05), steps, sparse=True)[0], atol=1e-6)
    decayed, _ = run(lambda p: LazyAdam(p, lr=0.05, weight_decay=0.1), steps, sparse=False)
    expected = run(lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1), steps, sparse=False)[0]
    assert torch.allclose(decayed, expected, atol=1e-6)


def test_lazy_momentum_is_torchs_where_every_row_has_a_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [(torch.arange(12), torch.randn(12, 4, generator=generator)) for _ in range(5)]
    expected = run(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8), steps, sparse=False)[0]
    for sparse in (True, False):
        found, _ = run(lambda p: LazyMomentum(p, lr=0.1, momentum=0.8), steps, sparse=sparse)
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("make", [RowwiseAdagrad, LazyMomentum, lambda p: LazyAdam(p, weight_decay=0.1)])
def test_rows_without_a_gradient_stay(make: Any) -> None:
    found, optimizer = run(make, gradients(5), sparse=True)
    start = torch.linspace(-1, 1, 48).view(12, 4)
    assert torch.equal(found[9:], start[9:]) and (found[:9] != start[:9]).any(1).all()
    for value in next(iter(optimizer.state.values())).values():
        assert value.dim() == 0 or not value[9:].any()
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (12, 4))
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = empty
    optimizer.step()
    assert torch.equal(weight.detach(), found)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sparse", [True, False])
def test_all_names_lower_a_loss_and_can_be_built_again_from_their_groups(name: str, sparse: bool) -> None:
    torch.manual_seed(0)
    table, output = nn.EmbeddingBag(20, 8, mode="sum", sparse=sparse), nn.Linear(8, 30)
    parameters = [*table.parameters(), *output.parameters()]
    optimizer = make_optimizer(name, parameters, lr=0.02, sparse=sparse)
    # As Horovod's DistributedOptimizer makes its own of the same class.
    optimizer = type(optimizer)(optimizer.param_groups)
    x, y = torch.randint(0, 20, (16, 3)), torch.randint(0, 30, (16,))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(output(table(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.97 * losses[0]
    restored = make_optimizer(name, parameters, lr=0.5, sparse=sparse)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accumulators_of_short_floats_are_loaded_as_they_were(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.zeros(12, 4, dtype=dtype)), nn.Parameter(torch.zeros(5, dtype=dtype))]
    optimizer = RowwiseAdagrad(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.1)
    for _ in range(300):
        optimizer.step()
    restored = RowwiseAdagrad(weights, lr=0.1)
    restored.load_state_dict(optimizer.state_dict())
    for weight in weights:
        total, loaded = optimizer.state[weight]["sum"], restored.state[weight]["sum"]
        assert loaded.dtype == torch.float32 and torch.equal(loaded, total) and not torch.equal(total, total.to(dtype).float())
    # From another run's, of another dtype.
    wide = RowwiseAdagrad([nn.Parameter(weight.detach().double()) for weight in weights])
    wide.load_state_dict(optimizer.state_dict())
    assert all(state["sum"].dtype == torch.float64 for state in wide.state.values())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer must be one of sgd, .*, got 'lion'"):
        make_optimizer("lion", [nn.Parameter(torch.zeros(1))], lr=1.0)
