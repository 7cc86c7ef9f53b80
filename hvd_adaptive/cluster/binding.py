"""What the launcher's environment says about this rank, and the device and threads that follow from it.

Every function is pure: the environment, the affinity sets and the number of GPUs are arguments. Nothing here
imports MPI, so all of it can run before MPI_Init, where most of these variables must be set to count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hvd_adaptive.cluster.host import must_yield

LauncherName = Literal["horovodrun-gloo", "openmpi", "hydra", "slurm", "torchrun", "none"]


@dataclass(frozen=True, kw_only=True)
class LauncherInfo:
    """What a launcher told this process through its environment; None where it said nothing.

    Attributes:
        name: "openmpi" (mpirun, and horovodrun over it), "hydra" (MPICH and its relatives), "slurm" (srun),
            "horovodrun-gloo", "torchrun" (or whoever else sets its variables), or "none" (started alone, or by a launcher that
            sets no known variable).
        rank: this process's rank in the world.
        world_size: how many ranks the launcher started. In a heterogeneous Slurm job: in this component.
        local_rank: this process's rank among those of its host.
        local_size: how many ranks the launcher started on this host.
        wired: srun gave its tasks a way to find each other (PMIx or PMI); True under other launchers.
    """

    name: LauncherName
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    wired: bool = True


class DeviceChoice(NamedTuple):
    """A torch device name, and a warning to show the user (None: nothing to say)."""

    device: str
    warning: str | None


def _read_int(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = env.get(name)
        if value:
            if not value.isdecimal():
                raise ValueError(f"{name} must be a whole number >= 0, got {value!r}: the launcher should have set it")
            return int(value)
    return None


def _info(name: LauncherName, env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> LauncherInfo:
    """What a launcher said in variables of these names."""
    return LauncherInfo(
        name=name,
        rank=_read_int(env, rank),
        world_size=_read_int(env, size),
        local_rank=_read_int(env, local_rank),
        local_size=_read_int(env, local_size),
    )


def expand_counts(text: str) -> list[int] | None:
    """Reads Slurm's compressed counts, one a node: "2(x3),1" is 2, 2, 2, 1. None for anything else.

    Args:
        text: as SLURM_STEP_TASKS_PER_NODE and its relatives have it.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _slurm_local_size(env: Mapping[str, str]) -> int | None:
    node, sizes = _read_int(env, "SLURM_NODEID"), expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return sizes[node] if sizes and node is not None and node < len(sizes) else None


