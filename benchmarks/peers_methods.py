"""The methods of peers.py. As a program: one rank of a run.

    mpirun -np 2 python benchmarks/peers_methods.py CASE.json RESULT.json PORT
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from peers_task import GPT, PERIOD, Case, Training
from torch import nn

from hvd_adaptive.cluster.binding import read_launcher

Method = Callable[[Training], dict[str, Any]]
AnyMethod = TypeVar("AnyMethod", bound=Method)

METHODS: dict[str, Method] = {}
OURS: dict[str, dict[str, Any]] = {
    "ours local": {},
    # Too quick by the last fragment of a round: it is sent on while the clock stands still for a look.
    "ours local, fragments": {"merge_fragments": 4},
    "ours local, 4 bits": {"compression": "maxmin:4"},
    "ours local, outer step, 4 bits": {
        "compression": "maxmin:4",
        "outer_step": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": 0.5,
        "mega_batch": PERIOD,
    },
    "ours local, fragments, 4 bits": {"merge_fragments": 4, "compression": "maxmin:4"},
    "ours sync, 4 bits": {"strategy": "sync", "compression": "maxmin:4"},
}
# What has to be installed into the peers' environment.
PACKAGES = {"torchft": "torchft", "hivemind": "hivemind"}


def package_of(method: str) -> str | None:
    """Returns the package that a method needs and that is not the project's own."""
    return next((package for word, package in PACKAGES.items() if word in method), None)


def tuned_as(method: str) -> str:
    """Returns the method whose learning rate this one takes: the one with the same updates."""
    if method in ("Horovod fp16", "DDP"):
        return "Horovod fp32"
    return method.removesuffix(", H by hand")


def method(name: str) -> Callable[[AnyMethod], AnyMethod]:
    def add(function: AnyMethod) -> AnyMethod:
        METHODS[name] = function
        return function

    return add


def periods(training: Training, *, by_hand: bool, multiple: int = 1) -> list[int]:
    """Returns each rank's number of steps between two merges: equal, or in proportion to the speeds."""
    case = training.case
    parts = case.parts if by_hand else [1 / len(case.parts)] * len(case.parts)
    return [max(1, round(case.period * part / multiple)) * multiple for part in parts]


def synchronous(
    training: Training,
    forward: nn.Module,
    optimizer: Any,
    *,
    horovod: bool = False,
    batches_a_step: int = 1,
    batches: Iterator[Any] | None = None,
) -> None:
    """Trains with the mean gradient of all ranks in every step. ``batches``: None: those of every other method."""
    every = PERIOD // training.case.batch // training.world_size // batches_a_step * batches_a_step
    training.start()
    while True:
        optimizer.zero_grad()
        for _ in range(batches_a_step):
            training.backward(forward, *(training.batch() if batches is None else next(batches)))
        if horovod:
            optimizer.synchronize()
        if batches_a_step > 1:
            for parameter in training.model.parameters():
                parameter.grad.div_(batches_a_step)
        training.clip()
        if horovod:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if training.num_steps % every == 0:
            # Within the time that counts: a wrapped script merges here.
            training.model.eval()
            if training.look():
                return


def horovod(
    training: Training, *, fp16: bool, batches_a_step: int = 1, batches: Callable[[], Iterator[Any]] | None = None
) -> dict[str, Any]:
    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        training.optimizer(), named_parameters=training.model.named_parameters(),
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none, backward_passes_per_step=batches_a_step,
    )  # fmt: skip
    own = None if batches is None else batches()
    synchronous(training, training.model, optimizer, horovod=True, batches_a_step=batches_a_step, batches=own)
    return {}


@method("Horovod fp32")
def horovod_fp32(training: Training) -> dict[str, Any]:
    return horovod(training, fp16=False)


