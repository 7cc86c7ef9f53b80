"""Session.schedule: torch's schedulers follow the samples of all ranks."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.session.schedules import Followed
from hvd_adaptive.session.session import Session

NUM_SAMPLES, EPOCHS, STEPS_PER_EPOCH = 480, 3, 30
_generator = torch.Generator().manual_seed(0)
X = torch.randn(NUM_SAMPLES, 6, generator=_generator)
DATA = TensorDataset(X, X.sum(1))

SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS * STEPS_PER_EPOCH),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=EPOCHS * STEPS_PER_EPOCH),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: lr_scheduler.StepLR(o, 5, 0.8),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 80)], milestones=[10]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=10), lr_scheduler.ExponentialLR(o, 0.95)]
    ),
}  # fmt: skip


def rates_of(name: str) -> list[float]:
    """The learning rate after each number of steps, in plain training."""
    optimizer = torch.optim.SGD(nn.Linear(6, 1).parameters(), lr=0.05)
    scheduler, rates = SCHEDULERS[name](optimizer), []
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < EPOCHS * STEPS_PER_EPOCH - 1:
            scheduler.step()
    return rates


def train(
    transport: LocalTransport, config: Config, *, name: str, schedule: bool = True, state: Any = None, until: int = EPOCHS
) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.05), config, transport=transport)
    scheduler = SCHEDULERS[name](session.optimizer)
    if schedule:
        session.schedule(scheduler, steps_per_epoch=STEPS_PER_EPOCH)
    if state is not None:
        session.load_state_dict(state)
    seen = []
    for batch in session.batches(DATA, num_epochs=until):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.mse_loss(model(batch.x)[:, 0], batch.y).backward()
            session.optimizer.step()
            seen.append((batch.num_samples_before, session.optimizer.param_groups[0]["lr"]))
        if not schedule:
            scheduler.step()
    state = session.state_dict()
    session.close()
    return seen, state


@pytest.mark.parametrize("strategy", ["local", "sync"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_plain_training_at_the_same_sample(name: str, strategy: str) -> None:
    expected = rates_of(name)
    local = {"mega_batch": 100, "lr_rule": "none"} if strategy == "local" else {}
    config = Config(strategy=strategy, batch_size=8, slowdown="1,3", **local)
    results = LocalWorld(2).run(lambda t: train(t, config, name=name))
    for seen, _ in results:
        assert len(seen) > 20
        reached = 0
        for before, rate in seen:
            # A rank's places may go back a little; its schedule does not.
            reached = max(reached, math.floor(before * STEPS_PER_EPOCH / NUM_SAMPLES))
            assert rate == pytest.approx(expected[reached], rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_between_rounds_ranks_of_any_speed_have_one_rate(name: str) -> None:
    expected = rates_of(name)

    def run(transport: LocalTransport) -> list[tuple[int, float]]:
        model = nn.Linear(6, 1)
        config = Config(batch_size=8, mega_batch=50, lr_rule="none", slowdown="1,20")
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.05), config, transport=transport)
        session.schedule(SCHEDULERS[name](session.optimizer), steps_per_epoch=STEPS_PER_EPOCH)
        found = []
        session.records.append(lambda record: found.append((record.num_samples, session.optimizer.param_groups[0]["lr"])))
        for batch in session.batches(DATA, num_epochs=EPOCHS):
            with session.step(batch):
                nn.functional.mse_loss(model(batch.x)[:, 0], batch.y).backward()
                session.optimizer.step()
        session.close()
        return found

    first, second = LocalWorld(2).run(run)
    assert first == second and len(first) > 10
    for num_samples, rate in first[:-1]:
        assert rate == pytest.approx(expected[num_samples * STEPS_PER_EPOCH // NUM_SAMPLES], rel=1e-6)


def test_a_last_round_that_goes_on_beyond_the_end_steps_no_schedule_too_far() -> None:
    def run(transport: LocalTransport) -> int:
        model = nn.Linear(6, 1)
        config = Config(batch_size=10, mega_batch=NUM_SAMPLES // 4, lr_rule="none")
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.05), config, transport=transport)
        scheduler = lr_scheduler.OneCycleLR(session.optimizer, max_lr=0.1, total_steps=74)
        session.schedule(scheduler, steps_per_epoch=100)
        for batch in session.batches(DATA, num_epochs=0.745):
            with session.step(batch):
                nn.functional.mse_loss(model(batch.x)[:, 0], batch.y).backward()
                session.optimizer.step()
        assert session.num_samples > 0.745 * NUM_SAMPLES
        session.close()
        return scheduler.last_epoch

    assert LocalWorld(2).run(run) == [74, 74]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_run_goes_on_in_its_schedule(name: str) -> None:
    config, expected = Config(batch_size=8, mega_batch=100, lr_rule="none"), rates_of(name)
    states = [state for _, state in LocalWorld(2).run(lambda t: train(t, config, name=name, until=1))]
    for world_size in (2, 3):
        results = LocalWorld(world_size).run(lambda t: train(t, config, name=name, state=states[t.rank % 2]))
        for seen, _ in results:
            before, rate = seen[-1]
            assert before > 2 * NUM_SAMPLES
            assert rate == pytest.approx(expected[math.floor(before * STEPS_PER_EPOCH / NUM_SAMPLES)], rel=1e-6)


@pytest.mark.parametrize("between", [False, True])
def test_a_scheduler_that_is_stepped_by_hand_as_well_is_an_error(between: bool) -> None:
    def run(transport: LocalTransport) -> None:
        model = nn.Linear(6, 1)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.05), Config(batch_size=8), transport=transport)
        scheduler = SCHEDULERS["cosine"](session.optimizer)
        session.schedule(scheduler, steps_per_epoch=STEPS_PER_EPOCH)
        for epoch in range(2):
            for batch in session.batches(DATA, num_epochs=epoch + 1):
                with session.step(batch):
                    nn.functional.mse_loss(model(batch.x)[:, 0], batch.y).backward()
                    session.optimizer.step()
                if not between:
                    scheduler.step()
            assert epoch == 0 and between
            scheduler.step()

    with pytest.raises(RuntimeError, match=r"take scheduler.step\(\) out of your code"):
        LocalWorld(1).run(run)


def test_a_schedule_within_the_loop_is_told_to_come_before_it() -> None:
    def run(transport: LocalTransport) -> None:
        model = nn.Linear(6, 1)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.05), Config(batch_size=8), transport=transport)
        for batch in session.batches(DATA):
            with session.step(batch):
                nn.functional.mse_loss(model(batch.x)[:, 0], batch.y).backward()
                session.optimizer.step()
            if batch.number == 2:
                with pytest.raises(RuntimeError, match="within the loop over the batches: call it once, before the loop"):
                    session.schedule(SCHEDULERS["cosine"](session.optimizer), steps_per_epoch=STEPS_PER_EPOCH)
        # Between two loops it may come.
        session.schedule(SCHEDULERS["cosine"](session.optimizer), steps_per_epoch=STEPS_PER_EPOCH)

    LocalWorld(1).run(run)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_steps_for_other_ranks_samples_give_no_warning(name: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(6, 1).parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        followed = Followed(SCHEDULERS[name](optimizer), STEPS_PER_EPOCH)
        # Others have made an epoch before this rank's first step.
        followed.reach(1)
        optimizer.step()
        followed.reach(2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates_of(name)[2 * STEPS_PER_EPOCH])


def test_other_warnings_of_a_schedulers_step_are_shown() -> None:
    def rate(step: int) -> float:
        if step:
            warnings.warn("of the script", UserWarning, stacklevel=1)
        return 1.0

    optimizer = torch.optim.SGD(nn.Linear(6, 1).parameters(), lr=0.05)
    followed = Followed(lr_scheduler.LambdaLR(optimizer, rate), STEPS_PER_EPOCH)
    with pytest.warns(UserWarning, match="of the script") as shown:
        followed.reach(0.1)
    assert {str(warning.message) for warning in shown} == {"of the script"}
    by_hand = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="Detected call"):
        by_hand.step()


def test_what_cannot_be_followed_is_refused() -> None:
    def run(transport: LocalTransport) -> None:
        model = nn.Linear(6, 1)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.05), Config(), transport=transport)
        with pytest.raises(TypeError, match=r"follows a metric, not steps: call its step\(metric\)"):
            session.schedule(lr_scheduler.ReduceLROnPlateau(session.optimizer), steps_per_epoch=1)
        with pytest.raises(TypeError, match=r"must be one of torch\.optim\.lr_scheduler, got function"):
            session.schedule(lambda: None, steps_per_epoch=1)  # type: ignore[arg-type]
        for number in (0, math.inf, math.nan, "5"):
            with pytest.raises(ValueError, match=f"steps_per_epoch must be a number > 0, got {number!r}"):
                session.schedule(SCHEDULERS["cosine"](session.optimizer), steps_per_epoch=number)  # type: ignore[arg-type]
        scheduler = SCHEDULERS["cosine"](session.optimizer)
        scheduler.of_its_own = object()
        with pytest.raises(TypeError, match="register_state: "):
            session.schedule(scheduler, steps_per_epoch=1)
        assert session._schedules.num_followed == 0
        session.close()
        with pytest.raises(RuntimeError, match="this Session is closed"):
            session.schedule(SCHEDULERS["cosine"](session.optimizer), steps_per_epoch=1)

    LocalWorld(1).run(run)


@pytest.mark.parametrize(
    ("name", "slowdown", "warns"), [("cosine", "1,3", True), ("step", "1,3", True), ("cosine", None, False)]
)
def test_steps_by_hand_on_unequal_ranks_are_told_of(
    name: str, slowdown: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dispatch = "dynamic" if slowdown else "equal"
    config = Config(batch_size=8, mega_batch=100, slowdown=slowdown, dispatch=dispatch)
    with caplog.at_level(logging.WARNING):
        LocalWorld(2).run(lambda t: train(t, config, name=name, schedule=False))
    assert ("the ranks' learning rates differ" in caplog.text) == warns
