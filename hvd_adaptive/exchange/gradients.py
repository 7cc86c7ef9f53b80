"""Gradients summed over ranks in encoded form while backward goes on, in buckets (arXiv 2006.15704) that are laid out once.

A bucket begins to be exchanged when its gradients are there: it is encoded and on its way before backward reaches the layers
in front of it, and goes on as its collectives arrive. All buckets begin in the same order on all ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.compress.policy import TensorInfo
from hvd_adaptive.config import Config
from hvd_adaptive.exchange.buckets import Bucket, DenseBucket, Slot, SparseBucket, fill_buckets
from hvd_adaptive.exchange.compressed import CompressedSum
from hvd_adaptive.exchange.pipeline import UnderWay

# A model's gradients go in about so many buckets: the link is busy while backward goes on.
_NUM_BUCKETS = 16
# Of a bucket. Smaller ones were not measured (benchmarks/records/2026-11-30-more-peers.md). The largest takes a link of 1 Gbit/s
# 4 ms at 4 bits.
_LEAST_ELEMENTS, _MOST_ELEMENTS = 1 << 16, 1 << 20
TOO_LATE = (
    "while its sum over the ranks is on the way: a step may call backward() as often as the session's first step did (strategy "
    "'horovod': once; a Horovod script: backward_passes_per_step times). Add up the losses and call backward() once, or use "
    "accumulation_steps or micro_batch_size"
)


class GradientExchange:
    """Hooks on parameters that sum their gradients over ranks. Construction is COLLECTIVE.

    After `synchronize` every rank's ``.grad`` holds the same bits: views into the buckets, so that the buckets are the
    gradients' only memory once backward is over, but for parameters that are not contiguous. Parameters without a gradient on
    any rank get zeros, as with Horovod.

    The first step only notes in which order gradients come, how often, and whether they are sparse, and is exchanged in
    `synchronize`. A loop may call backward several times in a step: as often as in the first one, or less often.
    Sparse gradients are exempt: indices and values travel as they are, and every rank adds them up in rank order.

    A step whose sum is not finite on any rank leaves no residuals: the values that they come from are not finite either, and
    under a gradient scaler (AMP) they are of the scale that made them so.

    Args:
        named_parameters: name and parameter; a tied one counts once. Those without ``requires_grad`` are left out, but for
            ``with_frozen``.
        options: policy, reducer, error feedback and seed.
        transport: the world.
        backward_passes: micro-batches whose gradients add up before they are exchanged.
        average: divide by the number of ranks, before encoding.
        auto_bits: steps between two choices of bits for each layer, see :class:`CompressedSum`; the step after a change is not
            overlapped.
        bucket_elements: gradients in a bucket, about; a larger one has a bucket of its own. None: by the model's size.
        name: of the exchanges; another one for each object whose exchanges may be under way at the same time.
        with_frozen: exchange parameters without ``requires_grad``, too, as they may be trained later. Until then they get zeros.

    Attributes:
        payload_bytes: encoded bytes of this rank's gradients so far.

    Raises:
        AgreedError: on all ranks, for a policy that cannot be read, names no parameter, or has a codec that cannot go with the
            reducer.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        options: Config,
        transport: Collectives,
        *,
        backward_passes: int = 1,
        average: bool = False,
        auto_bits: int = 0,
        bucket_elements: int | None = None,
        name: str = "gradients",
        with_frozen: bool = False,
    ) -> None:
        self._name = name
        seen: dict[int, Slot] = {}
        for parameter_name, parameter in named_parameters:
            if (parameter.requires_grad or with_frozen) and id(parameter) not in seen:
                info = TensorInfo(parameter_name, tuple(parameter.shape))
                seen[id(parameter)] = Slot(info, parameter, backward_passes)
        self._slots = list(seen.values())
        self._transport = transport
        infos = [slot.info for slot in self._slots]
        devices = [slot.parameter.device for slot in self._slots]
        self._sum = CompressedSum(options, transport, infos, devices=devices, auto_bits=auto_bits)
        self._backward_passes, self._repeats = backward_passes, 1
        self._factor = 1.0 / transport.world_size if average else 1.0
        self._error_feedback = options.error_feedback
        self._bucket_elements = bucket_elements
        # Names in the order of the buckets, and sparse_dim of those whose gradients are sparse.
        self._order: list[str] = []
        self._sparse: dict[str, int] = {}
        self._buckets: list[Bucket] | None = None
        self._next = 0
        self._under_way = UnderWay()
        self._lock = threading.Lock()
        self.payload_bytes = 0
        # Of the last step: the sums, and whether they are finite once that was asked.
        self._summed: list[Tensor] = []
        self._is_finite: bool | None = None
        self._handles = []
        if transport.world_size > 1:
            self._handles = [self._hook(slot) for slot in self._slots]

    @property
    def dense_bytes(self) -> int:
        """Bytes of this rank's gradients in a step, were they not encoded; sparse ones count as dense."""
        return sum(slot.parameter.nbytes for slot in self._slots)

    @property
    def has_begun(self) -> bool:
        """Whether gradients of this step have come that are not reduced yet."""
        return any(slot.passes_left < self._num_passes for slot in self._slots)

    @property
    def is_exact(self) -> bool:
        """Whether no gradient's codec loses anything."""
        return all(self._sum.policy.codec(slot.info).exact for slot in self._slots)

    @property
    def is_finite(self) -> bool:
        """Whether all of the sum of the last `synchronize` is finite. Waits for a GPU once a step, however often it is asked."""
        if self._is_finite is None:
            devices = {values.device for values in self._summed}
            self._is_finite = all(all_finite(*(v for v in self._summed if v.device == device)) for device in devices)
            self._summed = []
        return self._is_finite

    @torch.no_grad()
    def synchronize(self) -> None:
        """Waits until every ``.grad`` is the sum over ranks, or their mean. COLLECTIVE, after the last backward of a step."""
        if self._transport.world_size == 1:
            return
        if self._buckets is None:
            most = max((self._num_passes - slot.passes_left for slot in self._slots), default=0)
            self._repeats = max(self._repeats, -(-most // self._backward_passes))
            self._buckets = self._lay_out()
        for bucket in self._buckets[self._next :]:
            for slot in bucket.missing():
                bucket.take(slot)
        self._begin_complete_buckets()
        self._under_way.finish()
        self._next = 0
        for bucket in self._buckets:
            self.payload_bytes += bucket.finish(self._sum)
        for slot in self._slots:
            slot.passes_left = self._num_passes
        self._is_finite = None
        self._summed = [bucket.values() for bucket in self._buckets]
        # Equal bits everywhere, so all ranks are here or none.
        if self._error_feedback and not self.is_finite:
            self._sum.reset()
        if self._sum.begin_round():
            self._buckets = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes, between two steps, how many micro-batches' gradients add up before they are exchanged.

        Args:
            passes: of this rank, >= 1; other ranks may have another number.
        """
        self._backward_passes = passes
        for slot in self._slots:
            slot.passes_left = self._num_passes

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals, the number of steps, and the order of the gradients, between two steps."""
        state = {"sum": self._sum.state_dict(), "order": list(self._order), "sparse": dict(self._sparse)}
        # Only where it is known: a state without it is not refused.
        return state if self._bucket_elements is None else state | {"bucket_elements": self._bucket_elements}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state between two steps; residuals only where the number of ranks is the same, with a warning else.

        Raises:
            ValueError: if it is of other parameters.
        """
        names = {slot.info.name for slot in self._slots}
        if state["order"] and set(state["order"]) != names:
            other = sorted(names ^ set(state["order"]))
            raise ValueError(f"the state is of gradients of other parameters: {', '.join(other[:5])} differ")
        self._order, self._sparse = list(state["order"]), dict(state["sparse"])
        # Residuals are of buckets. Older states do not say how large these were; before the first step there are none.
        self._bucket_elements = state.get("bucket_elements", _MOST_ELEMENTS if self._order else None)
        self._buckets = None
        self._sum.load_state_dict(state["sum"])

    @property
    def _num_passes(self) -> int:
        """Backward passes of a step."""
        return self._backward_passes * self._repeats

    def _hook(self, slot: Slot) -> RemovableHandle:
        # A frozen parameter takes no hook, but keeps one.
        parameter, is_trained = slot.parameter, slot.parameter.requires_grad
        handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(functools.partial(self._accumulated, slot))
        parameter.requires_grad_(is_trained)
        return handle

    @torch.no_grad()
    def _accumulated(self, slot: Slot, _: Tensor) -> None:
        slot.passes_left -= 1
        if self._buckets is None:
            if slot.passes_left == 0:
                self._order.append(slot.info.name)
            return
        if slot.passes_left > 0:
            return
        if slot.passes_left < 0:
            raise RuntimeError(f"the gradient of {slot.info.name} was computed again {TOO_LATE}")
        # A model on several GPUs computes its gradients in several threads.
        with self._lock:
            slot.bucket.take(slot)
            if self._begin_complete_buckets():
                self._under_way.poll()

    def _begin_complete_buckets(self) -> bool:
        assert self._buckets is not None
        before = self._next
        while self._next < len(self._buckets) and not self._buckets[self._next].missing():
            for task in self._buckets[self._next].tasks(self._sum, self._transport, self._factor):
                self._under_way.begin(task)
            self._next += 1
        return self._next > before

    def _lay_out(self) -> list[Bucket]:
        """Makes the buckets. COLLECTIVE. Rank 0's order counts, and a gradient that is sparse on any rank is sparse."""
        by_name = {slot.info.name: slot for slot in self._slots}
        sparse = {
            name: slot.parameter.grad.sparse_dim()
            for name, slot in by_name.items()
            if slot.parameter.grad is not None and slot.parameter.grad.is_sparse
        }
        order = self._order if self._transport.rank == 0 else []
        found = self._transport.allgather_object((order, self._sparse | sparse))
        for _, other in found:
            self._sparse |= other
        # What has no gradient comes last, in backward's order.
        names = dict.fromkeys([*found[0][0], *reversed(by_name)])
        self._order = list(names)
        dense = [by_name[name] for name in self._order if name not in self._sparse]
        if self._bucket_elements is None:
            part = sum(slot.info.size for slot in dense) // _NUM_BUCKETS
            self._bucket_elements = min(max(part, _LEAST_ELEMENTS), _MOST_ELEMENTS)
        buckets: list[Bucket] = [
            DenseBucket(f"{self._name}.{number}", slots, self._sum.policy)
            for number, slots in enumerate(fill_buckets(dense, self._bucket_elements))
        ]
        buckets += [SparseBucket(f"{self._name}.{name}", by_name[name], dim) for name, dim in sorted(self._sparse.items())]
        places = {name: place for place, name in enumerate(self._order)}
        buckets.sort(key=lambda bucket: max(places[slot.info.name] for slot in bucket.slots))
        for bucket in buckets:
            bucket.prepare(self._sum)
        return buckets
