"""``--elastic`` of ``train`` and ``run``: from options to a supervised job."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from hvd_adaptive.cli.arguments import NUM_RANKS, without_options
from hvd_adaptive.cli.option_sources import run_path
from hvd_adaptive.cluster.binding import num_restarts
from hvd_adaptive.cluster.elastic_jobs import ScriptJob, TrainJob, job_name
from hvd_adaptive.cluster.last_checkpoint import resume_when_requeued
from hvd_adaptive.cluster.supervisor import Elastic, Supervisor
from hvd_adaptive.combinations import check_elastic, check_elastic_script
from hvd_adaptive.config import Config
from hvd_adaptive.state.folder_owner import FolderOwner
from hvd_adaptive.xmc.train_config import TrainConfig

_ONLY_ELASTIC = ("min_np", "max_np", "host_discovery_script", "elastic_timeout")
_OPTIONS = (*NUM_RANKS, "--min-np", "--max-np", "--host-discovery-script", "--elastic-timeout")


def check_only_elastic(options: argparse.Namespace) -> None:
    """Raises ValueError for options that need ``--elastic``, where it is not given."""
    # Ranks of an elastic job have the folder, too.
    names = _ONLY_ELASTIC if options.launch is not None else (*_ONLY_ELASTIC, "commit_dir")
    given = [name for name in names if getattr(options, name, None) is not None]
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} is for --elastic: give that too, or leave it out")


def supervise_training(options: argparse.Namespace, arguments: Sequence[str], configs: tuple[Config, TrainConfig]) -> int:
    """Runs a training under a supervisor; returns its exit code.

    Raises:
        ValueError: for bad options.
        RuntimeError: if ranks cannot be started from here.
    """
    config, train = configs
    limits = _limits(options)
    check_elastic(config)
    if train.checkpoint_interval == 0:
        raise ValueError("--elastic goes on from the disk where ranks are on several hosts: leave --checkpoint-interval 0 out")
    path = run_path(config, train).absolute()
    resume = resume_when_requeued(train.resume, train.out) if num_restarts(os.environ) else train.resume
    argv = without_options(arguments, (*_OPTIONS, "--out", "--resume"), flags=("--elastic",))
    if config.reference_ranks is None and config.logical_ranks is None:
        argv += ["--reference-ranks", str(limits.max_np)]
    return Supervisor(limits, lambda memory: TrainJob(argv, path, resume, memory)).run()


def supervise_script(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs a script under a supervisor; returns its exit code.

    Raises:
        ValueError: for bad options.
        RuntimeError: if ranks cannot be started from here.
    """
    from hvd_adaptive.cli.run import run_config

    limits = _limits(options)
    check_elastic_script(run_config(options))
    # What follows the script is the script's.
    first = len(arguments) - len(options.arguments) - 1
    argv = without_options(arguments[1:first], (*_OPTIONS, "--commit-dir"), flags=("--elastic",))
    folder = None if options.commit_dir is None else Path(options.commit_dir).expanduser().absolute()

    def make_job(memory: Path) -> ScriptJob:
        if folder is None:
            return ScriptJob(argv, arguments[first:], None, memory)
        owner = FolderOwner(folder, socket.gethostname(), job=job_name(memory))
        return ScriptJob(argv, arguments[first:], folder, memory, owner.other)

    return Supervisor(limits, make_job).run()


def _limits(options: argparse.Namespace) -> Elastic:
    if options.num_ranks is not None and options.max_np is not None:
        raise ValueError(f"-np {options.num_ranks} is --max-np with --elastic, which is given as {options.max_np}: leave -np out")
    most = options.max_np if options.max_np is not None else options.num_ranks
    if most is None:
        raise ValueError("--elastic needs --max-np: the largest number of ranks")
    return Elastic(
        min_np=1 if options.min_np is None else options.min_np,
        max_np=most,
        script=options.host_discovery_script,
        timeout_s=600.0 if options.elastic_timeout is None else options.elastic_timeout,
    )
