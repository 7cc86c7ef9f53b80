"""Optimizers that torch lacks: row-wise Adagrad, and momentum and Adam for parameters with sparse gradients.

They are "lazy": a step changes only the rows that have a gradient, and the state of these rows. So one step costs what its
gradient costs, and merges can leave out the rows that no rank touched. Dense gradients get the usual step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.adam import adam

OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise-adagrad", "adam", "adamw")
# Squares that a pass keeps in the cache of a core.
_CPU_CHUNK_ELEMENTS = 1 << 17


def slice_dim(shape: torch.Size) -> int:
    """Returns the dimension along which a dense parameter is cut into slices: the longest one, the first of equal ones.

    That is the features' dimension of an embedding and the labels' of an output layer, however it is stored. A scalar has 0.
    """
    return max(range(len(shape)), key=lambda d: (shape[d], -d), default=0)


def row_dims(parameters: Sequence[Tensor], row_parameters: Iterable[int]) -> list[int]:
    """Returns each parameter's dimension of rows: the first one for those at ``row_parameters``, else :func:`slice_dim`'s."""
    by_rows = set(row_parameters)
    return [0 if index in by_rows else slice_dim(p.shape) for index, p in enumerate(parameters)]


def slice_shape(shape: torch.Size, dim: int) -> list[int]:
    """Returns the shape of one value a slice: that size at the slices' dimension ``dim``, and 1 at every other."""
    return [size if d == dim else 1 for d, size in enumerate(shape)]


