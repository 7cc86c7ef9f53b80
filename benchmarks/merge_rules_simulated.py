"""P@1 of local merges by rule, learning rate and optimizer, on unequal ranks simulated in one process without MPI.

    python benchmarks/merge_rules_simulated.py --data PREFIX --rules dual-averaging avg --rates 0.05 0.1 --sync 256

Four ranks at speeds 1:1:2:4 train the papers' model. Each rank is a thread with its own copy of the model and its own optimizer.
Speed is a number of batches, not a time: of each round's samples, a rank takes a part in proportion to its speed. Merges use the
package's own code (make_merge_rule, OuterStep, average_). Left out: adaptive batch sizes, codecs, and the time of anything.

The value of a run is its best mean of two consecutive evaluations, which a single lucky evaluation raises less than a maximum.
Set OMP_NUM_THREADS=1: threads are the ranks here. data: as for `hvd-adaptive train --data`; text_to_xmc.py makes such files.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from recording import header
from torch import Tensor

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.engine.merge_rule import MergeRule, make_merge_rule
from hvd_adaptive.engine.optimizer_state import average_
from hvd_adaptive.engine.optimizers import OPTIMIZERS, make_optimizer
from hvd_adaptive.xmc.data import SparseDataset, build, open_splits, resolve
from hvd_adaptive.xmc.sparse_mlp import SparseMLP, multilabel_softmax_loss

Rows = NDArray[np.int64]
Curve = list[tuple[float, float]]
"""Epochs and P@1 of each evaluation."""

SPEEDS = (1.0, 1.0, 2.0, 4.0)
RULES = ("dual-averaging", "avg", "fisher-rows")
TEST_BLOCK = 1000
# A run has no natural limit; LocalWorld wants one.
TIMEOUT_S = 1e6


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        rule: one of RULES: dual averaging, deltas weighted by updates, or by squared-gradient mass a row.
        optimizer: of every rank, a name of OPTIMIZERS.
        lr: its learning rate.
        batch_size: of a rank, the same on all.
        speeds: of the ranks; a single one is synchronous training with that batch.
        merges: an epoch.
        average_state: at each merge the optimizer's state becomes the ranks' mean, weighted by updates; else ranks keep theirs.
            Dual averaging sums it itself.
        epochs: of the training data, over all ranks.
        outer: "none" or "nesterov".
        outer_momentum: of nesterov.
        outer_lr: of nesterov.
        evaluations: an epoch, about; the last merge is followed by one in any case.
        seed: of the order of samples and of the model.
    """

    rule: str
    optimizer: str
    lr: float
    batch_size: int
    speeds: tuple[float, ...]
    merges: float
    average_state: bool
    epochs: float
    outer: str
    outer_momentum: float
    outer_lr: float
    evaluations: float
    seed: int

    def mega_batch(self, num_samples: int) -> float:
        """Returns the samples between two merges, over all ranks: a batch a rank at least."""
        return max(float(self.batch_size * len(self.speeds)), num_samples / self.merges)

    @property
    def name(self) -> str:
        """The method, without its learning rate."""
        if len(self.speeds) == 1:
            return f"sync, batch {self.batch_size}"
        state = "sum" if self.rule == "dual-averaging" else "average" if self.average_state else "keep"
        outer = "" if self.outer == "none" else f", {self.outer} {self.outer_momentum:g}/{self.outer_lr:g}"
        return f"{self.rule}, state {state}, {self.merges:g} merges{outer}"


