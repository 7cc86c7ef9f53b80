"""Which ranks sleep where they wait, and what a CPU quota leaves to ranks."""

from __future__ import annotations

import subprocess
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
    [(4, None, False), (1, None, True), (3, None, True), (64, 3.5, True), (64, 4.0, False), (2, 64.0, True)],
)
def test_who_has_few_cores(
    cores, num_cores: int, quota: float | None, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cores(num_cores, quota)
    info = read_launcher(TWO)
    assert not patience.is_busy_waiting(info), "not built: scripts/setup.sh"
    monkeypatch.setattr(patience, "patient_library", lambda: None)
    assert patience.is_busy_waiting(info) is expected
    patience.wait_patiently(info, seldom=True)
    assert (f"{patience.BUSY_WAITING}: {patience.NOT_BUILT}" in caplog.text) is expected
    caplog.clear()
    patience.wait_patiently(info, seldom=False)
    assert (patience.BUSY_WAITING in caplog.text) is (quota is not None and quota < min(num_cores, 4)), "exchanges of every step"
    assert not patience.is_busy_waiting(LauncherInfo(name="none"))


def test_where_nothing_yields_nothing_is_changed() -> None:
    """A process without MPI."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).make_patient())"
    found = subprocess.run(
        [sys.executable, "-c", code, str(patience.patient_library())], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "0"


def test_threads_of_a_quota(cores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    places = [("a", range(64))] * 4
    for quota, expected in ((None, 16), (9.0, 2), (1.0, 1)):
        cores(64, quota)
        assert compute_threads(places, 0) == expected
