"""``hvd-adaptive calibrate``: measures ranks, link and merges, and writes the options that fit them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_adaptive import __version__
from hvd_adaptive.calibrate.calibrator import Calibrator
from hvd_adaptive.calibrate.choices import table
from hvd_adaptive.calibrate.file import LOCAL_ONLY, Calibration, write_file
from hvd_adaptive.calibrate.memory_ceiling import limit_bytes
from hvd_adaptive.calibrate.recommend import Recommendation
from hvd_adaptive.cli.arguments import check_writable
from hvd_adaptive.cli.train import check_memory, open_data, use_device
from hvd_adaptive.cluster.host import free_memory_bytes
from hvd_adaptive.comm.protocols import AgreedError, Transport, agree_equal, attempt
from hvd_adaptive.config import Config
from hvd_adaptive.xmc.train_config import TrainConfig

# Options of one run, which another one shall not take over.
_NOT_KEPT = ("out", "resume", "record", "replay", "calibration")


def calibrate(
    config: Config, train: TrainConfig, given: Mapping[str, Any], out: str, seconds: float, transport: Transport
) -> None:
    """Measures, writes the file on rank 0, and prints what is recommended. COLLECTIVE.

    Args:
        config: how ranks share and merge.
        train: model and data.
        given: the options of the command line and its file, by name; what variables said is not written.
        out: the file.
        seconds: how long rounds of each kind are measured at least.
        transport: the world.

    Raises:
        AgreedError: on all ranks, for bad input on any.
    """
    agree_equal(
        transport,
        {**dataclasses.asdict(train), **dataclasses.asdict(config), "seconds": seconds},
        "Start every rank with the same options and the same HVD_ADAPTIVE_* variables.",
    )
    if transport.backend == "torch":
        raise AgreedError(
            "calibrate measures plain Horovod as well: start it by -np, mpirun, horovodrun or srun, without backend 'torch'"
        )
    device = use_device(train.device, transport, threads=config.compute_threads)
    data, _ = open_data(train.data, train.test_data, train.cache_dir, transport)
    # Of the rounds only what is wrong is news.
    logging.getLogger("hvd_adaptive").setLevel(logging.WARNING)
    path = Path(out)
    check_memory(train, data, device, transport)
    # Before minutes of measuring.
    attempt(transport, lambda: check_writable("--out", path) if transport.rank == 0 else None)
    memory_bytes = limit_bytes(free_memory_bytes(), transport.local_size)
    calibrator = attempt(
        transport,
        lambda: Calibrator(
            config,
            train,
            data,
            device=device,
            transport=transport,
            memory_bytes=memory_bytes,
            least_s=seconds,
            given=set(given),
            say=lambda line: print(f"measuring {line} ...", flush=True),
        ),
    )
    chosen, found = calibrator.run()
    found = dataclasses.replace(found, versions={"hvd_adaptive": __version__, **found.versions})
    options = {name: value for name, value in given.items() if name not in _NOT_KEPT}
    for name in ("data", "test_data"):
        if options.get(name) and Path(options[name]).parent.exists():
            options[name] = str(Path(options[name]).absolute())
    options |= {
        "batch_size": chosen.batch_size,
        "min_batch_size": chosen.min_batch_size,
        "max_batch_size": chosen.max_batch_size,
        "mega_batch": chosen.mega_batch,
    }
    if chosen.micro_batch_size is not None:
        options["micro_batch_size"] = chosen.micro_batch_size
    if chosen.batch_size != config.batch_size:
        options["reference_batch_size"] = config.reference_batch_size or config.batch_size
    comment = f"hvd-adaptive calibrate, {found.created}: {len(found.ranks)} ranks on {found.link.num_hosts} host(s)"
    attempt(transport, lambda: write_file(path, options, found, comment=comment) if transport.rank == 0 else None)
    if transport.rank == 0:
        print(describe(chosen, found, path))
    transport.close()


def bounds(chosen: Recommendation, found: Calibration) -> dict[str, int]:
    """Returns the bounds of the batch sizes that the chosen strategy keeps to: ``sync`` to those that were given."""
    names = LOCAL_ONLY if found.predicted.strategy == "local" else found.bounds
    return {name: getattr(chosen, name) for name in names}


def describe(chosen: Recommendation, found: Calibration, path: Path) -> str:
    """Returns what people should know of a calibration, in lines of at most 100 columns but for notes."""
    lines = ["", f"{'rank':>4}  {'host':<16} {'device':<20} {'step':>9} {'a sample':>9} {'fit':>6} {'together':>8}  memory"]
    for rank, one in enumerate(found.ranks):
        sample_s = one.per_work_s * found.work_per_sample
        lines.append(
            f"{rank:>4}  {one.host[:16]:<16} {one.device[:20]:<20} {1e6 * one.fixed_s:>6.0f} us {1e6 * sample_s:>6.1f} us "
            f"{one.fit_error:>5.1%} {one.together:>8.2f}  {one.memory}"
        )
    merge, link, best = found.merge, found.link, found.predicted
    lines += [
        "",
        f"claim {1e6 * found.claim_s:.0f} us; allreduce {1e3 * link.latency_s:.2g} ms + "
        f"{1e3 * link.per_byte_s * 2**20:.2g} ms a MiB; merge of {merge.payload_bytes[-1] / 2**20:.3g} MiB "
        f"{1e3 * merge.merge_s[-1]:.3g} ms every {merge.round_s[-1]:.3g} s",
        "",
        *table(found.choices, best),
        "",
        f"recommended: strategy {best.strategy}, compression {best.compression}, merge_fragments {best.merge_fragments}, "
        f"micro_batch_size {best.micro_batch_size or 'none'},",
        f"             batch_size {chosen.batch_size}, "
        + "".join(f"{name} {bound}, " for name, bound in bounds(chosen, found).items())
        + f"mega_batch {chosen.mega_batch}",
        f"predicted:   {best.samples_per_s:,.0f} samples/s over all ranks",
        *(f"note:        {note}" for note in chosen.notes),
        f"written:     {path}; hvd-adaptive train -np {len(found.ranks)} --config {path}",
    ]
    return "\n".join(lines)
