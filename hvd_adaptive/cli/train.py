"""``hvd-adaptive train``: from options to a trainer, with every failure agreed by all ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from hvd_adaptive.cli.early_checks import check_slowdown_early
from hvd_adaptive.cli.option_sources import run_path
from hvd_adaptive.cli.progress import Progress
from hvd_adaptive.cluster.binding import idle_nodes, num_restarts
from hvd_adaptive.cluster.device import bind_device, compute_threads, device_place
from hvd_adaptive.cluster.device_places import missing_gpus, shared_devices
from hvd_adaptive.cluster.elastic_jobs import job_name
from hvd_adaptive.cluster.host import free_memory_bytes, own_cores
from hvd_adaptive.cluster.last_checkpoint import describe_newest, resume_when_requeued
from hvd_adaptive.comm.protocols import Transport, agree_equal, attempt, from_rank_0, long_task
from hvd_adaptive.comm.shared_gpus import settle_shared_gpus
from hvd_adaptive.config import Config
from hvd_adaptive.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED
from hvd_adaptive.report.tensorboard import ScalarWriter
from hvd_adaptive.session.supervised import Supervised
from hvd_adaptive.state.preemption import PREEMPTION
from hvd_adaptive.xmc.data import SparseDataset, build, open_splits, resolve
from hvd_adaptive.xmc.run_directory import RunDirectory
from hvd_adaptive.xmc.train_config import TrainConfig
from hvd_adaptive.xmc.trainer import Trainer

log = logging.getLogger(__name__)


def train(
    config: Config,
    options: TrainConfig,
    *,
    transport: Transport,
    terminal: bool,
    predicted_speed: Callable[..., float | None] | None = None,
    supervised: Supervised | None = None,
) -> int:
    """Runs a training; returns the exit code: 75 for one that was preempted, 130 for one that Ctrl-C ended, else 0. COLLECTIVE.

    Args:
        config: how ranks share and merge.
        options: what to train.
        transport: the world.
        terminal: rank 0's output goes to a terminal.
        predicted_speed: gets ``num_samples`` and ``model_bytes``; returns the samples a second that ``calibrate`` predicted, to
            be shown beside what happened.
        supervised: what the supervisor of ``--elastic`` asks for, None where there is none.

    Raises:
        AgreedError: on all ranks, for bad input on any.
    """
    path = run_path(config, options)
    if transport.rank == 0 and options.checkpoint_interval != 0:
        # A run that goes on has saved something before this process did.
        PREEMPTION.saved = PREEMPTION.saved_at_first = lambda: describe_newest(path / "checkpoints")
    # Whether Slurm has requeued this job: mpirun passes on only some variables.
    is_restarted = bool(options.out) and from_rank_0(transport, lambda: num_restarts(os.environ)) > 0
    if is_restarted and options.resume != "auto":
        # One rank looks, as another may see an old state of a shared folder.
        resume = from_rank_0(transport, lambda: resume_when_requeued(options.resume, options.out))
        options = dataclasses.replace(options, resume=resume)
        if transport.rank == 0:
            log.info("Slurm has started this job again: --resume %s", resume)
    agree_equal(
        transport,
        {**dataclasses.asdict(options), **dataclasses.asdict(config)},
        "Start every rank with the same options and the same HVD_ADAPTIVE_* variables.",
    )
    hosts = transport.allgather_object(transport.host)
    device = use_device(options.device, transport, threads=config.compute_threads)
    if (config.logical_ranks or config.repeatable) and device.type == "cuda":
        # Before the first use of cuBLAS, which reads the variable then.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    splits = open_data(options.data, options.test_data, options.cache_dir, transport)
    check_memory(options, splits[0], device, transport)
    sizes = {"num_samples": len(splits[0]), "model_bytes": _model_bytes(options, splits[0])}
    predicted = attempt(transport, lambda: predicted_speed(**sizes) if predicted_speed else None)
    attempt(transport, lambda: check_slowdown_early(config.slowdown, transport.world_size))
    make_directory = attempt(
        transport,
        lambda: _run_directory(path, config, options, supervised, is_restarted=is_restarted) if transport.rank == 0 else None,
    )
    if transport.rank == 0 and (warning := idle_nodes(os.environ, len(set(hosts)))):
        log.warning(warning)
    progress = (
        Progress(splits, config, transport.world_size, carrier=transport.describe()["carrier"], terminal=terminal)
        if transport.rank == 0
        else None
    )
    if progress:
        progress.start(path)
    trainer = Trainer(
        config,
        options,
        splits,
        device=device,
        transport=transport,
        make_directory=make_directory,
        supervised=supervised,
        predicted_samples_per_s=predicted,
        show_progress=progress.show if progress else None,
    )
    directory = trainer.directory
    # Only now: a refused resume leaves the run as it was.
    attempt(transport, lambda: directory.write_config(config, recorded(options)) if directory else None)
    try:
        summary = trainer.run()
    finally:
        if progress:
            progress.stop()
    if summary is None:
        if trainer.preempted == signal.SIGINT:
            return EXIT_INTERRUPTED
        # Without checkpoints it would only begin again if it were started again.
        return EXIT_PREEMPTED if options.checkpoint_interval != 0 else 1
    if progress and directory:
        progress.finish(summary, directory.path)
    return 0


def use_device(option: str, transport: Transport, *, threads: int | None = None) -> torch.device:
    """Chooses this rank's device and computing threads. COLLECTIVE.

    Args:
        option: as for :func:`bind_device`.
        transport: the world.
        threads: None: OMP_NUM_THREADS, else this rank's share of its host's cores.

    Raises:
        AgreedError: on all ranks, if one has no such device, or some share one beside an idle one.
    """
    device = attempt(
        transport,
        lambda: bind_device(option, local_rank=transport.local_rank, local_size=transport.local_size),
    )
    devices = transport.allgather_object(device_place(device, option, transport.host))
    attempt(transport, lambda: shared_devices(devices))
    if transport.rank == 0 and (warning := missing_gpus(devices)):
        log.warning(warning)
    settle_shared_gpus(transport, device)
    places = transport.allgather_object((transport.host, own_cores()))
    threads = threads or compute_threads(places, transport.rank)
    torch.set_num_threads(threads)
    return device


def open_data(
    data: str | None, test_data: str | None, cache_dir: str | None, transport: Transport
) -> tuple[SparseDataset, SparseDataset]:
    """Opens both splits; one rank a host builds the cache. COLLECTIVE.

    Raises:
        AgreedError: on all ranks, if the data cannot be read on one of them, or differ.
    """
    cache = Path(cache_dir) if cache_dir else None
    source = attempt(transport, lambda: resolve(data, test_data))
    with long_task(transport, "building the data cache"):
        attempt(transport, lambda: build(source, cache) if transport.local_rank == 0 else None)
    splits = attempt(transport, lambda: open_splits(source, cache))
    agree_equal(
        transport,
        {
            "fingerprint of the training data": splits[0].fingerprint,
            "fingerprint of the test data": splits[1].fingerprint,
        },
        "Give every host the same files.",
    )
    return splits


def _model_bytes(options: TrainConfig, data: SparseDataset) -> int:
    return 4 * options.hidden_size * (data.num_features + data.num_labels)  # no bias


def check_memory(options: TrainConfig, data: SparseDataset, device: torch.device, transport: Transport) -> None:
    """Raises AgreedError if the model's weights alone are more than the memory that is free. COLLECTIVE."""
    size, num_bytes = options.hidden_size, _model_bytes(options, data)
    on_gpu = device.type == "cuda"
    own = attempt(transport, lambda: torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory_bytes())
    # What is free changes from one look to the next: ranks of one place say the same.
    place = (transport.host, str(device))
    found = [free for *its, free in transport.allgather_object((*place, own)) if tuple(its) == place and free is not None]

    def check() -> None:
        if found and num_bytes * (1 if on_gpu else transport.local_size) > min(found):
            where = device if on_gpu else f"host {transport.host}, which has {transport.local_size} rank(s)"
            raise ValueError(
                f"hidden_size {size}: a rank's weights alone take {num_bytes:,} bytes, and {min(found):,} are free on {where}; "
                "take a smaller hidden_size"
            )

    attempt(transport, check)


