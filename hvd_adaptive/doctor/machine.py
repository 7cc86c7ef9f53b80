"""What the operating system says about this rank's place. Imports neither torch nor MPI, so it works where those do not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.cluster.host import cpu_quota, host_cores, own_cores
from hvd_adaptive.cluster.patience import is_busy_waiting

_DISTRIBUTIONS = ("torch", "horovod", "mpi4py", "numpy", "numba", "triton")
_SMI_LIMIT_S = 10.0


def machine_facts(backend: str) -> dict[str, Any]:
    """Returns host, versions, cores, quota, shared memory and GPUs of this process; JSON values only.

    Args:
        backend: what is to carry the ranks' tensors, "horovod" or "torch".
    """
    cores = own_cores()
    shm = Path("/dev/shm")
    room = shutil.disk_usage(shm) if shm.is_dir() else None
    return {
        "host": socket.gethostname(),
        "backend": backend,
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": installed_versions(),
        "horovod_built_for": horovod_build().get("pytorch"),
        "cores": cores,
        "host_cores": host_cores() or cores,
        "cpu": cpu_model(),
        "cpu_quota": cpu_quota(),
        "busy_waiting": backend == "horovod" and is_busy_waiting(read_launcher(os.environ)),
        "shm_bytes": room.total if room else None,
        "shm_free_bytes": room.free if room else None,
        "nvidia_smi": list_gpus(),
    }


def installed_versions() -> dict[str, str]:
    """Returns the versions of the installed distributions that matter here, without importing them."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def horovod_build() -> dict[str, str]:
    """Returns what Horovod's build wrote down: for each framework the version that it was built against."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return {}
    try:
        found = json.loads((Path(spec.origin).parent / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def cpu_model() -> str:
    """Returns the processor's name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def list_gpus() -> dict[str, Any] | None:
    """Returns {"gpus": lines of `nvidia-smi -L`} or {"error": text}; None where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"nvidia-smi -L did not answer in {_SMI_LIMIT_S:g} s"}
    if answer.returncode:
        return {"error": (answer.stdout + answer.stderr).strip()[:300]}
    return {"gpus": [line for line in answer.stdout.splitlines() if line.startswith("GPU ")]}
