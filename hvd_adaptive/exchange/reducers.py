"""The ways in which encoded values are summed over ranks, each in chunks so that coding overlaps the wire.

`allreduce` sums the payloads of linear codes. `scatter_reduce_allgather` (SRA, arXiv 2111.08617) sends every rank its piece
of each chunk encoded, which sums in fp32 in rank order, encodes the sum and sends it to all; everybody, the piece's
owner too, decodes the same bytes, so that all ranks end with the same bits. Over two groups it is hierarchical: full
precision inside a host, where each rank sums a part of the chunk, then SRA between hosts, one group for each such part.

Two ranks of SRA send each other whole chunks instead, and both sum the same bytes in the same order: as many bytes, one
collective in place of two, and values are encoded once. So do two hosts of several ranks each, with their sums.

All return tasks (:mod:`hvd_adaptive.exchange.pipeline`), one a chunk, which every rank runs in the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from hvd_adaptive.comm.protocols import Group, Pending
from hvd_adaptive.compress.codec import SUMMABLE, ValueCodec
from hvd_adaptive.compress.feedback import ErrorFeedback
from hvd_adaptive.compress.kernels.reference import mix_key
from hvd_adaptive.exchange.pipeline import Task
from hvd_adaptive.exchange.plan import Span, chunks, pieces

# The most bytes of an encoded chunk in SRA, which is the chunk of the default size at 4 bits. At 8 bits, twice as many took a
# fifth longer over 1 Gbit/s: coding comes in bursts, in which a shared core leaves the wire alone.
CHUNK_BYTES = 550_000


@dataclass(frozen=True)
class Job:
    """One tensor to sum.

    Attributes:
        flat: contiguous, one dimension, of any floating-point type; replaced by the weighted sum.
        name: of the exchange, equal on all ranks and different for each tensor of a model.
        codec: equal on all ranks.
        key: of the random numbers, equal on all ranks; mixed with the rank and place.
        chunk_elements: the most elements of a chunk, about; SRA takes fewer where they would be over `CHUNK_BYTES` encoded.
        feedback: this rank's residuals; None without error feedback.
        weight: this rank's values are multiplied by it on their way, > 0.
    """

    flat: Tensor
    name: str
    codec: ValueCodec
    key: int
    chunk_elements: int
    feedback: ErrorFeedback | None = None
    weight: float = 1.0

    def residual(self, side: str, num_elements: int, start: int, size: int) -> AbstractContextManager[Tensor | None]:
        """Lends a part of this rank's residual on the worker's or the owner's side, which has num_elements, fp32."""
        if self.feedback is None:
            return nullcontext()
        return self.feedback.lent(f"{self.name}.{side}", num_elements, self.flat.device, slice(start, start + size))


def allreduce(world: Group, job: Job) -> list[Task]:
    """Sums a linear code's payloads.

    The sum is rounded as Horovod rounds in the payload's type: fp16 adds up in fp16. A codec that loses nothing sums the
    tensor itself.

    Raises:
        ValueError: on every rank, if the codec is not linear.
    """
    codec, flat = job.codec, job.flat
    if codec.exact and flat.dtype in SUMMABLE:
        return [_allreduce_itself(world, job)] if flat.numel() else []
    wire_dtype = codec.wire_dtype
    if wire_dtype is None:
        raise ValueError(
            f"codec {codec.spec} is not linear: sums of its payloads mean nothing, so reducer 'allreduce' cannot take "
            "it; use 'sra' or 'hierarchical', or a linear codec (none, fp16)"
        )
    spans = chunks(flat.numel(), chunk_elements=job.chunk_elements, granularity=codec.granularity, num_pieces=1)
    return [_allreduce_chunk(world, job, span, f"{job.name}.{chunk}") for chunk, span in enumerate(spans)]


def _allreduce_itself(world: Group, job: Job) -> Task:
    if job.weight != 1.0:
        job.flat.mul_(job.weight)
    yield world.allreduce_sum_async_(job.flat, job.name)


def _allreduce_chunk(world: Group, job: Job, span: Span, name: str) -> Task:
    wire_dtype = job.codec.wire_dtype
    assert wire_dtype is not None
    total = yield world.allreduce_sum_async_(_encoded(world, job, span).view(wire_dtype), name)
    job.codec.decode_(total.view(torch.uint8), job.flat[span.start : span.stop])


def _encoded(world: Group, job: Job, span: Span) -> Tensor:
    """Returns the payload of this rank's weighted values of a chunk."""
    values = job.flat[span.start : span.stop]
    payload = torch.empty(job.codec.payload_bytes(span.size), dtype=torch.uint8, device=values.device)
    key = mix_key(job.key, world.rank, span.start)
    with job.residual("worker", job.flat.numel(), span.start, span.size) as residual:
        job.codec.encode_(values, payload, key=key, residual=residual, weight=job.weight)
    return payload


