"""The ways in which encoded values are summed over ranks, each in chunks so that coding overlaps the wire.

`allreduce` sums the payloads of linear codes. `scatter_reduce_allgather` (SRA, arXiv 2111.08617) sends every rank its piece
of each chunk encoded, which sums in fp32 in rank order, encodes the sum and sends it to all; everybody, the piece's
owner too, decodes the same bytes, so that all ranks end with the same bits. Over two groups it is hierarchical: full
precision inside a host, where each rank sums a part of the chunk, then SRA between hosts, one group for each such part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from hvd_adaptive.compress.codec import Codec
from hvd_adaptive.compress.feedback import ErrorFeedback, encode_with_residual_
from hvd_adaptive.exchange.pipeline import Stage, run_pipeline
from hvd_adaptive.exchange.plan import Span, chunks, pieces
from hvd_adaptive.kernels.reference import mix_key
from hvd_adaptive.transport.base import Collectives, Pending


@dataclass(frozen=True, kw_only=True)
class Job:
    """One tensor to sum.

    Attributes:
        flat: the weighted values, contiguous, one dimension, of any floating-point type; replaced by their sum.
        name: of the exchange, equal on all ranks and different for each tensor of a model.
        codec: equal on all ranks.
        key: of the random numbers, equal on all ranks; mixed with the rank and place.
        chunk_elements: the most elements of a chunk, about.
        feedback: this rank's residuals; None without error feedback.
    """

    flat: Tensor
    name: str
    codec: Codec
    key: int
    chunk_elements: int
    feedback: ErrorFeedback | None = None

    def residual(self, side: str, num_elements: int) -> Tensor | None:
        """Returns this rank's residual on the worker's or the owner's side, fp32, shape (num_elements,)."""
        if self.feedback is None:
            return None
        like = torch.empty(num_elements, dtype=torch.float32, device=self.flat.device)
        return self.feedback.residual(f"{self.name}.{side}", like)


def allreduce(world: Collectives, job: Job) -> None:
    """Sums a linear code's payloads. COLLECTIVE.

    The sum is rounded as Horovod rounds in the payload's type: fp16 adds up in fp16. A codec that loses nothing sums the
    tensor itself.

    Raises:
        ValueError: on every rank, if the codec is not linear.
    """
    codec, flat = job.codec, job.flat
    if codec.exact and flat.dtype in (torch.float16, torch.float32, torch.float64):
        world.allreduce_sum_(flat, job.name)
        return
    wire_dtype = codec.wire_dtype
    if wire_dtype is None:
        raise ValueError(
            f"codec {codec.spec} is not linear: sums of its payloads mean nothing, so reducer 'allreduce' cannot take "
            "it; use 'sra' or 'hierarchical', or a linear codec (none, fp16)"
        )
    spans = chunks(flat.numel(), chunk_elements=job.chunk_elements, granularity=codec.granularity, num_pieces=1)
    residual = job.residual("worker", flat.numel())

    def send(chunk: int, _: None) -> Pending:
        span = spans[chunk]
        payload = torch.empty(codec.payload_bytes(span.size), dtype=torch.uint8, device=flat.device)
        values = flat[span.start : span.stop].to(torch.float32)
        part = residual[span.start : span.stop] if residual is not None else None
        encode_with_residual_(codec, values, payload, part, key=mix_key(job.key, world.rank, span.start))
        return world.allreduce_sum_async_(payload.view(wire_dtype), f"{job.name}.{chunk}")

    def receive(chunk: int, pending: Pending) -> None:
        span = spans[chunk]
        codec.decode_(pending.wait().view(torch.uint8), flat[span.start : span.stop])

    run_pipeline(len(spans), (send, receive))


def scatter_reduce_allgather(world: Collectives, job: Job) -> None:
    """Sums through one owner of each piece; see the module. COLLECTIVE.

    Sums are fp32, whatever the tensor's type. Memory beyond the tensor: a few chunks; with error feedback one residual of the
    tensor's size and one of the own shard's, fp32.
    """
    if world.world_size > 1:
        _Sra(job, cross=world, host=None).run()


def hierarchical(host: Collectives, cross: Collectives, job: Job) -> None:
    """Sums in fp32 inside each host, and encoded between hosts, all local ranks in parallel. COLLECTIVE.

    Args:
        host: the ranks of this host.
        cross: the ranks that have this rank's place on their hosts; all hosts have equally many ranks.
        job: what to sum.
    """
    _Sra(job, cross=cross, host=host).run()


