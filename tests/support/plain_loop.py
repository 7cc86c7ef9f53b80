"""A person's own loop over a session, as plain as it can be."""

from __future__ import annotations

from typing import Any

from torch import nn

from hvd_adaptive.session.session import Session


def take_steps(session: Session, model: nn.Module, data: Any) -> None:
    """Trains one pass of a classifier, and closes the session."""
    for batch in session.batches(data):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
