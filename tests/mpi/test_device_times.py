"""Shares of `sync` follow the seconds of devices that compute beside their processes."""

from __future__ import annotations

import pytest
import torch
from scripted_device import Samples, ScriptedDevice
from torch import nn

from hvd_adaptive.comm import connect
from hvd_adaptive.config import Config
from hvd_adaptive.session import session as sessions
from hvd_adaptive.session.session import Session


@pytest.mark.mpi(2)
def test_shares_follow_the_devices_speed_though_launches_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = connect(stall_limit_s=60)
    device = ScriptedDevice(1.5e-3 * (1, 3)[transport.rank])
    monkeypatch.setattr(sessions, "device_clock", lambda _: device)
    model, records = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config(strategy="sync", batch_size=16, mega_batch=640, hash_interval=0)
    session = Session(model, optimizer, config, transport=transport)
    session.records.append(records.append)
    for batch in session.batches(Samples(3 * 640)):
        with session.step(batch):
            session.optimizer.zero_grad()
            loss = model(batch.x).mean()
            device.launch(batch.num_samples)
            loss.backward()
            session.optimizer.step()
    session.close()
    stats = records[-1].stats
    assert stats["num_samples"][0] > 2.3 * stats["num_samples"][1], stats["num_samples"]
    # Who waits for the other is not busy.
    assert stats["equal_share_s"][1] > 2 * stats["equal_share_s"][0], stats["equal_share_s"]
