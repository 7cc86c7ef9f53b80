"""A signal on real ranks: every strategy closes its round, saves, and goes on with every sample once."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Checkpointer, Config, Session
from hvd_adaptive.state import checkpoint
from hvd_adaptive.state.checkpoint import find_checkpoints
from hvd_adaptive.state.preemption import PREEMPTION

NUM_SAMPLES = 400
CASES: list[dict[str, Any]] = [
    {},
    {"strategy": "sync"},
    {"strategy": "sync", "accumulation_steps": 2},
    {"strategy": "horovod"},
    {"strategy": "sma"},
    {"logical_ranks": 3},
    {"compression": "maxmin:4"},
]
PHASES = ["start", "claim", "statistics", "merge", "checkpoint", "evaluation"]
# The round that is to be closed early, by phase; in the others the signal comes when all is claimed.
CLOSED_ROUND = {"step": 0, "start": 0, "claim": 0, "checkpoint": 1, "evaluation": 1}


def send_signal() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    while not PREEMPTION.signal_number:
        time.sleep(0.001)


class Part:
    """Runs a session in this world until its end, with a signal on one rank."""

    def __init__(self, folder: Path) -> None:
        self.x = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(0))
        self.folder = folder
        self.transport: Any = None

    def run(self, name: str, options: dict[str, Any], signalled: int, phase: str = "step") -> tuple[list[int], Session]:
        PREEMPTION.catch_signals()
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        config = Config(batch_size=8, mega_batch=200, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = Session(model, optimizer, config, transport=self.transport)
        self.transport = session.transport
        rows: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            closed = self.folder / f"{name}.closed"
            if session.rank == signalled:
                self.arm(patch, session, phase)
                self.tell_when_closed(patch, session, closed)
            checkpoints = Checkpointer(session, self.folder / name, interval=1)
            checkpoints.resume()
            numbers: Counter[int] = Counter()
            for batch in session.batches(TensorDataset(self.x, (self.x.sum(dim=1) > 0).long()), num_epochs=2):
                with session.step(batch):
                    session.optimizer.zero_grad()
                    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                    session.optimizer.step()
                rows.extend(batch.rows.tolist())
                number, numbers[session.round] = numbers[session.round], numbers[session.round] + 1
                if signalled >= 0 and session.round == CLOSED_ROUND.get(phase):
                    if "strategy" in options and (session.rank != signalled or number == 0):
                        # Ranks that wait for each other promise the steps of 0.2 s, which must not be all of the round.
                        time.sleep(5e-2)
                    if session.rank != signalled:
                        # Ranks that do not must not be through before it comes, however late that is.
                        while number and not closed.exists():
                            time.sleep(1e-3)
                    elif number == 1 and phase == "step":
                        send_signal()
                    while session.rank == signalled and phase == "checkpoint" and not PREEMPTION.signal_number:
                        time.sleep(1e-3)
            counts = checkpoints.close()
        assert counts.failed == 0 and (folder_round(self.folder / name) == session.round)
        PREEMPTION.stop()
        return rows, session

    @staticmethod
    def tell_when_closed(patch: pytest.MonkeyPatch, session: Session, file: Path) -> None:
        """Makes a file when this rank closes the round."""
        strategy: Any = session._strategy
        close_round = strategy.close_round

        def told() -> None:
            close_round()
            file.touch()

        patch.setattr(strategy, "close_round", told)

    def arm(self, patch: pytest.MonkeyPatch, session: Session, phase: str) -> None:
        """Has this rank get the signal the first time that it comes to a phase."""
        strategy: Any = session._strategy

        def before(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def wrapped(*args: Any, **options: Any) -> Any:
                if not PREEMPTION.signal_number:
                    send_signal()
                return original(*args, **options)

            patch.setattr(owner, name, wrapped)

        if phase == "start":
            send_signal()
        elif phase == "claim":
            # In the thread that fetches.
            before(self.transport, "add")
        elif phase == "statistics":
            before(strategy.merge, "weights")
        elif phase == "merge":
            before(strategy.flat_model, "merge_")
        elif phase == "checkpoint":
            before(checkpoint, "write_state")
        elif phase == "evaluation":
            session.records.append(lambda record: None if PREEMPTION.signal_number else send_signal())


def folder_round(folder: Path) -> int:
    return int(find_checkpoints(folder)[0].name[-8:])


@pytest.mark.mpi(3, timeout=300)
def test_a_signal_at_any_time_with_any_strategy(num_ranks: int, shared_tmp_path: Path) -> None:
    part = Part(shared_tmp_path)
    for case, (options, phase) in enumerate([*((options, "step") for options in CASES), *(({}, phase) for phase in PHASES)]):
        first, session = part.run(str(case), options, 1, phase)
        assert session.preempted == signal.SIGUSR1, (options, phase)
        if phase in ("checkpoint", "evaluation"):
            # Between two rounds: the next one ends as soon as it has begun.
            assert session.round == 2 and 200 < session.num_samples < 400, (options, phase)
        else:
            assert session.round == 1, (options, phase)
        if phase == "step":
            whole = "logical_ranks" in options
            assert session.ledger.epoch == 0
            assert session.ledger.cursor == 200 if whole else session.ledger.cursor < 200, options
        second, session = part.run(str(case), options, -1)
        assert session.preempted == 0 and session.num_samples == 2 * NUM_SAMPLES, (options, phase)
        # On a busy machine a rank may have had no batch at all: an empty list is of floats.
        everyone = np.concatenate(session.transport.allgather_object([*first, *second])).astype(np.int64)
        counts = np.bincount(everyone, minlength=NUM_SAMPLES)
        if options.get("strategy") in ("horovod", "sma"):
            # Padded at the ends of rounds.
            assert counts.min() >= 2, options
        else:
            assert (counts == 2).all(), (options, phase)
    session.close()
