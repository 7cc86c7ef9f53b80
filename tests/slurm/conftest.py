"""A Slurm for the tests of this folder, started once.

Most of what these tests do is to wait for Slurm. Those marked `beside` run at the same time, in threads, and wait in the queue as
other people's jobs do. The others, among them what loses nodes, come before them.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from campaign import write_data
from jobs import MARK, run_job
from needs import need_root_and, skip_or_fail
from slurm_site import SlurmJob, SlurmSite
from two_hosts import TwoHosts

_AT_ONCE = 6  # the longest ones first, as the files have them
_begun = pytest.StashKey[dict[str, "Future[object]"]]()
# What a rank writes that Open MPI has crashed in MPI_Init.
_START_CRASH = "Caught signal 11 (Segmentation fault: address not mapped to object at address (nil))"


def _is_beside(item: pytest.Item) -> bool:
    return item.get_closest_marker("beside") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run beside each other come last of the folder."""
    places = [place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    for place, item in zip(places, sorted((items[place] for place in places), key=_is_beside), strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def threads() -> Iterator[ThreadPoolExecutor]:
    """Those of the tests that run beside each other."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls a test. Starts all that run beside each other when the first one of these is called, and takes the result of this."""
    fixture = pyfuncitem._request.getfixturevalue
    if not _is_beside(pyfuncitem):
        values = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
        _call(pyfuncitem.obj, values, fixture("tmp_path_factory"))
        return True
    begun = pyfuncitem.session.stash.setdefault(_begun, {})
    if not begun:
        for item in pyfuncitem.session.items:
            if isinstance(item, pytest.Function) and _is_beside(item):
                values = dict(item.callspec.params) if hasattr(item, "callspec") else {}
                # These are not set up yet: they take only what is made once for all tests, and a folder.
                for name in inspect.signature(item.obj).parameters:
                    if name == "folder":
                        values[name] = fixture("tmp_path_factory").mktemp("beside")
                    elif name not in values:
                        values[name] = fixture(name)
                begun[item.nodeid] = fixture("threads").submit(_call, item.obj, values, fixture("tmp_path_factory"))
    begun[pyfuncitem.nodeid].result()
    return True


def _call(test: Callable[..., None], values: dict[str, Any], folders: pytest.TempPathFactory) -> None:
    """Calls a test; once more where MPI crashed when a job of it started.

    Once in 200 starts of several jobs or steps at once, more often on a busy machine, Slurm 22.05's PMIx has let a rank out of
    MPI_Init while the other one was in its first fence. Its message then meets an Open MPI 4.1 that calls address 0.
    """
    try:
        test(**values)
    except AssertionError as error:
        if _START_CRASH not in str(error):
            raise
        warnings.warn(f"MPI crashed at a start, and the test runs once more:\n{error}", stacklevel=1)
        if "folder" in values:
            values["folder"] = folders.mktemp("again")
        test(**values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the test's own. To one that runs beside others the hook above gives another one."""
    return tmp_path


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


@pytest.fixture(scope="session")
def run_in_slurm(slurm: SlurmSite) -> Callable[..., Any]:
    """Runs one of Slurm's commands.

    With `leaves_job` what the command has submitted may go on. Else `run_job` ends all that carries its mark, and a job
    inherits that from sbatch.
    """

    def run(*argv: str, leaves_job: bool = False, **options: Any) -> Any:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**slurm.environment, "PATH": path, "VENV": sys.prefix, **({MARK: ""} if leaves_job else {})}
        return run_job(slurm.command(argv), env=env, **{"timeout": 400.0, **options})

    return run


@pytest.fixture(scope="session")
def pmix(run_in_slurm: Callable[..., Any]) -> None:
    """Goes on only where this Slurm has PMIx."""
    job = run_in_slurm("srun", "-n", "1", "--mpi=pmix", "true")
    if job.returncode:
        skip_or_fail(f"needs PMIx for Slurm (Debian: libpmix-dev): {job.stderr.strip()}")


@pytest.fixture(scope="session")
def train_options(hosts: TwoHosts, data: Path) -> Callable[[Path, int], list[str]]:
    """Options of a short training that notes its run in `folder / "run"`."""

    def options(folder: Path, num_epochs: int) -> list[str]:
        places = ["--data", str(data), "--cache-dir", str(hosts.local / "cache"), "--out", str(folder / "run")]
        small = ["--no-calibration", "--hidden-size", "16", "--batch-size", "32", "--eval-rounds", "0"]
        return [*places, *small, "--epochs", str(num_epochs)]

    return options


@pytest.fixture(scope="session")
def submit(run_in_slurm: Callable[..., Any], slurm: SlurmSite, hosts: TwoHosts, data: Path) -> Callable[..., SlurmJob]:
    """Submits a training over two nodes with one rank each, which goes on with the one in `folder`."""

    def run(folder: Path, *sbatch: str, train: tuple[str, ...] = (), num_epochs: int) -> SlurmJob:
        output = folder / f"output-{len(list(folder.glob('output-*')))}"
        places = ["--data", str(data), "--cache-dir", str(hosts.local / "cache"), "--out", str(folder / "run")]
        small = ["--no-calibration", "--hidden-size", "16", "--batch-size", "16", "--mega-batch", "400", "--eval-rounds", "0"]
        argv = [*places, *small, "--epochs", str(num_epochs), "--record", "--checkpoint-interval", "2", *train]
        if sbatch:
            smaller = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=5", f"--output={output}"]
            job = run_in_slurm("sbatch", "--parsable", *smaller, *sbatch, *argv, leaves_job=True)
        else:
            smaller = ["--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1", "--time", "5", "--log", str(output)]
            command = [sys.executable, "-m", "hvd_adaptive", "submit", *smaller, "--venv", sys.prefix, "--requeue", "--yes"]
            job = run_in_slurm(*command, "--", "train", *argv, leaves_job=True)
        assert job.returncode == 0, job.describe()
        return SlurmJob(slurm, job.stdout.split()[-1], folder / "run", output)

    return run
