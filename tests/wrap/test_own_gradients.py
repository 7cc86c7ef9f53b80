"""Changes of gradients that Horovod has not averaged yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.reasons import Reason


def by_hand(model: nn.Module) -> None:
    norm = sum(float(p.grad.norm()) ** 2 for p in gradients(model)) ** 0.5
    for parameter in gradients(model):
        parameter.grad.data.mul_(0.1 / norm)


def gradients(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.grad is not None)


def each(change: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], None]:
    def change_all(model: nn.Module) -> None:
        for parameter in gradients(model):
            assert parameter.grad is not None
            change(parameter.grad)

    return change_all


CHANGES = {
    "by norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "by norm, one by one": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "by hand": by_hand,
    "sign": each(lambda gradient: gradient.sign_()),
    "noise": each(lambda gradient: gradient.add_(torch.randn_like(gradient))),
    "centred": each(lambda gradient: gradient.__isub__(gradient.mean())),
}
NO_CHANGES = {
    "scaled": each(lambda gradient: gradient.div_(2)),
    "scaled by an operator": each(lambda gradient: gradient.__imul__(0.5)),
    "norm for a log": each(lambda gradient: gradient.norm()),
    "set to zero": lambda model: model.zero_grad(set_to_none=False),
    "copied": each(lambda gradient: gradient.clone().clamp_(-1, 1)),
    "weights": lambda model: [p.data.clamp_(-1, 1) for p in model.parameters()],
}


def findings(change: Callable[[nn.Module], object], *, is_averaged: bool = False) -> set[Reason]:
    model, tracer = nn.Linear(4, 3), Tracer()
    tracer.train(list(model.parameters()))
    x = torch.randn(6, 4)
    tracer.begin([x], 6)
    model(x).pow(2).mean().backward()
    tracer.gradients.arrive()
    if is_averaged:
        tracer.gradients.are_here = False
    change(model)
    tracer.end()
    return tracer.findings


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_that_are_changed_too_early(change: Callable[[nn.Module], object]) -> None:
    assert findings(change) == {Reason.CLIPPED}
    assert not findings(change, is_averaged=True)


@pytest.mark.parametrize("change", NO_CHANGES.values(), ids=NO_CHANGES)
def test_what_does_no_harm_to_them(change: Callable[[nn.Module], object]) -> None:
    assert not findings(change)