def read_launcher(env: Mapping[str, str]) -> LauncherInfo:
    """Find out which launcher started this process, and what it said about rank and world.

    An mpirun inside a Slurm job wins over Slurm: its ranks inherit SLURM_* of the batch step or of the
    daemon's step, which count something else. A batch script's own process (which has SLURM_PROCID but no
    SLURM_STEP_NUM_TASKS) is "none": Slurm did not start ranks there. So does torchrun, which srun may start on each node; whoever
    else sets its variables stands behind all others.

    Args:
        env: the process's environment.

    Raises:
        ValueError: a variable of the launcher is not a whole number.
    """
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in env and "HOROVOD_RANK" in env:
        return _info("horovodrun-gloo", env, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    if "OMPI_COMM_WORLD_RANK" in env:
        variables = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        return _info("openmpi", env, *variables)
    in_slurm_step = "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env
    by_torchrun = all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if by_torchrun and ("TORCHELASTIC_RUN_ID" in env or not (in_slurm_step or "PMI_RANK" in env)):
        return _info("torchrun", env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # srun --mpi=pmi2 sets PMI_RANK too; only hydra's proxy adds MPI_LOCALRANKID.
    if "PMI_RANK" in env and ("MPI_LOCALRANKID" in env or not in_slurm_step):
        local = [("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")]
        return _info("hydra", env, "PMI_RANK", "PMI_SIZE", *(next((v for v in pair if env.get(v)), pair[0]) for pair in local))
    if in_slurm_step:
        return LauncherInfo(
            name="slurm",
            rank=_read_int(env, "SLURM_PROCID"),
            world_size=_read_int(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_read_int(env, "SLURM_LOCALID"),
            local_size=_slurm_local_size(env),
            wired="PMIX_RANK" in env or "PMI_RANK" in env,
        )
    return LauncherInfo(name="none")


def idle_nodes(env: Mapping[str, str], num_hosts: int) -> str | None:
    """A warning if nodes of a Slurm job have no rank, as under an mpirun that does not know Slurm; None: nothing to say.

    Args:
        env: rank 0's environment.
        num_hosts: hosts that MPI's ranks are on.
    """
    num_nodes = _read_int(env, "SLURM_JOB_NUM_NODES")
    if num_nodes is None or num_hosts >= num_nodes:
        return None
    return (
        f"the Slurm job has {num_nodes} nodes, and all ranks are on {num_hosts} of them: the others idle. If that is not meant, "
        "start with `srun --mpi=pmix`, or with an mpirun that was built for Slurm (`ompi_info | grep slurm`), and look whether "
        "`--nodes` and the number of ranks fit"
    )


def num_restarts(env: Mapping[str, str]) -> int:
    """How many times Slurm has requeued this job and started it again.

    Args:
        env: the process's environment.

    Raises:
        ValueError: SLURM_RESTART_COUNT is not a whole number.
    """
    return _read_int(env, "SLURM_RESTART_COUNT") or 0


def starts_alone(info: LauncherInfo, env: Mapping[str, str]) -> bool:
    """Whether this process is a world of its own: no launcher, or one unconnected task such as an interactive shell's.

    Args:
        info: what the launcher said.
        env: the process's environment. A component of a heterogeneous Slurm job may have one task, too.
    """
    single = info.world_size == 1 and (info.name == "torchrun" or (info.name == "slurm" and not info.wired))
    return info.name == "none" or (single and "SLURM_HET_SIZE" not in env)


def check_srun(info: LauncherInfo, env: Mapping[str, str], library_version: str, *, embedded: bool) -> None:
    """Refuse tasks of srun that Open MPI cannot connect; it would end them in MPI_Init without the remedy.

    Args:
        info: what the launcher said.
        env: the process's environment.
        library_version: what MPI's library says of itself.
        embedded: the Open MPI is PyPI's, which knows PMIx alone. (A site's 4 may know Slurm's PMI as well; MPICH and its
            relatives start as many worlds of one, which `check_world` refuses.)

    Raises:
        RuntimeError: with the right way to start the job.
    """
    match = re.search(r"Open MPI v?(\d+)", library_version)
    if info.name != "slurm" or match is None or "PMIX_RANK" in env or not (embedded or int(match[1]) >= 5):
        return
    raise RuntimeError(
        f"srun started {info.world_size} ranks (this is rank {info.rank}), but not with PMIx, by which {match[0]} "
        "connects them: start with `srun --mpi=pmix`. `srun --mpi=list` shows what this site has; where pmix is not "
        "among it, or srun cannot load it, use `mpirun` inside the job"
    )


def check_world(info: LauncherInfo, mpi_world_size: int) -> None:
    """Refuse a world that the launcher and MPI disagree on: N processes that would each train alone.

    Args:
        info: what the launcher said.
        mpi_world_size: the size of MPI's COMM_WORLD in this process.

    Raises:
        RuntimeError: the sizes differ; the message says how to start the job instead.
    """
    expected = info.world_size
    if expected is None or expected == mpi_world_size:
        return
    # A heterogeneous srun joins several components in one world, and each counts only its own tasks.
    if info.name == "slurm" and mpi_world_size > expected:
        return
    disagreement = f"{info.name} started {expected} ranks (this is rank {info.rank}), but MPI sees {mpi_world_size}"
    library = "python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'"
    remedies = {
        "horovodrun-gloo": "horovodrun ran with Gloo, where MPI is not set up. Start the same command with "
        "`horovodrun --mpi`, with plain `horovodrun` on a Horovod built with MPI, or with `mpirun`.",
        "slurm": "srun did not connect the tasks to MPI. Start with `srun --mpi=pmix` (Open MPI) or `srun "
        "--mpi=pmi2` (MPICH and its relatives; Open MPI 4 where built with it); `srun --mpi=list` shows what "
        "this site has. Or use `mpirun` inside the job.",
        "openmpi": "the mpirun that started this job belongs to another MPI than the library in this "
        f"process. Compare `mpirun --version` with `{library}`, and use the mpirun that stands beside that "
        "library.",
        "torchrun": "RANK and WORLD_SIZE are not those of the process group that this process has; unset them, or make the group "
        "from them.",
        "hydra": "the mpiexec that started this job belongs to another MPI than the library in this process. "
        f"Compare `mpiexec --version` with `{library}`, and use the mpiexec that stands beside that library.",
    }
    raise RuntimeError(f"{disagreement}: {remedies[info.name]}")


def choose_device(option: str, *, local_rank: int, local_size: int, cuda_device_count: int) -> DeviceChoice:
    """Pick the torch device of one rank.

    With several GPUs visible the device is the local rank; with exactly one it is that one, as a launcher may
    show each rank its own (`shared_devices` then tells whether they really are different). More ranks than
    GPUs share them in turn, with a warning.

    Args:
        option: "auto" (a GPU where there is one, else the CPU), "cpu", "cuda" (a GPU, or an error), "cuda:K".
        local_rank: this rank's number on its host, >= 0.
        local_size: ranks on this host, > local_rank.
        cuda_device_count: GPUs visible to this process, >= 0.

    Raises:
        ValueError: option is none of these.
        RuntimeError: a GPU was asked for that is not there.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", option)
    if match is None:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:K, got {option!r}")
    if option == "cpu" or (option == "auto" and cuda_device_count == 0):
        return DeviceChoice("cpu", None)
    if cuda_device_count == 0:
        raise RuntimeError(
            f"device is {option!r}, but torch sees no GPU: check `nvidia-smi`, CUDA_VISIBLE_DEVICES and that "
            "torch is a CUDA build (torch.version.cuda is not None), ask the scheduler for GPUs, or use "
            "--device cpu"
        )
    if match[1] is not None:
        index = int(match[1])
        if index >= cuda_device_count:
            raise RuntimeError(
                f"device is {option!r}, but this process sees {cuda_device_count} GPU(s), numbered from 0: "
                "name a smaller one, or make more of them visible (CUDA_VISIBLE_DEVICES)"
            )
        return DeviceChoice(f"cuda:{index}", None)
    index = local_rank % cuda_device_count
    if 1 < cuda_device_count < local_size:
        return DeviceChoice(
            f"cuda:{index}",
            f"{local_size} ranks share this host's {cuda_device_count} GPUs (this one uses cuda:{index}): "
            "they take turns, and exchange through host memory; start one rank per GPU instead",
        )
    return DeviceChoice(f"cuda:{index}", None)


def requested_threads(env: Mapping[str, str]) -> int | None:
    """The threads per rank that the user asked for by OMP_NUM_THREADS (its first level), None if not set.

    Raises:
        ValueError: the variable is not a list of whole numbers >= 1.
    """
    value = env.get("OMP_NUM_THREADS", "").strip()
    if not value:
        return None
    first = value.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise ValueError(
            f"OMP_NUM_THREADS must be a whole number >= 1, got {value!r}: set it right or unset it"
        )
    return int(first)


def num_threads(affinity: Sequence[Collection[int]], local_rank: int) -> int:
    """Threads that one rank should compute with, so that the ranks of a host do not fight for cores.

    A core counts for 1/k where k ranks may run on it, so ranks that are bound to cores of their own get all
    of these, and unbound ones share the host evenly.

    Args:
        affinity: the cores that each rank of this host may run on, in local-rank order.
        local_rank: whose threads, 0 <= local_rank < len(affinity).

    Returns:
        At least 1.

    Raises:
        ValueError: local_rank is out of range.
    """
    if not 0 <= local_rank < len(affinity):
        raise ValueError(f"local_rank must be in [0, {len(affinity)}), got {local_rank}")
    sharers: defaultdict[int, int] = defaultdict(int)
    for cores in affinity:
        for core in set(cores):
            sharers[core] += 1
    share = sum(1 / sharers[core] for core in set(affinity[local_rank]))
    return max(1, int(share + 1e-9))  # thirds do not add up to 1 exactly


# By launcher's name; other launchers start ranks of either.
YIELD_VARIABLES = {"openmpi": "OMPI_MCA_mpi_yield_when_idle", "hydra": "MPIR_CVAR_POLLS_BEFORE_YIELD"}


def mpi_environment(info: LauncherInfo, num_cores: float) -> dict[str, str]:
    """Variables to set before MPI_Init, where the user has not set them: waiting ranks must yield their core.

    A thread that waits in MPI spins; where threads share cores it thereby starves the one that it waits for.

    Args:
        info: what the launcher said; without a local size nothing is known and nothing is set.
        num_cores: cores' worth of time that the ranks of this host have together, > 0.
    """
    if info.local_size is None or not must_yield(info.local_size, num_cores):
        return {}
    known = YIELD_VARIABLES.get(info.name)
    return dict.fromkeys([known] if known else YIELD_VARIABLES.values(), "1")
