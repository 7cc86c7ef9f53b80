"""Ranks that the zygote forks are what ranks of their own processes would be, and end as these do."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from zygote import stub_of

# What a program sees of its process, but for what differs from one process to the next.
FACTS = """
import json, os, random, resource, signal, sys, threading
from pathlib import Path

if "with torch" in sys.argv:
    import horovod.torch, numpy, torch

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "folder": os.getcwd(), "name": __name__,
    "file": globals().get("__file__"), "spec": getattr(globals().get("__spec__"), "name", None),
    "variables": {name: value for name, value in os.environ.items() if name.startswith(("HVD_TEST_X", "OMP_", "LD_", "PYTHON"))},
    "rank": os.environ["OMPI_COMM_WORLD_RANK"], "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
    "umask": os.umask(0), "blocked": status["SigBlk"].strip(),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)],
    "shown": Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode().split("\\0"),
    "seen": b"OMPI_COMM_WORLD_RANK=" in Path("/proc/self/environ").read_bytes(),
    "streams": [(s.encoding, s.errors, s.line_buffering, s.isatty()) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "unbuffered": [s.write_through for s in (sys.stdout, sys.stderr)],
    "threads": threading.active_count(),
    "main": sys.modules["__main__"].__dict__ is globals(), "comm": Path("/proc/self/comm").read_text(),
}
facts["mpi"] = "mpi4py.MPI" in sys.modules
facts["random"] = [random.random()]
if "with torch" in sys.argv:
    facts["masks"] = [status[name].strip() for name in ("SigIgn", "SigCgt")]  # Horovod's libraries take some
    facts["torch"] = [torch.get_num_threads(), torch.is_grad_enabled()]
    facts["random"] += [float(numpy.random.random()), torch.initial_seed()]
facts["parent"] = os.getppid()
Path(os.environ["HVD_TEST_X"], facts["rank"]).write_text(json.dumps(facts))
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "-u", "file"])
def test_a_fork_finds_what_a_process_of_its_own_finds(run_job: Any, tmp_path: Path, kind: str) -> None:
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    words = {"-c": ["-c", FACTS], "-m": ["-m", "facts"], "-u": ["-u", str(script)], "file": [str(script)]}[kind]
    # Importing torch takes a process of its own longer than all else here.
    more = ["with torch"] if kind == "file" else []
    found = []
    for forked in (True, False):
        folder = tmp_path / f"forked-{forked}"
        folder.mkdir()
        env = {"HVD_TEST_X": str(folder), "OMP_NUM_THREADS": "1"}
        shell = ["nice", "-n", "1", "bash", "-c", 'umask 027; trap "" HUP; exec taskset -c 0 "$@"', "rank"]
        job = run_job([*shell, sys.executable, *words, "-x", "y z", *more], np=2, env=env, cwd=tmp_path, forked=forked)
        assert job.returncode == 0 and not job.stderr and not job.leftover, job.describe()
        found.append([json.loads((folder / str(rank)).read_text()) for rank in range(2)])
    forks, own = found
    for ranks in found:
        # Each has random numbers of its own, and a parent that runs under the launcher.
        assert len({str(rank.pop("random")) for rank in ranks}) == 2
        for rank in ranks:
            rank["variables"].pop("HVD_TEST_X")
            rank.pop("parent")
    for fork, process in zip(forks, own, strict=True):
        assert {key: (fork[key], process[key]) for key in process if fork[key] != process[key]} == {}


ENDS = {
    "returns": ("print('well')", 0, "well"),
    "a number": ("import sys; sys.exit(7)", 7, ""),
    "words": ("import sys; sys.exit('in words')", 1, "in words"),
    "an error": ("def f(): raise KeyError('wrong')\nf()", 1, 'File "<string>", line 2, in <module>'),
    "a signal": ("import os; os.kill(os.getpid(), 9)", 137, "signal 9"),
    "at exit": ("import atexit; atexit.register(print, 'at last')", 0, "at last"),
    "a thread": ("import threading\nthreading.Timer(0.2, print, ['at last']).start()", 0, "at last"),
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_such_a_process_does(run_job: Any, end: str) -> None:
    program, code, said = ENDS[end]
    for forked in (True, False):
        job = run_job([sys.executable, "-c", program], np=1, forked=forked)
        assert job.returncode == code and said in job.stdout + job.stderr and not job.leftover, job.describe()
        assert "zygote.py" not in job.stderr, job.describe()


WAITING = """
import os, signal, sys, time
from pathlib import Path
from mpi4py import MPI

def heed(number, frame):
    print("heard", number, flush=True)
    os._exit(3)

signal.signal(signal.SIGUSR1, heed)
Path(sys.argv[1], str(MPI.COMM_WORLD.rank)).write_text(str(os.getpid()))
time.sleep(300)
"""


@pytest.mark.parametrize(("whom", "number"), [("fork", 9), ("stub", 9), ("stub", signal.SIGUSR1), ("launcher", 9)])
def test_a_fork_and_its_stub_end_together(run_job: Any, tmp_path: Path, whom: str, number: int) -> None:
    pids: list[int] = []

    def strike(child: Any) -> None:
        end = time.monotonic() + 60
        while len([file for file in tmp_path.iterdir() if file.read_text()]) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        pids.extend(int((tmp_path / str(rank)).read_text()) for rank in range(2))
        os.kill({"fork": pids[1], "stub": stub_of(pids[1]), "launcher": child.pid}[whom], number)

    job = run_job([sys.executable, "-c", WAITING, str(tmp_path)], np=2, during=strike, timeout=100)
    assert job.returncode not in (0, None) and not job.timed_out and not job.leftover, job.describe()
    if number == signal.SIGUSR1:
        assert "heard 10" in job.stdout and re.search(r"Exit code: +3", job.stderr), job.describe()
    elif whom != "launcher":
        assert "exited on signal 9" in job.stderr, job.describe()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
