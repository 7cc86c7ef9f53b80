"""Horovod's functions, intercepted: a script may call them as it could call Horovod's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adaptive.wrap.optimizer_calls import _intercept_optimizer
from hvd_adaptive.wrap.run_options import RunConfig


@pytest.mark.mpi(2)
def test_only_the_first_init_is_a_start_and_one_after_a_shutdown(num_ranks: int) -> None:
    import horovod.torch as hvd

    from hvd_adaptive.cli.run import make_engine

    # Horovod may run before anything is intercepted.
    hvd.init()
    engine = make_engine(RunConfig(strategy="local"), None)
    starts: list[int] = []
    engine.on_start.append(lambda: starts.append(hvd.size()))
    for num_starts in (1, 2):
        hvd.init()
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        if hvd.rank() == 0:
            # As a helper does that looks whether this is rank 0. Without its optimizers a rank would merge no more.
            hvd.init()
        assert starts == [num_ranks] * num_starts
        assert [ref() for ref in engine._local._optimizers] == [optimizer]
        hvd.shutdown()


class Fused(torch.optim.SGD):
    """As apex's and DeepSpeed's FusedAdam, whose zero_grad takes no argument."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)


class Keeping(torch.optim.SGD):
    """One with a default of its own."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


@pytest.mark.parametrize(
    ("own", "options", "is_none"),
    [(Fused, {}, False), (Keeping, {}, False), (Keeping, {"set_to_none": True}, True), (torch.optim.SGD, {}, True)],
)
def test_zero_grad_is_the_wrapped_optimizers_own(own: Any, options: dict[str, bool], is_none: bool) -> None:
    from horovod.torch.optimizer import _DistributedOptimizer

    # As Horovod does, which makes a class of the optimizer's and its own methods.
    wrapped: Any = type("Wrapped", (own,), dict(vars(_DistributedOptimizer)))
    _intercept_optimizer(None, wrapped)  # type: ignore[arg-type]
    optimizer = object.__new__(wrapped)
    parameter = torch.nn.Parameter(torch.ones(2))
    own.__init__(optimizer, [parameter], lr=0.1)
    optimizer._handles = {}
    parameter.grad = torch.ones(2)
    optimizer.zero_grad(**options)
    assert (parameter.grad is None) == is_none and (is_none or not parameter.grad.any())
    optimizer._handles = {parameter: None}
    with pytest.raises(AssertionError, match="prohibited"):
        optimizer.zero_grad(**options)


def test_gradients_that_horovod_does_not_exchange_are_checked_as_its_own() -> None:
    """As in local steps. Else a step that a scaler leaves out on one rank would have ranks wait for ever."""
    from horovod.torch.optimizer import _DistributedOptimizer

    listener: Any = SimpleNamespace(accumulated=lambda optimizer: True, synchronize=lambda optimizer, action: True)
    wrapped: Any = type("Wrapped", (torch.optim.SGD,), dict(vars(_DistributedOptimizer)))
    _intercept_optimizer(listener, wrapped)
    optimizer = object.__new__(wrapped)
    parameter = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD.__init__(optimizer, [parameter], lr=0.1)
    optimizer._handles, optimizer.backward_passes_per_step = {}, 2
    hook = optimizer._make_hook(parameter)
    for _ in range(2):
        hook()
        with pytest.raises(AssertionError, match=r"prohibited.*call optimizer.synchronize\(\) before it"):
            optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        hook()
    optimizer.synchronize()
    optimizer.zero_grad()
    hook()
