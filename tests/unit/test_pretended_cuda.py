"""What a session would do to a GPU, on a pretended one: when the host waits, which copies are pageable, what mixes devices.

Steps must not wait for the GPU (`sync`: once), must copy by pinned memory alone, and must use tensors of other streams only after
waiting for these. See tests/support/pretended_cuda.py for what this cannot find.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pretended_cuda
import pytest
import torch
from pretended_cuda import Log, Stream, recording
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress import encode, parse_codec
from hvd_adaptive.compress.codec import of_values
from hvd_adaptive.compress.kernels import dispatch
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.compress.low_rank import subtract_product_
from hvd_adaptive.config import Config
from hvd_adaptive.engine import device_copies
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.session.session import Session
from hvd_adaptive.wrap.encoded import EncodedGradients
from hvd_adaptive.wrap.merging import Merger
from hvd_adaptive.wrap.meter import Meter
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.wrap.stopwatch import Stopwatch

NUM_SAMPLES, NUM_ROUNDS = 320, 2  # what a merge leaves for the next round is there in the second


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_cuda.pretended_cuda(monkeypatch):
        yield


class Dense:
    """Some layers with batch normalization, and Adam."""

    def __init__(self) -> None:
        self.data: Any = TensorDataset(torch.randn(NUM_SAMPLES, 16), torch.randint(0, 4, (NUM_SAMPLES,)))
        self.model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).to("cuda")
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-3, foreach=True)

    def loss(self, x: Any, y: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(x), y)


class Sparse(Dense):
    """An embedding with sparse gradients, and Adagrad."""

    def __init__(self) -> None:
        self.data = TensorDataset(torch.randint(0, 200, (NUM_SAMPLES, 5)), torch.randint(0, 4, (NUM_SAMPLES,)))
        self.model = nn.Sequential(nn.EmbeddingBag(200, 8, mode="sum", sparse=True), nn.Linear(8, 4)).to("cuda")
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)


def train(
    transport: LocalTransport,
    config: Config,
    kind: Callable[[], Dense],
    *,
    amp: bool = False,
    side_stream: bool = False,
    records: list[Any] | None = None,
) -> Log:
    """Trains for an epoch; phases of the log: "start", "first" (step), "step" (with all between two steps), "round", "end",
    "fetch"."""
    log = Log()
    with recording(log), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        work = kind()
        if side_stream:
            stream = Stream()
            stream.wait_stream(torch.cuda.current_stream())
            state = [value for values in work.optimizer.state.values() for value in values.values()]
            for tensor in (*work.model.parameters(), *work.model.buffers(), *state):
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
            stack.enter_context(torch.cuda.stream(stream))
        scaler = torch.amp.GradScaler("cuda", enabled=amp)
        session = Session(work.model, work.optimizer, config, transport=transport)
        session.records += [] if records is None else [records.append]
        end_round = session._end_round

        def ending(*args: Any) -> None:
            log.phase = "round"
            end_round(*args)
            log.phase = "step"

        session._end_round = ending  # type: ignore[method-assign]
        for number, batch in enumerate(session.batches(work.data)):
            # The first one of ``sync`` compares gradients, and waits for that.
            log.phase = "step" if number else "first"
            with session.step(batch):
                session.optimizer.zero_grad()
                with torch.autocast("cuda", enabled=amp):
                    batch.loss = work.loss(batch.x, batch.y)
                scaler.scale(batch.loss).backward()
                if amp:
                    session.synchronize()
                    scaler.unscale_(session.optimizer)
                scaler.step(session.optimizer)
                scaler.update()
            log.num_steps += number > 0
        log.phase = "end"
        session.close()
    return log


PHASES = ("start", "first", "step", "fetch", "round", "end")


def check(log: Log, *, waits: float = 0, kernels: float) -> None:
    """Asserts what a session may do to a GPU.

    Args:
        log: of a run.
        waits: the most times that the host waits for the GPU in a step, the mean over steps.
        kernels: the most launches in this package's code in a step, the mean over steps.
    """
    ours = "\n".join(line for line in log.lines("step", "fetch") if " kernel " not in line)
    wrong = [line for line in log.lines(*PHASES) if " mix " in line or " race " in line]
    assert not wrong, "\n".join(wrong)
    assert not log.count("pageable", "step") and not log.count("pageable", "fetch"), ours
    assert log.count("wait", "step") <= waits * log.num_steps, ours
    assert log.kernels["step"] <= kernels * log.num_steps, "\n".join(log.lines("step"))


def run(kind: Callable[[], Dense], *, world_size: int = 2, options: dict[str, Any] | None = None, **how: Any) -> Log:
    config = Config(batch_size=16, mega_batch=NUM_SAMPLES // NUM_ROUNDS, hash_interval=2, **(options or {}))
    logs: list[Log] = LocalWorld(world_size).run(lambda transport: train(transport, config, kind, **how))
    assert sum(log.num_steps + 1 for log in logs) >= NUM_SAMPLES / 16 and logs[0].num_steps
    return logs[0]


CODECS = ["none", "fp16", "maxmin:4", "maxmin:4,nearest", "normal:2", "topk:0.1", "topk:0.1,sampled", "powersgd:2"]


# One of each kind also in the other way.
@pytest.mark.parametrize(
    ("codec", "fragments"), [*((codec, 2) for codec in CODECS), *((codec, 1) for codec in ("none", "normal:2", "powersgd:2"))]
)
def test_a_step_of_local_never_waits(codec: str, fragments: int) -> None:
    """But when it sends a fragment, once a round and at the end: whether that is finite decides what is sent."""
    log = run(Dense, options={"compression": codec, "merge_fragments": fragments}, side_stream=True)
    # Fragments are sent and taken in between steps, of which a round has six or more: some 100 launches at most for a tensor.
    check(log, waits=0 if fragments == 1 else (NUM_ROUNDS + 1) / log.num_steps, kernels=1 if fragments == 1 else 30)


@pytest.mark.parametrize(
    "options",
    [
        {"merge_weights": "fisher-rows"}, {"optimizer_state": "average"},
        {"merge_weights": "paper", "perturbation": True}, {"compression": "maxmin:4", "auto_bits": 1},
        {"batch_size_rule": "proportional"}, {"dispatch": "equal", "outer_step": "nesterov"}, {"strategy": "sma"},
    ],
    ids=str,
)  # fmt: skip
def test_a_step_of_local_never_waits_whatever_merges(options: dict[str, Any]) -> None:
    # Masses are of each parameter; `sma` loads its replica once a round.
    check(run(Dense, options=options), kernels=17 if "fisher" in str(options) else 2)


def test_a_logical_rank_waits_at_the_end_of_its_turn() -> None:
    log = run(Dense, options={"logical_ranks": 2})
    check(log, waits=2 * NUM_ROUNDS / log.num_steps, kernels=12)


@pytest.mark.parametrize("options", [{}, {"sparse_merge": "never"}, {"merge_weights": "dual-averaging"}], ids=str)
def test_a_step_of_local_with_sparse_gradients_never_waits(options: dict[str, Any]) -> None:
    # Dual averaging notes where a round starts.
    check(run(Sparse, options=options, side_stream=True), kernels=3)


@pytest.mark.parametrize(
    ("codec", "feedback"),
    [*((codec, True) for codec in CODECS[1:]), *((codec, False) for codec in ("fp16", "normal:2", "powersgd:2"))],
)
def test_a_step_of_sync_waits_once(codec: str, feedback: bool) -> None:
    options = {"strategy": "sync", "compression": codec, "error_feedback": feedback}
    # One bucket; powersgd codes the matrices one after the other.
    log = run(Dense, options=options, side_stream=True)
    check(log, waits=1, kernels=100 if codec.startswith("powersgd") else 60)


@pytest.mark.parametrize(
    ("codec", "feedback"), [("maxmin:4", True), ("normal:2", False), ("bf16", False), ("bf16", True), ("topk:0.1", True)]
)
def test_a_step_of_sync_launches_no_more_with_more_ranks(codec: str, feedback: bool) -> None:
    options = {"strategy": "sync", "compression": codec, "error_feedback": feedback, "reducer": "sra"}
    logs = [run(Dense, world_size=world_size, options=options) for world_size in (2, 4, 8)]
    two, few, many = (log.kernels["step"] / log.num_steps for log in logs)
    # Two ranks encode once.
    assert abs(many - few) < 0.5 and two <= few, "\n".join(logs[2].lines("step"))


def test_the_largest_values_of_several_peers_add_up_in_one_launch() -> None:
    codec, num, piece = of_values(parse_codec("topk:0.3")), 1000, 300
    torch.manual_seed(0)
    parts = [part for _ in range(3) for part in torch.randn(num).split(piece)]
    sent, expected = torch.cat([encode(codec, part) for part in parts]), torch.empty(num)
    codec.decode_(sent, expected, num_peers=3, piece=piece)
    with recording(Log()) as log:
        out = torch.empty(num, device="cuda")
        codec.decode_(sent.to("cuda"), out, num_peers=3, piece=piece)
        assert log.kernels["start"] == 1, "\n".join(log.lines("start"))
        assert torch.equal(out.cpu(), expected)


def test_whether_tensors_are_finite_takes_equally_many_launches_for_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are too long for a list of torch's have a launch each."""
    monkeypatch.setattr(dispatch, "_MOST_IN_A_LIST", 1000)
    launches = []
    for sizes in ((7, 8), (8,) * 40, (2000, *(8,) * 40), (2000,)):
        with recording(Log()) as log:
            tensors = [torch.ones(size).to("cuda") for size in sizes]
            log.phase = "step"
            assert all_finite(*tensors)
            log.phase = "end"
            launches.append(log.kernels["step"])
            assert log.count("wait", "step") == 1
            for place in {0, len(sizes) - 1}:
                broken = torch.ones(sizes[place]).index_fill(0, torch.tensor(sizes[place] - 1), float("nan")).to("cuda")
                assert not all_finite(*tensors[:place], broken, *tensors[place + 1 :])
    assert launches[0] == launches[1] == launches[2] - 1 <= 8 and launches[3] <= 8, launches


