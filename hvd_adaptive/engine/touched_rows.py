"""Which rows of a parameter a rank's own steps have changed since the last merge."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from hvd_adaptive.comm.protocols import Collectives, agree_equal
from hvd_adaptive.config import Config
from hvd_adaptive.engine.optimizers import LAZY

log = logging.getLogger(__name__)


class TouchedRows:
    """Marks the rows of one parameter that optimizer steps change, from the sparse gradient of each step.

    Whatever else writes to the parameter, and whatever step is not known to change only rows with a gradient, marks ALL
    rows: the tensor's version counter tells. Writes through ``parameter.data`` do not move that counter; a comparison with
    the global model finds those (:meth:`hvd_adaptive.engine.row_merge.RowRange.compute_delta_`).

    Args:
        name: the parameter's, for messages.
        parameter: shape (num_rows, ...).
        optimizer: the one that steps it; hooks are registered on it.

    Attributes:
        parameter_id: ``id`` of the parameter.
        mask: the touched rows, bool, shape (num_rows,), on the parameter's device.
    """

    def __init__(self, name: str, parameter: nn.Parameter, optimizer: Optimizer) -> None:
        self.name = name
        self.parameter_id = id(parameter)
        self._parameter = parameter
        self._optimizer = optimizer
        self.mask = torch.zeros(parameter.shape[0], dtype=torch.bool, device=parameter.device)
        self._version = parameter._version
        self._warned = False
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self.check_version()),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Takes the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Forgets all rows: the parameter is the global model now."""
        self.mask.zero_()
        self._version = self._parameter._version

    def check_version(self) -> None:
        """Marks all rows if something other than a step has written to the parameter."""
        if self._parameter._version != self._version:
            self.mark_all("was written outside optimizer.step")
            self._version = self._parameter._version

    def _after_step(self, *_: Any) -> None:
        # After the step, not before: with a closure the gradient comes into being inside.
        if self._parameter._version == self._version:
            return
        self._version = self._parameter._version
        gradient = self._parameter.grad
        if gradient is None:
            self.mark_all("was changed by a step and has no gradient")
        elif gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            self.mark_all("got a dense gradient")
        elif (reason := why_dense(self._optimizer, self._parameter)) is not None:
            self.mark_all(f"was stepped by {reason}")
        else:
            self.mask.index_fill_(0, gradient._indices()[0], True)

    def mark_all(self, what: str) -> None:
        """Marks all rows, and warns once of what has happened to the parameter."""
        self.mask.fill_(True)
        if not self._warned:
            self._warned = True
            log.warning(
                "%s %s: all its rows are merged wherever that happens. Merging only touched rows needs sparse gradients "
                "and no other writes.",
                self.name,
                what,
            )


def mark_rows(model: nn.Module, optimizer: Optimizer, config: Config, transport: Collectives) -> dict[int, TouchedRows]:
    """Begins to mark the rows of a model's sparse parameters, where merges can make use of it. COLLECTIVE.

    Args:
        model: any module.
        optimizer: of its parameters.
        config: the rules of merges.
        transport: the world.

    Returns:
        By ``id`` of a parameter its marks; those of which all rows are merged are left out.

    Raises:
        ValueError: if ``sparse_merge`` is ``always`` and there are none.
        AgreedError: on all ranks, if they differ in what can be marked.
    """
    beside_steps = config.merge_fragments > 1 or config.merges_beside_steps
    dense = beside_steps or config.measures_deltas or config.encodes or config.logical_ranks is not None
    if dense or config.sparse_merge == "never" or config.outer_state == "host":
        return {}
    touched, refused = {}, []
    for name, parameter in sparse_parameters(model).items():
        if (reason := why_dense(optimizer, parameter)) is None:
            touched[id(parameter)] = TouchedRows(name, parameter, optimizer)
        else:
            refused.append(f"{name} is stepped by {reason}")
    agree_equal(
        transport,
        {"sparse parameters": [t.name for t in touched.values()]},
        "Give every rank the same model with the same sparse=True.",
    )
    if not touched and config.sparse_merge == "always":
        raise ValueError(
            "sparse_merge 'always' needs an nn.Embedding or nn.EmbeddingBag with sparse=True and an optimizer whose step "
            "changes only rows with a gradient (SGD without momentum and weight decay, Adagrad, SparseAdam, those of "
            f"hvd_adaptive), got {'; '.join(refused) or 'a model without sparse gradients'}"
        )
    if refused and transport.rank == 0:
        log.warning("all rows of sparse parameters are merged: %s", "; ".join(refused))
    return touched


def why_dense(optimizer: Optimizer, parameter: Tensor) -> str | None:
    """Returns why a step of the optimizer may change rows without gradient, None if it is known not to."""
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        return "another optimizer"
    if type(optimizer) in LAZY:
        return None
    # Subclasses may do anything.
    if type(optimizer) not in (SGD, Adagrad, SparseAdam):
        return f"{type(optimizer).__name__}, which is not known to change only rows with a gradient"
    for option in ("momentum", "weight_decay"):
        if group.get(option):
            return f"{type(optimizer).__name__} with {option}, which changes all rows"
    return None


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trainable weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``, each once, by name."""
    weights = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return {name: p for name, p in model.named_parameters() if id(p) in weights and p.requires_grad}
