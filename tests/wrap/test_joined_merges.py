"""Merges of a script's model beside ranks that have called hvd.join(), one of the others broken; through Horovod itself."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.comm.script_world import ScriptWorld
from hvd_adaptive.wrap.merging import Merger
from hvd_adaptive.wrap.run_options import RunConfig

SCRIPTS = Path(__file__).parent / "scripts"


class Rank:
    """A model with BatchNorm and SGD with momentum; its gradients are its rank plus one."""

    def __init__(self, hvd: Any, **options: Any) -> None:
        torch.manual_seed(1)
        self.rank, self.num_ranks = hvd.rank(), hvd.size()
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        world = ScriptWorld(hvd, lambda what: nullcontext())
        config = RunConfig(strategy="local", hash_interval=1, **options)
        self.merger = Merger(self.optimizer, list(self.model.named_parameters()), [self.model], config, world)  # type: ignore[arg-type]

    def step(self) -> None:
        self.merger.begin_step(num_samples=8, global_samples=8 * self.num_ranks, epoch_samples=80_000)
        self.merger.timed(0.01)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, self.rank + 1.0)
        self.optimizer.step()
        self.merger.end_step()

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def break_(self) -> None:
        self.model[0].weight.data[0, 0] = float("nan")  # type: ignore[index,union-attr]


@pytest.mark.mpi(3, timeout=300)
def test_a_broken_rank_beside_one_that_has_joined(num_ranks: int) -> None:
    """Rank 0 has run out of data and rank 1 is broken: only rank 2's steps count, and all three meet again in its model."""
    import horovod.torch as hvd

    hvd.init()
    # How far two steps with gradients of 3 go in the second one, by what the first merge has left of the momentum.
    for options, expected in (
        ({"optimizer_state": "keep"}, 0.1 * (0.5 * 3 + 3)),
        ({"optimizer_state": "average"}, 0.1 * (0.5 * 2 + 3)),
        ({"optimizer_state": "reset", "outer_step": "momentum", "outer_momentum": 0.0}, 0.1 * 3),
        ({"compression": "maxmin:8"}, 0.1 * (0.5 * 3 + 3)),
    ):
        rank = Rank(hvd, **options)
        rank.step()
        rank.merger.merge()
        base = rank.weights()
        if rank.rank:
            rank.step()
            if rank.rank == 1:
                rank.break_()
            rank.merger.merge()
            moved = base - rank.weights()
            assert torch.allclose(moved, torch.full_like(moved, expected)), (options, rank.rank, moved)
            assert rank.merger.log.weight is not None and rank.merger.log.weight[:2].tolist() == [0.0, 0.0], options
            if rank.rank == 1:
                # What the broken steps have left does not reach the next ones.
                assert not any(state.get("momentum_buffer") is not None for state in rank.optimizer.state.values()), options
        hvd.join()
        for _ in range(2):
            rank.step()
            rank.merger.merge()
        weights = hvd.allgather(rank.weights()[None], name="weights")
        assert bool(weights.isfinite().all()) and all(torch.equal(weights[0], other) for other in weights[1:]), options
    hvd.shutdown()


@pytest.mark.mpi(3, timeout=300)
def test_a_rank_that_missed_merges_takes_over_the_others_model(num_ranks: int) -> None:
    """Rank 0 joins with a step after the last merge that it saw; the others have a step or none after their last one."""
    import horovod.torch as hvd

    hvd.init()
    for num_left in (0, 1):
        for options in ({}, {"outer_step": "momentum", "outer_momentum": 0.5}, {"compression": "maxmin:8"}):
            rank = Rank(hvd, **options)
            rank.step()
            rank.merger.merge()
            rank.step()
            if rank.rank:
                rank.merger.merge()
            base = rank.weights()
            if rank.rank and num_left:
                rank.step()
            hvd.join()
            rank.merger.merge(have_joined=True)
            weights = hvd.allgather(rank.weights()[None], name="weights")
            assert all(torch.equal(weights[0], other) for other in weights[1:]), (num_left, options)
            if rank.rank and not num_left:
                assert torch.equal(rank.weights(), base), options
            elif rank.rank:
                # Rank 0's step counts for nothing.
                assert rank.merger.log.weight is not None and rank.merger.log.weight.tolist() == [0.0, 0.5, 0.5], options
            assert len(set(hvd.allgather_object((rank.merger.num_calls, rank.merger.log.steps_per_merge)))) == 1, options
            # Ranks whose models differ would be told of.
            for _ in range(2):
                rank.step()
                rank.merger.merge()
    hvd.shutdown()


@pytest.mark.parametrize(
    "options", [["--mega-batch", "32"], ["--mega-batch", "48", "--merge-period", "auto", "--outer-step", "momentum"]]
)
def test_a_script_that_joins_in_each_epoch(options: list[str], run_job: Any) -> None:
    """After each join the ranks count alike and have one model, and nobody waits for a rank that has joined.
    A later optimizer steps locally as well."""
    job = run_job(
        [sys.executable, "-m", "hvd_adaptive", "run", "-np", "2", "--strategy", "local", "--hash-interval", "2", *options,
         str(SCRIPTS / "joins.py")],
        timeout=200,
    )  # fmt: skip
    assert job.returncode == 0, job.describe()
    for rank in range(2):
        assert f"rank {rank}: {[True] * 7}, stood alone 0 s" in job.stdout, job.describe()