def test_a_step_of_sync_on_one_rank_waits_once() -> None:
    check(run(Dense, world_size=1, options={"strategy": "sync"}), waits=1, kernels=20)


def test_a_step_of_sync_with_sparse_gradients_waits_for_each_ranks_rows() -> None:
    # What all do, and to know how many rows there are: before, after, and from each of two ranks.
    check(run(Sparse, options={"strategy": "sync", "compression": "fp16"}, side_stream=True), waits=1 + 2 + 2, kernels=60)


@pytest.mark.parametrize("options", [{}, {"strategy": "sync", "compression": "maxmin:4"}], ids=str)
def test_a_gradient_scaler_adds_nothing_of_ours(options: dict[str, Any]) -> None:
    check(run(Dense, options=options, amp=True), waits=len(options) > 0, kernels=60)


def test_losses_are_those_of_the_processor() -> None:
    """Added up on the device, read once a round."""
    records: list[Any] = []

    def body(transport: LocalTransport) -> list[Any]:
        losses: list[Any] = []
        records.append(losses)
        return [train(transport, Config(batch_size=16, mega_batch=160), Dense, records=losses)]

    LocalWorld(1).run(body)
    assert len(records[0]) == NUM_ROUNDS and all(0.5 < record.loss < 3.0 for record in records[0])
    assert all(record.stats["loss_samples"].sum() == 160 for record in records[0])


