"""Codec x reducer over simulated ranks: equal bits on every rank, and the error that the codes allow."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sums import SPECS, assert_near

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress import parse_codec
from hvd_adaptive.compress.feedback import ErrorFeedback
from hvd_adaptive.exchange.pipeline import Beside, UnderWay, run_pipeline
from hvd_adaptive.exchange.plan import chunks, pieces
from hvd_adaptive.exchange.reducers import Job, allreduce, hierarchical, scatter_reduce_allgather

REDUCERS = ["allreduce", "sra", "hierarchical"]


def values(rank: int, num: int, step: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(1000 * step + rank))


def total(transport: LocalTransport, reducer: str, job: Job, num_hosts: int = 2) -> torch.Tensor:
    if reducer == "allreduce":
        run_pipeline(allreduce(transport, job))
    elif reducer == "sra":
        run_pipeline(scatter_reduce_allgather(transport, job))
    else:
        local_size = transport.world_size // num_hosts
        host = transport.split(transport.rank // local_size)
        cross = transport.split(num_hosts + transport.rank % local_size)
        run_pipeline(hierarchical(host, cross, job))
    return job.flat


def make_job(flat: torch.Tensor, spec: str, **options: Any) -> Job:
    return Job(**{"flat": flat, "name": "x", "codec": parse_codec(spec), "key": 1, "chunk_elements": 3000, **options})


@pytest.mark.parametrize(
    # Each codec and each way with each number of ranks, and each codec each way with two of them.
    ("spec", "reducer", "world_size"),
    [
        (spec, reducer, size)
        for place, spec in enumerate(SPECS)
        for turn, reducer in enumerate(REDUCERS)
        for size in ((1, 4), (2, 3))[(place + turn) % 2]
    ],
)
def test_all_ranks_get_the_same_bits_near_the_sum(spec: str, reducer: str, world_size: int) -> None:
    num_hosts = 2 if world_size % 2 == 0 else world_size
    linear = parse_codec(spec).wire_dtype is not None
    for num in (1, 513, 10_007):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            run = lambda t: total(t, reducer, make_job(values(t.rank, num).to(dtype), spec), num_hosts)  # noqa: B023, E731
            if reducer == "allreduce" and not linear:
                with pytest.raises(ValueError, match="use 'sra' or 'hierarchical'"):
                    LocalWorld(world_size).run(run)
                return
            results = LocalWorld(world_size).run(run)
            assert all(torch.equal(result, results[0]) for result in results)
            exact = sum(values(rank, num).to(dtype).double() for rank in range(world_size))
            if spec.startswith("normal") and num == 1:
                # A bucket of one value has no distribution.
                continue
            error = assert_near(results[0], exact, spec)
            if reducer == "sra" and spec.startswith("maxmin") and world_size > 1 and num > 1:
                assert error > 1e-4


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_cgxs_check_on_aranges(world_size: int, bits: int) -> None:
    """Rank r holds (r + 1) x arange: the error is below N (N + 1) / 2 x B / (2^q - 1), four times tighter than CGX's bound."""
    bucket = 512
    for num in (1, 2, 511, 512, 513, 4096, 100_000, 1_000_000):
        job = lambda t: make_job(  # noqa: E731
            (t.rank + 1) * torch.arange(num, dtype=torch.float32),  # noqa: B023
            f"maxmin:{bits},bucket={bucket},nearest",
            chunk_elements=1 << 18,
        )
        results = LocalWorld(world_size).run(lambda t: total(t, "sra", job(t)))  # noqa: B023
        factor = world_size * (world_size + 1) / 2
        exact = factor * torch.arange(num, dtype=torch.float32)
        assert all(torch.equal(result, results[0]) for result in results)
        # Sums of a million times ten are rounded in the last bit of fp32, which is 1 there.
        room = factor * bucket / (2**bits - 1) + (1 if num == 1_000_000 else 0)
        assert float((results[0] - exact).abs().max()) <= room


@pytest.mark.parametrize("reducer", ["sra", "hierarchical"])
def test_constants_are_exact(reducer: str) -> None:
    results = LocalWorld(4).run(
        lambda t: total(t, reducer, make_job(torch.full((5000,), 0.5 * (t.rank + 1)), "maxmin:4"))
    )
    assert all(torch.equal(result, torch.full((5000,), 5.0)) for result in results)


