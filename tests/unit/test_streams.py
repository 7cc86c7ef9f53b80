"""The command where its standard streams are closed, full, or read by nobody any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "hvd_adaptive"]
SUBMIT = [*COMMAND, "submit", "--", "train"]
FULL = "hvd-adaptive: error: standard output (/dev/full) cannot be written: No space left on device"


def run(argv: list[str], stdout: int | None = None, *, closed: bool = False) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", 'exec "$@" >&- <&-', "sh", *argv] if closed else argv
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


def without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_full_device_is_named_and_a_reader_that_has_gone_is_no_error() -> None:
    with open("/dev/full", "wb") as full:
        done = run(SUBMIT, full.fileno())
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith(FULL), done
    writer = without_reader()
    done = run(SUBMIT, writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, ""), done


def test_closed_streams_are_none_to_trip_over() -> None:
    done = run(SUBMIT, closed=True)
    assert (done.returncode, done.stderr) == (0, ""), done


@pytest.mark.parametrize("where", ["full", "closed", "gone", "both full"])
def test_a_training_goes_on_without_its_output(tmp_path: Path, where: str) -> None:
    least = ["--epochs", "0.02", "--hidden-size", "8", "--eval-rounds", "0", "--no-calibration"]
    argv = [*COMMAND, "train", *least, "--out", str(tmp_path / "run")]
    if where == "both full":
        with open("/dev/full", "wb") as full:
            assert subprocess.run(argv, stdout=full, stderr=full, timeout=120).returncode == 0
        assert (tmp_path / "run" / "summary.json").exists()
        return
    if where == "closed":
        done = run(argv, closed=True)
    else:
        stream = os.open("/dev/full", os.O_WRONLY) if where == "full" else without_reader()
        done = run(argv, stream)
        os.close(stream)
    assert done.returncode == 0 and (tmp_path / "run" / "summary.json").exists(), done
    assert done.stderr.count("cannot be written") == (where != "closed"), done
    assert (where == "closed") or "The run goes on without it." in done.stderr, done
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    argv = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), *COMMAND, "train"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done
    assert done.stderr.startswith("hvd-adaptive: error: the working directory cannot be used: No such file"), done


def test_a_name_that_the_encoding_lacks_is_shown_by_its_number(tmp_path: Path) -> None:
    argv = [*COMMAND, "submit", "--job-name", "\xe9", "--", "train"]
    done = subprocess.run(argv, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=120)
    assert done.returncode == 0 and b'--job-name="\\xe9"' in done.stdout, done
