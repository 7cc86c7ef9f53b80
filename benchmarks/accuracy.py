"""What encoding costs in accuracy: strategies sync and local with codecs, beside plain Horovod and PyTorch DDP.

    mpirun -np 2 python benchmarks/accuracy.py run --out DIR [--task digits] [--seeds 0,1,2] [--only REGEX] [--limit-s 300]
    mpirun -np 2 python benchmarks/accuracy.py run --out TUNING --lr-factors 0.5,1,2,4 --seeds 7    tunes each method
    python benchmarks/over_link.py --rate 1gbit -- python benchmarks/accuracy.py run --out DIR --link "1 Gbit/s" --tuned TUNING
    python benchmarks/accuracy.py record --out DIR [--record FILE]    a Markdown record of all that is in DIR

Every run writes a file; runs that are in DIR already are not repeated, so that it can be run in pieces. One that diverges ends
the job: start it again for the rest. All methods of a task take the same data, model and batches, and the same learning rate, but
for strategy local, whose steps are others; with --tuned each takes that of TUNING with which it was at the target first.

digits: a CNN of 1.1 million parameters on scikit-learn's digits; transformer: a small one on the same. embedded: the model and
data of `hvd-adaptive train`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recording import header, publish
from tasks import TASKS, Task
from torch import nn

from hvd_adaptive.algorithm.ledger import epoch_order
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import BatchSource
from hvd_adaptive.session.session import Session

CODECS = (
    *("none", "fp16", "maxmin:8", "maxmin:4", "maxmin:2", "maxmin:2,nearest", "maxmin:1", "normal:2"),
    *("topk:0.01", "powersgd:4"),
)
# Without error feedback as well. 8 bits and fp16 lose too little to show a difference.
BARE = ("maxmin:4", "maxmin:2", "normal:2", "topk:0.01", "powersgd:4")
PEERS = ("horovod-fp32", "horovod-fp16", "ddp-fp32", "ddp-powersgd:4")
ONE_HOST = "one host"
COLUMNS = ("method", "lr factor", "seeds", "accuracy", "range", "against none, seed by seed", "MB encoded a rank")
TIME_COLUMNS = (
    *("method", "lr factor", "seeds", "s to target: median (range)", "times sooner: median (range)", "never there"),
    "MB encoded a rank",
)


def methods() -> Iterator[str]:
    """All methods: STRATEGY CODEC [bare], or a peer."""
    for strategy in ("sync", "local"):
        for codec in CODECS:
            yield f"{strategy} {codec}"
            if codec in BARE:
                yield f"{strategy} {codec} bare"
    yield from PEERS


def run_all(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    transport = connect(stall_limit_s=300)
    begin = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    tasks: dict[str, Task] = {}
    tuned = best_factors(read_results(options.tuned)) if options.tuned else {}
    for seed in (int(seed) for seed in options.seeds.split(",")):
        for name in options.task.split(","):
            for method, factor in ((m, f) for m in methods() for f in tuned.get((name, m), options.lr_factors)):
                path = options.out / f"{name}.{method.replace(' ', '_').replace(':', '-')}.{factor:g}.{seed}.json"
                wanted = re.search(options.only, method) and not path.exists()
                late = options.limit_s and time.perf_counter() - begin > options.limit_s
                # Rank 0 decides: clocks and folders differ.
                wanted, late = transport.allgather_object((bool(wanted), bool(late)))[0]
                if late:
                    transport.close()
                    return
                if not wanted:
                    continue
                if name not in tasks:
                    if transport.local_rank == 0:
                        tasks[name] = TASKS[name]()
                    transport.rendezvous("data")
                    tasks.setdefault(name, TASKS[name]())
                task = tasks[name]
                epochs = options.epochs or task.epochs
                task = replace(task, epochs=epochs, lr=factor * task.lr, local_lr=factor * task.local_lr)
                result = run(task, method, seed, transport, options.until)
                if transport.rank == 0:
                    about = {"task": name, "method": method, "seed": seed, "link": options.link, "epochs": epochs}
                    path.write_text(json.dumps({**about, "lr_factor": factor, "until": options.until, **result}))
                    best = max(score for _, _, score in result["curve"])
                    print(
                        f"{name} {method} seed {seed}: {result['curve'][-1][2]:.4f} (best {best:.4f}) in "
                        f"{result['train_s']:.1f} s, {result['payload_bytes'] / 1e6:.1f} MB encoded",
                        flush=True,
                    )
                if result.get("diverged"):
                    # Its round was left half way, and its claims with it: the next run needs a new job.
                    transport.close()
                    return
    transport.close()


def run(task: Task, method: str, seed: int, transport: Transport, until: float) -> dict[str, Any]:
    """Trains once, up to a score; returns the curve as (seconds, epochs, score), with evaluation excluded from the seconds."""
    torch.manual_seed(seed)
    if method in PEERS:
        return run_peer(task, method, seed, transport, until)
    strategy, codec, *bare = method.split()
    model = task.make_model(True)
    if strategy == "sync":
        steps_of_round = max(1, int(len(task.train) * task.epochs / task.evaluations / task.global_batch))
        settings = {
            "global_batch_size": task.global_batch, "mega_batch": steps_of_round * task.global_batch,
            "batch_size": task.global_batch // transport.world_size, "batch_size_rule": "fixed",
        }  # fmt: skip
        lr = task.lr
    else:
        settings, lr = task.local, task.local_lr
    config = Config(
        strategy=strategy, compression=codec, error_feedback=not bare, seed=seed, hash_interval=10, stall_limit_s=300,
        **({"sparse_merge": "never"} if strategy == "local" else {}), **settings,
    )  # fmt: skip
    momentum = task.momentum if strategy == "sync" else 0.0
    session = Session(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), config, transport=transport)
    curve: list[tuple[float, float, float]] = []
    payload_bytes = 0

    def after_round(record: Any) -> None:
        nonlocal payload_bytes
        payload_bytes += record.payload_bytes
        last = curve[-1][1] if curve else 0.0
        if record.epoch - last >= task.epochs / task.evaluations or record.epoch >= task.epochs - 1e-9:
            curve.append((record.train_s, record.epoch, task.score(model)))
            if curve[-1][2] >= until:
                session.stop(agreed=True)

    session.records.append(after_round)
    diverged = False
    try:
        for batch in session.batches(task.train, num_epochs=task.epochs):
            with session.step(batch):
                session.optimizer.zero_grad()
                task.loss(model(batch.x), batch.y).backward()
                session.optimizer.step()
    except AgreedError as error:
        if "diverged" not in str(error):
            raise
        diverged = True
        curve.append((session.train_s, task.epochs, 0.0))
    # Not session.close(): the next run needs the ranks.
    session._hooks.remove()
    return {
        "curve": curve, "train_s": session.train_s, "payload_bytes": payload_bytes, "num_steps": session.round,
        "diverged": diverged,
    }  # fmt: skip


def run_peer(task: Task, method: str, seed: int, transport: Transport, until: float) -> dict[str, Any]:
    """Plain data parallelism with equal batches: Horovod's own optimizer, or DDP over gloo."""
    kind, _, how = method.partition("-")
    # DDP's hook takes dense gradients only.
    model = task.make_model(kind == "horovod")
    transport.broadcast_([p.detach() for p in model.parameters()])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    wrapped = model
    if kind == "horovod":
        import horovod.torch as hvd

        compression = hvd.Compression.fp16 if how == "fp16" else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    else:
        wrapped = ddp(model, how, transport)
    source = BatchSource(task.train, torch.device("cpu"), None)
    share = task.global_batch // transport.world_size
    curve: list[tuple[float, float, float]] = []
    train_s, num_samples, num_steps = 0.0, 0, 0
    for epoch in range(int(np.ceil(task.epochs))):
        order = epoch_order(len(source), seed=seed, epoch=epoch)
        for first in range(0, len(order), task.global_batch):
            rows = np.resize(order[first : first + task.global_batch], task.global_batch)
            begin = time.perf_counter()
            batch = source.load(rows[transport.rank * share : (transport.rank + 1) * share], share)
            optimizer.zero_grad()
            task.loss(wrapped(batch.x), batch.y).backward()
            optimizer.step()
            train_s += time.perf_counter() - begin
            num_samples += len(order[first : first + task.global_batch])
            num_steps += 1
            epochs, last = num_samples / len(order), curve[-1][1] if curve else 0.0
            if epochs - last >= task.epochs / task.evaluations - 1e-9 or num_samples >= task.epochs * len(order):
                curve.append((max(transport.allgather_object(train_s)), epochs, task.score(model)))
                if curve[-1][2] >= until:
                    break
        if curve and curve[-1][2] >= until:
            break
    return {"curve": curve, "train_s": curve[-1][0], "payload_bytes": 0, "num_steps": num_steps}


