"""What is said of ranks whose progress a merge leaves out, when that ends the job, and of optimizers that merges do not suit."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.comm.protocols import AgreedError

log = logging.getLogger(__name__)

# Rounds in a row in which a rank loses all its work to NaN or Inf, after which the job ends.
_MOST_BROKEN = 10


class BrokenRounds:
    """Counts the rounds in a row in which each rank has lost all its work to NaN or Inf.

    Args:
        who: what the error calls the ranks.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._counts = np.zeros(1)

    def count(self, finite: NDArray[np.bool_], works: NDArray[np.bool_]) -> None:
        """Counts a round, the same on every rank.

        Args:
            finite: whether a rank's parameters are, shape (world_size,).
            works: whether it made updates, shape (world_size,): a round without them ends no count.

        Raises:
            AgreedError: on all ranks, if a rank has lost its work in ten rounds in a row.
        """
        self._counts = np.where(finite & works, 0, self._counts + ~finite)
        if (self._counts >= _MOST_BROKEN).any():
            raise AgreedError(
                f"{self._who} {np.flatnonzero(self._counts >= _MOST_BROKEN).tolist()} had NaN or Inf in their parameters in "
                f"{_MOST_BROKEN} rounds in a row, so that nothing they computed was merged: look at their data and devices, or "
                "lower the learning rate"
            )


def warn_of_broken(finite: NDArray[np.bool_], who: str = "ranks") -> None:
    """Logs which of them (``who``) have parameters that are not finite, if any."""
    text = (
        "ranks %s had NaN or Inf in their parameters: they contributed nothing and start again from the merged model. "
        "If this repeats, lower the learning rate."
    )
    if not finite.all():
        log.warning(text.replace("ranks", who, 1), np.flatnonzero(~finite).tolist())


def warn_of_outliers(outliers: NDArray[np.bool_], what: str = "progress", *, who: str = "ranks") -> None:
    """Logs of which of them (``who``) the progress was left out because it was much larger than usual, if any's was."""
    if outliers.any():
        log.warning(
            "%s %s: their %s was much larger than it has been, so it was left out of the merge and they go on from the merged "
            "model (outlier_limit). If this repeats, look at their data or lower the learning rate.",
            who, np.flatnonzero(outliers).tolist(), what,
        )  # fmt: skip


def warn_of_copies(names: list[str]) -> None:
    """Logs which states of an optimizer (``names``) are copies of the parameters, if any are."""
    if names:
        log.warning(
            "the optimizer keeps a copy of the parameters in its state (%s). If its steps copy that back, as those with fp32 "
            "master weights, Lookahead and schedule-free methods do, they undo merges: set optimizer_state 'average' and "
            "outer_step 'none', or use strategy 'sync'.",
            ", ".join(names),
        )


def warn_of_infinite_state(parameters: list[Tensor], modules: list[nn.Module]) -> None:
    """Logs of which parameters ranks keep the optimizer's state, as its mean is not finite.

    Args:
        parameters: they.
        modules: that hold them, and tell their names.
    """
    places = {id(p) for p in parameters}
    names = [name for module in modules for name, p in module.named_parameters() if id(p) in places]
    log.warning(
        "the optimizer's state of %s has NaN or Inf on a rank, so each rank keeps its own for now. Said once. If the loss gets "
        "worse, lower the learning rate or clip gradients.",
        _few(names or [f"{len(places)} parameters"]),
    )


class OtherOptimizers:
    """Watches the trainable parameters that the session's optimizer does not have: another optimizer may change them.

    Its fused steps are not seen, nor changes of ``parameter.data``.

    Args:
        model: to train.
        optimizer: that Session was given.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._versions = [(name, p, p._version) for name, p in model.named_parameters() if p.requires_grad]

    def warn(self) -> None:
        """Logs which of them have changed since construction, if any have."""
        known = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        names = [name for name, p, version in self._versions if p._version != version and id(p) not in known]
        if names:
            log.warning(
                "something else than the optimizer that Session was given has changed %s. If that is a second optimizer: "
                "learning rates that the session changes (lr_rule, warmup_epochs, lr_decay) do not reach it, merges leave its "
                "state alone, and checkpoints lack it. Give Session one optimizer with a parameter group for each.",
                _few(names),
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more parameters" if len(names) > 3 else "")
