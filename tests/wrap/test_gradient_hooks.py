"""Hooks of a script on gradients: models that hold them are saved and copied as without us."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hvd_adaptive.wrap.gradient_hooks import intercept_gradient_hooks
from hvd_adaptive.wrap.graphs import intercept_backward
from hvd_adaptive.wrap.own_use import OwnUse, intercept_own_use


def look(*_: Any) -> None:
    """Only looks."""


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 2), 0
        self.layer.register_full_backward_hook(self.seen)

    def seen(self, *_: Any) -> None:
        self.count += 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    for owner, names in (
        (torch.Tensor, ("register_hook", "register_post_accumulate_grad_hook")),
        (nn.Module, ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook")),
        (torch.autograd, ("grad", "backward")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr("hvd_adaptive.wrap.own_use.register_optimizer_step_pre_hook", lambda hook: None)
    told: list[int] = []
    intercept_gradient_hooks(lambda: told.append(1), lambda: True)
    return told


def test_a_model_with_a_hook_is_saved(told: list[int]) -> None:
    model = nn.Linear(3, 2)
    model.register_full_backward_hook(look)
    other = pickle.loads(pickle.dumps(model))
    other(torch.ones(2, 3)).sum().backward()
    assert not told


def test_a_copy_has_hooks_of_its_own(told: list[int]) -> None:
    model = Counting()
    other = copy.deepcopy(model)
    other.layer(torch.ones(2, 3)).sum().backward()
    assert (model.count, other.count) == (0, 1) and not told


def test_changes_are_told_of(told: list[int]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    handles = [parameter.register_hook(look), parameter.register_hook(lambda g: g.clamp(-1, 1))]
    (3 * parameter).sum().backward()
    assert told == [1] and parameter.grad is not None and parameter.grad.tolist() == [1.0] * 3
    for handle in handles:
        handle.remove()


def test_edges_and_iterators_go_through(told: list[int]) -> None:
    own_use, seen = OwnUse(lambda reason: None), []
    intercept_backward(seen.append)
    intercept_own_use(own_use)
    x = torch.ones(3, requires_grad=True)
    middle = 2 * x
    edge = torch.autograd.graph.get_gradient_edge(middle)
    assert torch.autograd.grad(middle.sum(), edge, retain_graph=True)[0].tolist() == [1.0] * 3
    assert torch.autograd.grad(middle.sum(), iter([x]), retain_graph=True)[0].tolist() == [2.0] * 3
    torch.autograd.backward(iter([middle.sum()]))
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3 and len(seen) == 1