@method("ours, run --strategy local")
def wrapped(training: Training) -> dict[str, Any]:
    """Plain Horovod's loop with a DataLoader, to be started by `hvd-adaptive run`, which shares out its batches."""

    def batches() -> Iterator[Any]:
        data = torch.utils.data.TensorDataset(training.train_x, training.train_y)
        sampler = torch.utils.data.DistributedSampler(data, training.world_size, training.rank, seed=training.case.seed)
        return iter(torch.utils.data.DataLoader(data, batch_size=training.case.batch, sampler=sampler))

    return horovod(training, fp16=False, batches=batches)


@method("Horovod fp16")
def horovod_fp16(training: Training) -> dict[str, Any]:
    return horovod(training, fp16=True)


@method("Horovod fp16, 4 batches a step")
def horovod_accumulated(training: Training) -> dict[str, Any]:
    """Fewer exchanges for larger steps."""
    return horovod(training, fp16=True, batches_a_step=4)


def gloo(training: Training) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{training.address}:{training.port + 1}", rank=training.rank, world_size=training.world_size,
        timeout=timedelta(seconds=120),
    )  # fmt: skip


@method("DDP")
def ddp(training: Training) -> dict[str, Any]:
    gloo(training)
    synchronous(training, nn.parallel.DistributedDataParallel(training.model), training.optimizer())
    return {}


@method("DDP, PowerSGD")
def powersgd(training: Training) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    gloo(training)
    # One bucket: over gloo the hook of two starts collectives in different orders on different ranks.
    wrapped = nn.parallel.DistributedDataParallel(training.model, bucket_cap_mb=4096)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    synchronous(training, wrapped, training.optimizer())
    return {"rank": 4}


@method("PostLocalSGD")
def post_local_sgd(training: Training, *, by_hand: bool = False) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    gloo(training)
    steps = periods(training, by_hand=by_hand)
    wrapped = nn.parallel.DistributedDataParallel(training.model)
    alone = [torch.distributed.new_group([rank]) for rank in range(training.world_size)][training.rank]
    wrapped.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=0), post_localSGD_hook)
    averager = PeriodicModelAverager(period=steps[training.rank], warmup_steps=0)
    # It would average after the first step, before anybody has learned something.
    averager.step = 1
    optimizer = PostLocalSGDOptimizer(training.optimizer(), averager)
    training.start()
    while True:
        optimizer.zero_grad()
        training.backward(wrapped, *training.batch())
        training.clip()
        optimizer.step()
        if training.num_steps % steps[training.rank] == 0 and training.look():
            return {"H": steps}


@method("PostLocalSGD, H by hand")
def post_local_sgd_by_hand(training: Training) -> dict[str, Any]:
    return post_local_sgd(training, by_hand=True)