# What is missing after 30 steps, over the inputs' sum: one step's loss, not the sum of 30 losses.
MISSING = {"maxmin:4": 0.08, "normal:2": 0.45, "topk:0.1": 0.6, "fp16": 1e-4}


@pytest.mark.parametrize(("reducer", "num_ranks", "num_hosts"), [("sra", 4, 2), ("hierarchical", 4, 2), ("hierarchical", 6, 3)])
@pytest.mark.parametrize("spec", list(MISSING))
def test_error_feedback_on_both_sides_telescopes_over_the_ranks(
    reducer: str, num_ranks: int, num_hosts: int, spec: str
) -> None:
    num, steps = 5001, 30

    def body(transport: LocalTransport) -> tuple[torch.Tensor, dict[str, Any]]:
        feedback, received = ErrorFeedback(), torch.zeros(num, dtype=torch.float64)
        for step in range(steps):
            job = make_job(values(transport.rank, num, step), spec, key=step, feedback=feedback)
            received += total(transport, reducer, job, num_hosts)
        return received, feedback.state_dict()

    results = LocalWorld(num_ranks).run(body)
    inputs = sum(values(rank, num, step).double() for rank in range(num_ranks) for step in range(steps))
    missing = inputs - results[0][0]
    assert float(missing.norm() / inputs.norm()) < MISSING[spec]
    if reducer == "sra":
        # Element by element: each rank's loss as a worker, and each owner's in its pieces.
        granularity = parse_codec(spec).granularity
        spans = chunks(num, chunk_elements=3000, granularity=granularity, num_pieces=4)
        expected = sum(state["x.worker"].double() for _, state in results)
        for rank, (_, state) in enumerate(results):
            own = [pieces(span, num_pieces=4, granularity=granularity)[rank] for span in spans]
            for piece, residual in zip(own, state["x.owner"].split([p.size for p in own]), strict=True):
                expected[piece.start : piece.stop] += residual
        assert torch.allclose(missing, expected, atol=1e-3)
    if (reducer, num_hosts) == ("hierarchical", 2):
        # Two hosts swap their sums: nobody encodes the sum of both, and each host's loss is all that is missing.
        assert all(list(state) == ["x.worker"] for _, state in results)
        lost = sum(state["x.worker"].double().sum() for _, state in results)
        assert float(missing.sum()) == pytest.approx(float(lost), abs=1e-2)


def test_ranks_chunks_and_sides_round_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal random numbers for equal values would make errors add up instead of averaging out."""
    sent: list[bytes] = []
    scatter = LocalTransport.alltoall_bytes_async

    def watched(self: LocalTransport, tensor: torch.Tensor, **options: Any) -> Any:
        sent.extend(part.numpy().tobytes() for part in tensor.split(options["send_bytes"]))
        return scatter(self, tensor, **options)

    monkeypatch.setattr(LocalTransport, "alltoall_bytes_async", watched)
    block = values(0, 512)
    LocalWorld(3).run(lambda t: total(t, "sra", make_job(block.repeat(9), "maxmin:4", chunk_elements=1536)))
    assert len(sent) == 27 and len(set(sent)) == 27


def test_results_repeat_and_follow_the_key() -> None:
    run = lambda key: LocalWorld(3).run(lambda t: total(t, "sra", make_job(values(t.rank, 4000), "maxmin:4", key=key)))[0]  # noqa: E731
    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


def test_a_value_that_is_not_finite_reaches_all_ranks() -> None:
    def body(transport: LocalTransport) -> torch.Tensor:
        x = values(transport.rank, 9000)
        if transport.rank == 1:
            x[4000] = float("nan")
        return total(transport, "sra", make_job(x, "maxmin:4"))

    for result in LocalWorld(3).run(body):
        assert torch.isnan(result[4000]) and torch.isfinite(result[:3000]).all()


def test_an_empty_tensor_is_no_exchange() -> None:
    for reducer in REDUCERS:
        assert LocalWorld(2).run(lambda t: total(t, reducer, make_job(torch.empty(0), "fp16")).numel()) == [0, 0]  # noqa: B023


def test_ranks_whose_codecs_differ_fail() -> None:
    with pytest.raises(RuntimeError, match="bytes, but"):
        LocalWorld(2).run(lambda t: total(t, "sra", make_job(values(t.rank, 900), f"maxmin:{4 + t.rank}")))


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 8])
@pytest.mark.parametrize("granularity", [1, 8, 512])
def test_pieces_partition_a_tensor_in_whole_granules(num_pieces: int, granularity: int) -> None:
    for num in (0, 1, 511, 513, 10_000, 123_457):
        spans = chunks(num, chunk_elements=5000, granularity=granularity, num_pieces=num_pieces)
        parts = [p for span in spans for p in pieces(span, num_pieces=num_pieces, granularity=granularity)]
        edge = 0
        for part in parts:
            assert part.start == edge and part.size >= 0
            assert part.size == 0 or part.start % granularity == 0
            edge = part.stop
        assert edge == num and len(parts) == num_pieces * len(spans)
        assert all(span.size <= max(5000, granularity * num_pieces) + granularity * num_pieces for span in spans)


class Wire:
    """Collectives that arrive when they are told to, and what happened in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.arrived: set[str] = set()

    def send(self, what: str) -> Any:
        self.log.append(what)
        return SimpleNamespace(done=lambda: what in self.arrived, wait=lambda: what)

    def task(self, chunk: int, num_steps: int = 2) -> Any:
        for letter in "abcd"[:num_steps]:
            assert (yield self.send(f"{letter}{chunk}")) == f"{letter}{chunk}"
        self.log.append(f"end{chunk}")


