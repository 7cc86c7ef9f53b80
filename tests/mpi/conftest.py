"""Data that several files train on, and the command run by ranks that are there already."""

from __future__ import annotations

import logging
import os
import socket
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from campaign import write_data
from mpi_world import REPORTS
from pairs import BACKENDS


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small learnable data set in the XMC format: a label's words are its own. Ranks share one."""
    if REPORTS not in os.environ:
        folder = tmp_path_factory.mktemp("data")
        write_data(folder)
        return folder
    from mpi4py import MPI

    folder = Path(os.environ[REPORTS]) / "data"
    if MPI.COMM_WORLD.Get_rank() == 0 and not folder.exists():
        folder.mkdir()
        write_data(folder)
    MPI.COMM_WORLD.Barrier()
    return folder


@pytest.fixture
def use_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Prepares the ranks for a backend, and returns it: ranks over torch are told where they meet. COLLECTIVE."""

    def use(backend: str) -> str:
        if backend == "torch":
            from mpi4py import MPI

            from hvd_adaptive.cluster.relaunch import meeting_place

            comm = MPI.COMM_WORLD
            with meeting_place({}) as place:
                for name, value in comm.bcast(place).items():
                    monkeypatch.setenv(name, value)
        return backend

    return use


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, use_backend: Callable[[str], str]) -> str:
    """Each backend in turn: the same test runs over both."""
    return use_backend(request.param)


@pytest.fixture
def pretend_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has this rank take itself for one on another host."""
    from hvd_adaptive.comm import horovod_mpi, torch_distributed

    def pretend(name: str) -> None:
        for module in (horovod_mpi, torch_distributed):
            monkeypatch.setattr(module, "socket", types.SimpleNamespace(**{**vars(socket), "gethostname": lambda: name}))

    return pretend


_LAUNCHERS = ("OMPI_COMM_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDRA_")  # variables of ranks


class Answer(NamedTuple):
    """What the command said on this rank."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def command(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """Runs ``hvd-adaptive`` on the ranks of an mpi test: for what is not about starting or ending a job. COLLECTIVE.

    As a job of its own, but that standard error also has what was logged, and that torch is there already. ``alone``: as without
    a launcher, by this rank by itself.
    """
    from hvd_adaptive.cli.main import main
    from hvd_adaptive.cluster import output
    from hvd_adaptive.state.preemption import PREEMPTION

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(output, "_OTHERS_LATER_S", 0.0)  # no launcher ends this job before rank 0 has spoken

    def run(*arguments: str | Path, alone: bool = False) -> Answer:
        caplog.clear()
        capfd.readouterr()
        with monkeypatch.context() as patch:
            for name in os.environ if alone else ():
                if name.startswith(_LAUNCHERS):
                    patch.delenv(name)
            try:
                code = main([str(argument) for argument in arguments])
            finally:
                PREEMPTION.stop()  # as the end of the process would
        captured = capfd.readouterr()
        return Answer(code, captured.out, captured.err + caplog.text)

    return run


@pytest.fixture
def train(command: Callable[..., Answer], data: Path, shared_tmp_path: Path) -> Callable[..., Answer]:
    """Runs ``hvd-adaptive train`` on the ranks of an mpi test; the run is in ``shared_tmp_path / out``. COLLECTIVE.

    ``alone``: on rank 0 only, as without a launcher.
    """
    from mpi4py import MPI

    def run(*options: str | Path, out: str = "run", code: int = 0, alone: bool = False) -> Answer:
        where = ["--data", data, "--cache-dir", data / "cache", "--out", shared_tmp_path / out]
        answer = Answer(code, "", "")
        if MPI.COMM_WORLD.Get_rank() == 0 or not alone:
            answer = command("train", *where, "--no-calibration", *options, alone=alone)
        if alone:
            MPI.COMM_WORLD.Barrier()
        assert answer.code == code, answer
        return answer

    return run


@pytest.fixture
def own_routes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test Horovod's collectives are its own again, where it had led them through host memory."""
    from horovod.torch import mpi_ops

    from hvd_adaptive.comm import through_host

    for name in through_host._FUNCTIONS:
        monkeypatch.setattr(mpi_ops, name, getattr(mpi_ops, name))
    wait = mpi_ops.mpi_lib.horovod_torch_wait_and_clear
    monkeypatch.setattr(mpi_ops.mpi_lib, "horovod_torch_wait_and_clear", wait)
    through_host.host_route.cache_clear()
    yield
    through_host.host_route.cache_clear()