def test_a_hash_comes_in_parts_and_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_PART_BYTES", 100)
    with recording(Log()) as log:
        model = Dense().model
        log.phase = "step"
        found = model_hash(model)
        log.phase = "end"
        expected = hashlib.sha256()
        for tensor in (*model.parameters(), *model.buffers()):
            expected.update(tensor.detach().cpu().numpy().tobytes())
    assert found == expected.hexdigest() and not log.count("pageable", "step")


@pytest.mark.parametrize("options", [{}, {"logical_ranks": 2}, {"compression": "powersgd:2", "error_feedback": True}], ids=str)
def test_a_checkpoint_is_taken_and_a_run_goes_on_from_it(options: dict[str, Any], tmp_path: Path) -> None:
    def body(transport: LocalTransport, *, resumes: bool) -> str:
        with recording(Log()) as log:
            work = Dense()
            config = Config(batch_size=16, mega_batch=160, **options)
            session = Session(work.model, work.optimizer, config, transport=transport)
            checkpointer = Checkpointer(session, tmp_path, interval=1, background=False)
            found = model_hash(work.model) if resumes and checkpointer.resume() else ""
            assert all(p.is_cuda for p in work.model.parameters())
            for batch in session.batches(work.data, num_epochs=1 + resumes):
                with session.step(batch):
                    session.optimizer.zero_grad()
                    work.loss(batch.x, batch.y).backward()
                    session.optimizer.step()
            checkpointer.close()
            session.close()
            wrong = [line for line in log.lines(*PHASES) if " mix " in line or " race " in line]
            assert not wrong, wrong
            return found or model_hash(work.model)

    hashes = {LocalWorld(2).run(lambda t, resumes=resumes: body(t, resumes=resumes))[0] for resumes in (False, True)}
    assert len(hashes) == 1


