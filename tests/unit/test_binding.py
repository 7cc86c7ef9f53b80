from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.cluster.binding import (
    LauncherInfo,
    check_srun,
    check_world,
    choose_device,
    idle_nodes,
    mpi_environment,
    num_restarts,
    num_threads,
    read_launcher,
    requested_threads,
    starts_alone,
)
from hvd_adaptive.cluster.device import device_place
from hvd_adaptive.cluster.device_places import DevicePlace, missing_gpus, shared_devices
from hvd_adaptive.cluster.host import cpu_quota, free_memory_bytes, host_cores, own_cores

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
GLOO = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "PMIX_RANK": "3",
}
UNWIRED = {name: value for name, value in SRUN.items() if name != "PMIX_RANK"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
# What a batch script sees of Slurm: the batch step is one process, whatever --ntasks says.
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize(
    ("name", "env"),
    [("openmpi", OPEN_MPI), ("hydra", HYDRA), ("horovodrun-gloo", GLOO), ("slurm", SRUN), ("torchrun", TORCHRUN)],
)
def test_every_launcher_tells_rank_and_world(name, env):
    expected = LauncherInfo(name=name, rank=3, world_size=4, local_rank=1, local_size=2)
    assert read_launcher(env) == expected
    check_world(expected, 4)


@pytest.mark.parametrize(("name", "env"), [("openmpi", OPEN_MPI), ("hydra", HYDRA), ("horovodrun-gloo", GLOO)])
def test_ranks_of_mpi_and_horovod_are_theirs_whatever_torch_was_told(name, env):
    plain = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert read_launcher({**plain, **env}).name == name


def test_torchrun_may_be_started_by_srun_and_its_variables_by_anybody():
    assert read_launcher({**SRUN, **TORCHRUN}).name == "torchrun"
    plain = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert read_launcher(plain).name == "torchrun"
    assert read_launcher({**SRUN, **plain}).name == "slurm"
    # A part of them, as a person's profile or a notebook may have it, starts no rank.
    for missing in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert read_launcher({**plain, missing: ""}).name == "none"
    alone = read_launcher({**plain, "RANK": "0", "WORLD_SIZE": "1"})
    assert starts_alone(alone, {}) and not starts_alone(read_launcher(plain), {})


def test_no_launcher():
    info = read_launcher({"PATH": "/bin"})
    assert info == LauncherInfo(name="none")
    check_world(info, 1)


def test_a_batch_script_is_no_rank():
    assert read_launcher(BATCH).name == "none"


@pytest.mark.parametrize("env", [OPEN_MPI, HYDRA])
def test_mpirun_inside_a_slurm_job_wins_over_slurm(env):
    # On the batch host ranks inherit the batch step's variables; elsewhere those of the daemons' step, one a
    # node.
    daemon_step = {**BATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    for slurm in (BATCH, daemon_step):
        info = read_launcher({**slurm, **env})
        assert (info.rank, info.world_size) == (3, 4)
        check_world(info, 4)


def test_srun_with_pmi2_is_slurm():
    assert read_launcher({**UNWIRED, "PMI_RANK": "3", "PMI_SIZE": "4"}).name == "slurm"


@pytest.mark.parametrize(
    ("node", "tasks", "size"),
    [("0", "4", 4), ("2", "2(x2),1", 1), ("1", "2(x2),1", 2), ("3", "2(x3)", None), ("0", "strange", None)],
)
def test_slurm_tasks_of_a_node(node, tasks, size):
    env = {**SRUN, "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert read_launcher(env).local_size == size


@pytest.mark.parametrize(
    ("env", "version", "embedded"),
    [
        (UNWIRED, "Open MPI v4.1.8, package:", True),
        ({**UNWIRED, "PMI_RANK": "3"}, "Open MPI v4.1.8, package:", True),
        (UNWIRED, "Open MPI v5.0.11, package:", False),
    ],
)
def test_open_mpi_under_srun_without_pmix_is_refused_with_the_fix(env, version, embedded):
    info = read_launcher(env)
    with pytest.raises(RuntimeError, match=r"srun started 4 ranks .this is rank 3.*Open MPI v\d.*srun --mpi=pmix.*mpirun"):
        check_srun(info, env, version, embedded=embedded)


@pytest.mark.parametrize(
    ("env", "version", "embedded"),
    [
        (SRUN, "Open MPI v4.1.8, package:", True),
        (SRUN, "Open MPI v5.0.11, package:", False),
        (UNWIRED, "Open MPI v4.1.4, package: Debian OpenMPI", False),
        ({**UNWIRED, "PMI_RANK": "3"}, "MPICH Version: 4.3.2", False),
        (OPEN_MPI, "Open MPI v4.1.8, package:", True),
    ],
)
def test_srun_that_may_connect_its_tasks_is_let_through(env, version, embedded):
    check_srun(read_launcher(env), env, version, embedded=embedded)


def test_one_task_of_srun_is_a_world_of_its_own_unless_it_is_a_component():
    shell = {**UNWIRED, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert starts_alone(read_launcher(shell), shell)
    component = {**shell, "SLURM_HET_SIZE": "2"}
    assert not starts_alone(read_launcher(component), component)
    wired = {**shell, "PMIX_RANK": "0"}
    assert not starts_alone(read_launcher(wired), wired)
    assert not starts_alone(read_launcher(UNWIRED), UNWIRED)
    assert not starts_alone(read_launcher(OPEN_MPI), OPEN_MPI)
    assert starts_alone(read_launcher({}), {})


def test_a_broken_variable_is_named():
    with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_SIZE.*'four'"):
        read_launcher({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "four"})


@pytest.mark.parametrize(
    ("env", "fix"),
    [
        (SRUN, "srun --mpi=pmix.*--mpi=pmi2"),
        (OPEN_MPI, "another MPI.*mpirun --version"),
        (HYDRA, "another MPI.*mpiexec --version"),
        (GLOO, "horovodrun --mpi.*horovodrun.*mpirun"),
    ],
)
def test_singletons_are_refused_with_the_fix(env, fix):
    with pytest.raises(RuntimeError, match=f"started 4 ranks .this is rank 3.*MPI sees 1.*{fix}"):
        check_world(read_launcher(env), 1)


def test_a_heterogeneous_srun_counts_its_component_only():
    check_world(read_launcher(SRUN), 9)
    with pytest.raises(RuntimeError, match="MPI sees 9"):
        check_world(read_launcher(OPEN_MPI), 9)


@pytest.mark.parametrize(
    ("option", "local_rank", "count", "device"),
    [
        ("auto", 0, 0, "cpu"),
        ("cpu", 1, 4, "cpu"),
        ("auto", 1, 4, "cuda:1"),
        ("cuda", 3, 4, "cuda:3"),
        ("cuda", 3, 1, "cuda:0"),
        ("cuda:2", 0, 3, "cuda:2"),
    ],
)
def test_device(option, local_rank, count, device):
    choice = choose_device(option, local_rank=local_rank, local_size=4, cuda_device_count=count)
    assert choice == (device, None)


def test_more_ranks_than_gpus_share_them_with_a_warning():
    choices = [choose_device("auto", local_rank=r, local_size=4, cuda_device_count=2) for r in range(4)]
    assert [choice.device for choice in choices] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert all(choice.warning and "4 ranks share" in choice.warning for choice in choices)


@pytest.mark.parametrize("option", ["cuda", "cuda:0"])
def test_a_missing_gpu_is_an_error(option):
    with pytest.raises(RuntimeError, match=r"sees no GPU.*--device cpu"):
        choose_device(option, local_rank=0, local_size=1, cuda_device_count=0)


def test_a_gpu_number_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"'cuda:4'.*sees 4 GPU"):
        choose_device("cuda:4", local_rank=0, local_size=1, cuda_device_count=4)


@pytest.mark.parametrize("option", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", "CPU"])
def test_unknown_devices(option):
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:K, got"):
        choose_device(option, local_rank=0, local_size=1, cuda_device_count=1)


def on(uuid, *others, host="a", named=False):
    return DevicePlace(host, uuid, (uuid, *others), named)


def test_gpus_of_their_own_are_fine():
    assert shared_devices([DevicePlace("a"), DevicePlace("a")]) is None
    # One name on two hosts is two GPUs; and ranks that see one each see different ones.
    assert shared_devices([on("G0"), on("G0", host="b"), on("G1")]) is None
    assert shared_devices([on("G0", "G1"), on("G1", "G0")]) is None


@pytest.mark.parametrize("places", [[on("G0"), on("G1"), on("G0")], [on("G0", named=True)] * 2])
def test_more_ranks_than_visible_gpus_are_warned_by_name(places):
    warning = shared_devices(places)
    ranks = [rank for rank, place in enumerate(places) if place.uuid == "G0"]
    assert warning is not None
    assert f"ranks {ranks[0]}, {ranks[1]} on a share the GPU G0" in warning
    assert "CUDA_VISIBLE_DEVICES" in warning


def test_ranks_that_share_a_gpu_beside_an_idle_one_are_refused():
    places = [on("G0"), on("G0"), on("G2", "G0", "G1"), on("G1", host="b")]
    with pytest.raises(RuntimeError, match=r"ranks 0, 1 on a all use the GPU G0, and G1 there is idle.*--device cuda:K"):
        shared_devices(places)


def test_ranks_without_a_gpu_beside_ranks_with_one_are_named():
    warning = missing_gpus([on("G0"), DevicePlace("b"), DevicePlace("c")])
    assert warning and re.match(r"ranks 1, 2 on b, c see no GPU, and the others have one: .*--device cpu", warning)
    # Who asked for the CPU has it.
    cpu = device_place(torch.device("cpu"), "cpu", "b")
    assert cpu.named and not device_place(torch.device("cpu"), "auto", "b").named
    assert missing_gpus([on("G0"), cpu]) is None and missing_gpus([DevicePlace("b")] * 2) is None


def test_who_asks_for_a_gpu_by_its_number_may_share_it_beside_an_idle_one():
    assert "ranks 0, 1 on a share the GPU G0" in (shared_devices([on("G0", "G1", named=True)] * 2) or "")
    with pytest.raises(RuntimeError, match="G1 there is idle"):
        shared_devices([on("G0", "G1", named=True), on("G0", "G1")])


def test_what_each_rank_can_tell_by_itself_is_not_said_again():
    # `choose_device` has warned these.
    assert shared_devices([on("G0", "G1"), on("G1", "G0"), on("G0", "G1")]) is None


@pytest.mark.parametrize(("value", "threads"), [("", None), ("3", 3), (" 4,2", 4)])
def test_requested_threads(value, threads):
    assert requested_threads({"OMP_NUM_THREADS": value}) == threads


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_bad_requested_threads(value):
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        requested_threads({"OMP_NUM_THREADS": value})


@given(st.integers(1, 64), st.integers(1, 32))
def test_unbound_ranks_share_evenly(cores, ranks):
    assert num_threads([range(cores)] * ranks, ranks - 1) == max(1, cores // ranks)


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_threads_never_exceed_the_cores_unless_ranks_do(affinity):
    threads = [num_threads(affinity, rank) for rank in range(len(affinity))]
    cores = len(set().union(*affinity))
    assert all(1 <= n <= len(own) for n, own in zip(threads, affinity, strict=True))
    assert sum(threads) <= cores + sum(n == 1 for n in threads)


def test_bound_ranks_keep_their_cores():
    assert [num_threads([{0, 1, 2}, {3}], rank) for rank in (0, 1)] == [3, 1]


def test_threads_of_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match=r"local_rank must be in \[0, 1\), got 1"):
        num_threads([{0}], 1)


def test_waiting_ranks_yield_only_when_there_are_too_many():
    info = read_launcher(OPEN_MPI)
    assert mpi_environment(info, 2 * info.local_size) == {}
    # Horovod's thread wants a core beside each rank's own.
    assert mpi_environment(info, 2 * info.local_size - 1) == {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert mpi_environment(info, 1) == {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert mpi_environment(read_launcher(HYDRA), 1) == {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    assert len(mpi_environment(read_launcher(SRUN), 1)) == 2
    assert mpi_environment(LauncherInfo(name="none"), 1) == {}


def test_cores_of_ranks_that_are_bound_to_some_each():
    own = own_cores()
    code = "import os, sys; from hvd_adaptive.cluster.host import cores_of_ranks; {} print(cores_of_ranks(2))"
    for bind, cores in (("", len(own)), (f"os.sched_setaffinity(0, [{own[0]}]);", min(2, len(own)))):
        found = subprocess.run([sys.executable, "-c", code.format(bind)], capture_output=True, text=True, check=True)
        assert int(found.stdout) == cores, bind


def test_binding_imports_no_mpi():
    code = "import sys, hvd_adaptive.cluster.binding as _; "
    code += "assert not {'mpi4py', 'horovod', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nodes_without_a_rank_are_noticed() -> None:
    assert idle_nodes({}, 1) is None and idle_nodes({"SLURM_JOB_NUM_NODES": "2"}, 2) is None
    # A component of a heterogeneous job counts only its own.
    assert idle_nodes({"SLURM_JOB_NUM_NODES": "1"}, 2) is None
    warning = idle_nodes({"SLURM_JOB_NUM_NODES": "4"}, 1)
    assert warning is not None and "has 4 nodes, and all ranks are on 1 of them" in warning


def test_restarts_are_counted_by_slurm() -> None:
    assert num_restarts({}) == 0 and num_restarts({"SLURM_RESTART_COUNT": "2"}) == 2
    with pytest.raises(ValueError, match="SLURM_RESTART_COUNT must be a whole number"):
        num_restarts({"SLURM_RESTART_COUNT": "x"})


@pytest.mark.parametrize("version", [1, 2])
def test_what_files_have_in_memory_counts_as_free(tmp_path: Path, version: int) -> None:
    """A control group's usage counts the pages of files that were read, which the kernel drops for whoever needs room."""
    limit, usage = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / usage).write_text("900\n")
    group = {"" if version == 2 else "memory": tmp_path}
    assert free_memory_bytes(group, tmp_path / "none") == 100
    prefix = "" if version == 2 else "total_"
    (tmp_path / "memory.stat").write_text(f"anon 300\n{prefix}inactive_file 500\n{prefix}active_file 50\n")
    assert free_memory_bytes(group, tmp_path / "none") == 650


def test_limits_of_control_groups_above_one_without_the_controllers_files_count(tmp_path: Path) -> None:
    step = tmp_path / "job/step/task"
    step.mkdir(parents=True)
    (tmp_path / "job/cpu.max").write_text("150000 100000\n")
    (tmp_path / "job/cpuset.cpus.effective").write_text("4-5\n")
    (tmp_path / "job/memory.max").write_text("1000\n")
    (tmp_path / "job/memory.current").write_text("900\n")
    groups = {"": step}
    assert cpu_quota(groups) == 1.5 and host_cores(groups) == [4, 5] and free_memory_bytes(groups, tmp_path / "none") == 100
    # What cannot be read hides nothing above it.
    (tmp_path / "job/step/cpu.max").mkdir()
    (tmp_path / "job/step/memory.max").mkdir()
    assert cpu_quota(groups) == 1.5 and free_memory_bytes(groups, tmp_path / "none") == 100
