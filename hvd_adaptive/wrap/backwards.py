"""The losses of one batch that a script calls backward on, and why the batch's shares must be equal for them."""

from __future__ import annotations

from typing import Any

from hvd_adaptive.wrap import losses
from hvd_adaptive.wrap.losses import Kind
from hvd_adaptive.wrap.made_of_batch import MadeOfBatch
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.scales import Scales
from hvd_adaptive.wrap.tape import Tape
from hvd_adaptive.wrap.target_means import WatchedTargets
from hvd_adaptive.wrap.tensors import tensors_in


class Backwards:
    """Judges them.

    Args:
        tape: how they were made.
        made: what else was made of the batch.
        weighs: ranks' gradients are averaged. Else a loss may be anything that is as large for some samples as for more.

    Attributes:
        kinds: what they are, one for each loss.
        are_scaled: something was scaled by a plain number that comes from the batch's length, which a loss computed again lacks.
        scales: the numbers that they are scaled by.
        targets: those of losses that are means over targets.
    """

    def __init__(self, tape: Tape, made: MadeOfBatch, *, weighs: bool) -> None:
        self._tape, self._made, self._weighs = tape, made, weighs
        self.kinds: list[Kind | None] = []
        self.are_scaled = False
        self.scales, self.targets = Scales(tape.is_made), WatchedTargets(tape, weighs=weighs)

    def begin(self) -> None:
        """Begins with a batch."""
        self.kinds, self.are_scaled = [], False
        self.scales.begin()
        self.targets.begin()

    def judge(self, args: tuple[Any, ...], kwargs: dict[str, Any], findings: set[Reason]) -> None:
        """Looks at what backward is called on, before it runs.

        Args:
            args: what it is called with.
            kwargs: and by names.
            findings: why shares must be equal; gets what these losses add.
        """
        # Losses may be given the gradients with respect to them, which may hold the batch's size.
        given = tensors_in([args[1:2], kwargs.get("gradient"), kwargs.get("grad_tensors")])
        is_scaled = self._weighs and self.scales.are_figures
        if is_scaled or any(bool((gradient != 1).any()) for gradient in given):
            findings.add(Reason.MIXED)
        for tensor in tensors_in([args[0] if args else kwargs.get("tensors", ())]):
            kind = self._made.kind(tensor)
            self.kinds.append(kind)
            self._tape.ends_in(tensor)
            reason = Reason.UNKNOWN_LOSS if kind is None else losses.REASONS.get(kind)
            if not self._weighs and kind in (Kind.SUM, Kind.OTHER):
                # A sum's gradients would have a rank's share twice, as its learning rate has it.
                reason = Reason.SUM_LOSS if kind is Kind.SUM else Reason.MIXED if self.are_scaled else None
            if reason is not None:
                findings.add(reason)
            elif not findings:
                proof = self._tape.tells_other(tensor, inside=self._made.needs_proof)
                is_other = (self._made.needs_proof or self._made.has_unknown or kind is Kind.OTHER) if proof is None else proof
                if is_other or losses.reduces_by_itself(self._made.known.values()):
                    findings.add(Reason.MIXED)
                elif kind is Kind.SUM and (proof is None or self.scales.may_count or self._has_own_function()):
                    findings.add(Reason.SUM_LOSS)

    def _has_own_function(self) -> bool:
        return any(losses.is_own_function(tensor.grad_fn) for tensor, _ in self._made.known.values())
