"""The papers' model for extreme multi-label data, and its loss.

Shapes: b = rows of a batch, F = features, H = hidden units, L = labels, nnz = stored entries of a CSR batch.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hvd_adaptive.xmc.rows import SparseRows

_log = logging.getLogger(__name__)


class SparseMLP(nn.Module):
    """Sparse input -> H ReLU units -> L logits, without biases, as in the released HeteroGPU code.

    Parameters:
        hidden.weight: (F, H) float32, drawn from N(0, 2 / H). Rows of XMC data have (about) unit norm, so
            this is He's rule for a unit-norm input: the hidden layer keeps a row's norm, whatever F is.
        output_weight: (H, L) float32, drawn from U(-1 / sqrt(H), 1 / sqrt(H)), the rule of `nn.Linear`. It is
            stored as (H, L), the transpose of `nn.Linear`'s, because all three products of a step then run on
            oneDNN without a copy.

    Args:
        num_features: F, >= 1.
        num_labels: L, >= 1.
        hidden_size: H, >= 1.
        sparse_gradients: `hidden.weight.grad` is a sparse COO tensor (uncoalesced, one entry a non-zero of
            the batch) instead of a dense one. Then the optimizer must accept sparse gradients: SGD without
            momentum and weight decay, Adagrad, SparseAdam.
        unit_rows: scale each row of features to length 1 (L2), so that one learning rate fits counts as well as tf-idf.
    """

    def __init__(
        self,
        num_features: int,
        num_labels: int,
        hidden_size: int = 128,
        *,
        sparse_gradients: bool = True,
        unit_rows: bool = False,
    ) -> None:
        super().__init__()
        self.hidden = nn.EmbeddingBag(
            num_features, hidden_size, mode="sum", sparse=sparse_gradients, include_last_offset=True
        )
        self.output_weight = nn.Parameter(torch.empty(hidden_size, num_labels))
        self._unit_rows = unit_rows
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws both weights anew (in place) from torch's global generator; see the class for the rule."""
        hidden_size = self.output_weight.shape[0]
        nn.init.normal_(self.hidden.weight, std=math.sqrt(2 / hidden_size))
        bound = 1 / math.sqrt(hidden_size)
        nn.init.uniform_(self.output_weight, -bound, bound)

    def forward(self, x: SparseRows) -> Tensor:
        """Computes the logits.

        Args:
            x: features; indices int64 (nnz,) in [0, F), offsets int64 (b + 1,), values floating (nnz,), or
                None for ones. A row without features gives logits of 0.

        Returns:
            Logits (b, L) in the dtype of the weights.
        """
        values = unit_values(x) if self._unit_rows else x.values
        values = None if values is None else values.to(self.hidden.weight.dtype)
        hidden = torch.relu(self.hidden(x.indices, x.offsets, per_sample_weights=values))
        return _matmul(hidden, self.output_weight)


def unit_values(x: SparseRows) -> Tensor:
    """Returns the values of rows scaled to length 1, shape (nnz,); a row of zeros stays."""
    values = torch.ones_like(x.indices, dtype=torch.float32) if x.values is None else x.values
    counts = x.offsets.diff()
    rows = torch.repeat_interleave(counts, output_size=values.numel())
    # In fp32 the squares of values beyond 1e19 or below 1e-22 would be infinite or 0.
    doubles = values.double()
    squares = doubles.new_zeros(counts.numel()).index_add_(0, rows, doubles * doubles)
    return (doubles * torch.where(squares > 0, squares, 1).rsqrt_()[rows]).to(values.dtype)


def multilabel_softmax_loss(logits: Tensor, labels: SparseRows) -> Tensor:
    """Softmax cross-entropy against the uniform distribution over each row's labels, mean over ALL rows.

    A row without labels adds 0 and still counts in the mean, so that the loss of a batch is the weighted mean
    of the losses of its parts. An empty batch gives 0. Stable for any finite logits. Forward allocates one
    (b, L) tensor, in which it writes the gradient; backward hands that tensor on, and allocates another only
    on CUDA or if the loss was scaled before `backward()`. Not twice differentiable.

    Args:
        logits: (b, L), float32 or float64; half types are computed in float32.
        labels: indices int64 (nnz,) in [0, L), offsets int64 (b + 1,), on the device of logits. A label that
            is listed twice counts twice.

    Returns:
        The loss, shape (), in the dtype of logits (float32 for half types).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return _MultilabelSoftmaxLoss.apply(logits, labels.indices, labels.offsets)


class _MultilabelSoftmaxLoss(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        num_rows, num_labels = logits.shape
        counts = offsets.diff()
        rows = torch.repeat_interleave(counts, output_size=indices.numel())
        share = counts.to(logits.dtype).mul_(num_rows).reciprocal_()[rows]
        gradient = torch.softmax(logits, dim=1)
        # The largest probability is at least 1 / L: its logarithm is safe, and saves a second pass of exp.
        highest = logits.amax(dim=1)
        log_highest = gradient.amax(dim=1).log_()
        entries = torch.add(indices, rows, alpha=num_labels)
        label_logits = logits[rows, indices]
        loss = (share * ((highest[rows] - label_logits) - log_highest[rows])).sum()
        if ctx.needs_input_grad[0]:
            gradient.mul_((counts > 0).to(logits.dtype).div_(max(num_rows, 1)).unsqueeze_(1))
            gradient.view(-1).index_add_(0, entries, share, alpha=-1)
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # Comparing on CUDA would make the host wait for the device.
        if not grad_output.is_cuda and grad_output.item() == 1.0:
            return gradient, None, None
        return gradient * grad_output, None, None


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x (b, H) @ weight (H, L), on oneDNN where that is possible (CPU, float32)."""
    usable = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and x.numel() > 0
    if usable and not torch.is_autocast_enabled("cpu") and _onednn_linear() is not None:
        return _OnednnMatmul.apply(x, weight)
    return x @ weight


class _OnednnMatmul(Function):
    """x @ weight through oneDNN: torch's own CPU matmul (MKL) has less than half its speed on AMD."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_x = _linear(grad_output, weight) if ctx.needs_input_grad[0] else None
        grad_weight = _linear(x.t(), grad_output.t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (m, k), weight (n, k), any strides -> x @ weight.T (m, n)."""
    linear = _onednn_linear()
    assert linear is not None
    return linear(x, weight, None, "none", [], "")


@functools.cache
def _onednn_linear() -> Callable[..., Tensor] | None:
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._linear_pointwise
    _log.warning(
        "this PyTorch has no oneDNN linear operator: CPU training uses the BLAS, which can take twice as long"
    )
    return None