def ddp(model: nn.Module, how: str, transport: Transport) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    if not dist.is_initialized():
        hosts = transport.allgather_object(transport.host)
        host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
        port = transport.allgather_object(_free_port() if transport.rank == 0 else 0)[0]
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=transport.rank, world_size=transport.world_size)
    if not how.startswith("powersgd"):
        return nn.parallel.DistributedDataParallel(model)
    # One bucket: over gloo the hook starts collectives from callbacks on two threads, so with two buckets their order differs
    # between ranks, which then take one another's: "collective mismatch", or a wait for ever.
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4096)
    # From the first steps on, as ours; its own default begins after 1000.
    rank = int(how.partition(":")[2])
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def read_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def best_factors(results: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float]]:
    """Returns each method's factor on the learning rate by task and method: the one that needs fewest epochs to the target.

    The target is 99% of the best that plain Horovod ends with. Of equals the one that ends higher.
    """
    found = {}
    for task in {result["task"] for result in results}:
        runs = [result for result in results if result["task"] == task]
        target = 0.99 * max(run["curve"][-1][2] for run in runs if run["method"] == "horovod-fp32")

        def cost(run: dict[str, Any], target: float = target) -> tuple[float, float]:
            epochs = next((epoch for _, epoch, score in run["curve"] if score >= target), float("inf"))
            return (epochs if not run.get("diverged") else float("inf")), -run["curve"][-1][2]

        for method in {run["method"] for run in runs}:
            best = min((run for run in runs if run["method"] == method), key=cost)
            found[task, method] = (best["lr_factor"],)
    return found


