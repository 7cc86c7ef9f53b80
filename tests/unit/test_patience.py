"""Which ranks sleep where they wait, and what a CPU quota leaves to ranks."""

from __future__ import annotations

import os
import sys

import pytest

from hvd_adaptive.cluster import host, patience
from hvd_adaptive.cluster.binding import LauncherInfo, read_launcher
from hvd_adaptive.cluster.device import compute_threads

TWO = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"} | {
    f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")
}


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch):
    """Sets the cores, the quota and whether the launcher shares it."""

    def set_(cores: int, quota: float | None = None, *, together: bool = True) -> None:
        monkeypatch.setattr(host, "_bound_cores", lambda num_ranks: cores)
        monkeypatch.setattr(host, "own_cores", lambda: list(range(cores)))
        monkeypatch.setattr(host, "cpu_quota", lambda: quota)
        monkeypatch.setattr(host, "_cgroup_text", lambda pid="self": "one" if together else str(pid))

    return set_


def test_a_quota_of_all_ranks_or_of_each(cores) -> None:
    for quota, together, expected in ((None, True, 8), (3.0, True, 3.0), (0.5, False, 2.0), (4.0, False, 8)):
        cores(8, quota, together=together)
        assert host.cores_of_ranks(4) == expected
        assert host.is_crowded(4) is (expected < 4)
    cores(8, 0.5)
    assert host.usable_cores() == 0.5


@pytest.mark.parametrize(
    ("num_cores", "quota", "expected"),
    [(4, None, False), (1, None, False), (1, 0.9, True), (64, 3.5, True), (64, 4.0, False), (2, 64.0, False)],
)
def test_who_is_busy_waiting(cores, num_cores: int, quota: float | None, expected: bool) -> None:
    cores(num_cores, quota)
    info = read_launcher(TWO)
    assert patience.is_busy_waiting(info, TWO) is expected
    assert not patience.is_busy_waiting(LauncherInfo(name="none"), {})
    for set_already in ({"LD_PRELOAD": "/a/patient_yield.so"}, {"OMPI_MCA_mpi_yield_when_idle": "1"}):
        assert not patience.is_busy_waiting(info, TWO | set_already)


def test_the_same_command_starts_once_more(cores, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str], str | None]] = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append((*command, os.environ.get("LD_PRELOAD"))))
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    for name in TWO:
        monkeypatch.setenv(name, TWO[name])
    library = patience.patient_library()
    assert library is not None, "not built: scripts/setup.sh"
    cores(1, 0.5)
    for before, after in ((None, library), ("/a/other.so", f"{library}:/a/other.so")):
        monkeypatch.delenv("LD_PRELOAD", raising=False)
        if before is not None:
            monkeypatch.setenv("LD_PRELOAD", before)
        patience.wait_patiently()
        assert started.pop() == (sys.executable, sys.orig_argv, after)
        patience.wait_patiently()
        assert not started, "once is enough"
    monkeypatch.delenv("LD_PRELOAD")
    assert "LD_PRELOAD=$(" in patience.busy_waiting_remedy()
    monkeypatch.setattr(patience, "patient_library", lambda: None)
    patience.wait_patiently()
    assert not started and "was not built" in patience.busy_waiting_remedy()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "none")
    patience.wait_patiently()
    assert not started


def test_threads_of_a_quota(cores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    places = [("a", range(64))] * 4
    for quota, expected in ((None, 16), (9.0, 2), (1.0, 1)):
        cores(64, quota)
        assert compute_threads(places, 0) == expected
