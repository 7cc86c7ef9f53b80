"""Judges what is installed and how the ranks were started. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_adaptive.cluster.host import may_hang_at_fork
from hvd_adaptive.doctor.findings import Facts, Finding, count, good, ranks_by_host


def versions(ranks: Sequence[Facts]) -> list[Finding]:
    """Compares the installed versions of all ranks."""
    first = {"Python": ranks[0]["machine"]["python"], **ranks[0]["machine"]["versions"]}
    needed = ("torch", "horovod", "mpi4py") if ranks[0]["machine"]["backend"] == "horovod" else ("torch",)
    missing = [name for name in needed if name not in first]
    text = ", ".join(f"{name} {version}" for name, version in first.items())
    if missing:
        remedy = "scripts/setup.sh" + ("" if "torch" in missing else "; or, to try without Horovod, --backend torch")
        return [Finding("versions", "problem", f"{text}; not installed: {', '.join(missing)}", remedy)]
    for rank, facts in enumerate(ranks):
        other = {"Python": facts["machine"]["python"], **facts["machine"]["versions"]}
        differing = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
        if differing:
            name = differing[0]
            text = f"{name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {rank} ({facts['machine']['host']})"
            return [Finding("versions", "problem", text, "start every rank with the same Python environment")]
    findings = [Finding("versions", "ok", text)]
    if may_hang_at_fork(first["Python"]):
        wrong = f"in Python {first['Python']} a worker of a DataLoader may never start (rare); the job then waits for ever"
        remedy = "3.10.15, 3.11.10, 3.12 or newer; or multiprocessing_context='forkserver' (docs/sharp-bits.md)"
        findings.append(Finding("Python", "warning", wrong, remedy))
    return findings


def horovod(ranks: Sequence[Facts]) -> list[Finding]:
    """Compares the torch that Horovod was built against with the installed one."""
    machine, built = ranks[0]["machine"], good(ranks[0], "horovod")
    against, installed = machine["horovod_built_for"], machine["versions"].get("torch")
    if against is None or installed is None or machine["backend"] == "torch":
        return []
    flags = []
    if built:
        flags = [name for name in ("mpi", "gloo", "nccl") if built[f"{name}_built"]]
    text = f"built against torch {against}" + (f", with {', '.join(flags)}" if flags else "")
    if built and not built["mpi_built"]:
        return [
            Finding("Horovod", "problem", f"{text}, but without MPI", "build it with HOROVOD_WITH_MPI=1: scripts/setup.sh")
        ]
    if against.split("+")[0] != installed.split("+")[0]:
        near = against.split(".")[:2] == installed.split(".")[:2]
        wrong = f"{text}, but torch {installed} is installed: " + (
            "it may crash" if near else "it crashes or computes nonsense"
        )
        return [Finding("Horovod", "warning" if near else "problem", wrong, "scripts/setup.sh builds it anew for this torch")]
    torch = good(ranks[0], "torch")
    if torch and torch["cuda"] and built and not built["nccl_built"]:
        wrong = f"{text}: a CPU build beside a torch for CUDA; every exchange goes through host memory"
        return [Finding("Horovod", "warning", wrong, "scripts/setup.sh builds it for CUDA where it finds the toolkit")]
    return [Finding("Horovod", "ok", text)]


def mpi_library(ranks: Sequence[Facts]) -> list[Finding]:
    """Says which MPI library Horovod and mpi4py have loaded."""
    found: dict[int, tuple[str, str]] = {}
    for rank, facts in enumerate(ranks):
        horovod, mpi4py = good(facts, "horovod"), good(facts, "mpi4py")
        if not horovod or not mpi4py:
            continue
        own = horovod["mpi_libraries"]
        others = [library for library in mpi4py["mpi_libraries"] if library not in own]
        if own and others:
            text = f"rank {rank}: Horovod loads {own[0]}, mpi4py {others[0]}"
            remedy = "unset MPI4PY_LIBMPI, load the module that Horovod was built with; or scripts/setup.sh --recreate"
            return [Finding("MPI library", "problem", text, remedy)]
        found[rank] = (mpi4py["library_version"], own[0] if own else "unknown")
    if not found:
        return []
    first, (version, library) = next(iter(found.items()))
    if len(set(found.values())) > 1:
        rank = next(rank for rank, one in found.items() if one != (version, library))
        text = f"rank {first} has {version} ({library}), rank {rank} {found[rank][0]} ({found[rank][1]})"
        return [Finding("MPI library", "warning", text, "start every rank in the same environment")]
    return [Finding("MPI library", "ok", f"{version}, {library}; Horovod and mpi4py share it")]


def world(ranks: Sequence[Facts]) -> list[Finding]:
    """Says how many ranks there are, what carries their tensors, and how they were started."""
    world = good(ranks[0], "world")
    if world is None:
        return []
    text = f"{count(world['world_size'], 'rank')} on {count(len(ranks_by_host(ranks)), 'host')}"
    if "torch_size" in world:
        text += f"; over {world['carrier']}"
    elif "mpi_size" in world:
        text += f"; MPI sees {world['mpi_size']}, Horovod {world['horovod_size']}"
        text += f"; {world['thread_level']}, controller {world['controller']}"
    else:
        text += "; no launcher, so no MPI was started"
    return [Finding("world", "ok", text)]
