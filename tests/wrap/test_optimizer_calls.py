"""Horovod's functions, intercepted: a script may call them as it could call Horovod's own."""

from __future__ import annotations

import pytest
import torch

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
