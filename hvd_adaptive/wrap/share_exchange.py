"""The ranks' exchange: what each tells the others within synchronize, and the shares that follow on every rank alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.wrap.closing_report import Report
from hvd_adaptive.wrap.loaders import IndexStream, Loader
from hvd_adaptive.wrap.losses import Kind
from hvd_adaptive.wrap.reasons import Reason, mask
from hvd_adaptive.wrap.run_options import RunConfig, check_shares, parse_shares
from hvd_adaptive.wrap.share_rules import Controller, Window, judge, pack, unpack

# Looks at the speeds come early at first, as every equal step before them is slow.
_FIRST_EXCHANGES = (4, 8, 12, 16)
# Where a dry run begins to try unequal shares, if nothing speaks against them, and where it ends.
_TRIAL, _TRIAL_OVER = 16, 28
# How long a rank whose dry run is over waits for the others.
_PATIENCE_S = 30.0
# What a dry run tries where steps have not shown that unequal shares are better: each rank's part, from the first to the last.
_TRIED = (1.0, 1.5)


# A condition of equal updates that the batches themselves show.
_PADDED = "samples have other shapes from batch to batch, as where each batch is padded to its longest sample"

_RATES = (
    "the ranks' learning rates differ, and unequal shares may be why: then the ranks' models differ from that step on. Run the "
    "script again with --shares equal"
)
_LATE_TARGETS = (
    "a loss began to leave out targets (ignore_index) after steps with unequal shares, and until the next measurement its "
    "samples were not weighted by their targets"
)


class DryRunOver(SystemExit):
    """Ends a dry run on all ranks at the same step."""


def _wait_for_others() -> None:
    """Waits until every rank is at the end of its dry run: one that ends takes Horovod from the others. COLLECTIVE.

    Not for long, as another rank may wait for this one, or make fewer steps.
    """
    import horovod.torch as hvd

    handle, end = hvd.allreduce_async(torch.zeros(1), name="hvd_adaptive.over", op=hvd.Sum), time.monotonic() + _PATIENCE_S
    while not hvd.poll(handle) and time.monotonic() < end:
        time.sleep(0.01)


class Shares:
    """Decides at which steps the ranks exchange their numbers, and takes in what comes of it.

    Args:
        config: the options.
        report: is told of each exchange.

    Attributes:
        config: the options.
        reasons: why no loader's shares may change.
    """

    def __init__(self, config: RunConfig, report: Report) -> None:
        self.config = config
        self.reasons: set[Reason] = set()
        self._report = report
        self._world_size, self._rank = 1, 0
        # Steps since all ranks were known to be at one place: what all of them count alike.
        self._num_steps = 0
        # Steps in which the ranks exchange nothing of ours.
        self._num_alone = 0
        # An exchange has come after steps that no loader fed.
        self._is_unfed = False

    def started(self, world_size: int, rank: int) -> None:
        """Horovod has been initialized, on every rank.

        Raises:
            ValueError: if there is not one share a rank.
        """
        check_shares(self.config.shares, world_size)
        self._world_size, self._rank = world_size, rank
        self._num_steps = 0
        for loader in self._report.loaders:
            loader.controller, loader.fractions = None, None

    def meet(self) -> None:
        """Takes note that all ranks have come to one place, some of them by other numbers of steps."""
        self._num_steps = 0
        for loader in self._report.loaders:
            loader.fractions = None

    def refuse(self, reason: Reason) -> None:
        """Takes note of something for which all shares must be equal."""
        self.reasons.add(reason)
        self._report.note(reason.value)

    @property
    def are_refused(self) -> bool:
        """Whether every rank knows by itself of a reason for which optimizers run as in plain Horovod."""
        # A process set's optimizer may be on some ranks only.
        return bool(self._of_optimizers - {Reason.PROCESS_SET})

    def agree_on_refusal(self) -> bool:
        """Returns whether any rank knows of such a reason. COLLECTIVE."""
        if self._world_size > 1 and not self.are_refused:
            import horovod.torch as hvd

            found = torch.tensor([float(Reason.PROCESS_SET in self.reasons)])
            # A sum, as it works beside ranks that have joined.
            if float(hvd.allreduce(found, name="hvd_adaptive.refused", op=hvd.Sum)):
                self.refuse(Reason.PROCESS_SET)
        return bool(self._of_optimizers)

    @property
    def _of_optimizers(self) -> set[Reason]:
        # A join keeps shares equal, which only ranks with steps beside it know of; later optimizers go on after it.
        return self.reasons - {Reason.JOIN}

    def tell_unencoded(self, optimizer: str) -> None:
        """Says in the report that an optimizer stays Horovod's own, if the options ask for encoded exchanges.

        Args:
            optimizer: what the report calls it.
        """
        if not self.config.merging().encodes or self._world_size == 1:
            return
        reasons = sorted(self.reasons, key=lambda reason: reason.bit)
        because = f": {'; '.join(reason.value for reason in reasons)}" if reasons else ", as its steps are not local"
        self._report.note(f"compression {self.config.compression!r} is not used by {optimizer}{because}")

    def count(self, *, is_local: bool) -> bool:
        """Counts a step; returns whether an exchange is due in it."""
        self._num_steps += 1
        if self.config.dry_run:
            return self._num_steps % 4 == 0
        return self._num_steps in _FIRST_EXCHANGES or (not is_local and self._num_steps % self.config.interval == 0)

    def count_alone(self) -> None:
        """Counts a step in which the ranks exchange nothing of ours, for a dry run's end.

        Raises:
            DryRunOver: if the dry run is over.
        """
        self._num_alone += 1
        # Where all ranks come to counted steps as well, those end it, at one step on all ranks.
        if self.config.dry_run and self._num_alone >= _TRIAL and not self._num_steps:
            if self._world_size > 1:
                _wait_for_others()
            raise DryRunOver(0)

    def begin(self, stream: IndexStream | None, window: Window, rates: int) -> Callable[[], None]:
        """Begins an exchange; returns what ends it. COLLECTIVE.

        Args:
            stream: the pass that fed the last step; None: no loader did.
            window: what this rank did since the last exchange.
            rates: a checksum of the optimizer's learning rates.
        """
        import horovod.torch as hvd

        reasons, proposal, is_due = set(self.reasons), np.zeros(self._world_size), False
        if stream is None:
            reasons.add(Reason.NO_LOADER)
        else:
            loader = stream.loader
            if loader.heads.take_ignored() and self.config.strategy == "sync":
                loader.targets.are_weighted = True
            if Reason.KEPT not in loader.reasons and loader.looks.are_kept():
                loader.reasons.add(Reason.KEPT)
            loader.reasons |= loader.looks.reasons()
            if stream.is_uneven():
                loader.reasons.add(Reason.UNEVEN)
            # So the other ranks, too, wait for a loader whose use does not show yet.
            is_known = loader.is_traced and loader.looks.are_enough
            reasons |= loader.reasons | (set() if is_known else {Reason.NO_FORWARD})
            window.num_delivered, window.num_handed = stream.num_delivered, stream.num_handed
            window.dataset = loader.fingerprint()
            # Whether the script has come to the end of a pass that another thread reads cannot be known.
            window.num_batches = 0 if stream.is_beside else stream.num_batches
            # A part of a micro-batch takes as long as all of it.
            window.smallest = max(loader.smallest, loader.smallest_seen, self.config.micro_batch_size or 1)
            window.checksum = stream.last_checksum() or 0
            window.adds_up = int(loader.loss_kinds == {Kind.SUM})
            window.are_weighted = int(loader.targets.are_weighted)
            # A compiled model may have its loss inside.
            window.targets = loader.targets.code if self.config.micro_batch_size is None else 0
            proposal = self.controller(loader).proposal
            is_due = loader.num_steps >= loader.followed_from
        window.reasons, window.rates = mask(reasons), rates
        # Behind it, how many ranks would follow the first batch of the next pass.
        vector = np.append(pack(window, proposal, world_size=self._world_size, rank=self._rank), float(is_due))
        handle = hvd.allreduce_async_(torch.from_numpy(vector), name="hvd_adaptive.exchange", op=hvd.Sum)

        def finish() -> None:
            summed = hvd.synchronize(handle).numpy()
            gathered, agreed = unpack(summed[:-1], world_size=self._world_size)
            if stream is not None:
                stream.loader.begins_followed = bool(summed[-1] == self._world_size)
            self._decide(stream, gathered, agreed)

        return finish

    def controller(self, loader: Loader) -> Controller:
        """Returns what proposes a loader's shares."""
        if loader.controller is None:
            shares = self.config.shares
            pinned = None if shares is None else parse_shares(shares, self._world_size)
            loader.controller = Controller(self._world_size, pinned=pinned)
        return loader.controller

    def _decide(self, stream: IndexStream | None, gathered: Gathered, agreed: Array) -> None:
        """Changes the shares, on every rank alike, from the first batch that no rank has handed out yet."""
        reasons = judge(gathered)
        if Reason.JOIN in reasons:
            self._report.note(Reason.JOIN.value)
        if Reason.RATES in reasons and any(loader.num_shared for loader in self._report.loaders):
            self._report.note(_RATES)
        # These are of the script, whatever feeds it next.
        self.reasons |= reasons & {Reason.JOIN, Reason.RATES}
        if reasons & {Reason.JOIN, Reason.NO_LOADER}:
            # A rank that no loader fed does not know whose shares end on the others.
            for loader in self._report.loaders:
                loader.fractions = None
        if stream is None:
            # Once, it may be a script that makes its optimizers while it is at its first batch.
            if self._is_unfed or not self._report.loaders:
                self._report.note(Reason.NO_LOADER.value)
            self._is_unfed = True
        else:
            self._change(stream, gathered, reasons, agreed)
        is_tried = stream is not None and stream.loader.fractions is not None
        if self.config.dry_run and self._num_steps >= (_TRIAL_OVER if is_tried else _TRIAL):
            raise DryRunOver(0)

    def _change(self, stream: IndexStream, gathered: Gathered, reasons: set[Reason], agreed: Array) -> None:
        loader = stream.loader
        loader.smallest = int(gathered["smallest"].max())
        lengths = set(gathered["num_batches"])
        loader.ends_together = len(lengths) == 1 and 0 not in lengths and Reason.OUT_OF_STEP not in reasons
        # What was not seen yet may still be.
        loader.reasons |= reasons - {Reason.NO_FORWARD}
        if not reasons:
            loader.adds_up = bool(gathered["adds_up"].all())
            was_weighted = loader.targets.agreed is not None
            loader.targets.agree(int(gathered["targets"][0]), are_weighted=bool(gathered["are_weighted"].any()))
            if loader.num_shared and loader.targets.agreed is not None and not was_weighted:
                self._report.condition(_LATE_TARGETS)
        # Equal shares are the script's own batches, with nothing to pool; zeros stand for them, too.
        usable = not reasons and not loader.reasons and not self.reasons and bool(np.ptp(agreed) > 1e-9)
        if self.config.dry_run:
            usable, agreed = self._on_trial(loader, reasons, agreed)
        loader.fractions = tuple(float(part) for part in agreed) if usable else None
        stream.change_fractions(loader.fractions, first=int(gathered["num_handed"].max()))
        if usable and loader.looks.has_other_shapes:
            self._report.condition(_PADDED)
        self._report.window(loader, gathered)
        if not reasons:
            self.controller(loader).propose(gathered, self.config.max_batch_size)

    def _on_trial(self, loader: Loader, reasons: set[Reason], agreed: Array) -> tuple[bool, Array]:
        """Returns whether a dry run tries unequal shares now, and which."""
        if loader.fractions is not None:
            # For as long as the trial goes: a change would show less of them.
            agreed = np.array(loader.fractions)
        is_tried = not reasons and not loader.reasons and not self.reasons and self._num_steps >= _TRIAL
        if is_tried and np.ptp(agreed) <= 1e-9:
            agreed = np.linspace(*_TRIED, self._world_size)
            agreed = agreed / agreed.sum()
            self._report.is_only_tried = True
        return is_tried, agreed