@pytest.mark.parametrize("codec", ["none", "maxmin:4"])
def test_a_wrapped_scripts_local_steps_never_wait(codec: str) -> None:
    def body(transport: LocalTransport) -> Log:
        with recording(Log()) as log:
            torch.manual_seed(0)
            work = Dense()
            config = RunConfig(strategy="local", compression=codec)
            named = list(work.model.named_parameters())
            merger = Merger(work.optimizer, named, [work.model], config, transport)  # type: ignore[arg-type]
            watch, meter = Stopwatch(time.perf_counter), Meter()
            x, y = (column.to("cuda") for column in work.data.tensors)
            for _ in range(2):
                for _ in range(4):
                    log.phase = "step"
                    watch.start()
                    work.optimizer.zero_grad()
                    work.loss(x, y).backward()
                    merger.begin_step(num_samples=8, global_samples=16, epoch_samples=NUM_SAMPLES)
                    stretch = watch.stop()
                    meter.step([], [] if stretch is None else [stretch], merger.timed)
                    work.optimizer.step()
                    merger.end_step()
                    log.num_steps += 1
                log.phase = "round"
                merger.merge()
            return log

    check(LocalWorld(2).run(body)[0], kernels=0)


def test_a_wrapped_scripts_encoded_gradients_wait_once() -> None:
    def body(transport: LocalTransport) -> Log:
        with recording(Log()) as log:
            torch.manual_seed(0)
            work = Dense()
            work.optimizer._parameter_names = {p: name for name, p in work.model.named_parameters()}
            work.optimizer.backward_passes_per_step, work.optimizer.op = 1, hvd.Average
            work.optimizer._requires_update = set(work.model.parameters())
            encoded = EncodedGradients(RunConfig(compression="maxmin:4"), lambda: transport)  # type: ignore[arg-type, return-value]
            encoded.registered(work.optimizer)
            x, y = (column.to("cuda") for column in work.data.tensors)
            for step in range(5):
                # The first one lays out.
                log.phase = "step" if step else "start"
                work.optimizer.zero_grad()
                work.loss(x, y).backward()
                encoded.synchronize(work.optimizer, refused=lambda: False)
                work.optimizer.step()
                log.num_steps += step > 0
            log.phase = "end"
            return log

    check(LocalWorld(2).run(body)[0], waits=1, kernels=60)


class TestWhatIsFound:
    """Each finding, by taking away what prevents it."""

    def test_a_batch_that_no_stream_waits_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
        with pytest.raises(AssertionError, match="has not waited"):
            check(run(Dense), kernels=1)

    def test_a_batch_of_which_the_allocator_is_not_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_copies, "record_stream", lambda value, stream: None)
        with pytest.raises(AssertionError, match="no record_stream"):
            check(run(Dense), kernels=1)

    def test_pageable_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True, raising=False)
        with pytest.raises(AssertionError, match="pageable host to device"):
            check(run(Dense), kernels=1)

    def test_waits_and_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        add_loss = DeviceTimes._add_loss

        def waiting(self: DeviceTimes, loss: torch.Tensor, num_samples: int) -> None:
            add_loss(self, loss, num_samples)
            all_finite(loss)

        monkeypatch.setattr(DeviceTimes, "_add_loss", waiting)
        with pytest.raises(AssertionError, match=r"kernels/dispatch.py"):
            check(run(Dense), kernels=100)
        with pytest.raises(AssertionError):
            check(run(Dense), waits=1, kernels=1)

    def test_a_mix_of_devices(self) -> None:
        with recording(Log()) as log:
            subtract_product_(torch.ones(3, 2), torch.ones(3, 1, device="cuda"), torch.ones(2, 1))
        assert log.count("mix", "start")