@dataclass
class _Sra:
    """One run of SRA: a chunk has one piece for each rank, those of one host's place l next to each other."""

    job: Job
    cross: Collectives
    host: Collectives | None
    worker_offsets: list[int] = field(default_factory=list)
    owner_offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        granularity, flat = self.job.codec.granularity, self.job.flat
        self.local_size = self.host.world_size if self.host else 1
        self.local_rank = self.host.rank if self.host else 0
        num_pieces = self.local_size * self.cross.world_size
        self.spans = chunks(
            flat.numel(), chunk_elements=self.job.chunk_elements, granularity=granularity, num_pieces=num_pieces
        )
        self.pieces = [pieces(span, num_pieces=num_pieces, granularity=granularity) for span in self.spans]
        parts = [self.part(chunk, self.local_rank) for chunk in range(len(self.spans))]
        self.worker_offsets = [0, *accumulate(sum(p.size for p in part) for part in parts)]
        self.owner_offsets = [0, *accumulate(part[self.cross.rank].size for part in parts)]

    def part(self, chunk: int, local_rank: int) -> list[Span]:
        """The pieces that the ranks of this place on their hosts own, in order of hosts."""
        size = self.cross.world_size
        return self.pieces[chunk][local_rank * size : (local_rank + 1) * size]

    def payload_bytes(self, chunk: int, local_rank: int) -> list[int]:
        return [self.job.codec.payload_bytes(piece.size) for piece in self.part(chunk, local_rank)]

    @cached_property
    def worker_residual(self) -> Tensor | None:
        return self.job.residual("worker", self.worker_offsets[-1])

    @cached_property
    def owner_residual(self) -> Tensor | None:
        return self.job.residual("owner", self.owner_offsets[-1])

    def run(self) -> None:
        stages: list[Stage] = [self.send_to_owners, self.reduce]
        if self.host is not None:
            stages = [self.gather_from_host, *stages, self.spread_in_host]
        run_pipeline(len(self.spans), [*stages, self.decode])

    def gather_from_host(self, chunk: int, _: None) -> Pending:
        """Sends every local rank its part of the chunk in fp32."""
        assert self.host is not None
        span = self.spans[chunk]
        values = self.job.flat[span.start : span.stop].to(torch.float32)
        sizes = [4 * sum(p.size for p in self.part(chunk, rank)) for rank in range(self.local_size)]
        return self.host.alltoall_bytes_async(
            values.view(torch.uint8),
            send_bytes=sizes,
            receive_bytes=[sizes[self.local_rank]] * self.local_size,
            name=f"{self.job.name}.{chunk}.host",
        )

    def send_to_owners(self, chunk: int, arriving: Pending | None) -> Pending | None:
        """Encodes this rank's values, or its part of the host's sum, and sends each owner its piece."""
        codec, part = self.job.codec, self.part(chunk, self.local_rank)
        first, size = part[0].start, sum(piece.size for piece in part)
        if arriving is None:
            values = self.job.flat[first : first + size].to(torch.float32)
        else:
            values = _sum_rows(arriving.wait().view(torch.float32).view(self.local_size, size))
        if not size:
            return None
        sizes = self.payload_bytes(chunk, self.local_rank)
        payload = torch.empty(sum(sizes), dtype=torch.uint8, device=values.device)
        for piece, buffer in zip(part, payload.split(sizes), strict=True):
            encode_with_residual_(
                codec,
                values[piece.start - first : piece.stop - first],
                buffer,
                _slice(self.worker_residual, self.worker_offsets[chunk] + piece.start - first, piece.size),
                key=mix_key(self.job.key, 0, self.cross.rank, piece.start),
            )
        return self.cross.alltoall_bytes_async(
            payload,
            send_bytes=sizes,
            receive_bytes=[sizes[self.cross.rank]] * self.cross.world_size,
            name=f"{self.job.name}.{chunk}.scatter",
        )

    def reduce(self, chunk: int, arriving: Pending | None) -> Pending | None:
        """Decodes and sums the own piece in rank order, encodes the sum and sends it to the other owners."""
        if arriving is None:
            return None
        codec, sizes = self.job.codec, self.payload_bytes(chunk, self.local_rank)
        piece = self.part(chunk, self.local_rank)[self.cross.rank]
        received = arriving.wait()
        total = torch.empty(piece.size, dtype=torch.float32, device=received.device)
        for rank, payload in enumerate(received.view(self.cross.world_size, sizes[self.cross.rank])):
            codec.decode_(payload, total, add=int(rank > 0))
        encoded = torch.empty(sizes[self.cross.rank], dtype=torch.uint8, device=received.device)
        residual = _slice(self.owner_residual, self.owner_offsets[chunk], piece.size)
        encode_with_residual_(codec, total, encoded, residual, key=mix_key(self.job.key, 1, piece.start))
        return self.cross.allgather_bytes_async(
            encoded, receive_bytes=sizes, name=f"{self.job.name}.{chunk}.gather"
        )

    def spread_in_host(self, chunk: int, arriving: Pending | None) -> Pending:
        """Hands the encoded sums of this place on to the other ranks of the host."""
        assert self.host is not None
        sizes = [sum(self.payload_bytes(chunk, rank)) for rank in range(self.local_size)]
        payloads = arriving.wait() if arriving else self.job.flat.new_empty(0, dtype=torch.uint8)
        return self.host.allgather_bytes_async(
            payloads, receive_bytes=sizes, name=f"{self.job.name}.{chunk}.spread"
        )

    def decode(self, chunk: int, arriving: Pending) -> None:
        """Decodes the sums of all pieces: on every rank from the same bytes."""
        sizes = [self.job.codec.payload_bytes(piece.size) for piece in self.pieces[chunk]]
        for piece, payload in zip(self.pieces[chunk], arriving.wait().split(sizes), strict=True):
            self.job.codec.decode_(payload, self.job.flat[piece.start : piece.stop])


def _sum_rows(rows: Tensor) -> Tensor:
    """Sums in the order of rows, which a library's sum does not promise."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total


def _slice(residual: Tensor | None, start: int, size: int) -> Tensor | None:
    return None if residual is None else residual[start : start + size]
