"""How ranks talk: collectives over Horovod and mpi4py or torch.distributed, and beside them the side channel for claims and
heartbeats."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path

from hvd_adaptive.cluster.binding import (
    LauncherInfo,
    check_srun,
    check_world,
    mpi_environment,
    read_launcher,
    starts_alone,
)
from hvd_adaptive.cluster.host import cores_of_ranks
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.comm.start_watch import start_watch

log = logging.getLogger(__name__)


class _Cycles:
    """How often Horovod's thread looks for something to sum (HOROVOD_CYCLE_TIME, ms), where nobody has set it.

    Horovod keeps what was set once, in the environment or not, and crashes when it is started again with its fusion set as well.

    Attributes:
        was_started: whether Horovod was, in this process.
        are_ours: whether the setting is from here.
    """

    was_started = False
    are_ours = False

    def choose(self, *, seldom: bool, repeatable: bool) -> None:
        """Sets it before Horovod starts.

        Raises:
            RuntimeError: Horovod would crash.
        """
        is_set = "HOROVOD_CYCLE_TIME" in os.environ
        fusion_is_set = repeatable or "HOROVOD_FUSION_THRESHOLD" in os.environ
        if self.was_started and is_set and fusion_is_set:
            raise RuntimeError(
                "Horovod cannot be started again in one process with both HOROVOD_CYCLE_TIME, which strategy 'local' sets, and "
                "HOROVOD_FUSION_THRESHOLD, which record and replay set: start a new process for this session"
            )
        if self.are_ours:
            os.environ["HOROVOD_CYCLE_TIME"] = "5" if seldom else "1"
        elif seldom and not (self.was_started or is_set or fusion_is_set):
            os.environ["HOROVOD_CYCLE_TIME"] = "5"
            self.are_ours = True
        self.was_started = True


_CYCLES = _Cycles()

# Ranks of these launchers carry no variable that read_launcher knows.
_UNKNOWN_LAUNCHERS = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK")


def connect(
    *,
    stall_limit_s: float,
    backend: str = "auto",
    groups: bool | None = False,
    repeatable: bool = False,
    mpi_alone: bool = False,
    seldom: bool = False,
) -> Transport:
    """Joins the world that a launcher started, or makes one of this process alone. COLLECTIVE.

    Args:
        stall_limit_s: seconds after which a dead, frozen or stuck rank ends the job.
        backend: what carries tensors, "horovod" or "torch"; "auto": torch where torchrun started the ranks, else Horovod.
        groups: whether the ranks will be split into groups (for the hierarchical exchange); None: only where there are several
            hosts of several ranks each, equally many.
        repeatable: the bits of sums must repeat from run to run: Horovod fuses no tensors then, as what is fused depends on
            timing.
        seldom: sums are of whole rounds, and not of each step: Horovod's thread looks for them every 5 ms, not every ms. Each
            look is a message to all ranks, which took a sixth of a core from a rank that computes. HOROVOD_CYCLE_TIME (ms)
            overrides it. Where ranks have few cores, threads that wait sleep.
        mpi_alone: start MPI and Horovod also where no launcher started this process; one rank needs neither.

    Raises:
        RuntimeError: if the launcher's world, MPI's and Horovod's are not one.
    """
    info = read_launcher(os.environ)
    if info.name == "none":
        strangers = [name for name in _UNKNOWN_LAUNCHERS if name in os.environ]
        if strangers:
            raise RuntimeError(
                f"a launcher that is not known here started this process ({', '.join(strangers)} is set): each rank would "
                "train alone. Start with mpirun, horovodrun, srun or torchrun, or unset the variable to run one rank."
            )
    if starts_alone(info, os.environ) and not (mpi_alone and info.name == "none"):
        from hvd_adaptive.comm.threads import LocalTransport

        return LocalTransport()
    if choose_backend(backend, info) == "torch":
        from hvd_adaptive.comm.torch_distributed import TorchTransport

        with start_watch(info.rank, stall_limit_s=stall_limit_s, backend="torch") as met:
            return TorchTransport(info, stall_limit_s=stall_limit_s, met=met)
    if info.name == "horovodrun-gloo":
        # MPI is not set up there, and Open MPI may end a process that tries without a word that helps.
        check_world(info, 1)
    _CYCLES.choose(seldom=seldom, repeatable=repeatable)
    set_mpi_environment(info)
    if repeatable:
        # Before Horovod starts, which reads them then. Its autotuning would choose another threshold.
        os.environ |= {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_AUTOTUNE": "0"}
        log.info("Horovod's tensor fusion is off (HOROVOD_FUSION_THRESHOLD=0), so that sums repeat bit for bit")
    from hvd_adaptive.comm.horovod_mpi import HorovodMpiTransport

    with start_watch(info.rank, stall_limit_s=stall_limit_s) as met:
        return HorovodMpiTransport(info, stall_limit_s=stall_limit_s, groups=groups, seldom=seldom, met=met)


def choose_backend(option: str, info: LauncherInfo) -> str:
    """Returns what carries the ranks' tensors, "horovod" or "torch".

    Args:
        option: "auto", "horovod" or "torch".
        info: what the launcher's environment says.

    Raises:
        RuntimeError: Horovod is asked for, or nothing, where it is not installed or its launcher did not start the ranks.
    """
    if option == "auto":
        option = "torch" if info.name == "torchrun" else "horovod"
    if option == "horovod" and info.name == "torchrun":
        raise RuntimeError(
            "torchrun started the ranks, and Horovod needs them to be MPI's: start them by mpirun, srun, horovodrun or -np, or "
            "choose backend 'torch'"
        )
    if option == "torch":
        return option
    lacking = [name for name in ("horovod", "mpi4py") if not _is_installed(name)]
    if lacking:
        raise RuntimeError(
            f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed: scripts/setup.sh builds Horovod with "
            "MPI; --backend torch (HVD_ADAPTIVE_BACKEND=torch) or torchrun does without"
        )
    return option


def _is_installed(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def set_mpi_environment(info: LauncherInfo) -> None:
    """Sets the variables that MPI reads when it starts, where nobody has set them.

    Args:
        info: what the launcher's environment says.

    Raises:
        RuntimeError: if srun started the ranks in a way by which this MPI cannot connect them.
    """
    for name, value in mpi_environment(info, cores_of_ranks(info.local_size or 1)).items():
        os.environ[name] = os.environ.get(name) or value
    embedded = (Path(sys.prefix) / "bin" / "orted").exists()
    if embedded:
        # PyPI's Open MPI was moved from where it was built. mpirun tells its ranks; srun's ranks must be told.
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)
        # Its btl "ofi" is for one-sided communication, which nobody uses here, and sleeps for a second when it is closed.
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")
        os.environ["PATH"] = os.pathsep.join(
            [os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)]
        )
    from hvd_adaptive.comm.mpi_library import mpi_library_version

    # Before MPI_Init, in which Open MPI may end the process.
    check_srun(info, os.environ, mpi_library_version(), embedded=embedded)