def main() -> None:
    options = arguments()
    torch.set_flush_denormal(True)
    source = resolve(options.data)
    build(source)
    train, test = open_splits(source)
    print("\n".join(header(f"Merge rules: {source.name}, {options.optimizer}")))
    targets = [f"epochs to {target:g}" for target in options.targets]
    columns = ["method", "lr", "P@1", "at epoch", *targets]
    print(f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", sep="\n", flush=True)
    for run in runs(options):
        curve = simulate(run, train, test, labelled(test)[: options.test_rows])
        print(f"| {' | '.join([run.name, f'{run.lr:g}', *cells(curve, options.targets)])} |", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="PREFIX of PREFIX_train.txt and PREFIX_test.txt; default: the embedded set")
    parser.add_argument("--rules", nargs="*", choices=RULES, default=["avg"], help="none: only --sync")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.07])
    parser.add_argument("--merges", type=float, default=8, help="an epoch")
    parser.add_argument("--state", choices=("keep", "average"), default="average", help="of the optimizer, at a merge")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--outer", choices=("none", "nesterov"), default="none")
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=64, help="of a rank")
    parser.add_argument("--sync", type=int, metavar="BATCH", help="synchronous training with this global batch as well")
    parser.add_argument("--targets", nargs="*", type=float, default=[], help="values of P@1")
    parser.add_argument("--evaluations", type=float, default=4, help="an epoch")
    parser.add_argument("--test-rows", type=int, help="the first ones only")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yields every rule, then the synchronous reference, with every rate."""
    local = Run(
        rule="avg",
        optimizer=options.optimizer,
        lr=options.rates[0],
        batch_size=options.batch,
        speeds=SPEEDS,
        merges=options.merges,
        average_state=options.state == "average",
        epochs=options.epochs,
        outer=options.outer,
        outer_momentum=options.outer_momentum,
        outer_lr=options.outer_lr if options.outer != "none" else 1.0,
        evaluations=options.evaluations,
        seed=options.seed,
    )
    for rule, lr in itertools.product(options.rules, options.rates):
        yield Run(**{**vars(local), "rule": rule, "lr": lr})
    if options.sync:
        # A round of the single rank is what lies between two evaluations.
        alone = {"speeds": (1.0,), "batch_size": options.sync, "merges": options.evaluations}
        for lr in options.rates:
            yield Run(**{**vars(local), **alone, "lr": lr})


def cells(curve: Curve, targets: Sequence[float]) -> list[str]:
    """Returns the best mean of two consecutive evaluations, the second one's epoch, and the epochs to each target."""
    pairs = list(itertools.pairwise(curve)) or [(curve[0], curve[0])]
    value, epoch = max(((a[1] + b[1]) / 2, b[0]) for a, b in pairs)
    reached = [next((epoch for epoch, p1 in curve if p1 >= target), None) for target in targets]
    return [f"{value:.4f}", f"{epoch:.2f}", *("-" if epoch is None else f"{epoch:.2f}" for epoch in reached)]


def labelled(data: SparseDataset) -> Rows:
    """Returns the rows that have a label, ascending."""
    return np.flatnonzero(np.diff(data.y_indptr))


def simulate(run: Run, train: SparseDataset, test: SparseDataset, test_rows: Rows) -> Curve:
    """Trains with all ranks and returns the merged model's P@1 over time."""
    torch.manual_seed(1 + run.seed)
    model = SparseMLP(train.num_features, train.num_labels, 128, unit_rows=True)
    world = LocalWorld(len(run.speeds))
    curves = world.run(lambda transport: one_rank(transport, run, model, train, test, test_rows), timeout_s=TIMEOUT_S)
    curve: Curve = curves[0]
    return curve


