"""What this host's control groups, memory and Python leave to its ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# The cores of a control group, in versions 2 and 1.
_CPUSETS = {"": "cpuset.cpus.effective", "cpuset": "cpuset.effective_cpus"}
# Its memory: the limit, and what is used.
_MEMORY = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}


def may_hang_at_fork(version: str) -> bool:
    """Returns whether a fork by such a Python, such as "3.11.7", may wait for ever (CPython issue 112275)."""
    numbers = tuple(int(part) for part in re.findall(r"[0-9]+", version)[:3])
    return numbers < (3, 10, 15) or (3, 11) <= numbers < (3, 11, 10)


def own_cores() -> list[int]:
    """Returns the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def cores_of_ranks(num_ranks: int) -> float:
    """Returns the cores' worth of time that this host's ranks have together: cores that they may run on, or a CPU quota.

    Args:
        num_ranks: of this host; this process is one.
    """
    quota = quota_of_ranks(num_ranks)
    return _bound_cores(num_ranks) if quota is None else min(_bound_cores(num_ranks), quota)


def quota_of_ranks(num_ranks: int) -> float | None:
    """Returns the cores' worth of time that control groups grant this host's ranks together, None if they set no limit.

    Args:
        num_ranks: of this host; this process is one.
    """
    quota = cpu_quota()
    # Who started the ranks is in their control group if they have one together, as in a container.
    together = _cgroup_text(os.getppid()) in ("", _cgroup_text())
    return quota if quota is None or together else quota * num_ranks


def usable_cores() -> float:
    """Returns the cores' worth of time that this process may use."""
    quota = cpu_quota()
    return len(own_cores()) if quota is None else min(len(own_cores()), quota)


def _bound_cores(num_ranks: int) -> int:
    own = len(own_cores())
    try:
        # Also where the launcher bound each rank to some of its own.
        launchers = len(os.sched_getaffinity(os.getppid())) if sys.platform == "linux" else own
    except OSError:
        launchers = own
    return min(launchers, own * num_ranks) if launchers > own else own


def is_crowded(num_ranks: int) -> bool:
    """Whether so many ranks on this host are more than the cores' worth of time that they have."""
    return num_ranks > cores_of_ranks(num_ranks)


def is_rationed(num_ranks: int) -> bool:
    """Whether a CPU quota, which counts waiting that is busy as well, leaves this host's ranks fewer than two cores each."""
    cores = cores_of_ranks(num_ranks)
    return cores < _bound_cores(num_ranks) and must_yield(num_ranks, cores)


def must_yield(num_ranks: int, num_cores: float) -> bool:
    """Whether threads that wait in MPI take cores from those that compute: each rank has two that may, its own and Horovod's.

    Args:
        num_ranks: of one host.
        num_cores: cores' worth of time that they have together.
    """
    return 2 * num_ranks > num_cores


def parse_cores(text: str) -> list[int]:
    """Returns the numbers behind the kernel's lists such as "0-3,8"; empty for an empty one."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores += range(int(first), int(last or first) + 1)
    return cores


def own_groups(text: str, root: Path) -> dict[str, Path]:
    """Returns this process's control group folder of each controller, "" standing for version 2.

    Args:
        text: of /proc/self/cgroup.
        root: where control groups are mounted.
    """
    groups = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            base = root / controller if controller else root
            folder = base / path.lstrip("/")
            # In a container the path is the host's, and the own group is mounted at the top.
            groups[controller] = folder if folder.is_dir() else base
    return groups


def _cgroup_text(pid: int | str = "self") -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""


def _groups() -> dict[str, Path]:
    try:
        return own_groups(_cgroup_text(), Path("/sys/fs/cgroup"))
    except ValueError:
        return {}


def _upwards(folder: Path | None, file: str) -> Iterator[Path]:
    """Yields the folders of a control group and of those above it that have a file: all set limits, and not every one has each
    controller's files."""
    for level in (folder, *folder.parents) if folder is not None else ():
        if (level / file).exists():
            yield level


def host_cores(groups: dict[str, Path] | None = None) -> list[int]:
    """Returns the cores that ranks on this host could be given: those of the control group, else all that are online."""
    groups = _groups() if groups is None else groups
    candidates = [
        *(level / file for name, file in _CPUSETS.items() for level in _upwards(groups.get(name), file)),
        Path("/sys/devices/system/cpu/online"),
    ]
    for file in candidates:
        try:
            cores = parse_cores(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if cores:
            return cores
    return []


def cpu_quota(groups: dict[str, Path] | None = None) -> float | None:
    """Returns how many cores' worth of time the control groups grant this process, None if they set no limit."""
    groups = _groups() if groups is None else groups
    quotas = []
    for name, file in (("", "cpu.max"), ("cpu", "cpu.cfs_quota_us")):
        for folder in _upwards(groups.get(name), file):
            try:
                quota, *period = (folder / file).read_text(encoding="utf-8").split()
                length = period[0] if period else (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
                if quota != "max" and int(quota) > 0:
                    quotas.append(int(quota) / int(length))
            except (OSError, ValueError):
                continue
    return min(quotas, default=None)


def _cached_bytes(folder: Path) -> int:
    """Returns the bytes of files that a control group's usage counts, and that the kernel drops for whoever needs room."""
    try:
        text = (folder / "memory.stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.M)}
    # Version 1 has the group's own beside its children's.
    prefix = "total_" if "total_inactive_file" in found else ""
    return sum(found.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))


def free_memory_bytes(groups: dict[str, Path] | None = None, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Returns what the host and the control groups leave free, None where the system does not tell."""
    groups = _groups() if groups is None else groups
    try:
        match = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text(encoding="utf-8"))
    except OSError:
        match = None
    free = [int(match[1]) * 1024] if match else []
    for name, (limit_file, usage_file) in _MEMORY.items():
        for folder in _upwards(groups.get(name), limit_file):
            try:
                limit, usage = ((folder / file).read_text(encoding="utf-8").strip() for file in (limit_file, usage_file))
                if limit != "max":
                    free.append(max(0, int(limit) - int(usage) + _cached_bytes(folder)))
            except (OSError, ValueError):
                continue
    return min(free, default=None)