def diloco(training: Training, *, momentum: float, fragments: int = 1, by_hand: bool = False) -> dict[str, Any]:
    """torchft's DiLoCo, whose lighthouse runs in rank 0; streaming with more fragments than one."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    own = own_address(training)
    lighthouse_port = training.port + 1
    if training.rank == 0:
        lighthouse = LighthouseServer(
            bind=f"0.0.0.0:{lighthouse_port}", min_replicas=training.world_size, join_timeout_ms=60000, quorum_tick_ms=10
        )
    training.gather(None)
    model = training.model
    optimizer = training.optimizer()
    parts: list[nn.Module] = [model]
    if fragments > 1:  # runs of layers; the tables go with the first, the last norm with the last
        layers = list(model.blocks if isinstance(model, GPT) else model)
        edges = [round(k * len(layers) / fragments) for k in range(fragments + 1)]
        parts = [nn.ModuleList(layers[a:b]) for a, b in itertools.pairwise(edges)]
        if isinstance(model, GPT):
            parts[0].extend([model.bytes, model.positions])
            parts[-1].append(model.norm)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=momentum, nesterov=True) for part in parts]
    steps = periods(training, by_hand=by_hand, multiple=fragments)
    # Of what is between two fragments, half, as for ours.
    delay = steps[training.rank] // fragments // 2 if fragments > 1 else 0
    store = torch.distributed.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=90)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), min_replica_size=training.world_size, use_async_quorum=False,
        replica_id=f"rank{training.rank}", load_state_dict=model.load_state_dict, state_dict=model.state_dict, rank=0,
        world_size=1, store_addr=own, store_port=store.port, hostname=own, lighthouse_addr=f"http://{training.address}:{lighthouse_port}",
        init_sync=False, timeout=limit, quorum_timeout=limit, connect_timeout=limit,
    )  # fmt: skip
    merged = copy.deepcopy(model)
    whole = DiLoCo(
        manager, parts, optimizer, outer, sync_every=steps[training.rank], fragment_sync_delay=delay,
        fragment_update_alpha=0.5 if fragments > 1 else 0.0, use_bucketization=True,
    )  # fmt: skip

    def load_merged() -> None:
        """Puts the global model together, whose fragments torchft holds by name within each part."""
        of = {id(own): other for own, other in zip(model.parameters(), merged.parameters(), strict=True)}
        for part, fragment in zip(parts, whole._fragments, strict=True):
            for name, parameter in part.named_parameters():
                of[id(parameter)].data.copy_(fragment.original_parameters[name])

    commits = 0
    training.start()
    with whole:
        while True:
            optimizer.zero_grad()
            training.backward(model, *training.batch())
            training.clip()
            optimizer.step()
            if manager.current_step() >= commits + fragments:
                commits += fragments
                load_merged()
                if training.look(merged):
                    break
    training.gather(None)
    manager.shutdown(wait=False)
    training.gather(None)
    if training.rank == 0:
        lighthouse.shutdown()
    return {"H": steps, "outer_momentum": momentum, "fragments": fragments, "delay": delay, "commits": commits}


for _momentum in (0.9, 0.5):
    for _hand in (False, True):
        METHODS[f"torchft DiLoCo {_momentum}{', H by hand' * _hand}"] = (
            lambda training, momentum=_momentum, hand=_hand: diloco(training, momentum=momentum, by_hand=hand)
        )
for _hand in (False, True):
    METHODS[f"torchft streaming DiLoCo 0.5{', H by hand' * _hand}"] = (
        lambda training, hand=_hand: diloco(training, momentum=0.5, fragments=2, by_hand=hand)
    )


@method("hivemind")
def hivemind_local(training: Training) -> dict[str, Any]:
    """hivemind's Optimizer with local updates: peers' parameters are averaged once all have made so many samples together.

    Its epochs are not a place where ranks meet, so rank 0 keeps what it has after each, and scores that at the end.
    """
    import hivemind

    own = own_address(training)
    dht = None
    maddrs: list[list[str]] = []
    for turn in (0, 1):
        if (training.rank > 0) == bool(turn):
            dht = hivemind.DHT(
                start=True, initial_peers=[a for found in maddrs for a in found], host_maddrs=[f"/ip4/{own}/tcp/0"],
                use_relay=False, use_auto_relay=False, use_ipfs=False,
            )  # fmt: skip
        maddrs.append(training.gather([str(a) for a in dht.get_visible_maddrs()] if dht is not None and not turn else [])[0])
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="peers", target_batch_size=PERIOD, batch_size_per_step=training.case.batch,
        params=training.model.parameters(), optimizer=training.optimizer, use_local_updates=True,
        delay_optimizer_step=False, delay_state_averaging=False,
        offload_optimizer=False, matchmaking_time=1.0, averaging_timeout=60, averager_opts={"request_timeout": 0.4},
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
    )  # fmt: skip
    kept: list[tuple[int, float, dict[str, Any]]] = []
    epoch, start = 0, 0.0
    training.start()
    start = time.perf_counter()
    samples = [0] * training.world_size
    while not training.is_over(sum(samples)):
        optimizer.zero_grad()
        training.backward(training.model, *training.batch())
        training.clip()
        optimizer.step()
        training._store.set(f"samples.{training.rank}", str(training.num_samples))
        samples = [int(training._store.get(f"samples.{rank}")) for rank in range(training.world_size)]
        if optimizer.local_epoch > epoch:
            epoch = optimizer.local_epoch
            kept.append((sum(samples), time.perf_counter() - start, copy.deepcopy(training.model.state_dict())))
    training.gather(None)
    found = training.gather([(n, s) for n, s, _ in kept])[0]
    model = copy.deepcopy(training.model)
    for number, (num_samples, seconds) in enumerate(found):
        own_state = kept[number][2] if training.rank == 0 else None
        loss = score_alone(training, model, own_state) if own_state is not None else 0.0
        training.curve.append((num_samples, seconds, training.gather(loss)[0]))
    training.gather(None)
    optimizer.shutdown()
    dht.shutdown()
    return {"target_batch_size": PERIOD}


def score_alone(training: Training, model: nn.Module, state: dict[str, Any]) -> float:
    """Returns the held-out loss over all windows on this rank."""
    model.load_state_dict(state)
    with torch.no_grad():
        return float(training.loss(model, *training.test_samples()))


def own_address(training: Training) -> str:
    """Returns the address at which the other ranks find this one."""
    if training.case.link == "loopback":
        return "127.0.0.1"
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.77.0.254", 9))
        return str(probe.getsockname()[0])


def ours(training: Training, settings: dict[str, Any]) -> dict[str, Any]:
    """A Session with nothing set but the batch size and what the docs say for slow links."""
    import hvd_adaptive

    model = training.model
    config = hvd_adaptive.Config(batch_size=training.case.batch, seed=training.case.seed, stall_limit_s=120, **settings)
    session = hvd_adaptive.Session(model, training.optimizer(), config)
    weights, shares = [], []

    def after_round(record: Any) -> None:
        weights.append([round(float(w), 3) for w in record.weight])
        shares.append([int(n) for n in record.stats["num_samples"]])
        # Shorter rounds than PERIOD, which divide the epoch, are not all looked at.
        since = record.num_samples - (training.curve[-1][0] if training.curve else 0)
        if since >= 0.9 * PERIOD and training.look():
            session.stop(agreed=True)

    session.records.append(after_round)
    data = torch.utils.data.TensorDataset(training.train_x, training.train_y)
    training.start()
    for batch in session.batches(data, num_epochs=None):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = training.backward(model, batch.x, batch.y, num_samples_before=batch.num_samples_before)
            session.synchronize()
            training.clip()
            session.optimizer.step()
    # What fragments had on the way is in the model now.
    if settings.get("merge_fragments", 1) > 1:
        training.look()
    session.close()
    return {"weights": weights[-1], "samples_of_a_round": shares[-1], "settings": settings}


for _name, _settings in OURS.items():
    METHODS[_name] = lambda training, settings=_settings: ours(training, settings)


def find(name: str) -> Method:
    """Returns a method by its name, or ours with other settings: ``ours`` and fields of Config as JSON.

    Raises:
        ValueError: there is none of this name.
    """
    if name.startswith("ours {"):
        settings = json.loads(name.removeprefix("ours "))
        return lambda training: ours(training, settings)
    if name not in METHODS:
        raise ValueError(f"a method must be one of {'; '.join(METHODS)}; or 'ours {{...}}', got {name!r}")
    return METHODS[name]


def main() -> None:
    case = Case(**json.loads(Path(sys.argv[1]).read_text()))
    address = "127.0.0.1" if case.link == "loopback" else "10.77.0.1"
    rank = read_launcher(os.environ).rank
    if case.device == "cuda":
        # NCCL refuses two ranks on one GPU of one host.
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo" if case.link == "loopback" else "eth0"}
    training = Training(case, rank=rank, address=address, port=int(sys.argv[3]))
    more = find(case.method)(training)
    training.finish(Path(sys.argv[2]), **more)
    sys.stdout.flush()
    if package_of(case.method) is not None:
        # Their threads do not end with the program.
        time.sleep(1 if training.rank == 0 else 0)
        os._exit(0)


if __name__ == "__main__":
    main()