def one_rank(
    transport: Transport, run: Run, start: SparseMLP, train: SparseDataset, test: SparseDataset, test_rows: Rows
) -> Curve:
    """Trains one rank; returns the curve on rank 0 and nothing on others. COLLECTIVE."""
    torch.set_num_threads(1)
    model = copy.deepcopy(start)
    parameters: list[Tensor] = [model.hidden.weight, model.output_weight]
    optimizer = make_optimizer(run.optimizer, parameters, lr=run.lr)
    outer = OuterStep(run.outer, lr=run.outer_lr, momentum=run.outer_momentum)
    rule = make_merge_rule(run.rule, optimizer, parameters, row_parameters=[0])
    merged = torch.cat([p.detach().reshape(-1) for p in parameters])
    rows = labelled(train)
    curve, seen = [], 0
    between = max(1, round(len(rows) / run.mega_batch(len(rows)) / run.evaluations))
    # 1e-9: a whole number of rounds must not become one more by rounding.
    num_rounds = math.ceil(run.epochs * len(rows) / run.mega_batch(len(rows)) - 1e-9)
    for number, batches in enumerate(itertools.islice(rounds(rows, run), num_rounds), start=1):
        for batch in batches[transport.rank]:
            x, y = train.get_batch(batch)
            optimizer.zero_grad()
            multilabel_softmax_loss(model(x), y).backward()
            if rule:
                rule.before_step()
            optimizer.step()
            if rule:
                rule.after_step()
        updates = np.array([len(own) for own in batches], dtype=np.float64)
        weights = updates / max(1.0, updates.sum())
        if transport.world_size > 1 and updates.any():
            merge_(transport, parameters, merged, weights, rule, outer)
            if run.average_state and run.rule != "dual-averaging":
                average_(optimizer, transport, float(weights[transport.rank]))
        seen += int(updates.sum()) * run.batch_size
        if transport.rank == 0 and (number % between == 0 or number == num_rounds):
            curve.append((seen / len(rows), precision_at_1(model, test, test_rows)))
    return curve


@torch.no_grad()
def merge_(
    transport: Transport,
    parameters: list[Tensor],
    merged: Tensor,
    weights: NDArray[np.float64],
    rule: MergeRule | None,
    outer: OuterStep,
) -> None:
    """Moves ``merged`` and then ``parameters`` by the ranks' weighted deltas, in place. COLLECTIVE.

    Args:
        transport: the world.
        parameters: this rank's.
        merged: the global model, the parameters one after the other, shape (num_elements,).
        weights: updates over all ranks' updates, shape (world_size,).
        rule: finds a weight in each row or coordinate; None for ``weights``.
        outer: what the summed deltas go through.
    """
    parts = merged.split([p.numel() for p in parameters])
    globals_ = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
    own: Sequence[Tensor | float] = [float(weights[transport.rank])] * len(parameters)
    if rule:
        own = rule.exchange(transport, weights=weights, unions={})
    deltas = [(p - g) * share for p, g, share in zip(parameters, globals_, own, strict=True)]
    delta = torch.cat([d.reshape(-1) for d in deltas])
    transport.allreduce_sum_(delta, name="delta")
    outer.begin()
    outer.apply_(merged, delta)
    for p, g in zip(parameters, globals_, strict=True):
        p.copy_(g)


def rounds(rows: Rows, run: Run) -> Iterator[list[list[Rows]]]:
    """Yields each rank's batches of each round, without end; the same on all ranks.

    Samples come in passes, each in another order; a batch may span two passes. Over rounds, a rank's number of batches stays
    within one of its part of the samples.

    Args:
        rows: the samples, shape (num_samples,).
        run: its batch_size, speeds, merges and seed.
    """
    generator = np.random.default_rng(run.seed)
    shares = np.array(run.speeds) / sum(run.speeds)
    mega_batch = run.mega_batch(len(rows))
    ahead = np.empty(0, dtype=np.int64)

    def take() -> Rows:
        nonlocal ahead
        while len(ahead) < run.batch_size:
            ahead = np.concatenate([ahead, rows[generator.permutation(len(rows))]])
        batch, ahead = ahead[: run.batch_size], ahead[run.batch_size :]
        return batch

    done = np.zeros(len(shares), dtype=np.int64)
    for number in itertools.count(1):
        # 1e-9: a product that should be whole must not fall below it.
        due = np.floor(shares * mega_batch * number / run.batch_size + 1e-9).astype(np.int64)
        yield [[take() for _ in range(count)] for count in due - done]
        done = due


@torch.no_grad()
def precision_at_1(model: SparseMLP, test: SparseDataset, rows: Rows) -> float:
    """Returns the part of ``rows`` whose best label is a true one."""
    hits = 0
    for first in range(0, len(rows), TEST_BLOCK):
        x, y = test.get_batch(rows[first : first + TEST_BLOCK])
        best = model(x).argmax(1)
        hits += int((y.indices == best.repeat_interleave(y.offsets.diff())).sum())
    return hits / len(rows)


if __name__ == "__main__":
    main()
