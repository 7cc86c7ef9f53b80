"""What one watched batch shows of a script's way from loader to loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.reasons import Reason

BATCH = 6
FIXED = torch.ones(BATCH, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        return self.layer(x.reshape(-1, 4))


def trace(step: Callable[[Model, Tensor, Tensor], Any], batch: Any = None) -> Tracer:
    """Follows a step twice: the first finds the module, the second is watched."""
    model, tracer = Model(), Tracer()
    tracer.train(list(model.parameters()))
    x, y = torch.randn(BATCH, 4), torch.arange(BATCH) % 3
    for _ in range(2):
        tracer.begin([x, y] if batch is None else batch(x, y), BATCH)
        step(model, x, y)
        tracer.end()
        assert _get_current_function_mode() is None
    return tracer


def balanced(loss: Tensor, other: Tensor) -> Tensor:
    return loss + other * (loss.item() / (other.item() + 1e-8))


def test_a_plain_step_has_no_findings() -> None:
    models = []

    def step(model: Model, x: Tensor, y: Tensor) -> None:
        models.append(model)
        F.cross_entropy(model(x), y).backward()

    tracer = trace(step)
    assert not tracer.findings and tracer.num_forwards == 1
    assert tracer.places[models[0]] == {(0, 0, 1)}


@pytest.mark.parametrize(
    "step",
    [
        lambda m, x, y: F.cross_entropy(m(x.to(torch.float64).float().clone()), y),
        lambda m, x, y: F.cross_entropy(m(x=x[torch.randperm(len(x))]), y),
        lambda m, x, y: F.mse_loss(m(x), torch.ones(x.shape[0], 3) * 2),
        lambda m, x, y: F.cross_entropy(m(x), torch.tensor([0, 1, 2] * (BATCH // 3)).clone()),
        lambda m, x, y: F.cross_entropy(m(x, torch.zeros(x.size(0), 2)), y),
        lambda m, x, y: F.cross_entropy(m(torch.cat([x, x + 1])), y.repeat(2)),
        lambda m, x, y: F.cross_entropy(m(x[:, :4]), y, label_smoothing=0.1),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").mean(),
        # Each sample has one more place, without a target.
        lambda m, x, y: F.cross_entropy(m(x[:, None].expand(-1, 2, -1)), F.pad(y[:, None], (0, 1), value=-100).flatten()),
        lambda m, x, y: (m(x) - 1).pow(2).sum(dim=1).mean(),
        lambda m, x, y: F.cross_entropy(m(x), y) + 1e-3 * m.layer.weight.pow(2).sum(),
        lambda m, x, y: nn.CrossEntropyLoss()(m(torch.autograd.Variable(x)), y),
        lambda m, x, y: (loss := F.cross_entropy(m(x), y)) * (0.5 + 0 * loss.item()),
        # It is written there, and a batch's accuracy may be the same.
        lambda m, x, y: (x[:, 0].mul(0).add(0.5).mean().item(), 0.5 * F.cross_entropy(m(x), y))[1],
        lambda m, x, y: (F.cross_entropy(m(x), y), [x[i : i + 2].mean() for i in range(3)])[0],
    ],
)
def test_steps_that_only_look_odd(step: Any) -> None:
    tracer = trace(lambda model, x, y: step(model, x, y).backward())
    assert not tracer.findings and tracer.num_forwards == 1


@pytest.mark.filterwarnings("error")
def test_numbers_that_cannot_be_multiplied_are_looked_at_in_silence() -> None:
    def step(model: Model, x: Tensor, y: Tensor) -> None:
        for scale in (1e300, 1e-300, float("nan"), float("inf")):
            (x.double().sum() * scale).item()
        (F.cross_entropy(model(x), y) * 1.5).backward()

    assert not trace(step).findings


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda m, x, y: F.cross_entropy(m(x[0:6]), y), Reason.SUB_BATCHES),
        (lambda m, x, y: sum(F.cross_entropy(m(a), b) for a, b in zip(x.split(3), y.split(3), strict=True)), Reason.SUB_BATCHES),
        (lambda m, x, y: F.cross_entropy(m(x.narrow(0, 0, 4)), y[:4]), Reason.SUB_BATCHES),
        (lambda m, x, y: F.cross_entropy(m(x[y > 0]), y[y > 0]), Reason.SUB_BATCHES),
        (lambda m, x, y: F.cross_entropy(m(x, torch.zeros(BATCH, 2)), y), Reason.OTHER_INPUT),
        (lambda m, x, y: F.cross_entropy(m(x[torch.randperm(BATCH)]), y), Reason.OTHER_INPUT),
        # Made before the batch came, however much the script asks since.
        (lambda m, x, y: F.mse_loss(m(x[: len(x)]), FIXED.fill_(1.0)), Reason.OTHER_INPUT),
        (lambda m, x, y: F.mse_loss(m(x)[: len(x)], FIXED * 2), Reason.OTHER_INPUT),
        (lambda m, x, y: F.cross_entropy(m(torch.from_numpy(x.numpy().copy())), y), Reason.UNSEEN),
        (lambda m, x, y: (loss := F.cross_entropy(m(x), y)) / loss.item(), Reason.MIXED),
        (lambda m, x, y: (loss := F.cross_entropy(m(x), y)) * float(loss), Reason.MIXED),
        (lambda m, x, y: balanced(F.cross_entropy(m(x), y), m(x).pow(2).mean()), Reason.MIXED),
        (lambda m, x, y: F.cross_entropy(m(x), y, reduction="none") @ torch.ones(BATCH), Reason.NONE_LOSS),
        (lambda m, x, y: F.cross_entropy(m(x), y.clone().index_fill_(0, torch.tensor([1]), -100)), Reason.WEIGHTED_LOSS),
    ],
)  # fmt: skip
def test_steps_whose_batches_must_stay_equal(step: Any, reason: Reason) -> None:
    assert reason in trace(lambda model, x, y: step(model, x, y).backward()).findings


def test_a_loss_inside_the_forward_is_seen() -> None:
    class WithLoss(Model):
        def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
            assert extra is not None
            return F.cross_entropy(self.layer(x), extra, reduction="sum" if self.layer.bias[0] else "mean")

    for bias, expected in ((0.0, set()), (1.0, {Reason.SUM_LOSS})):
        model, tracer = WithLoss(), Tracer()
        model.layer.bias.data.fill_(bias)
        tracer.train(list(model.parameters()))
        x, y = torch.randn(BATCH, 4), torch.arange(BATCH) % 3
        for _ in range(2):
            tracer.begin([x, y], BATCH)
            model(x, y).backward()
            tracer.end()
        assert tracer.findings == expected


def test_batches_of_any_shape_are_followed() -> None:
    class Fields:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    for batch in (lambda x, y: {"a": (x, [y])}, lambda x, y: x, lambda x, y: [Fields(x), y]):
        assert not trace(lambda model, x, y: model(x).pow(2).mean().backward(), batch).findings


def test_forwards_without_gradients_do_not_count() -> None:
    def step(model: Model, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            model(x[:2])
        F.cross_entropy(model(x), y).backward()

    tracer = trace(step)
    assert not tracer.findings and tracer.num_forwards == 1


def test_a_mode_of_the_scripts_own_does_not_break_it() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, tracer = Model(), Tracer()
    tracer.train(list(model.parameters()))
    x, y = torch.randn(BATCH, 4), torch.arange(BATCH) % 3
    tracer.begin([x, y], BATCH)
    with Mode():
        F.cross_entropy(model(x), y).backward()
        tracer.end()
    tracer.begin([x, y], BATCH)
    F.cross_entropy(model(x), y).backward()
    tracer.end()
    assert _get_current_function_mode() is None and not tracer.findings


def test_a_model_can_be_copied_and_saved_with_its_hooks(tmp_path: Any) -> None:
    import copy

    model, tracer = Model(), Tracer()
    tracer.train(list(model.parameters()))
    tracer.begin([torch.ones(BATCH, 4)], BATCH)
    model(torch.ones(BATCH, 4))
    tracer.end()
    twin = copy.deepcopy(model)
    assert twin(torch.ones(2, 4)).shape == (2, 3)
    torch.save(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=False)(torch.ones(2, 4)).shape == (2, 3)
