"""A Slurm for the tests of this folder, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from needs import need_root_and
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
