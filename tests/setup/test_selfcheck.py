"""The closing check's judgement on the reports of ranks, and its look at a real memory map."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import selfcheck


def report(rank: int, **changes: Any) -> dict[str, Any]:
    result = {
        "rank": rank,
        "mpi_size": 2,
        "hvd_rank": rank,
        "hvd_size": 2,
        "host": "here",
        "libmpi_mpi4py": "/a/libmpi.so.40",
        "libmpi_horovod": "/a/libmpi.so.40",
        "sum": 1,
        "torch_cuda": None,
        "horovod_nccl": False,
    }
    return result | changes


def test_ranks_that_agree_have_no_finding() -> None:
    assert selfcheck.findings([report(0), report(1)], launched=2) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"libmpi_horovod": "/b/libmpi.so.40"}, "/b/libmpi.so.40"),
        ({"mpi_size": 1}, "Horovod says"),
        ({"hvd_rank": 1}, "Horovod says"),
        ({"sum": 0}, "allreduce"),
        ({"torch_cuda": "13.0"}, "CPU build"),
    ],
)
def test_each_mismatch_is_named_with_the_rank(changes: dict[str, Any], word: str) -> None:
    found = selfcheck.findings([report(0, **changes), report(1)], launched=None)
    assert len(found) == 1
    assert "rank 0 on here" in found[0]
    assert word in found[0]


def test_ranks_that_each_form_a_world_of_their_own_are_noticed() -> None:
    alone = report(0, mpi_size=1, hvd_size=1, sum=0)
    (found,) = selfcheck.findings([alone], launched=2)
    assert "another MPI" in found


def test_the_file_behind_a_function_is_found_in_this_process() -> None:
    import _ctypes

    address = ctypes.cast(ctypes.CDLL(_ctypes.__file__).PyInit__ctypes, ctypes.c_void_p).value
    assert address is not None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert Path(selfcheck.file_at(address, maps)).samefile(_ctypes.__file__)


def test_an_address_outside_every_file_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="0x1"):
        selfcheck.file_at(1, "7f0000000000-7f0000001000 r-xp 00000000 00:00 0\n")
