"""Merges whose exchange runs beside the next steps, one fragment of the model after the other."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.algorithm.fragments import phases, phases_beside_steps
from hvd_adaptive.algorithm.merge_weights import DIVERGED
from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.algorithm.outliers import NormHistory, clip_factor
from hvd_adaptive.comm.protocols import AgreedError, Collectives
from hvd_adaptive.compress.kernels.dispatch import all_finite, sum_of_squares
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import FlatModel
from hvd_adaptive.engine.model_fragments import Fragment, Piece, cut_model
from hvd_adaptive.engine.rank_warnings import warn_of_broken, warn_of_outliers
from hvd_adaptive.exchange.pipeline import Beside, UnderWay

log = logging.getLogger(__name__)

# The last phases of a round come with its end, when the ranks have met.
_BEFORE_END = 1 - 1e-9
# Of two places, as parts of a round; a sample is more.
_LEAST_DISTANCE = 1e-8


class OverlappedMerge:
    """Exchanges the progress of some steps while the next ones compute (Streaming DiLoCo, arXiv 2501.18512).

    The model is cut into F fragments of layers. Each is sent at its own place in the round, which is a place of the cursor that
    all ranks share, and its sum is taken in a stated delay later. With G the fragment's global model, equal on all ranks, and w a
    rank's own: at its place a rank sends p, what its steps have added to the fragment since it was sent before. Until the
    sum S = sum a_i p_i is there the rank goes on. Then G moves by the outer step of S, and w by (1 - alpha) (G - s), where s is
    what w was when it was sent: the rank keeps its steps since then, and the part alpha of its distance to the merged model.

    Every p_i enters exactly one sum: what alpha keeps is no progress. The paper instead sets w to alpha w + (1 - alpha) G, which
    gives up a part of the steps since the fragment was sent and sends what it keeps once more. Without a delay both are the same
    w. With one rank and no outer step, w is plain training, whatever F, delay and alpha are.

    Ranks send a fragment before they know what others have done. So each weights its progress by its own work, and the sum of
    the weights, by which all divide, comes with the sum.

    Between rounds the model is G: evaluation, hashes and files see what all ranks hold. Float buffers are merged at the end of
    each round: a stale variance could become negative. :meth:`drain_` merges what is left over, so that nothing is lost.

    A rank whose fragment is not finite when it is sent contributes zeros, and starts all fragments again from G.

    Needs one more copy of the trainable parameters; with several fragments another one between rounds. What codecs lose is
    added to what is sent of the fragment a round later.

    Args:
        flat_model: the model; its delta is what is on the way.
        outer: the outer step.
        transport: the world.
        config: number of fragments, delay, alpha and the rule for weights.
        forget: puts this rank's optimizer back to where it began; called when the rank was not finite.
        num_fragments: F; with ``config.merge_fragments`` as many.
        history: of the norms of this rank's progress in the whole model; None: each fragment has its own.
        threaded: a thread goes on with encoded sums.

    Raises:
        AgreedError: on all ranks, if the model has fewer layers than fragments.
    """

    def __init__(
        self,
        flat_model: FlatModel,
        outer: OuterStep,
        transport: Collectives,
        config: Config,
        forget: Callable[[], None] = lambda: None,
        *,
        num_fragments: int,
        history: NormHistory | None = None,
        threaded: bool = False,
    ) -> None:
        self._flat_model = flat_model
        self._outer = outer
        self._transport = transport
        self._config = config
        self._forget = forget
        self._alpha = 0.0 if config.merges_beside_steps else config.fragment_alpha
        self._beside_steps = config.merges_beside_steps
        # Where each rank has a part of its own, or there is one alone, runs have the same bits again, but for Horovod's fusion.
        claims = config.dispatch == "dynamic" and transport.world_size > 1
        self._takes_in_early = self._beside_steps and claims
        self._phases = phases(num_fragments, config.merge_delay)
        self._next = 0
        self._fragments = cut_model(flat_model, num_fragments, by_layers=not self._beside_steps)
        # On a GPU steps are short, and a thread would need a stream of its own.
        beside = Beside() if threaded and flat_model.device.type == "cpu" else None
        for fragment in self._fragments:
            fragment.under_way = UnderWay(beside)
        for fragment in self._fragments if config.outlier_limit else ():
            whose = f"rank {transport.rank}, fragment {fragment.number}"
            fragment.history = history or NormHistory(config.outlier_limit, whose)
        # This rank's own model between rounds. One fragment has just been sent then: it is `ahead` of the global model.
        self._own: list[Tensor] | None = None
        # How far the round has come, and one over its work.
        self._reached, self._scale = 0.0, 1.0
        self._seen_work = self._seen_updates = 0.0
        self._sent_bytes = 0

    @property
    def num_fragments(self) -> int:
        """F."""
        return len(self._fragments)

    @property
    def _pieces(self) -> Iterator[Piece]:
        return itertools.chain.from_iterable(fragment.pieces for fragment in self._fragments)

    @torch.no_grad()
    def start_round_(self, *, work: float = 1.0, merges: int = 1) -> None:
        """Loads this rank's own model for its next steps.

        Args:
            work: of the round over all ranks, as :meth:`reach_` counts it; only its scale matters.
            merges: of the whole model in the round, where they go beside steps.
        """
        # What has put parameters in others' place between two rounds has told the whole groups.
        for piece in self._pieces:
            piece.rebind()
        goes_on = self._own is not None
        self._load_own_()
        if self._beside_steps:
            self._phases = phases_beside_steps(merges, len(self._fragments))
        for fragment in self._fragments:
            fragment.sent_at = 0.0
        for phase in self._phases if goes_on else ():
            if not phase.arrives:
                # In the round before.
                self._fragments[phase.fragment].sent_at = phase.position - 1.0
        self._next, self._seen_work, self._seen_updates, self._sent_bytes = 0, 0.0, 0.0, 0
        self._reached, self._scale = 0.0, 1.0 / work

    @torch.no_grad()
    def reach_(self, position: float, work: float, num_updates: float = 0.0) -> None:
        """Sends and takes in fragments up to a place before the end of the round, and goes on with encoded sums. Call it
        between steps. Every rank comes by every place, each at its own time; where it takes a sum in, it waits for those who
        have not sent yet.

        Args:
            position: the part of the round's work that was claimed when this rank's next batch was.
            work: this rank's in the round so far, in samples or updates, whichever weighs ranks.
            num_updates: its updates in the round so far.

        Raises:
            AgreedError: on all ranks, if a fragment is finite on none.
        """
        self._reached = max(self._reached, position)
        self._count(work, num_updates)
        self._follow()
        for fragment in self._fragments:
            fragment.under_way.poll()
            if self._takes_in_early and fragment.arrived:
                self._arrive_(fragment)
        while self._next < len(self._phases) and self._phases[self._next].position <= min(position, _BEFORE_END):
            self._meet_()

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Measures the buffers' changes in the round; returns whether they and this rank's model are finite."""
        self._flat_model.rebind()
        self._follow(changed=True)
        finite = self._flat_model.buffers.compute_delta()
        return all_finite(*(t for group in self._flat_model.parameter_groups for t in group.tensors)) and finite

    @torch.no_grad()
    def merge_(self, *, buffer_weight: float, left_out: bool = False) -> None:
        """Ends a round: goes through its last phases, merges the buffers, and loads the global model. COLLECTIVE.

        Args:
            buffer_weight: this rank's weight for float buffers.
            left_out: this rank was not finite, and gives up what it has not sent.
        """
        if left_out:
            self._start_again_()
        while self._next < len(self._phases):
            self._meet_()
        flat = self._flat_model
        flat.payload_bytes = flat.buffers.payload_bytes + self._sent_bytes
        if not self._beside_steps:
            self._own = [g.gather_(torch.empty_like(g.weights)) for g in flat.parameter_groups]
        flat.buffers.start_(buffer_weight)
        flat.buffers.finish_()
        flat.restore_()

    @torch.no_grad()
    def drain_(self) -> None:
        """Merges all that is on the way, and what was not sent yet: the model is the global one, and nothing is left over.
        Between rounds. COLLECTIVE."""
        if self._own is None and not any(fragment.pending for fragment in self._fragments):
            return
        unsent = self._own is not None
        self._load_own_()
        arrivals = [self._fragments[phase.fragment] for phase in self._phases if phase.arrives]
        for fragment in arrivals:
            self._arrive_(fragment)
        if unsent:
            # The last one has just been sent.
            for phase in self._phases:
                if not phase.arrives and phase.position < 1.0:
                    self._send_(self._fragments[phase.fragment], 1.0 - phase.position)
            for fragment in self._fragments[:-1]:
                self._arrive_(fragment)
        for piece in self._pieces:
            piece.ahead.zero_()
        self._flat_model.restore_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums on the way, once they are there (shared), and what this rank holds alone (own). COLLECTIVE."""
        for fragment in self._fragments:
            self._wait(fragment)
        groups = self._flat_model.parameter_groups
        shared = {
            "deltas": [g.delta for g in groups],
            "pending": [fragment.pending for fragment in self._fragments],
            "factors": [fragment.factor for fragment in self._fragments],
        }
        own = {
            "ahead": [piece.ahead for piece in self._pieces],
            "model": self._own,
            "work": [fragment.work for fragment in self._fragments],
            "histories": [None if fragment.history is None else fragment.history.state_dict() for fragment in self._fragments],
        }
        return {"shared": shared, "own": own}

    @torch.no_grad()
    def load_state_dict(self, shared: dict[str, Any] | None, own: dict[str, Any] | None) -> None:
        """Goes on from a state, of as many fragments. COLLECTIVE: what is on the way now is given up once it is there.

        Args:
            shared: what was on the way; None: nothing.
            own: of this very rank; None: it starts from the global model.

        Raises:
            ValueError: if it is of another number of fragments.
        """
        num_saved = len(self._fragments) if shared is None else len(shared["pending"])
        if num_saved != len(self._fragments):
            raise ValueError(
                f"it was saved with merge_fragments {num_saved}, got {len(self._fragments)}: sums on the way are of fragments. "
                f"Set merge_fragments {num_saved}"
            )
        for index, fragment in enumerate(self._fragments):
            # It would write over what is loaded. At the end of a round every rank has begun the same sums.
            fragment.finish()
            fragment.message = None
            fragment.pending = shared is not None and bool(shared["pending"][index])
            fragment.factor = 1.0 if shared is None else float(shared["factors"][index])
            fragment.work = 0.0 if own is None else float(own["work"][index])
            if fragment.history is not None and own is not None:
                fragment.history.load_state_dict(own["histories"][index])
        if shared is not None:
            for group, delta in zip(self._flat_model.parameter_groups, shared["deltas"], strict=True):
                group.delta.copy_(delta)
        pieces = list(self._pieces)
        for piece, ahead in zip(pieces, own["ahead"] if own is not None else [None] * len(pieces), strict=True):
            piece.ahead.zero_() if ahead is None else piece.ahead.copy_(ahead)
        values = None if own is None else own["model"]
        self._own = None if values is None else [value.to(self._flat_model.device, copy=True) for value in values]
        if own is None and len(self._fragments) > 1 and self._transport.rank == 0:
            log.warning(
                "the number of ranks has changed: what they had learned since each of %d fragments was sent last, half a round "
                "on average, is lost",
                len(self._fragments),
            )

    def _load_own_(self) -> None:
        if self._own is not None:
            self._flat_model.load_(self._own)
            self._own = None
            return
        # Merges beside steps have left the global model there, and the loop may have written to it since.
        for piece in self._pieces if not self._beside_steps else ():
            piece.group.scatter_(piece.start())

    def _follow(self, *, changed: bool = False) -> None:
        """Takes parameters anew that a step has put in others' place."""
        if self._flat_model.follow() or changed:
            for piece in self._pieces:
                piece.rebind()

    def _meet_(self) -> None:
        """Goes through the next phase."""
        phase = self._phases[self._next]
        self._next += 1
        fragment = self._fragments[phase.fragment]
        if phase.arrives:
            self._arrive_(fragment)
            return
        # At the end of a round that is closed early come all places that are left, and nothing is left to send at most of them.
        place = min(phase.position, self._reached) if self._beside_steps else phase.position
        if (part := place - fragment.sent_at) > _LEAST_DISTANCE:
            fragment.sent_at = place
            self._send_(fragment, part)

    def _count(self, work: float, num_updates: float) -> None:
        for fragment in self._fragments:
            fragment.work += (work - self._seen_work) * self._scale
            fragment.num_updates += num_updates - self._seen_updates
        self._seen_work, self._seen_updates = work, num_updates

    def _send_(self, fragment: Fragment, part: float) -> None:
        """Starts to sum a fragment's progress; ``part``: of a round's work, that all ranks made since it was sent last."""
        transport, flat, num_updates = self._transport, self._flat_model, fragment.num_updates
        finite = fragment.measure_()
        if not finite:
            self._start_again_()
            self._forget()
        # The weights of a merge sum to about one, so that what codecs lose counts as much in the next one.
        weight = fragment.work / part if finite else 0.0
        if self._config.weight_rule == "uniform":
            weight = float(weight > 0) / transport.world_size
        norm, outlies = 0.0, False
        if weight and self._config.measures_deltas:
            norm = float(sum(sum_of_squares(piece.group.delta) for piece in fragment.pieces)) ** 0.5
            # The whole model's history is that of rounds with one merge, too.
            amount = num_updates if self._beside_steps else fragment.work
            outlies = fragment.history is not None and fragment.history.is_outlier(norm, amount)
        if outlies:
            weight = 0.0
            fragment.start_again_()
        fragment.message = torch.zeros(transport.world_size, 5, dtype=torch.float64)
        own = [weight, float(not finite), float(outlies), norm * weight, num_updates]
        fragment.message[transport.rank] = torch.tensor(own, dtype=torch.float64)
        name = f"overlap.{fragment.pieces[0].group.name}.message"
        fragment.handles.append(transport.allreduce_sum_async_(fragment.message, name=name))
        fragment.work = fragment.num_updates = 0.0
        compressed = flat.compressed
        if compressed is not None:
            compressed.begin_round()
        for piece in fragment.pieces:
            group = piece.group
            if not weight:
                group.delta.zero_()
            elif compressed is None:
                # Encoding multiplies on its way.
                group.delta.mul_(weight)
            if compressed is None:
                fragment.handles.append(transport.allreduce_sum_async_(group.delta, name=f"overlap.{group.name}"))
                self._sent_bytes += group.delta.nbytes
            else:
                compressed.prepare(group.delta, group.name, group.infos)
                for task in compressed.tasks(group.delta, group.name, weight=weight or 1.0):
                    fragment.under_way.begin(task)
                self._sent_bytes += compressed.payload_bytes(group.name)
        fragment.pending = True

    def _wait(self, fragment: Fragment) -> None:
        fragment.finish()
        if fragment.message is None:
            return
        weights, broken, outliers, norms, updates = (column.numpy() for column in fragment.message.unbind(1))
        fragment.message = None
        if broken.all():
            raise AgreedError(DIVERGED)
        fragment.merged_updates = float(updates.max())
        # Without a step of anybody there is nothing to divide.
        fragment.factor = 1.0 / (float(weights.sum()) or 1.0)
        if self._config.clip_delta:
            fragment.factor *= clip_factor(norms, np.ones(len(norms)), self._config.clip_delta / fragment.factor)
        if self._transport.speaks:
            warn_of_broken(broken == 0)
            warn_of_outliers(outliers > 0, f"progress in fragment {fragment.number}")

    def _arrive_(self, fragment: Fragment) -> None:
        """Moves the global model by a fragment's sum, and this rank's own with it."""
        if not fragment.pending:
            return
        self._wait(fragment)
        if self._beside_steps and not fragment.merged_updates:
            # Nobody made a step, as where a round was closed early: there is nothing but what codecs have left.
            fragment.take_in_(None, self._alpha)
            return
        if self._beside_steps:
            self._outer.count(fragment.merged_updates, fragment.number)
        self._outer.begin(fragment.number)
        fragment.take_in_(self._outer, self._alpha)

    def _start_again_(self) -> None:
        """Gives up this rank's steps that were not sent."""
        for fragment in self._fragments:
            fragment.start_again_()
        self._flat_model.restore_()
