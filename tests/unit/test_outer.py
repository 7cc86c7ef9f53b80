"""The outer step against plain formulas."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive.algorithm.outer_step import OuterStep


@pytest.mark.parametrize("size", [0, 5, 200_001])
@pytest.mark.parametrize(
    ("kind", "lr"), [("none", 1.0), ("none", 0.5), ("momentum", 1.0), ("momentum", 0.5), ("nesterov", 0.7), ("cautious", 0.3)]
)
def test_it_is_the_formula(kind: str, lr: float, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    outer = OuterStep(kind, lr=lr, momentum=0.9)
    weights = torch.randn(size, generator=generator, dtype=torch.float64)
    expected, velocity = weights.clone(), torch.zeros_like(weights)
    for _ in range(4):
        delta = torch.randn(size, generator=generator, dtype=torch.float64)
        if kind == "none":
            expected += lr * delta
        else:
            velocity = 0.9 * velocity + delta
            far = lr * (velocity if kind == "momentum" else delta + 0.9 * velocity)
            goes_on = (velocity.sign() == delta.sign()) & (velocity != delta)
            expected += torch.where(goes_on, far, delta) if kind == "cautious" else far
        outer.apply_(weights, delta.clone())
    assert torch.allclose(weights, expected, rtol=1e-12)


def test_momentum_is_the_papers_rule() -> None:
    # w' = sum a_i w_i + gamma (w - w_previous)
    outer = OuterStep("momentum", momentum=0.9)
    history = [torch.zeros(3, dtype=torch.float64)]
    weights = history[0].clone()
    for step in range(5):
        merged = weights + torch.tensor([1.0, -2.0, 0.5 * step], dtype=torch.float64)
        previous = history[-2] if len(history) > 1 else history[-1]
        expected = merged + 0.9 * (history[-1] - previous)
        outer.apply_(weights, merged - weights)
        assert torch.allclose(weights, expected)
        history.append(weights.clone())


def test_torchs_sgd_agrees_on_nesterov() -> None:
    start = torch.randn(10, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer, weights = OuterStep("nesterov", lr=0.7, momentum=0.9), start.clone()
    for _ in range(5):
        delta = torch.randn(10, dtype=torch.float64)
        parameter.grad = -delta
        sgd.step()
        outer.apply_(weights, delta.clone())
    assert torch.allclose(weights, parameter.detach())


def test_cautious_adds_a_delta_that_turns_back_as_it_is() -> None:
    outer, weights, steps = OuterStep("cautious", lr=0.5, momentum=0.8), torch.zeros(4), []
    for delta in ([1.0, 1.0, 1.0, 1.0], [1.0, -0.5, -2.0, 0.0]):
        before = weights.clone()
        outer.apply_(weights, torch.tensor(delta))
        steps.append(weights - before)
    assert steps[0].tolist() == [1.0] * 4
    # The velocities are 1.8, 0.3, -1.2 and 0.8.
    assert steps[1].tolist() == pytest.approx([0.5 * (1 + 0.8 * 1.8), -0.5, 0.5 * (-2 - 0.8 * 1.2), 0.0])
    assert outer.velocity[torch.float32].tolist() == pytest.approx([1.8, 0.3, -1.2, 0.8])


def test_it_begins_after_so_many_updates_with_a_velocity_of_zero() -> None:
    outer = OuterStep("nesterov", lr=0.7, momentum=0.5, start=25)
    weights, steps = torch.zeros(3, dtype=torch.float64), []
    for _ in range(4):
        outer.count(10)
        outer.begin()
        before = weights.clone()
        outer.apply_(weights, torch.ones_like(weights))
        steps.append(float((weights - before)[0]))
    # From the third merge on 0.7 (d + 0.5 v), v = 0.5 v + d.
    assert steps == pytest.approx([1.0, 1.0, 0.7 * 1.5, 0.7 * 1.75])


def test_momentum_that_is_not_set_looks_back_over_a_fifth_of_the_run_however_long_its_rounds_are() -> None:
    outer = OuterStep("cautious", lr=None, momentum=None)
    weights, velocity, total, momenta = torch.zeros(2, dtype=torch.float64), 0.0, 0, []
    for merges, updates in enumerate((10, 10, 10, 10, 10, 30, 5, 15, 4, *[10] * 90)):
        if merges == 7:
            saved, outer = outer.state_dict(), OuterStep("cautious", lr=None, momentum=None)
            outer.load_state_dict(saved, device=torch.device("cpu"))
        outer.count(updates)
        outer.begin()
        before, total = float(weights[0]), total + updates
        outer.apply_(weights, torch.ones_like(weights), [slice(0, 1), slice(1, 2)])
        momentum = min(max(0.0, 1 - 5 * updates / total), 0.95)
        momenta.append(momentum)
        velocity = momentum * velocity + 1
        assert float(weights[0]) - before == pytest.approx((1 - momentum) ** 0.5 * (1 + momentum * velocity))
        assert weights[0] == weights[1]
    # The first five merges add the delta. A longer round forgets more.
    assert momenta[:5] == [0.0] * 5
    assert momenta[5] == 0.0
    assert momenta[8] == pytest.approx(1 - 20 / 104)
    assert momenta[-1] == 0.95


def test_a_run_that_is_taken_up_before_the_outer_step_begins_begins_it_where_the_whole_one_does() -> None:
    whole = OuterStep("momentum", momentum=0.5, start=25)
    whole.count(20)
    rest = OuterStep("momentum", momentum=0.5, start=25)
    rest.load_state_dict({name: value.clone() for name, value in whole.state_dict().items()}, device=torch.device("cpu"))
    weights = torch.zeros(2)
    assert (rest.begun, rest.velocity_of(weights)) == (False, None)
    rest.count(10)
    assert rest.begun
    assert rest.velocity_of(weights) is not None
    # Files of older versions know no count: theirs had begun.
    older = OuterStep("momentum", momentum=0.5, start=25)
    older.load_state_dict({"float32": torch.ones(2)}, device=torch.device("cpu"))
    assert older.begun
