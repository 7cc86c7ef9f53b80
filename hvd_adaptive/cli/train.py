"""``hvd-adaptive train``: from options to a trainer, with every failure agreed by all ranks."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from hvd_adaptive.cli.progress import Progress
from hvd_adaptive.config import Config, TrainConfig
from hvd_adaptive.data import SparseDataset, build, open_splits, resolve
from hvd_adaptive.launch.binding import num_threads, requested_threads, shared_devices
from hvd_adaptive.launch.device import bind_device, device_place
from hvd_adaptive.train.compressed import check_compression
from hvd_adaptive.train.run_directory import RunDirectory
from hvd_adaptive.train.trainer import Trainer
from hvd_adaptive.transport.base import Transport, agree, agree_equal, long_task

log = logging.getLogger(__name__)
Result = TypeVar("Result")


def train(config: Config, options: TrainConfig, *, transport: Transport, terminal: bool) -> None:
    """Runs a training. COLLECTIVE.

    Args:
        config: how ranks share and merge.
        options: what to train.
        transport: the world.
        terminal: rank 0's output goes to a terminal.

    Raises:
        AgreedError: on all ranks, for bad input on any.
    """
    agree_equal(
        transport,
        {**dataclasses.asdict(options), **dataclasses.asdict(config)},
        "Start every rank with the same options and the same HVD_ADAPTIVE_* variables.",
    )
    device = use_device(options.device, transport, threads=config.compute_threads)
    if (config.logical_ranks or config.repeatable) and device.type == "cuda":
        # Before the first use of cuBLAS, which reads the variable then.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    splits = open_data(options.data, options.test_data, options.cache_dir, transport)
    attempt(transport, lambda: _check_slowdown(config, transport.world_size))
    attempt(transport, lambda: check_compression(config))
    directory = attempt(
        transport, lambda: _make_run_directory(config, options) if transport.rank == 0 else None
    )
    progress = (
        Progress(splits, config, transport.world_size, terminal=terminal) if transport.rank == 0 else None
    )
    if progress and directory:
        progress.start(directory.path)
    trainer = Trainer(
        config,
        options,
        splits,
        device=device,
        transport=transport,
        run_directory=directory,
        show_progress=progress.show if progress else None,
    )
    if options.resume is not None:
        # Only now: a refused resume leaves the run as it was.
        attempt(transport, lambda: directory.write_config(config, recorded(options)) if directory else None)
    summary = trainer.run()
    if progress and directory:
        progress.finish(summary, directory.path)


def attempt(transport: Transport, action: Callable[[], Result]) -> Result:
    """Runs an action that may find bad input on some ranks only; all ranks raise if one does. COLLECTIVE.

    Raises:
        AgreedError: on all ranks, with the messages.
    """
    result, error = None, None
    try:
        result = action()
    except (ValueError, RuntimeError, OSError) as failure:
        error = str(failure)
    agree(transport, error)
    return result  # type: ignore[return-value]


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
    places = transport.allgather_object(device_place(device, option, transport.host))
    warning = attempt(transport, lambda: shared_devices(places))
    if warning and transport.rank == 0:
        log.warning(warning)
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    neighbours = [
        where for host, where in transport.allgather_object((transport.host, cores)) if host == transport.host
    ]
    threads = threads or requested_threads(os.environ) or num_threads(neighbours, transport.local_rank)
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


def _check_slowdown(config: Config, world_size: int) -> None:
    from hvd_adaptive.train.emulation import Slowdown

    Slowdown(config.slowdown, world_size=world_size)


def _make_run_directory(config: Config, options: TrainConfig) -> RunDirectory:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(options.out) if options.out else Path("runs") / f"{options.name or config.strategy}-{stamp}"
    if options.resume is None:
        directory = RunDirectory(path)
        directory.write_config(config, recorded(options))
        return directory
    return RunDirectory(path, resume=options.resume == "auto" or _is_run_of(Path(options.resume), path))


def _is_run_of(source: Path, path: Path) -> bool:
    """Whether a checkpoint, a folder of them or a run directory belongs to the run in ``path``."""
    return path.resolve() in (source.resolve(), *source.resolve().parents)


def recorded(options: TrainConfig) -> TrainConfig:
    """Returns the options as config.json records them, so that evaluate and predict find the data from any folder."""
    if options.data and not resolve(options.data, options.test_data).is_embedded:
        test_data = os.path.abspath(options.test_data) if options.test_data else None
        options = dataclasses.replace(options, data=os.path.abspath(options.data), test_data=test_data)
    return options