def test_the_next_chunk_is_sent_before_the_last_is_awaited() -> None:
    wire = Wire()
    run_pipeline([wire.task(0), wire.task(1), wire.task(2, num_steps=1)])
    assert wire.log == ["a0", "a1", "b0", "a2", "b1", "end0", "end2", "end1"]


def test_tasks_go_on_as_their_collectives_arrive() -> None:
    wire, under_way = Wire(), UnderWay()
    for chunk, num_steps in enumerate((3, 2, 3)):
        under_way.begin(wire.task(chunk, num_steps))
    under_way.poll()
    assert wire.log == ["a0", "a1", "a2"]
    wire.arrived = {"a1", "b1", "a2"}
    under_way.poll()
    assert wire.log[3:] == ["b1", "end1", "b2"]
    under_way.finish()
    # What is least advanced comes first, or ranks could wait for each other.
    assert wire.log[6:] == ["b0", "c0", "c2", "end0", "end2"]


def test_a_thread_goes_on_with_tasks_and_hands_on_their_errors() -> None:
    wire, under_way = Wire(), UnderWay(Beside())
    for chunk in range(2):
        under_way.begin(wire.task(chunk))
    wire.arrived = {"a0", "b0", "a1", "b1"}
    deadline = time.monotonic() + 10
    while not under_way.is_over and time.monotonic() < deadline:
        time.sleep(0.005)
    assert under_way.is_over and {"end0", "end1"} <= set(wire.log)
    under_way.begin(wire.task(2, num_steps=1))
    under_way.finish()
    assert wire.log[-1] == "end2"

    def failing() -> Any:
        yield wire.send("x")
        raise RuntimeError("a part is missing")

    wire.arrived.add("x")
    under_way.begin(failing())
    while under_way._error is None and time.monotonic() < deadline:
        time.sleep(0.005)
    for ask in (under_way.poll, under_way.finish):
        with pytest.raises(RuntimeError, match="a part is missing"):
            ask()


def test_one_thread_goes_on_with_all_and_passes_by_what_is_waited_for() -> None:
    """Whoever waits for the first sum gets it only after another rank has got a part of the second one from this rank."""
    wire, beside, before = Wire(), Beside(), set(threading.enumerate())
    first, second = UnderWay(beside), UnderWay(beside)
    second_has_gone_on = threading.Event()

    def waits() -> Any:
        yield SimpleNamespace(done=lambda: False, wait=lambda: second_has_gone_on.wait(10))

    def goes_on() -> Any:
        yield wire.send("a")
        second_has_gone_on.set()
        yield wire.send("b")

    first.begin(waits())
    second.begin(goes_on())
    threading.Timer(0.05, wire.arrived.add, ("a",)).start()
    first.finish()
    assert second_has_gone_on.is_set()
    assert [thread for thread in set(threading.enumerate()) - before if thread.name == "exchange"] == [beside._thread]
    wire.arrived.add("b")
    second.finish()
    # Nothing is left to do for it. Another one comes with the next task.
    deadline = time.monotonic() + 10
    while beside._thread is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert beside._thread is None
    second.begin(wire.task(0, num_steps=1))
    wire.arrived.add("a0")
    while not second.is_over and time.monotonic() < deadline:
        time.sleep(0.01)
    assert second.is_over
