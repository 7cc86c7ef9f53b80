"""The exchange's front: one call that sums a flat tensor of many layers, each by the codec that the policy gives it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from hvd_adaptive.comm.protocols import Collectives, Group, agree, agree_equal, has_equal_hosts
from hvd_adaptive.compress.codec import TensorCodec, of_values
from hvd_adaptive.compress.feedback import ErrorFeedback
from hvd_adaptive.compress.kernels.reference import mix_key
from hvd_adaptive.compress.policy import Policy, TensorInfo
from hvd_adaptive.exchange.layout import PACKED_ELEMENTS, Run, lay_out
from hvd_adaptive.exchange.pipeline import Task, run_pipeline
from hvd_adaptive.exchange.reducers import Job, allreduce, hierarchical, scatter_reduce_allgather

log = logging.getLogger(__name__)

REDUCERS = ("allreduce", "by-host", "sra", "hierarchical")
CHUNK_ELEMENTS = 1 << 20


def misfit(policy: Policy, reducer: str, tensors: Sequence[TensorInfo]) -> str | None:
    """Returns why a reducer cannot go with the codec of one of the tensors, None if it can with all."""
    for tensor in tensors:
        codec = policy.codec(tensor)
        if reducer == "allreduce" and codec.wire_dtype is None:
            return (
                f"{tensor.name}: codec {codec.spec} is not linear and cannot go with reducer 'allreduce'; use 'sra' or "
                "'hierarchical', or a linear codec (none, fp16)"
            )
    return None


class Exchange:
    """Sums weighted values over ranks, in place of `Collectives.allreduce_sum_`.

    Construction is COLLECTIVE, and so is each method that says so. Every rank ends with the same bits.

    Attributes:
        reducer: how tensors whose codec loses something are summed: "allreduce", "sra" or "hierarchical".

    Args:
        transport: the world; for ``hierarchical``, and for the others to have it, connected with ``groups``.
        policy: the codec of each tensor.
        reducer: for tensors whose codec loses something: "allreduce" (linear codes), "sra", "hierarchical", or "by-host":
            hierarchical where the transport has groups and several hosts have several ranks each, equally many, else SRA.
            Hierarchical on one host, or on hosts of one rank each, is SRA. Uncompressed tensors always take allreduce.
        error_feedback: whether what a code loses is sent in the next step.
        residuals_on_host: what it loses is kept in host memory.
        seed: of stochastic rounding.
        chunk_elements: the most elements of a chunk, about; the next chunk is encoded while one is on the wire.

    Raises:
        AgreedError: on every rank, if the ranks' arguments differ, or hierarchical finds hosts of different sizes.
        ValueError: for an unknown reducer.
    """

    def __init__(
        self,
        transport: Collectives,
        policy: Policy,
        *,
        reducer: str = "sra",
        error_feedback: bool = False,
        residuals_on_host: bool = False,
        seed: int = 0,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        if reducer not in REDUCERS:
            raise ValueError(f"reducer must be one of {', '.join(REDUCERS)}, got {reducer!r}")
        self._transport = transport
        self._seed = seed
        self._chunk_elements = chunk_elements
        self._feedback = ErrorFeedback(on_host=residuals_on_host) if error_feedback else None
        self._layouts: dict[str, list[Run]] = {}
        self._memory: dict[str, Tensor] = {}
        agree_equal(
            transport,
            {"reducer": reducer, "seed": seed, "error_feedback": error_feedback, "chunk_elements": chunk_elements},
            "Start all ranks with the same configuration.",
        )
        if reducer == "by-host":
            by_host = transport.groups and has_equal_hosts(transport.allgather_object(transport.host))
            reducer = "hierarchical" if by_host else "sra"
        self._groups = self._make_groups() if reducer == "hierarchical" else None
        self.reducer = "sra" if reducer == "hierarchical" and self._groups is None else reducer
        self.set_policy(policy)

    @property
    def _parts(self) -> str:
        # Of these parts a rank holds what their codes lost. By hosts they follow from its place on its host and among hosts.
        if self._groups is None:
            return self.reducer
        host, cross = self._groups
        how = "swapped by hosts" if cross.world_size == 2 else self.reducer
        return f"{how} {host.world_size} {host.rank} {cross.rank}"

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    def set_policy(self, policy: Policy) -> None:
        """Changes the codecs from the next `sum_` on, and forgets residuals. COLLECTIVE.

        Raises:
            AgreedError: on every rank, if the policies differ.
        """
        agree_equal(self._transport, {"policy": policy.spec}, "Give all ranks the same policy.")
        self.take_policy(policy)

    def take_policy(self, policy: Policy) -> None:
        """As `set_policy`, by this rank alone: the caller sees to it that all ranks take the same before the next `sum_`."""
        self._policy = policy
        self._layouts.clear()
        self.reset()

    @torch.no_grad()
    def sum_(
        self, flat: Tensor, name: str, *, step: int, tensors: Sequence[TensorInfo], weight: float = 1.0
    ) -> None:
        """Replaces weighted values by their sum over ranks, with the same bits on every rank. COLLECTIVE.

        Values that are not finite on any rank make sums that are not finite on all; give zeros in their place.

        Args:
            flat: contiguous, one dimension; changed in place.
            name: of this group of tensors, equal on all ranks.
            step: the round, for the random numbers; equal on all ranks.
            tensors: name and shape of each tensor in ``flat``, in order.
            weight: as for `tasks`.

        Raises:
            AgreedError: on every rank, at the first call with this name, if the layouts differ, a codec cannot go with the
                reducer, or the shapes do not fill ``flat``.
        """
        self.prepare(flat, name, tensors)
        run_pipeline(self.tasks(flat, name, step=step, weight=weight))

    def prepare(self, flat: Tensor, name: str, tensors: Sequence[TensorInfo]) -> None:
        """Lays out a group of tensors before its first `tasks`. COLLECTIVE.

        Args:
            flat: as for `sum_`; stays as it is.
            name: as for `sum_`.
            tensors: as for `sum_`.

        Raises:
            AgreedError: as `sum_`.
        """
        if name not in self._layouts:
            self._layouts[name] = self._lay_out(name, flat, tensors)

    @torch.no_grad()
    def tasks(self, flat: Tensor, name: str, *, step: int, weight: float = 1.0) -> list[Task]:
        """Returns what `sum_` does as tasks, for a group that `prepare` knows. All ranks run them in the same order.

        Args:
            flat: as for `sum_`; holds the sum when all tasks are over.
            name: as for `sum_`.
            step: as for `sum_`.
            weight: this rank's values are multiplied by it on their way, > 0.
        """
        if self._transport.world_size == 1:
            if weight != 1.0:
                flat.mul_(weight)
            return []
        tasks = []
        for run in self._layouts[name]:
            first = run.spans[0]
            key = mix_key(self._seed, step, crc32(name.encode()), first.start)
            reduce = functools.partial(self._reduce, run, name=f"{name}.{first.start}", key=key, weight=weight)
            tasks += reduce(flat[first.start : first.stop]) if len(run.spans) == 1 else [self._packed(flat, run, reduce)]
        return tasks

    def _packed(self, flat: Tensor, run: Run, reduce: Callable[[Tensor], list[Task]]) -> Task:
        parts = [flat[span.start : span.stop] for span in run.spans]
        packed = torch.cat(parts)
        for task in reduce(packed):
            yield from task
        for part, value in zip(parts, packed.split([span.size for span in run.spans]), strict=True):
            part.copy_(value)

    def payload_bytes(self, name: str) -> int:
        """Returns the size of one encoded copy of that group of tensors, after its first `sum_`."""
        return sum(run.payload_bytes for run in self._layouts[name])

    def reset(self) -> None:
        """Forgets residuals: when the number of ranks or the model changes."""
        self._memory.clear()
        if self._feedback is not None:
            self._feedback.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals and the policy; residuals differ from rank to rank."""
        residuals = self._feedback.state_dict() if self._feedback is not None else {}
        return {
            "policy": self._policy.spec,
            "world_size": self._transport.world_size,
            "parts": self._parts,
            "residuals": residuals,
            "factors": dict(self._memory),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes residuals over if policy, ranks and this rank's parts are those that they were made with; else forgets them.

        Ranks' places on hosts may have changed for some ranks only: these forget theirs, and the others go on with them.
        """
        self.reset()
        self._layouts.clear()
        fits = (state["policy"], state["world_size"]) == (self._policy.spec, self._transport.world_size)
        if fits:
            # Equal on all ranks, as what decides on it is: it does not depend on a rank's place.
            self._memory = {name: value.clone() for name, value in state["factors"].items()}
        if not fits or state.get("parts", "sra") != self._parts:
            if state["residuals"]:
                log.warning(
                    "error feedback starts anew: codecs, the number of ranks or this rank's place among hosts have changed "
                    "since the checkpoint"
                )
        elif self._feedback is not None:
            self._feedback.load_state_dict(state["residuals"])

    def _reduce(self, run: Run, flat: Tensor, *, name: str, key: int, weight: float) -> list[Task]:
        feedback = self._feedback
        if isinstance(run.codec, TensorCodec):
            task = run.codec.sum_tensors(
                self._transport, flat, run.shapes, name=name, key=key, weight=weight, feedback=feedback, memory=self._memory
            )
            return [task]
        job = Job(flat, name, of_values(run.codec), key, self._chunk_elements, feedback, weight)
        if run.codec.exact or self.reducer == "allreduce":
            return allreduce(self._transport, job)
        if self._groups is not None:
            return hierarchical(*self._groups, job)
        return scatter_reduce_allgather(self._transport, job)

    def _lay_out(self, name: str, flat: Tensor, tensors: Sequence[TensorInfo]) -> list[Run]:
        error, size = misfit(self._policy, self.reducer, tensors), sum(tensor.size for tensor in tensors)
        if size != flat.numel():
            error = f"{name}: the tensors' shapes have {size} elements, but the flat tensor has {flat.numel()}"
        agree(self._transport, error)
        runs = lay_out(
            self._policy,
            tensors,
            flat.dtype,
            packed_elements=PACKED_ELEMENTS,
            most_elements=self._chunk_elements,
        )
        layout = [(run.codec.spec, *run.spans) for run in runs]
        agree_equal(self._transport, {"layout": layout}, "All ranks must hold the same model.")
        return runs

    def _make_groups(self) -> tuple[Group, Group] | None:
        transport = self._transport
        hosts = transport.allgather_object((transport.host, transport.local_size))
        sizes = {size for _, size in hosts}
        names = sorted({host for host, _ in hosts})
        agree(
            transport,
            None
            if len(sizes) == 1
            else f"reducer 'hierarchical' needs the same number of ranks on every host, got {sorted(sizes)}; use 'sra'",
        )
        if len(names) == 1 or sizes == {1}:
            return None
        host = transport.split(names.index(transport.host))
        cross = transport.split(len(names) + transport.local_rank)
        return host, cross
