"""Strategy ``local`` for one optimizer of a script: its steps stay on this rank, and the ranks' deltas are merged."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_adaptive.algorithm.batch_sizes import lr_multiplier
from hvd_adaptive.algorithm.merge_period import (
    LEAST_MERGES_AN_EPOCH,
    NARROW_LINK,
    STEPS_OF_SHORT_ROUNDS,
    MergePeriod,
)
from hvd_adaptive.algorithm.statistics import Gathered
from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.engine.learning_rate import LearningRateMultiplier
from hvd_adaptive.engine.merge import Merge, MergeStats
from hvd_adaptive.engine.optimizer_state import is_adam, with_outer_step
from hvd_adaptive.research.heterogpu import add_rules
from hvd_adaptive.wrap.meter import usual_seconds
from hvd_adaptive.wrap.run_options import RunConfig

log = logging.getLogger(__name__)

# As ``train``: batches of one rank in a mega-batch.
_BATCHES_A_ROUND = 50
# Steps between two merges where the length of an epoch is not known: DiLoCo's H (arXiv 2311.08105).
_MOST_STEPS = 500


@dataclass(slots=True)
class Round(MergeStats):
    """What one rank did since the last merge, beside the fields of :class:`MergeStats`. A batch whose samples are not known
    counts as one sample.

    Attributes:
        present: 1; a rank that has called hvd.join() shows as 0 in the sum of all rows.
        num_calls: steps of all ranks together, as they are counted: also those that this rank left out (GradScaler).
        global_samples: samples of the ranks' batches together.
        epoch_samples: samples of a pass of the script's loader over all ranks; 0: not known.
        step_s: seconds of computing, stretched to all steps.
        merge_s: seconds of the merge before, waiting for other ranks excluded.
        checksum: of the global model after the merge before; 0: not looked at.
        generation: merges that this rank's global model has seen; fewer after hvd.join().
        period: steps to the next merge but one, as this rank proposes; 0: nothing yet.
        steps_per_merge: steps to the next merge, as this rank knows.
        is_narrow: 1 if merges have fewer bits, or shall have them from the next one on.
        is_loaded: 1 if the script has loaded weights into the model.
        is_fresh: 1 if no step has been counted since: ranks that have not loaded may not have got the weights yet.
        num_copies: tensors in copies of modules; 0: not looked at.
        copies: a checksum of these.
    """

    present: float = 1.0
    num_calls: float = 0.0
    global_samples: float = 0.0
    epoch_samples: float = 0.0
    step_s: float = 0.0
    merge_s: float = 0.0
    checksum: float = 0.0
    generation: float = 0.0
    period: float = 0.0
    steps_per_merge: float = 0.0
    is_narrow: float = 0.0
    is_loaded: float = 0.0
    is_fresh: float = 0.0
    num_copies: float = 0.0
    copies: float = 0.0


@dataclass
class MergeLog:
    """What the report tells of an optimizer's merges, also when it is gone.

    Attributes:
        kind: the optimizer's class.
        num_merges: merges so far.
        merge_s: seconds of them, waiting for other ranks excluded.
        weight: the ranks' weights in the last one, shape (world_size,); None before any.
        steps_per_merge: the period, as of the last merge.
        optimizer_state: what becomes of the optimizer's state.
        outer_step: how the merged change moves the model.
        compression: what merges are encoded with.
        copies_differ: a copy of the model was not the same on all ranks.
    """

    kind: str
    num_merges: int = 0
    merge_s: float = 0.0
    weight: NDArray[np.float64] | None = None
    steps_per_merge: int = 1
    optimizer_state: str = "keep"
    outer_step: str = "none"
    compression: str = "none"
    copies_differ: bool = False


class Trained(nn.Module):
    """An optimizer's parameters, and the buffers of the modules that hold them, as :class:`FlatModel` takes a model.

    Looked up anew each time, since a script may replace a tensor (``module.to(device)``, ``parameter.data = ...``).

    Args:
        named: the parameters that are exchanged, in the order of the optimizer; those frozen later stay among them.
        roots: modules whose buffers are merged.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], roots: list[nn.Module]) -> None:
        super().__init__()
        self._named = named
        # A list of modules would be taken for parts of this one.
        self._roots = lambda: roots

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters as tensors of their own that share memory with them."""
        for name, parameter in self._named:
            yield name, nn.Parameter(parameter.detach(), requires_grad=True)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields them without their names."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields each buffer of the modules once; with several modules their numbers are in the names."""
        seen: set[int] = set()
        roots = self._roots()
        for number, root in enumerate(roots):
            for name, buffer in root.named_buffers(str(number) if len(roots) > 1 else ""):
                if id(buffer) not in seen and not buffer.is_sparse and buffer.numel():
                    seen.add(id(buffer))
                    yield name, buffer

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yields them without their names."""
        return (buffer for _, buffer in self.named_buffers())


class Merger:
    """Merges one optimizer's model over the ranks. Construction is COLLECTIVE: all ranks start from rank 0's model.

    Args:
        optimizer: the script's, as ``hvd.DistributedOptimizer`` made it.
        named: its parameters, as they are named in the script.
        roots: the modules that hold them, whose buffers are merged.
        config: the options.
        world: the ranks.
        find_copies: returns the parameters of modules that are copies of others.

    Attributes:
        num_calls: steps counted since the last merge, the same on every rank.
        is_due: a merge is due now, on every rank.
        stream: the pass whose batches led to the last step; None: there was none.
        log: what the report tells.
    """

    def __init__(
        self,
        optimizer: Any,
        named: list[tuple[str, nn.Parameter]],
        roots: list[nn.Module],
        config: RunConfig,
        world: Collectives,
        find_copies: Callable[[], list[Tensor]] = list,
    ) -> None:
        add_rules()
        self._find_copies = find_copies
        self._config = config
        self._world = world
        rules = config.merging()
        if rules.outer_step is None and not is_adam(optimizer):
            # SGD's outer step makes each merge's change several times as long, and the script's rate is plain Horovod's.
            rules = with_outer_step(rules, "none", optimizer)
        self._engine = Merge(Trained(named, roots), optimizer, rules, world, parameters=[p for _, p in named], modules=roots)
        self._flat = self._engine.flat_model
        self._multiplier = LearningRateMultiplier(optimizer)
        self._period: MergePeriod | None = None
        self._round = Round()
        self._timed: list[float] = []
        self._epoch_samples = 0
        self._last_merge_s = 0.0
        self._checksum = 0
        self._generation = 0
        self._proposal = self._loaded_at = 0
        self._is_narrow = False
        self.num_calls = 0
        self.is_due = False
        self.stream: Any = None
        taken = self._engine.config
        self.log = MergeLog(
            type(optimizer).__name__,
            optimizer_state=self._engine.state_rule,
            outer_step=str(taken.outer_step),
            compression=taken.compression,
        )

    def begin_step(self, *, num_samples: int, global_samples: int, epoch_samples: int) -> None:
        """Counts a step, before the optimizer takes it.

        Args:
            num_samples: samples of this rank's batches of the step; 0: not known.
            global_samples: those of all ranks' batches.
            epoch_samples: those of a pass of the loader; 0: not known.
        """
        world_size, this = self._world.world_size, self._round
        self.num_calls += 1
        this.num_samples += num_samples or 1
        this.global_samples += global_samples or world_size
        # Not every step tells: one of a GAN's may be on batches that another optimizer has had.
        this.epoch_samples = self._epoch_samples = epoch_samples or self._epoch_samples
        if self._engine.rule is not None:
            self._engine.rule.before_step()
        self._multiplier.value = 1.0
        if num_samples:
            self._multiplier.value = lr_multiplier(
                self._config.lr_rule, batch_size=num_samples, reference_batch_size=global_samples / world_size
            )
        self.is_due = self.num_calls >= self.log.steps_per_merge

    def timed(self, seconds: float) -> None:
        """Takes note of this rank's computing in a step."""
        self._timed.append(seconds)

    def end_step(self) -> None:
        """Counts a step that the optimizer has taken."""
        if self._engine.rule is not None:
            self._engine.rule.after_step()
        self._round.num_updates += 1

    @torch.no_grad()
    def loaded(self, module: nn.Module) -> None:
        """Takes note that the script has loaded weights into a module: they are where this rank's steps start from."""
        self._flat.rebind()
        self._flat.buffers.rebind()
        if self._engine.rule is not None:
            self._engine.rule.restart()
        places = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        for group in self._flat.groups:
            for base, tensor in zip(group.slices(group.weights), group.tensors, strict=True):
                if tensor.data_ptr() in places:
                    base.copy_(tensor)
        self._round.is_loaded, self._loaded_at = 1.0, self.num_calls

    def merge(self, *, have_joined: bool = False) -> None:
        """Merges the ranks' models. COLLECTIVE.

        Args:
            have_joined: all ranks have just called hvd.join(): one that has missed merges starts from the others' model.

        Raises:
            RuntimeError: on all ranks, if no rank's parameters are finite, or the ranks' global models differ.
        """
        begin = time.perf_counter()
        this = self._round
        this.batch_size = max(this.num_samples / max(self.num_calls, 1), 1e-9)
        self._engine.measure_(this)
        this.num_calls, this.merge_s, this.checksum = self.num_calls, self._last_merge_s, self._checksum
        this.generation, this.period, this.steps_per_merge = self._generation, self._proposal, self.log.steps_per_merge
        this.is_narrow = float(self._is_narrow)
        # Without a loader a validation between two steps looks like a part of the second.
        this.step_s = usual_seconds(self._timed) * self.num_calls / len(self._timed) if self._timed else 0.0
        # Ever more seldom, until they differ.
        if self._generation & (self._generation - 1) == 0 and not self.log.copies_differ:
            copies = self._find_copies()
            this.num_copies, this.copies = len(copies), _checksum_of(copies)
        this.is_fresh = float(bool(this.is_loaded) and self.num_calls == self._loaded_at)
        delta_s = time.perf_counter() - begin
        gathered = self._gather(this)
        of_copies = [set(gathered[name][gathered["present"] > 0]) for name in ("num_copies", "copies")]
        self.log.copies_differ |= len(of_copies[0]) == 1 and len(of_copies[1]) > 1
        begin = time.perf_counter()
        # Of the ranks that have seen most merges, the first one's word counts; one that has joined has an empty row.
        root = int(np.argmax(np.where(gathered["present"] > 0, gathered["generation"], -1.0)))
        if gathered["is_narrow"][root]:
            # Also for a rank that had joined when the others began with it.
            self._is_narrow = True
            self._engine.codec.narrow(self._flat.compressed)
            self.log.compression = self._engine.codec.config.compression
        counted, stale = gathered, have_joined & (gathered["generation"] < gathered["generation"][root])
        if (gathered["is_fresh"] > 0).any():
            # Before the script broadcasts the weights, as its state_dict() for that: the others still have the old ones.
            stale = stale | ((gathered["present"] > 0) & (gathered["is_loaded"] == 0))
        if stale.any():
            # Steps from before the merges that were missed, towards a model that is no more.
            gathered = {**gathered, **{name: np.where(stale, 0.0, gathered[name]) for name in ("num_updates", "is_loaded")}}
            counted = {**gathered, "finite": np.where(stale, 0.0, gathered["finite"])}
        self._agree_on_base(gathered, root)
        if stale[self._world.rank]:
            self._flat.restore_()
            self._flat.compute_delta()
        if gathered["num_updates"].sum():
            self.log.weight = self._engine.weights(counted)
            self._engine.apply_(gathered, self.log.weight, present=gathered["present"] > 0)
        elif have_joined:
            # A rank that has missed merges has the others' floats by now, but not their counts of batches.
            self._flat.buffers.undo_()
            self._flat.buffers.start_(None)
            self._flat.buffers.finish_()
        self._last_merge_s = delta_s + time.perf_counter() - begin - self._engine.state_s
        self.log.merge_s += self._last_merge_s
        self.log.num_merges += 1
        self._generation = int(gathered["generation"][root]) + 1
        if have_joined:
            # After different numbers of steps, which say nothing of a period.
            self._proposal, self.log.steps_per_merge = (int(gathered[name][root]) for name in ("period", "steps_per_merge"))
        else:
            self._set_period(gathered, root)
        interval = self._config.hash_interval
        self._checksum = self._global_checksum() if interval and self._generation % interval == 0 else 0
        self._round, self._timed = Round(), []
        self.num_calls, self.is_due = 0, False

    def _gather(self, this: Round) -> Gathered:
        """All ranks' rows, by a sum, which works beside ranks that have joined."""
        rows = this.table(rank=self._world.rank, world_size=self._world.world_size)
        self._world.allreduce_sum_(torch.from_numpy(rows), name="round")
        return Round.by_name(rows)

    @torch.no_grad()
    def _agree_on_base(self, gathered: Gathered, root: int) -> None:
        """Sees to it that the ranks' deltas are from one global model. COLLECTIVE."""
        present, is_loaded = gathered["present"] > 0, gathered["is_loaded"] > 0
        if is_loaded.any() or len(set(gathered["generation"][present])) > 1:
            # Weights that were loaded on some ranks only have been broadcast to the others.
            root = int(np.argmax(is_loaded)) if is_loaded.any() else root
            if is_loaded.any() and self._flat.compressed is not None:
                # What was lost of the way that the script has left.
                self._flat.compressed.reset()
            for group in self._flat.groups:
                self._take_from(root, group.weights, group.name)
            for index, start in enumerate(self._engine.rule.starts() if self._engine.rule is not None else ()):
                self._take_from(root, start, f"accumulators.{index}")
            # Before the outer step begins nobody has a velocity.
            self._take_from(root, self._engine.outer.num_updates, "updates")
            for group in self._flat.parameter_groups:
                velocity = self._engine.outer.velocity_of(group.weights)
                if velocity is not None and is_loaded.any():
                    velocity.zero_()
                elif velocity is not None:
                    self._take_from(root, velocity, group.name)
            self._flat.compute_delta()
            return
        checksums = gathered["checksum"][present]
        if len(set(checksums)) > 1:
            raise RuntimeError(
                f"the ranks' merged models differ (checksums {checksums.astype(int).tolist()}): this is a fault in hvd_adaptive "
                "or in a machine; run with --strategy sync and report it"
            )

    def _take_from(self, root: int, values: Tensor, name: str) -> None:
        """Replaces values by one rank's; a sum, as it works beside ranks that have joined."""
        if self._world.rank != root:
            values.zero_()
        self._world.allreduce_sum_(values, f"base.{name}")

    def _set_period(self, gathered: Gathered, root: int) -> None:
        num_calls, samples = (float(gathered[name][root]) for name in ("num_calls", "global_samples"))
        if not num_calls:
            return
        config = self._config
        if self._period is None:
            batch_size = samples / num_calls / self._world.world_size
            rules = self._engine.config
            # The rules' own batch size is not the script's.
            num_batches = _BATCHES_A_ROUND if rules.mega_batch is None else STEPS_OF_SHORT_ROUNDS * self._world.world_size
            start = config.mega_batch or round(num_batches * batch_size)
            self._period = MergePeriod(rules.merge_period or "fixed", start=start, share=rules.merge_share)
        elif gathered["step_s"].any():
            merge_s, epoch_samples = float(gathered["merge_s"].max()), int(gathered["epoch_samples"][root])
            self._period.observe(
                num_samples=round(samples),
                round_s=float(gathered["step_s"].max()) + merge_s,
                communication_s=merge_s,
                largest=epoch_samples // LEAST_MERGES_AN_EPOCH or round(_MOST_STEPS * samples / num_calls),
            )
            self._is_narrow |= self._engine.codec.can_narrow and self._period.stretch > NARROW_LINK
        self._proposal = max(1, round(self._period.mega_batch * num_calls / samples))
        self.log.steps_per_merge = int(gathered["period"][root]) or self._proposal

    def _global_checksum(self) -> int:
        checksum = 1
        for group in self._flat.groups:
            checksum = zlib.crc32(group.weights.cpu().numpy().data, checksum)
        return checksum


def _checksum_of(tensors: list[Tensor]) -> int:
    """Returns a checksum that does not depend on the tensors' order."""
    bits = [zlib.crc32(tensor.detach().cpu().double().numpy().tobytes()) for tensor in tensors if not tensor.is_sparse]
    return sum(bits) % 2**32