def slice_squares(gradient: Tensor, dim: int) -> Tensor:
    """Returns the sum of squares of each slice, in the gradient's dtype.

    Args:
        gradient: dense.
        dim: the slices' dimension.

    Returns:
        Shape as the gradient, but 1 in every other dimension.
    """
    others = [d for d in range(gradient.dim()) if d != dim]
    if not others:
        return gradient * gradient
    if gradient.device.type != "cpu" or gradient.numel() <= _CPU_CHUNK_ELEMENTS:
        return (gradient * gradient).sum(others, keepdim=True)
    # In parts that stay in the cache, along the first dimension, which is contiguous.
    rows = max(1, _CPU_CHUNK_ELEMENTS * gradient.shape[0] // gradient.numel())
    parts = [(part * part).sum(others, keepdim=True) for part in gradient.split(rows)]
    return torch.cat(parts) if dim == 0 else torch.stack(parts).sum(0)


class _Lazy(Optimizer):
    """Steps parameter by parameter; subclasses say how."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                    # What else looks at the gradient after the step need not add up its rows again.
                    parameter.grad = gradient
                    if gradient._nnz():
                        self._step_rows_(parameter, gradient._indices()[0], gradient._values(), state, group)
                else:
                    self._step_(parameter, gradient, state, group)
        return loss

    def _step_rows_(self, w: Tensor, rows: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Steps the rows ``rows`` (each once, ascending) of ``w`` with their gradients ``g``."""
        raise AssertionError

    def _step_(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Steps ``w`` with the dense gradient ``g``."""
        raise AssertionError


class RowwiseAdagrad(_Lazy):
    """Adagrad with one accumulator a row, as in DLRM (arXiv 1906.00091; FBGEMM's EXACT_ROWWISE_ADAGRAD).

    sum += mean of the row's squared gradients; row -= lr gradient / (sqrt(sum) + eps). A "row" is a slice along the parameter's
    longest dimension (:func:`slice_dim`), or along the first one where gradients are sparse. One-dimensional parameters get
    plain Adagrad.

    State: ``sum``, shape as the parameter, but 1 in every dimension except the slices'.

    Args:
        params: parameters or groups of them.
        lr: learning rate, > 0.
        eps: added to the root, > 0.
        initial_accumulator_value: what ``sum`` starts from, >= 0.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.05, eps: float = 1e-10, initial_accumulator_value: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state, as torch's optimizers do; ``sum`` stays fp32 where parameters are bf16 or fp16."""
        super().load_state_dict(state_dict)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for place, w in zip(places, parameters, strict=True):
            total = state_dict["state"].get(place, {}).get("sum")
            if total is not None:
                # torch has rounded it to the parameter's dtype, in which it would soon stop growing.
                self.state[w]["sum"] = total.to(w.device, _sum_dtype(w))

    def _step_rows_(self, w: Tensor, rows: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        total = row_sum(w, 0, state, group)
        mean = (g * g).view(len(rows), -1).mean(1, dtype=total.dtype).view(-1, *total.shape[1:])
        some = total.index_select(0, rows).add_(mean)
        total[rows] = some
        w.index_add_(0, rows, g * some.sqrt_().add_(group["eps"]).reciprocal_().to(g.dtype), alpha=-group["lr"])

    def _step_(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        dim = slice_dim(w.shape)
        total = row_sum(w, dim, state, group)
        total.add_(slice_squares(g, dim), alpha=total.numel() / max(1, g.numel()))
        w.addcdiv_(g, total.sqrt().add_(group["eps"]).to(g.dtype), value=-group["lr"])


def row_sum(w: Tensor, dim: int, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Returns row-wise Adagrad's accumulator of a parameter, and makes it where the parameter has had no step yet."""
    if "sum" not in state:
        state["sum"] = w.new_full(slice_shape(w.shape, dim), group["initial_accumulator_value"], dtype=_sum_dtype(w))
    total: Tensor = state["sum"]
    return total


def _sum_dtype(w: Tensor) -> torch.dtype:
    return torch.promote_types(w.dtype, torch.float32)


class LazyMomentum(_Lazy):
    """SGD with momentum whose velocity acts on rows with a gradient only: v = momentum v + g; row -= lr v.

    torch's SGD keeps a sparse velocity that grows with every step. Here the velocity of a row waits until its next gradient.

    Args:
        params: parameters or groups of them.
        lr: learning rate, > 0.
        momentum: in [0, 1).
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def _velocity(self, w: Tensor, state: dict[str, Any]) -> Tensor:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(w)
        velocity: Tensor = state["momentum_buffer"]
        return velocity

    def _step_rows_(self, w: Tensor, rows: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        velocity = self._velocity(w, state)
        some = velocity.index_select(0, rows).mul_(group["momentum"]).add_(g)
        velocity[rows] = some
        w.index_add_(0, rows, some, alpha=-group["lr"])

    def _step_(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        w.add_(self._velocity(w, state).mul_(group["momentum"]).add_(g), alpha=-group["lr"])


class LazyAdam(_Lazy):
    """Adam or AdamW; of sparse gradients, the moments of rows without a gradient stay, as in torch's ``SparseAdam``.

    The bias correction counts the parameter's steps, not a row's. Decoupled weight decay shrinks only rows with a gradient.

    Args:
        params: parameters or groups of them.
        lr: learning rate, > 0.
        betas: decay of both moments.
        eps: added to the root, > 0.
        weight_decay: decoupled (AdamW), >= 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _moments(self, w: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
        return state["step"], state["exp_avg"], state["exp_avg_sq"]

    def _step_rows_(self, w: Tensor, rows: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        step, first, second = self._moments(w, state)
        step += 1
        beta1, beta2 = group["betas"]
        m = first.index_select(0, rows).lerp_(g, 1 - beta1)
        v = second.index_select(0, rows).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        first[rows], second[rows] = m, v
        number = float(step)
        root = (v / (1 - beta2**number)).sqrt_().add_(group["eps"])
        some = w.index_select(0, rows).mul_(1 - group["lr"] * group["weight_decay"])
        w[rows] = some.addcdiv_(m, root, value=-group["lr"] / (1 - beta1**number))

    def _step_(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        step, first, second = self._moments(w, state)
        adam(
            [w], [g], [first], [second], [], [step],
            decoupled_weight_decay=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


LAZY = (RowwiseAdagrad, LazyMomentum, LazyAdam)


def make_optimizer(
    name: str, params: Iterable[Any], *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, sparse: bool = True
) -> Optimizer:
    """Returns an optimizer by name: torch's own class where it does the step.

    Args:
        name: one of :data:`OPTIMIZERS`.
        params: parameters or groups of them.
        lr: learning rate, > 0.
        momentum: of ``momentum``.
        weight_decay: of ``sgd``, ``momentum``, ``adagrad`` and ``adam`` added to the gradient, of ``adamw`` decoupled.
        sparse: some gradients are sparse, for which ``weight_decay`` must be 0 except with ``adamw``.

    Raises:
        ValueError: for an unknown name.
    """
    if name == "sgd":
        return SGD(params, lr=lr, weight_decay=weight_decay)
    if name == "momentum":
        return LazyMomentum(params, lr=lr, momentum=momentum) if sparse else SGD(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay
        )
    if name == "adagrad":
        if sparse and not torch.sparse.check_sparse_tensor_invariants.is_enabled():
            # As it is. Said aloud, torch's Adagrad does not warn of it.
            torch.sparse.check_sparse_tensor_invariants.disable()
        return Adagrad(params, lr=lr, weight_decay=weight_decay)
    if name == "rowwise-adagrad":
        return RowwiseAdagrad(params, lr=lr)
    if name in ("adam", "adamw"):
        if sparse:
            return LazyAdam(params, lr=lr, weight_decay=weight_decay)
        return (AdamW if name == "adamw" else Adam)(params, lr=lr, weight_decay=weight_decay)
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