def scatter_reduce_allgather(world: Group, job: Job) -> list[Task]:
    """Sums through one owner of each piece; see the module.

    Sums are fp32, whatever the tensor's type. Memory beyond the tensor: the chunks under way; with error feedback one residual
    of the tensor's size and one of the own shard's, fp32; two ranks own no shards.
    """
    if world.world_size == 2:
        granularity = job.codec.granularity
        spans = chunks(job.flat.numel(), chunk_elements=_most_elements(job), granularity=granularity, num_pieces=1)
        return [_swap_chunk(world, job, span, f"{job.name}.{chunk}.gather") for chunk, span in enumerate(spans)]
    return _Sra(job, cross=world, host=None).tasks() if world.world_size > 1 else []


def _most_elements(job: Job) -> int:
    """Returns the most elements of a chunk whose code is not summed on the wire."""
    return min(job.chunk_elements, job.chunk_elements * CHUNK_BYTES // job.codec.payload_bytes(job.chunk_elements))


def _swap_chunk(world: Group, job: Job, span: Span, name: str) -> Task:
    received = yield world.allgather_bytes_async(
        _encoded(world, job, span), receive_bytes=[job.codec.payload_bytes(span.size)] * 2, name=name
    )
    _decode_both(job, received, span)


def _decode_both(job: Job, received: Tensor, span: Span) -> None:
    """Puts the sum of two payloads in a span's place."""
    out = job.flat[span.start : span.stop]
    # Of the tensor's type only when both are in.
    total = out if out.dtype == torch.float32 else torch.empty(span.size, dtype=torch.float32, device=out.device)
    job.codec.decode_(received, total, num_peers=2)
    if total is not out:
        out.copy_(total)


def hierarchical(host: Group, cross: Group, job: Job) -> list[Task]:
    """Sums in fp32 inside each host, and encoded between hosts, all local ranks in parallel.

    Two hosts swap their sums, in one step and encoded once, as two ranks do.

    Args:
        host: the ranks of this host.
        cross: the ranks that have this rank's place on their hosts; all hosts have equally many ranks.
        job: what to sum.
    """
    return _Sra(job, cross=cross, host=host).tasks()


@dataclass
class _Sra:
    """One run of SRA: a chunk has one piece for each rank, those of one host's place l next to each other. Of two hosts that
    swap their sums it has one piece for each place."""

    job: Job
    cross: Group
    host: Group | None
    worker_offsets: list[int] = field(default_factory=list)
    owner_offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        granularity, flat = self.job.codec.granularity, self.job.flat
        self.local_size = self.host.world_size if self.host else 1
        self.local_rank = self.host.rank if self.host else 0
        self.swaps = self.host is not None and self.cross.world_size == 2
        self.num_owners = 1 if self.swaps else self.cross.world_size
        num_pieces = self.local_size * self.num_owners
        self.spans = chunks(flat.numel(), chunk_elements=_most_elements(self.job), granularity=granularity, num_pieces=num_pieces)
        self.pieces = [pieces(span, num_pieces=num_pieces, granularity=granularity) for span in self.spans]
        parts = [self.part(chunk, self.local_rank) for chunk in range(len(self.spans))]
        self.worker_offsets = [0, *accumulate(sum(p.size for p in part) for part in parts)]
        if not self.swaps:
            self.owner_offsets = [0, *accumulate(part[self.cross.rank].size for part in parts)]

    def part(self, chunk: int, local_rank: int) -> list[Span]:
        """The pieces that the ranks of this place on their hosts own, in order of hosts; the one that they swap."""
        return self.pieces[chunk][local_rank * self.num_owners : (local_rank + 1) * self.num_owners]

    def payload_bytes(self, chunk: int, local_rank: int) -> list[int]:
        return [self.job.codec.payload_bytes(piece.size) for piece in self.part(chunk, local_rank)]

    def tasks(self) -> list[Task]:
        return [self.task(chunk) for chunk in range(len(self.spans))]

    def task(self, chunk: int) -> Task:
        """Takes a chunk through the exchange; a rank whose part is empty has nothing to do with its owners."""
        span = self.spans[chunk]
        part = self.part(chunk, self.local_rank)
        first, size = part[0].start, sum(piece.size for piece in part)
        if self.host is None:
            values, weight = self.job.flat[first : first + size].to(torch.float32), self.job.weight
        else:
            received = yield self.gather_from_host(self.host, chunk, span)
            values, weight = _sum_rows(received.view(torch.float32).view(self.local_size, size)), 1.0
        if self.swaps:
            sums = yield self.swap(chunk, values) if size else None
        else:
            received = yield self.send_to_owners(chunk, values, weight) if size else None
            sums = yield self.send_sums(chunk, received) if size else None
        if self.host is not None:
            sums = yield self.spread_in_host(self.host, chunk, sums)
        self.decode(chunk, sums)

    def gather_from_host(self, host: Group, chunk: int, span: Span) -> Pending:
        """Sends every local rank its part of the weighted chunk in fp32."""
        values = self.job.flat[span.start : span.stop].to(torch.float32)
        values = values if self.job.weight == 1.0 else values * self.job.weight
        sizes = [4 * sum(p.size for p in self.part(chunk, rank)) for rank in range(self.local_size)]
        return host.alltoall_bytes_async(
            values.view(torch.uint8),
            send_bytes=sizes,
            receive_bytes=[sizes[self.local_rank]] * self.local_size,
            name=f"{self.job.name}.{chunk}.host",
        )

    def swap(self, chunk: int, values: Tensor) -> Pending:
        """Encodes this rank's part of the host's sum, and gathers both hosts'."""
        payload = self.encoded(chunk, values, 1.0)
        return self.cross.allgather_bytes_async(
            payload, receive_bytes=[payload.numel()] * 2, name=f"{self.job.name}.{chunk}.gather"
        )

    def send_to_owners(self, chunk: int, values: Tensor, weight: float) -> Pending:
        """Encodes this rank's weighted values, or its part of the host's sum, and sends each owner its piece."""
        sizes = self.payload_bytes(chunk, self.local_rank)
        return self.cross.alltoall_bytes_async(
            self.encoded(chunk, values, weight),
            send_bytes=sizes,
            receive_bytes=[sizes[self.cross.rank]] * self.cross.world_size,
            name=f"{self.job.name}.{chunk}.scatter",
        )

    def encoded(self, chunk: int, values: Tensor, weight: float) -> Tensor:
        """Returns the payloads of this rank's weighted values, one after the other, for each piece of its part."""
        codec, part = self.job.codec, self.part(chunk, self.local_rank)
        payload = torch.empty(sum(self.payload_bytes(chunk, self.local_rank)), dtype=torch.uint8, device=values.device)
        with self.job.residual("worker", self.worker_offsets[-1], self.worker_offsets[chunk], values.numel()) as residual:
            codec.encode_(
                values,
                payload,
                key=mix_key(self.job.key, 0, self.cross.rank, part[0].start),
                residual=residual,
                weight=weight,
                piece=self.pieces[chunk][0].size,
            )
        return payload

    def send_sums(self, chunk: int, received: Tensor) -> Pending:
        """Decodes and sums the own piece in rank order, encodes the sum and sends it to the other owners."""
        codec, sizes = self.job.codec, self.payload_bytes(chunk, self.local_rank)
        piece = self.part(chunk, self.local_rank)[self.cross.rank]
        total = torch.empty(piece.size, dtype=torch.float32, device=received.device)
        codec.decode_(received, total, num_peers=self.cross.world_size)
        encoded = torch.empty(sizes[self.cross.rank], dtype=torch.uint8, device=received.device)
        with self.job.residual("owner", self.owner_offsets[-1], self.owner_offsets[chunk], piece.size) as residual:
            codec.encode_(total, encoded, key=mix_key(self.job.key, 1, piece.start), residual=residual)
        return self.cross.allgather_bytes_async(
            encoded, receive_bytes=sizes, name=f"{self.job.name}.{chunk}.gather"
        )

    def spread_in_host(self, host: Group, chunk: int, sums: Tensor | None) -> Pending:
        """Hands the encoded sums of this place, or both hosts', on to the other ranks of the host."""
        num_sums = 2 if self.swaps else 1
        sizes = [num_sums * sum(self.payload_bytes(chunk, rank)) for rank in range(self.local_size)]
        payloads = self.job.flat.new_empty(0, dtype=torch.uint8) if sums is None else sums
        return host.allgather_bytes_async(payloads, receive_bytes=sizes, name=f"{self.job.name}.{chunk}.spread")

    def decode(self, chunk: int, sums: Tensor) -> None:
        """Decodes the sums of all pieces: on every rank from the same bytes."""
        span = self.spans[chunk]
        if self.swaps:
            for piece in self.pieces[chunk]:
                end = 2 * self.job.codec.payload_bytes(piece.size)
                if piece.size:
                    _decode_both(self.job, sums[:end], piece)
                sums = sums[end:]
            return
        self.job.codec.decode_(sums, self.job.flat[span.start : span.stop], piece=self.pieces[chunk][0].size)


def _sum_rows(rows: Tensor) -> Tensor:
    """Sums in the order of rows, which a library's sum does not promise."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total
