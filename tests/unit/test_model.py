"""SparseMLP and its loss against plain torch."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.cli.use_model import build_model
from hvd_adaptive.xmc import sparse_mlp as model_module
from hvd_adaptive.xmc.sparse_mlp import SparseMLP, multilabel_softmax_loss


class Rows(NamedTuple):
    indices: Tensor
    offsets: Tensor
    values: Tensor | None = None


def make_rows(lists: list[list[int]], *, with_values: bool = False, seed: int = 0) -> Rows:
    indices = torch.tensor([i for row in lists for i in row], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in lists])], dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    return Rows(indices, offsets, torch.rand(len(indices), generator=generator) if with_values else None)


def dense(rows: Rows, width: int) -> Tensor:
    matrix = torch.zeros(len(rows.offsets) - 1, width)
    index = torch.repeat_interleave(rows.offsets.diff())
    values = torch.ones(len(rows.indices)) if rows.values is None else rows.values
    return matrix.index_put((index, rows.indices), values, accumulate=True)


def reference_loss(logits: Tensor, labels: Rows) -> Tensor:
    target = dense(labels, logits.shape[1]).to(logits.dtype)
    target = target / target.sum(1, keepdim=True).clamp(min=1)
    return -(target * torch.log_softmax(logits, 1)).sum() / logits.shape[0]


label_lists = st.integers(1, 9).flatmap(
    lambda num_labels: st.tuples(
        st.just(num_labels),
        st.lists(st.lists(st.integers(0, num_labels - 1), unique=True, max_size=4), min_size=1, max_size=6),
    )
)


@settings(deadline=None)
@given(label_lists, st.integers(0, 2**16), st.sampled_from([0.1, 3.0, 100.0]))
def test_loss_and_gradient_equal_log_softmax(
    case: tuple[int, list[list[int]]], seed: int, scale: float
) -> None:
    num_labels, lists = case
    labels = make_rows(lists)
    torch.manual_seed(seed)
    logits = (torch.randn(len(lists), num_labels, dtype=torch.float64) * scale).requires_grad_()
    loss = multilabel_softmax_loss(logits, labels)
    expected = reference_loss(logits, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    for factor in (1.0, 0.25, 3.0, 1.0):
        (got,) = torch.autograd.grad(loss * factor, logits, retain_graph=True)
        (want,) = torch.autograd.grad(expected * factor, logits, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_loss_gradcheck() -> None:
    labels = make_rows([[0, 3], [], [2], [1, 4, 5]])
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: multilabel_softmax_loss(x, labels), (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_is_stable_at_large_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]], dtype=dtype, requires_grad=True)
    loss = multilabel_softmax_loss(logits, make_rows([[1], [1, 2]]))
    loss.backward()
    assert loss.item() == pytest.approx((2e4 + np.log(2)) / 2, rel=1e-6)
    expected = torch.tensor([[0.5, -0.5, 0], [0, 0, 0]], dtype=dtype)
    torch.testing.assert_close(logits.grad, expected)


def test_unlabelled_rows_count_in_the_mean_and_move_nothing() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = multilabel_softmax_loss(logits, make_rows([[], [4], []]))
    alone = multilabel_softmax_loss(logits[1:2], make_rows([[4]]))
    loss.backward()
    assert loss.item() == pytest.approx(alone.item() / 3)
    assert logits.grad is not None
    assert not logits.grad[[0, 2]].any()


@pytest.mark.parametrize("lists", [[], [[], []]])
def test_batches_without_labels_give_zero(lists: list[list[int]]) -> None:
    model = SparseMLP(7, 5)
    x = make_rows([[1]] * len(lists), with_values=True)
    loss = multilabel_softmax_loss(model(x), make_rows(lists))
    loss.backward()
    assert loss.item() == 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.to_dense()
        assert gradient.shape == parameter.shape
        assert not gradient.any()


@pytest.mark.parametrize("scale", [1e-36, 1e-22, 1e20, 1e37])
def test_unit_rows_are_of_length_one_whatever_fp32_holds(scale: float) -> None:
    x = make_rows([[0, 3, 10], [5]], with_values=True)
    assert x.values is not None
    scaled = Rows(x.indices, x.offsets, x.values * scale)
    torch.testing.assert_close(model_module.unit_values(scaled), model_module.unit_values(x))


@pytest.mark.parametrize("with_values", [True, False])
def test_unit_rows_are_rows_of_length_one(with_values: bool) -> None:
    torch.manual_seed(0)
    unit, plain = SparseMLP(11, 5, 8, unit_rows=True), SparseMLP(11, 5, 8)
    plain.load_state_dict(unit.state_dict())
    x = make_rows([[0, 3, 10], [], [5], [2, 4, 5, 6]], with_values=with_values)
    values = torch.ones(len(x.indices)) if x.values is None else x.values.clone()
    for start, stop in itertools.pairwise(x.offsets.tolist()):
        values[start:stop] /= values[start:stop].norm()
    torch.testing.assert_close(unit(x), plain(Rows(x.indices, x.offsets, values)))
    zeros = Rows(torch.tensor([3]), torch.tensor([0, 1]), torch.tensor([0.0]))
    assert torch.equal(unit(zeros), torch.zeros(1, 5))


def test_non_finite_logits_show_in_the_loss() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    assert multilabel_softmax_loss(logits, make_rows([[0], [1]])).isnan()


def test_half_logits_are_computed_in_float32() -> None:
    logits = torch.randn(3, 8).bfloat16().requires_grad_()
    labels = make_rows([[1], [2, 3], [0]])
    loss = multilabel_softmax_loss(logits, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference_loss(logits.float(), labels))
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_loss_of_a_batch_is_the_weighted_mean_of_its_parts() -> None:
    logits = torch.randn(5, 9, dtype=torch.float64)
    lists = [[1], [], [2, 8], [0], [3, 4, 5]]
    whole = multilabel_softmax_loss(logits, make_rows(lists))
    parts = [
        multilabel_softmax_loss(logits[a:b], make_rows(lists[a:b])) * (b - a) / 5 for a, b in ((0, 2), (2, 5))
    ]
    torch.testing.assert_close(whole, sum(parts))


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("use_onednn", [True, False])
def test_model_equals_a_dense_network(
    sparse: bool, dtype: torch.dtype, use_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_onednn:
        monkeypatch.setattr(model_module, "_onednn_linear", lambda: None)
    torch.manual_seed(0)
    model = SparseMLP(11, 13, 8, sparse_gradients=sparse).to(dtype)
    x = make_rows([[0, 3, 10], [], [5], [2, 4, 5, 6]], with_values=True)
    labels = make_rows([[1, 12], [3], [], [7]])
    first = model.hidden.weight.detach().clone().requires_grad_()
    second = model.output_weight.detach().clone().requires_grad_()
    logits = torch.relu(dense(x, 11).to(dtype) @ first) @ second
    torch.testing.assert_close(model(x), logits)
    assert not model(x)[1].any()
    multilabel_softmax_loss(model(x), labels).backward()
    reference_loss(logits, labels).backward()
    gradient = model.hidden.weight.grad
    assert gradient is not None
    assert gradient.is_sparse == sparse
    torch.testing.assert_close(gradient.to_dense(), first.grad)
    torch.testing.assert_close(model.output_weight.grad, second.grad)


def test_onednn_is_used_and_takes_strided_gradients() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(4, 5, requires_grad=True)
    result = model_module._matmul(x, weight)
    if torch.backends.mkldnn.is_available():
        assert "Onednn" in type(result.grad_fn).__name__
    result.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(1).expand(6, 4))
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(4, 5))


def test_missing_onednn_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert model_module._onednn_linear.__wrapped__() is None
    assert "oneDNN" in caplog.text


def test_training_fits_a_small_problem() -> None:
    torch.manual_seed(0)
    model = SparseMLP(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    lists = [[i] for i in range(20)]
    x = make_rows(lists)
    for _ in range(200):
        optimizer.zero_grad()
        loss = multilabel_softmax_loss(model(x), make_rows(lists))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
    assert model(x).argmax(1).tolist() == list(range(20))


def test_the_hidden_layer_keeps_the_norm_of_unit_rows() -> None:
    torch.manual_seed(0)
    model = SparseMLP(1000, 3)
    lists = [np.random.default_rng(i).permutation(1000)[:40].tolist() for i in range(50)]
    x = make_rows(lists)._replace(values=torch.full((2000,), 40**-0.5))
    norms = torch.relu(model.hidden(x.indices, x.offsets, per_sample_weights=x.values)).norm(dim=1)
    assert 0.9 < norms.mean().item() < 1.1


def test_a_model_file_without_hidden_units_is_refused() -> None:
    tensors = {"hidden.weight": torch.zeros(3, 0), "output_weight": torch.zeros(0, 2)}
    metadata = {"num_features": "3", "num_labels": "2", "hidden_size": "0"}
    with pytest.raises(ValueError, match="says hidden_size 0"):
        build_model(tensors, metadata, num_features=3, num_labels=2)
