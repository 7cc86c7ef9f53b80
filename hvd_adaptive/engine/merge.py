"""The merge: what strategy ``local`` and wrapped scripts do between two stretches of local steps.

Each rank measures its delta (:meth:`Merge.measure_`), the ranks gather their statistics, every rank derives the same weights
from them (:meth:`Merge.weights`), and the deltas, the outer step and the optimizers' states follow (:meth:`Merge.apply_`).
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.merge_period import ADAM_START, FRAGMENTS_START, with_short_rounds
from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.algorithm.outliers import NormHistory, clip_factor
from hvd_adaptive.algorithm.round_control import round_weights
from hvd_adaptive.algorithm.statistics import Array, Gathered, Statistics
from hvd_adaptive.comm.protocols import AgreedError, Collectives, is_one_host
from hvd_adaptive.config import Config
from hvd_adaptive.engine import optimizer_state
from hvd_adaptive.engine.base_watch import BaseWatch
from hvd_adaptive.engine.flat_model import FlatModel, has_batch_norm
from hvd_adaptive.engine.merge_codec import MergeCodec
from hvd_adaptive.engine.merge_rule import make_merge_rule
from hvd_adaptive.engine.model_fragments import cut_model, fragments_beside_steps
from hvd_adaptive.engine.overlap import OverlappedMerge
from hvd_adaptive.engine.rank_warnings import (
    BrokenRounds,
    OtherOptimizers,
    warn_of_broken,
    warn_of_copies,
    warn_of_infinite_state,
    warn_of_outliers,
)
from hvd_adaptive.engine.row_merge import RowMerge
from hvd_adaptive.engine.shards import local_state, sharded_state
from hvd_adaptive.engine.touched_rows import mark_rows, sparse_parameters
from hvd_adaptive.exchange.compressed import CompressedSum

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MergeStats(Statistics):
    """What a merge has to know of each rank.

    Attributes:
        batch_size: the rank's batch size b_i, samples.
        num_updates: its updates since the last merge; samples over b_i, so that a batch cut short counts as a part.
        num_samples: samples computed.
        finite: 1 if the rank's parameters are finite, else 0.
        norm_per_parameter: L2 norm of the model over its number of parameters; 0 where no rule needs it.
        state_checksum: of the structure of the optimizer's state, where ranks average it; 0: empty, or not looked at.
        delta_norm: L2 norm of the rank's progress; 0 where nothing needs it.
        outlier: 1 if that is much larger than usual, so that it is left out.
        base: checksum of the parameters that the loop changed between the last round and this one; 0: none.
        state_due: 1 if the rank may spend time on an average of optimizer states.
    """

    batch_size: float = 0.0
    num_updates: float = 0.0
    num_samples: float = 0.0
    finite: float = 1.0
    norm_per_parameter: float = 0.0
    state_checksum: float = 0.0
    delta_norm: float = 0.0
    outlier: float = 0.0
    base: float = 0.0
    state_due: float = 0.0


class Merge:
    """Merges a model and the state of its optimizer over the ranks. Construction is COLLECTIVE: all start from rank 0's model.

    Args:
        model: as :class:`FlatModel` takes it.
        optimizer: of its parameters.
        config: the rules. What is not set follows from the optimizer.
        transport: the world.
        parameters: the trainable ones as the optimizer knows them; None: the model's.
        modules: those that hold them; None: the model.
        beside_steps: whether the caller begins rounds and tells :attr:`overlap` of its steps, and the transport tells what has
            arrived, so that a round may have several merges.

    Attributes:
        config: the rules, completed.
        codec: what merges are encoded with.
        flat_model: the global model and the deltas.
        outer: the outer step.
        rule: weighs rows or coordinates and must hear of every step; None: a rank has one weight.
        rows: tells rows of sparse parameters apart; None: it does not.
        overlap: lets sums arrive beside later steps; None: they do not.
        state_rule: what becomes of the optimizer's state.
        state_s: seconds of the last merge for it, which the length of rounds does not follow, as they have their own limit.
        merges_from: updates of the fastest rank before rounds should have several merges.
        num_rows: rows of sparse parameters that the last merge exchanged; 0 where none are told apart.
        who: what its warnings call the ranks; None: this rank gives none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        transport: Collectives,
        *,
        parameters: Sequence[Tensor] | None = None,
        modules: Iterable[nn.Module] | None = None,
        beside_steps: bool = False,
    ) -> None:
        is_whole = parameters is None
        if parameters is None:
            parameters = [p for p in model.parameters() if p.requires_grad]
        modules = [model] if modules is None else list(modules)
        config = optimizer_state.with_defaults(config, optimizer, parameters, world_size=transport.world_size)
        if optimizer_state.learns_from_short_rounds(config, optimizer):
            # On one host merges are quick, and late sums harm BatchNorm: benchmarks/records/2026-11-26-whole-batches.md.
            norms = any(map(has_batch_norm, modules))
            helps = beside_steps and not norms and not is_one_host(transport)
            config = with_short_rounds(config, transport.world_size, beside_steps=helps)
        self.codec = MergeCodec(config, optimizer, parameters, transport)
        self.config = config = self.codec.config
        self._optimizer = optimizer
        self._transport = transport
        touched, on_host = mark_rows(model, optimizer, config, transport), config.outer_state == "host"
        flat = self.flat_model = FlatModel(model, transport, touched, on_host=on_host)
        if config.merge_fragments > len(parameters):
            # Refuses them before anything is made for each.
            cut_model(flat, config.merge_fragments)
        self.rows = RowMerge(flat.row_ranges, transport, config, payload_bytes=flat.payload_bytes) if flat.row_ranges else None
        sparse = {id(p) for module in modules for p in sparse_parameters(module).values()}
        by_rows = [place for place, p in enumerate(parameters) if id(p) in sparse]
        self.rule = flat.rule = make_merge_rule(config.weight_rule, optimizer, parameters, row_parameters=by_rows)
        # A history of norms is the whole model's.
        cuts = config.merges_beside_steps and not config.measures_deltas
        num_fragments = fragments_beside_steps(flat) if cuts else config.merge_fragments
        self.merges_from = ADAM_START if num_fragments == 1 else FRAGMENTS_START
        start = ADAM_START if optimizer_state.is_adam(optimizer) else 0
        self.outer = OuterStep.of(config, start=start, num_fragments=num_fragments)
        if config.encodes:
            infos = [info for group in flat.parameter_groups for info in group.infos]
            flat.compressed = CompressedSum(
                config, transport, infos, devices=[flat.device], auto_bits=config.auto_bits, residuals_on_host=on_host
            )
        self.state_rule = optimizer_state.rule(config, optimizer)
        self.state_s, self._state_limit = 0.0, optimizer_state.AverageLimit.of(config, optimizer)
        self._modules, self._told_of_state = modules, False
        # Averaged copies of the parameters are the merged ones, unless an outer step moves these farther.
        averages = self.state_rule == "average" and self._state_limit is None and self.outer.kind == "none"
        merges = transport.world_size > 1 and config.logical_ranks is None
        self._seeks_copies = merges and not averages and self.state_rule != "reset"
        # In the first round. A wrapped script may have several optimizers, and says which parameters are merged.
        self._seek_others = functools.partial(OtherOptimizers, model, optimizer) if is_whole else None
        self._others: OtherOptimizers | None = None
        self._initial_state = copy.deepcopy(optimizer.state_dict()["state"])
        overlap = functools.partial(
            OverlappedMerge, flat, self.outer, transport, config, self._forget, num_fragments=num_fragments
        )
        self.overlap: OverlappedMerge | None = overlap() if config.merge_fragments > 1 else None
        self._history: NormHistory | None = None
        if config.outlier_limit and config.merge_fragments == 1:
            self._history = NormHistory(config.outlier_limit, f"{'rank' if config.island is None else 'island'} {transport.rank}")
        # Of who begins rounds: between two of them the model is the global one.
        self._base: BaseWatch | None = None
        self._within_round = False
        # Fragments, for each of which is kept what codecs have lost; None: no round has begun.
        self._residuals_for: int | None = None
        self._beside_steps: OverlappedMerge | None = None
        if config.merges_beside_steps:
            # Already now, so that memory that is too small is found at the start.
            self._beside_steps = overlap(history=self._history, threaded=beside_steps)
        self.num_rows = 0
        self._broken = BrokenRounds("ranks" if config.island is None else "islands")
        self.who = "ranks" if transport.rank == 0 else None

    def begin_round(self, merges: int, *, narrow: bool = False) -> None:
        """Sets how often the whole model is merged in the round that begins, the same on every rank. What the loop has changed in
        the parameters since the last round becomes the global model, if all ranks have made the same change.

        Args:
            merges: of the whole model.
            narrow: merges shall have fewer bits from now on, where nobody has chosen their codec; COLLECTIVE then.
        """
        if narrow:
            self.codec.narrow(self.flat_model.compressed)
        if self._beside_steps is not None:
            self.overlap = self._beside_steps if merges > 1 else None
            kept_for = 1 if self.overlap is None else self.overlap.num_fragments
            if self.flat_model.compressed is not None and self._residuals_for not in (None, kept_for):
                self.flat_model.compressed.reset()
            self._residuals_for = kept_for
        if self._base is None:
            self._base = BaseWatch(self.flat_model, self.outer)
            # Merges beside steps change parameters as well.
            self._others = self._seek_others() if self._seek_others and self.overlap is None else None
        self._adopt()
        if self.overlap is not None:
            # Before the first of the merges, all of which end with an error if ranks have not made the same change.
            self._base.forget_residuals()
        self._within_round = True

    def _adopt(self) -> None:
        if self._base is None or self._within_round:
            return
        if self.overlap is None or self.overlap is self._beside_steps:
            self._base.adopt_()
        elif self._base.find():
            # What is on the way goes to the old model.
            raise RuntimeError(
                "parameters were changed between two rounds, as by model.load_state_dict in session.records, which does not go "
                "with merge_fragments: their sums are still on the way then. Leave it out, or change nothing"
            )

    def measure_(self, stats: MergeStats, *, verify: bool = False) -> None:
        """Fills this rank's delta, and the statistics that are of it.

        Args:
            stats: gets whether the delta is finite, the model's norm, and the checksum.
            verify: look for changes in rows of sparse parameters that no step touched.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
        """
        finite = self.flat_model.compute_delta(verify=verify) if self.overlap is None else self.overlap.is_finite()
        stats.finite = float(finite)
        if self._seeks_copies and self._optimizer.state:
            self._seeks_copies = False
            if self.who is not None:
                warn_of_copies(optimizer_state.copies_of_parameters(self._optimizer))
        if self._others is not None:
            if self.who is not None:
                self._others.warn()
            self._others = None
        self.state_s = 0.0
        stats.base = 0.0 if self._base is None else float(self._base.checksum)
        # What is sent beside steps is measured and weighed by its own rank, before others' statistics are there.
        if finite and self.config.measures_deltas and self.overlap is None:
            stats.delta_norm = self.flat_model.delta_norm()
        if self._history is not None:
            stats.outlier = float(self._history.is_outlier(stats.delta_norm, stats.num_updates))
        if self.config.perturbation:
            stats.norm_per_parameter = self.flat_model.norm_per_parameter()
        averages = self.state_rule == "average" and self._transport.world_size > 1
        stats.state_due = float(averages and (self._state_limit is None or self._state_limit.is_due()))
        stats.state_checksum = optimizer_state.checksum(self._optimizer) if stats.state_due else 0.0

    def weights(self, gathered: Gathered) -> Array:
        """Returns the weight of each rank's delta, shape (world_size,), the same on every rank.

        Args:
            gathered: the fields of :class:`MergeStats` by name.

        Raises:
            AgreedError: on all ranks, if no rank's parameters are finite.
        """
        left_out = gathered["outlier"] > 0
        if left_out.any() and ((gathered["finite"] > 0) & ~left_out).any():
            gathered = {**gathered, "finite": gathered["finite"] * ~left_out}
        try:
            weights = round_weights(self.config, gathered)
        except RuntimeError as error:
            # Every rank has the same statistics, so every rank is here.
            raise AgreedError(str(error)) from None
        clip = self.config.clip_delta if self.overlap is None else 0.0
        return weights * clip_factor(weights, gathered["delta_norm"], clip) if clip else weights

    def apply_(self, gathered: Gathered, weights: Array, *, present: NDArray[np.bool_] | None = None) -> None:
        """Exchanges the deltas, moves the global model, loads it, and merges the optimizers' states. COLLECTIVE.

        Args:
            gathered: as for :meth:`weights`.
            weights: from there.
            present: False for a rank that has called hvd.join(), which takes part in plain sums only; None: all are here.

        Raises:
            AgreedError: on all ranks, if one's parameters were not finite in ten rounds in a row.
        """
        start = time.perf_counter()
        finite = (gathered["finite"] > 0) | (False if present is None else ~present)
        self._broken.count(finite, gathered["num_updates"] > 0)
        flat, rank = self.flat_model, self._transport.rank
        convex = weights / weights.sum()
        if self._base is not None and not self._base.settle_(gathered["base"], who=self.who):
            if self.overlap is not None:
                # Merges beside steps have moved other models on each rank. Every rank has the same statistics.
                raise AgreedError(
                    "ranks changed parameters between two rounds, and not all alike: change them alike on all ranks, in "
                    "session.records, or within session.step"
                )
            flat.compute_delta(verify=True)
        compressed, everyone = flat.compressed, present is None or bool(present.all())
        if not everyone:
            flat.compressed = None
        if self.rows is not None:
            self.rows.exchange()
        if self.overlap is None or self.overlap is not self._beside_steps:
            self.outer.count(float(gathered["num_updates"].max()))
        flat.weigh_(convex)
        own, own_buffers = float(weights[rank]), float(convex[rank])
        if self.overlap is not None:
            self.overlap.merge_(buffer_weight=own_buffers, left_out=not gathered["finite"][rank])
        else:
            flat.merge_(self.outer, weight=own, buffer_weight=own_buffers, rows=self.rows)
        flat.compressed = compressed
        if self.rows is not None:
            self.num_rows = self.rows.num_rows
            self.rows.observe(time.perf_counter() - start, flat.payload_bytes)
        self._merge_state(gathered, own_buffers, everyone=everyone)
        self._within_round = False
        if self.who is not None:
            warn_of_broken(finite, self.who)
            warn_of_outliers((gathered["outlier"] > 0) & (weights == 0), who=self.who)

    def _merge_state(self, gathered: Gathered, weight: float, *, everyone: bool) -> None:
        averages, start = everyone and bool(gathered["state_due"].all()), time.perf_counter()
        is_lost = not gathered["finite"][self._transport.rank]
        if averages:
            checksums = gathered["state_checksum"]
            unions = {} if self.rows is None else self.rows.unions()
            agreed = bool((checksums == checksums[0]).all())
            left_out = optimizer_state.average_(
                self._optimizer, self._transport, weight, agreed=agreed, is_lost=is_lost, unions=unions
            )
            if left_out and self.who is not None and not self._told_of_state:
                warn_of_infinite_state(left_out, self._modules)
                self._told_of_state = True
            if self._state_limit is not None:
                self.state_s = self._state_limit.took(time.perf_counter() - start)
        if self.state_rule == "reset" or (is_lost and not averages and self.state_rule != "sum"):
            self._forget()

    def _forget(self) -> None:
        optimizer_state.reset_(self._optimizer, self._initial_state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the global model, the outer step's velocity and what merges beside steps have on the way (``shared``), and this
        rank's optimizer state, progress and residuals (``own``). COLLECTIVE. What the loop has changed since the last round is
        in each rank's global model, whether all have made the same change or not."""
        self._adopt()
        flat, overlap = self.flat_model, {"shared": None, "own": None}
        # Merges beside steps leave nothing on the way.
        if self.overlap is not None and self.overlap is not self._beside_steps:
            overlap = self.overlap.state_dict()
        compressed = None if flat.compressed is None else flat.compressed.state_dict()
        if compressed is not None and self._base is not None and self._base.is_whole:
            # Of the way to another model.
            compressed["exchange"] |= {"residuals": {}, "factors": {}}
        return {
            "shared": {"model": flat.state_dict(), "outer": self.outer.state_dict(), "overlap": overlap["shared"]},
            "own": {
                "optimizer": local_state(self._optimizer.state_dict()),
                "overlap": overlap["own"],
                "compressed": compressed,
                "residuals_for": self._residuals_for,
            }
            | ({} if self._history is None else {"history": self._history.state_dict()}),
        }

    def load_shared(self, shared: dict[str, Any]) -> None:
        """Takes over a global model and the outer step's velocity."""
        self.flat_model.load_state_dict(shared["model"])
        if self._base is not None:
            self._base.forget()
        self.outer.load_state_dict(shared["outer"], device=self.flat_model.state_device)
        if shared["outer"] and self.outer.kind == "none" and self._transport.rank == 0:
            log.warning("the outer step's velocity in the checkpoint is dropped, as there is none now: set outer_step to keep it")

    def load_own(self, shared: dict[str, Any], own: dict[str, Any], *, same_ranks: bool) -> None:
        """Takes over a rank's own state, after the shared one.

        Args:
            shared: as from :meth:`state_dict`.
            own: of a rank that saved it.
            same_ranks: that rank is this one; else its progress is left out.
        """
        self._optimizer.load_state_dict(sharded_state(own["optimizer"], self._optimizer))
        if self.rule is not None:
            self.rule.restart()
        # Other ones than this run begins with are forgotten then.
        self._residuals_for = own.get("residuals_for")
        # First: sums on the way change what codecs have lost.
        if self.overlap is not None and self.overlap is not self._beside_steps:
            self.overlap.load_state_dict(shared["overlap"], own["overlap"] if same_ranks else None)
        # A link that was fast may be slow now.
        if self.flat_model.compressed is not None and own["compressed"] is not None:
            self.flat_model.compressed.load_state_dict(own["compressed"])
        if self._history is not None and same_ranks:
            self._history.load_state_dict(own["history"])