def _run_directory(
    path: Path, config: Config, options: TrainConfig, supervised: Supervised | None, *, is_restarted: bool
) -> Callable[[], RunDirectory]:
    """Tries whether the run directory can be made, leaves none behind, and returns what makes it."""
    # A missing package must be found before the folder is made.
    sinks = [ScalarWriter(path / "tensorboard")] if options.tensorboard else []
    # The folder of a job's earlier launches and starts is this one's.
    resume = is_restarted or bool(supervised and supervised.launch > 1) or (
        options.resume is not None and (options.resume == "auto" or _is_run_of(Path(options.resume), path))
    )
    RunDirectory(path, resume=resume).abandon()
    # Each launch is a job of its own, whose name says whose launch it is.
    job = f"{job_name(supervised.memory)}/{supervised.launch}" if supervised and supervised.memory else None
    return lambda: RunDirectory(path, resume=resume, sinks=sinks, job=job)


def _is_run_of(source: Path, path: Path) -> bool:
    """Whether a checkpoint, a folder of them or a run directory belongs to the run in ``path``."""
    return path.resolve() in (source.resolve(), *source.resolve().parents)


def recorded(options: TrainConfig) -> TrainConfig:
    """Returns the options as config.json records them, so that evaluate and predict find the data from any folder."""
    if options.cache_dir:
        options = dataclasses.replace(options, cache_dir=os.path.abspath(options.cache_dir))
    if options.data and not resolve(options.data, options.test_data).is_embedded:
        test_data = os.path.abspath(options.test_data) if options.test_data else None
        options = dataclasses.replace(options, data=os.path.abspath(options.data), test_data=test_data)
    return options
