"""A Slurm for the tests of this folder, started once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign import write_data
from jobs import MARK
from needs import need_root_and, skip_or_fail
from slurm_site import SlurmSite
from two_hosts import TwoHosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Two hosts with a 1 Gbit/s link."""
    need_root_and(ip="iproute2", tc="iproute2", unshare="util-linux", hostname="hostname")
    two = TwoHosts(tmp_path_factory.mktemp("hosts"))
    yield two
    two.close()


@pytest.fixture(scope="session")
def slurm(hosts: TwoHosts) -> Iterator[SlurmSite]:
    """Slurm on these hosts."""
    need_root_and(munged="munge", slurmctld="slurm-wlm", slurmd="slurm-wlm", srun="slurm-wlm")
    site = SlurmSite(hosts)
    yield site
    site.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small learnable data set in the XMC format."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture
def run_in_slurm(run_job: Any, slurm: SlurmSite) -> Iterator[Callable[..., Any]]:
    """Runs one of Slurm's commands; brings back nodes that the test has lost.

    With `leaves_job` what the command has submitted may go on. Else `run_job` ends all that carries its mark, and a job
    inherits that from sbatch.
    """

    def run(*argv: str, leaves_job: bool = False, **options: Any) -> Any:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**slurm.environment, "PATH": path, "VENV": sys.prefix, **({MARK: ""} if leaves_job else {})}
        return run_job(slurm.command(argv), env=env, **{"timeout": 400.0, **options})

    yield run
    slurm.restore()


@pytest.fixture
def pmix(run_in_slurm: Callable[..., Any]) -> None:
    """Goes on only where this Slurm has PMIx."""
    job = run_in_slurm("srun", "-n", "1", "--mpi=pmix", "true")
    if job.returncode:
        skip_or_fail(f"needs PMIx for Slurm (Debian: libpmix-dev): {job.stderr.strip()}")
