"""Sessions with options drawn at random, on ranks that are threads: each ends, and takes every sample as often as it should.

    python tests/support/random_sessions.py --first 1000 --count 500

prints a line for each case that ends otherwise, and last how many there were of each kind.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.session.session import Session

CASE_LIMIT_S = 90.0
_SLOWDOWN = "slowdown"
# How likely an option is set, and to what.
_OPTIONS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "min_batch_size": (0.1, (1, 2, 4, 8)), "max_batch_size": (0.1, (16, 32, 64)),
    "mega_batch": (0.4, (40, 64, 100, 333, 1000)),
    "batch_size_rule": (0.25, ("fixed", "paper", "heterogpu", "static", "proportional")),
    "lr_rule": (0.2, ("linear", "sqrt", "none")), "warmup_epochs": (0.1, (0.3, 1.0)), "lr_decay": (0.1, (0.1, 1.0)),
    "merge_weights": (0.35, ("updates", "samples", "uniform", "paper", "heterogpu", "dual-averaging", "fisher-rows")),
    "perturbation": (0.08, (True,)), "outer_step": (0.35, ("none", "momentum", "nesterov", "cautious")),
    "outer_lr": (0.08, (0.5, 1.0)), "outer_momentum": (0.08, (0.5, 0.9)), "outer_state": (0.15, ("host",)),
    "optimizer_state": (0.3, ("keep", "reset", "average")), "hash_interval": (0.5, (1,)), _SLOWDOWN: (0.3, ("1,2",)),
    "global_batch_size": (0.15, (32, 50, 64)), "accumulation_steps": (0.15, (2, 3)), "micro_batch_size": (0.2, (2, 4, 8)),
    "logical_ranks": (0.08, (2, 4)), "reference_ranks": (0.1, (2, 4)), "elastic_batch": (0.05, ("fixed-per-rank",)),
    "dispatch": (0.3, ("equal", "proportional")), "merge_period": (0.2, ("fixed", "auto")),
    "sparse_merge": (0.1, ("always", "never")), "merges_per_round": (0.2, (2, 4)), "merge_fragments": (0.25, (2, 3)),
    "fragment_delay": (0.1, (0.0, 0.3, 1.0)), "fragment_alpha": (0.1, (0.0, 0.7)), "outlier_limit": (0.15, (3.0,)),
    "clip_delta": (0.15, (10.0,)),
    "compression": (0.4, ("none", "fp16", "maxmin:4", "maxmin:8", "topk:0.2", "normal:2", "powersgd:2")),
    "reducer": (0.2, ("sra", "hierarchical", "allreduce")), "error_feedback": (0.1, (False,)), "auto_bits": (0.08, (3,)),
}  # fmt: skip
_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.05), "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9), "Adam": lambda p: Adam(p, lr=5e-3),
    "AdamW": lambda p: AdamW(p, lr=5e-3), "Adagrad": lambda p: Adagrad(p, lr=0.03), "RMSprop": lambda p: RMSprop(p, lr=3e-3),
    "NAdam": lambda p: NAdam(p, lr=5e-3),
}  # fmt: skip


class _Refused(Exception):
    """The options do not go with each other, the optimizer or the model; what ranks raise later is no refusal."""


@dataclass(frozen=True)
class Case:
    """What a seed draws.

    Attributes:
        options: of the configuration.
        num_ranks: at the start.
        num_hosts: that these pretend to be on.
        num_after: ranks that go on from the checkpoint of the first round, or 0.
        num_samples: of the data.
        num_epochs: passes over them.
        optimizer: its name.
        has_norm: whether the model has BatchNorm.
        loads: whether batches come from ``session.loader``.
        breaks: whether rank 1's first loss is NaN.
    """

    options: dict[str, Any]
    num_ranks: int
    num_hosts: int
    num_after: int
    num_samples: int
    num_epochs: int
    optimizer: str
    has_norm: bool
    loads: bool
    breaks: bool

    @classmethod
    def draw(cls, seed: int) -> Case:
        """Returns the case of a seed, the same on each machine."""
        rng = random.Random(seed)
        options = _valid(rng)
        num_ranks = rng.choice([1, 2, 2, 3, 4])
        if _SLOWDOWN in options:
            options[_SLOWDOWN] = ",".join(rng.choice(["1", "1.5", "2", "4"]) for _ in range(num_ranks))
        num_after = rng.choice([num_ranks] if _SLOWDOWN in options else [num_ranks, 1, 2, 3])
        return cls(
            options, num_ranks, rng.choice([1, 2]) if num_ranks % 2 == 0 else 1, num_after if rng.random() < 0.35 else 0,
            rng.choice([61, 200, 500]), rng.choice([2, 3]), rng.choice(list(_OPTIMIZERS)), rng.random() < 0.3,
            rng.random() < 0.3, rng.random() < 0.15 and options["strategy"] == "local" and num_ranks > 1,
        )  # fmt: skip

    def check(self) -> str:
        """Trains; returns "" or why the options were refused before that.

        Raises:
            AssertionError: for samples that were not taken as often as they should, or models that differ.
            TimeoutError: if a rank does not end.
        """
        with tempfile.TemporaryDirectory() as folder:
            try:
                taken, models = self._train(self.num_ranks, Path(folder), stops=self.num_after > 0, resumes=False)
                if self.num_after:
                    more, models = self._train(self.num_after, Path(folder), stops=False, resumes=True)
                    taken += more
            except _Refused as refused:
                return str(refused)
        assert len(models) == 1, f"models differ: {models}"
        times = np.bincount(np.array(taken, dtype=np.int64), minlength=self.num_samples)
        assert (times == self.num_epochs).all(), f"samples were taken {times.min()} to {times.max()} times"
        return ""

    def _train(self, num_ranks: int, folder: Path, *, stops: bool, resumes: bool) -> tuple[list[int], set[str]]:
        generator = torch.Generator().manual_seed(self.num_samples)
        x = torch.randn(self.num_samples, 6, generator=generator)
        data = TensorDataset(x, (x.sum(1) > 0).long())
        # Made once: threads would draw from one generator in any order.
        torch.manual_seed(3)
        norm = [nn.BatchNorm1d(16)] if self.has_norm else []
        start = nn.Sequential(nn.Linear(6, 16), *norm, nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))

        def run(transport: Transport) -> tuple[list[int], str]:
            model = copy.deepcopy(start)
            optimizer = _OPTIMIZERS[self.optimizer](model.parameters())
            try:
                session = Session(model, optimizer, Config(**self.options), transport=transport)
            except (ValueError, AgreedError) as error:
                raise _Refused(str(error)) from error
            checkpointer = Checkpointer(session, folder, interval=1) if self.num_after else None
            if checkpointer is not None and resumes:
                assert checkpointer.resume() is not None
            taken: list[int] = []
            for batch in self._batches(session, data):
                with session.step(batch):
                    session.optimizer.zero_grad()
                    for micro in batch.micro_batches():
                        if self.has_norm and len(micro.x) == 1:
                            raise _Refused("BatchNorm takes no single sample")
                        loss = nn.functional.cross_entropy(model(micro.x), micro.y)
                        is_broken = self.breaks and session.rank == 1 and not taken and not resumes
                        (loss * float("nan") if is_broken else loss).backward()
                    if session.synchronize():
                        session.optimizer.step()
                # A rank without samples of a step has a stand-in.
                taken += batch.rows.tolist() if batch.weight else []
                if stops and session.round >= 1:
                    session.stop()
            if checkpointer is not None:
                checkpointer.close()
            session.close()
            return taken, model_hash(model)

        world = LocalWorld(num_ranks, num_hosts=self.num_hosts if num_ranks == self.num_ranks else 1)
        results = world.run(run, timeout_s=CASE_LIMIT_S)
        return [row for rows, _ in results for row in rows], {model for _, model in results}

    def _batches(self, session: Session, data: TensorDataset) -> Iterator[Batch]:
        if not self.loads:
            yield from session.batches(data, num_epochs=self.num_epochs)
            return
        loader = session.loader(data)
        while not session.stopped and session.ledger.epoch < self.num_epochs:
            yield from loader


def _valid(rng: random.Random) -> dict[str, Any]:
    """Draws options, and leaves out some until the rest go together."""
    options: dict[str, Any] = {"strategy": rng.choice(["local", "local", "sync"]), "batch_size": rng.choice([4, 8, 16, 30, 32])}
    for name, (probability, values) in _OPTIONS.items():
        if rng.random() < probability:
            options[name] = rng.choice(values)
    while True:
        try:
            Config(**options)
            return options
        except ValueError as error:
            free = [name for name in options if name in _OPTIONS]
            del options[rng.choice([name for name in free if name in str(error)] or free)]


def main() -> int:
    """Runs cases; returns 1 if some ended otherwise than they may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=1000, help="seed of the first case (default: 1000)")
    parser.add_argument("--count", type=int, default=500, help="cases (default: 500)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    kinds: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.count):
        case = Case.draw(seed)
        try:
            kind = "refused" if case.check() else "trained"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            kind = "failed"
            print(f"{seed}: {type(error).__name__}: {error}\n    {case}", flush=True)
        kinds[kind] += 1
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    return 1 if kinds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
