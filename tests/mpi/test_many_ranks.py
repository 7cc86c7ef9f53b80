"""What ranks do where there are many of them, on pretended hosts: host by host they meet and claim."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hvd_adaptive
from hvd_adaptive.comm import connect, host_store
from hvd_adaptive.comm.script_world import ScriptWorld


@pytest.mark.mpi(4, timeout=300)
def test_every_sample_is_used_once_where_hosts_claim_together(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{rank // 2}")
    monkeypatch.setattr(host_store, "_FROM_RANKS", 4)
    transport = connect(stall_limit_s=60, backend=backend)
    assert transport.host_store is not None and list(transport.host_store.ranks) == [rank // 2 * 2, rank // 2 * 2 + 1]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    config = hvd_adaptive.Config(batch_size=8, mega_batch=300, slowdown="1,1,2,4", lr_rule="none")
    session = hvd_adaptive.Session(model, torch.optim.SGD(model.parameters(), lr=0.01), config, transport=transport)
    asked: list[str] = []
    add = transport.add
    monkeypatch.setattr(transport, "add", lambda key, amount: (asked.append(key), add(key, amount))[1])
    seen: list[int] = []
    num_steps = 0
    for batch in session.batches(TensorDataset(torch.randn(1000, 3), torch.randn(1000, 1)), num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            (model(batch.x) - batch.y).square().mean().backward()
            session.optimizer.step()
        seen += batch.rows.tolist()
        num_steps += 1
    everyone = MPI.COMM_WORLD.allgather(seen)
    assert (np.bincount(np.concatenate(everyone), minlength=1000) == 2).all()
    sums = np.sum(MPI.COMM_WORLD.allgather([num_steps, sum(key.startswith("claim.") for key in asked)]), axis=0)
    assert sums[1] < 2 * sums[0]  # one read and one move of each claim, without pools
    session.close()


@pytest.mark.mpi(3, timeout=300)
def test_bits_of_all_ranks(backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    own = np.zeros(11, dtype=np.uint8)
    own[transport.rank] = 1 << transport.rank
    own[10] = 0x81
    expected = [1, 2, 4, *[0] * 7, 0x81]
    bits = own.copy()
    transport.allreduce_or_(bits)
    assert bits.tolist() == expected
    worlds: list[Any] = []
    if backend == "horovod":
        import horovod.torch as hvd

        worlds.append(ScriptWorld(hvd, transport.waiting))
    for world in worlds:
        bits = own.copy()
        world.allreduce_or_(bits)
        assert bits.tolist() == expected
        table = world.allgather_array(np.array([[transport.rank, -1.5]]))
        assert table.tolist() == [[[float(rank), -1.5]] for rank in range(3)]
    transport.close()