def record(options: argparse.Namespace) -> None:
    results = read_results(options.out)
    lines = [
        *header(
            "Accuracy of encoded exchanges",
            "Two ranks. Before: `mpirun -np 2 python benchmarks/accuracy.py run --out DIR --seeds 0,1,2`.",
        ),
        "Accuracy: P@1 (embedded) or the share of digits that are right, at the end, mean over seeds and their range. Codecs",
        "that lose something have error feedback where no line says otherwise. Over a link: seconds of training, evaluation",
        "excluded, to the target under the table, and how many times sooner that is than plain Horovod's in fp32, seed by seed.",
    ]
    runs = [result for result in results if "curve" in result]
    for task, link in dict.fromkeys((result["task"], result["link"]) for result in runs):
        lines += ["", *table(task, link, [r for r in runs if (r["task"], r["link"]) == (task, link)])]
    publish(lines, options.record)


def table(task: str, link: str, runs: list[dict[str, Any]]) -> list[str]:
    # By method and, where a method has several, by factor on its learning rate.
    by_method = {
        (method, factor): sorted((r for r in runs if (r["method"], r["lr_factor"]) == (method, factor)), key=lambda r: r["seed"])
        for method in methods()
        for factor in sorted({r["lr_factor"] for r in runs if r["method"] == method})
    }
    plain = next((found for (method, _), found in by_method.items() if method == "horovod-fp32"), [])
    target = min(r["until"] for r in runs)
    if target == float("inf"):
        target = 0.99 * statistics.mean(r["curve"][-1][2] for r in plain) if plain else 1.0
    columns = COLUMNS if link == ONE_HOST else TIME_COLUMNS
    epochs = "/".join(f"{e:g}" for e in sorted({r["epochs"] for r in runs}))
    lines = [f"## {task}, {link}, epochs: {epochs}", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for (method, factor), found in by_method.items():
        cells = [method.replace(" bare", ", no error feedback"), f"{factor:g}", str(len(found))]
        encoded = statistics.mean(r["payload_bytes"] for r in found) / 1e6
        if link == ONE_HOST:
            finals = [r["curve"][-1][2] for r in found]
            base = {r["seed"]: r["curve"][-1][2] for r in by_method.get((f"{method.split()[0]} none", factor), [])}
            pairs = [r["curve"][-1][2] - base[r["seed"]] for r in found if r["seed"] in base]
            diverged = any(r.get("diverged") for r in found)
            compared = " " in method and not method.endswith(" none") and not diverged
            cells += [
                "diverged" if diverged else f"{statistics.mean(finals):.4f}",
                "" if diverged else f"{min(finals):.4f} to {max(finals):.4f}",
                ", ".join(f"{p:+.4f}" for p in pairs) if compared else "",
                f"{encoded:.1f}" if encoded else "",
            ]
        else:
            times, plain_times = (_times_to(those, target) for those in (found, plain))
            sooner = [plain_times[seed] / times[seed] for seed in times if seed in plain_times]
            cells += [
                _median_and_range(list(times.values()), 1),
                _median_and_range(sooner, 2),
                str(len(found) - len(times)),
                f"{encoded:.1f}" if encoded else "",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines if link == ONE_HOST else [*lines, "", f"Target: {target:.4f}."]


def _median_and_range(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})" if values else ""


def _times_to(runs: list[dict[str, Any]], target: float) -> dict[int, float]:
    """Seconds to a score by seed, of the runs that got there."""
    reached = {run["seed"]: next((s for s, _, score in run["curve"] if score >= target), None) for run in runs}
    return {seed: seconds for seed, seconds in reached.items() if seconds is not None}


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("run", "record"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="digits,embedded")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default="", help="only methods that this expression finds")
    parser.add_argument("--limit-s", type=float, help="begin no run after so many seconds")
    parser.add_argument("--epochs", type=float, help="instead of the task's own: 12, embedded 2")
    parser.add_argument("--lr-factors", type=_floats, default=(1.0,), help="times the task's learning rates, a run with each")
    parser.add_argument("--tuned", type=Path, help="take the best of the factors in this DIR for each method in it")
    parser.add_argument("--until", type=float, default=float("inf"), help="end a run at this score")
    parser.add_argument("--link", default=ONE_HOST, help="what the record calls the link, with times; keep another DIR for each")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    {"run": run_all, "record": record}[options.stage](options)


if __name__ == "__main__":
    main()
