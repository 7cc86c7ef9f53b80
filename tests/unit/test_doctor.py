"""What doctor makes of the ranks' facts, and that a child that crashes or hangs does not take the page with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.cluster.host import cpu_quota, host_cores, own_groups, parse_cores
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.doctor import measure
from hvd_adaptive.doctor.examine import judge
from hvd_adaptive.doctor.findings import Finding
from hvd_adaptive.doctor.hardware import speeds
from hvd_adaptive.doctor.supervise import Ended, Outcome, _take, ending_signals, supervise
from hvd_adaptive.doctor.text_page import document, page

COMMAND = [sys.executable, "-m", "hvd_adaptive", "doctor", "--probe-seconds", "0.1"]
Examinations = dict[str, tuple[Path, subprocess.Popen[str]]]
BAD_HOROVODS = {
    "hang": ("import time; time.sleep(1000)", "Horovod does not load within {limit_s} s"),
    "crash": ("import os; os.abort()", "Horovod does not load: ended by SIGABRT"),
}
# Of a stage. Within the first, others load torch and compile kernels, but on a busy machine, and there they do within the last.
LIMITS_S = {"hang": (20, 120), "crash": (120,)}


def begin_examination(folder: Path, limit_s: int) -> subprocess.Popen[str]:
    """Examines a host whose Horovod is in a folder."""
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUTF8": "1"}
    command = [*COMMAND, "--limit", str(limit_s), "--json", "-"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True, scope="module")
def examinations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examinations]:
    """Of hosts with a bad Horovod: begun with this file's first test, as they mostly wait."""
    begun = {}
    for kind, (code, _) in BAD_HOROVODS.items():
        if any(item.name == f"test_a_horovod_that_crashes_or_hangs_is_a_finding[{kind}]" for item in request.session.items):
            folder = tmp_path_factory.mktemp(kind)
            (folder / "horovod").mkdir()
            (folder / "horovod" / "__init__.py").write_text(code)
            begun[kind] = folder, begin_examination(folder, LIMITS_S[kind][0])
    yield begun
    for _, child in begun.values():
        child.terminate()
        child.wait(60)


def facts(rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Facts of one of two healthy ranks of a host with four cores; "stage.name" changes one of them."""
    whole: dict[str, Any] = {
        "machine": {
            "host": "alpha", "python": "3.11.10", "executable": "/python", "horovod_built_for": "2.13.0+cpu",
            "backend": "horovod",
            "versions": {"torch": "2.13.0+cpu", "horovod": "0.28.1", "mpi4py": "4.1.2"}, "cores": [0, 1, 2, 3],
            "host_cores": [0, 1, 2, 3], "cpu": "Big CPU", "cpu_quota": None, "shm_bytes": 8 << 30, "shm_free_bytes": 8 << 30,
            "busy_waiting": False, "nvidia_smi": None,
        },
        "torch": {"version": "2.13.0+cpu", "cuda": None, "num_gpus": 0},
        "horovod": {
            "version": "0.28.1", "mpi_built": True, "gloo_built": True, "nccl_built": False, "cuda_built": False,
            "mpi_libraries": ["/lib/libmpi.so.40"],
        },
        "mpi4py": {"version": "4.1.2", "library_version": "Open MPI v4.1.8", "mpi_libraries": ["/lib/libmpi.so.40"]},
        "world": {
            "rank": rank, "world_size": 2, "mpi_size": 2, "horovod_size": 2, "thread_level": "MPI_THREAD_MULTIPLE",
            "controller": "MPI",
        },
        "device": {"device": "cpu", "threads": 2, "place": {"host": "alpha", "uuid": None, "visible": [], "named": False}},
        "kernels": {"backend": "numba", "first_s": 1.0, "second_s": 0.1},
        "speed": {"flops": 5e10, "seconds": 2.0, "cpu_share": 1.0},
        "claims": {"median_s": 2e-5, "p99_s": 1e-4},
        "collectives": {"small_bytes": 4096, "small_s": 1e-3, "large_bytes": 8 << 20, "large_s": 1e-2, "gather_s": 1e-4},
        "links": [],
    }  # fmt: skip
    for name, value in changes.items():
        stage, _, inner = name.partition("__")
        if inner:
            whole[stage][inner] = value
        else:
            whole[stage] = value
    return whole


def gpu(rank: int, uuid: str, flops: float = 5e13, **more: Any) -> dict[str, Any]:
    place = {"host": "alpha", "uuid": uuid, "visible": ["GPU-a", "GPU-b", "GPU-c"], "named": False}
    device = {"device": f"cuda:{rank}", "threads": 2, "name": "Fast GPU", "place": place}
    return facts(rank, device=device, speed={"flops": flops, "seconds": 2.0}, **more)


def bad(ranks: list[dict[str, Any]]) -> list[Finding]:
    return [finding for finding in judge(ranks, joined=True) if finding.status != "ok"]


def test_over_torch_neither_horovod_nor_mpi_is_missed() -> None:
    world = {"rank": 0, "world_size": 2, "carrier": "torch.distributed (Gloo)", "torch_size": 2}
    changes = {"machine__backend": "torch", "machine__versions": {"torch": "2.13.0+cpu"}, "world": world}
    ranks = [{k: v for k, v in facts(rank, **changes).items() if k not in ("horovod", "mpi4py")} for rank in range(2)]
    assert not bad(ranks)
    (found,) = [finding.text for finding in judge(ranks, joined=True) if finding.subject == "world"]
    assert found == "2 ranks on 1 host; over torch.distributed (Gloo)"
    ranks[0]["machine"]["backend"] = "horovod"
    (missing,) = bad(ranks)
    assert "not installed: horovod, mpi4py" in missing.text and "--backend torch" in str(missing.remedy)


def test_a_rank_with_fewer_threads_is_not_a_slow_one() -> None:
    ranks = [facts(rank, device__threads=8, speed__flops=2e11) for rank in range(4)]
    ranks += [facts(rank, device__threads=2) for rank in (4, 5, 6)]
    (finding,) = speeds(ranks)
    every = "(ranks: 100% of that)"
    assert finding.text == f"Big CPU, 8 threads: 200 GFLOP/s {every}; Big CPU, 2 threads: 50 GFLOP/s {every}"
    slow = [one for one in speeds([*ranks, facts(7, speed__flops=1e10)]) if one.status != "ok"]
    assert [one.text for one in slow] == ["rank 7 on alpha computes at 20% of the median of its kind (Big CPU, 2 threads)"]


def test_healthy_ranks_give_no_warning() -> None:
    findings = judge([facts(0), facts(1)], joined=True)
    assert [finding.subject for finding in findings] == [
        "versions", "Horovod", "MPI library", "world", "devices", "cores", "shared memory", "kernels", "speed", "claims",
        "collectives",
    ]  # fmt: skip
    assert not bad([facts(0), facts(1)])
    assert not bad([gpu(0, "GPU-a"), gpu(1, "GPU-b"), gpu(2, "GPU-c")])


def links(mb_per_s: float) -> list[dict[str, Any]]:
    rates = (mb_per_s * 1e6, 1.5 * mb_per_s * 1e6)
    return [{"from": "a", "to": "b", "bytes_per_s": rate, "small_s": 1e-3, "small_bytes": 4096} for rate in rates]


def test_speeds_are_said_in_their_units() -> None:
    texts = {finding.subject: finding.text for finding in judge([facts(links=links(400.0)), facts(1)], joined=True)}
    assert texts["speed"] == "Big CPU, 2 threads: 50 GFLOP/s (ranks: 100% of that)"
    assert texts["claims"] == "one claim takes 20 us, at worst 20 us (medians of ranks); 99% within 100 us"
    assert texts["collectives"] == "allreduce of 4 KiB 1 ms, of 8 MiB 10 ms (0.84 GB/s); gather 100 us"
    assert texts["links"] == "2 links between hosts: 400 to 600 MB/s; 4 KiB in 1 ms"


@pytest.mark.parametrize(("mb_per_s", "advised"), [(199.0, True), (201.0, False)])
def test_compression_is_advised_where_no_link_carries_300_mb_a_second(mb_per_s: float, advised: bool) -> None:
    (found,) = [one for one in judge([facts(links=links(mb_per_s)), facts(1)], joined=True) if one.subject == "links"]
    assert found.status == "ok" and (found.remedy is not None) == advised
    assert not advised or "--compression maxmin:4" in str(found.remedy)


def test_a_links_rate_is_of_the_bytes_beyond_the_small_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds from rank 0 and from rank 1. There the large message takes too short, and one of eight times its size is sent.
    seconds = {4 << 10: (0.001, 0.002), 8 << 20: (0.101, 0.012), 64 << 20: (None, 0.082)}
    monkeypatch.setattr(measure, "_transfer", lambda transport, source, target, size: seconds[size][source])
    found, other = LocalWorld(2, num_hosts=2).run(measure.links)
    assert found == other and [(one["from"], one["to"]) for one in found] == [("host0", "host1"), ("host1", "host0")]
    assert [(one["bytes"], one["small_s"]) for one in found] == [(8 << 20, 0.001), (64 << 20, 0.002)]
    rates = [((8 << 20) - (4 << 10)) / 0.1, ((64 << 20) - (4 << 10)) / 0.08]
    assert [one["bytes_per_s"] for one in found] == pytest.approx(rates)


CASES: dict[str, tuple[Callable[[], list[dict[str, Any]]], str, str, str]] = {
    "torch of another kind": (
        lambda: [facts(machine__horovod_built_for="2.9.1")] * 2,
        "Horovod",
        "problem",
        "built against torch 2.9.1",
    ),
    "torch of another patch": (
        lambda: [facts(machine__horovod_built_for="2.13.1")] * 2,
        "Horovod",
        "warning",
        "torch 2.13.0+cpu",
    ),
    "a Python whose forks may hang": (lambda: [facts(machine__python="3.11.7")] * 2, "Python", "warning", "may never start"),
    "no MPI in Horovod": (lambda: [facts(horovod__mpi_built=False)] * 2, "Horovod", "problem", "without MPI"),
    "CPU Horovod beside CUDA torch": (lambda: [facts(torch__cuda="12.8")] * 2, "Horovod", "warning", "host memory"),
    "two MPIs": (
        lambda: [facts(), facts(1, mpi4py__mpi_libraries=["/lib/libmpi.so.40", "/usr/lib/libmpi.so.12"])],
        "MPI library",
        "problem",
        "rank 1: Horovod loads /lib/libmpi.so.40, mpi4py /usr/lib/libmpi.so.12",
    ),
    "another MPI on a rank beside one that did not say": (
        lambda: [facts(mpi4py={"error": "gone"}), facts(1), facts(2, mpi4py__library_version="Open MPI 5")],
        "MPI library",
        "warning",
        "rank 2 Open MPI 5",
    ),
    "other versions on one rank": (
        lambda: [facts(), facts(1, machine__versions={"torch": "2.9.0", "horovod": "0.28.1", "mpi4py": "4.1.2"})],
        "versions",
        "problem",
        "2.9.0 on rank 1",
    ),
    "two ranks on one GPU": (
        lambda: [gpu(0, "GPU-a"), gpu(1, "GPU-a")],
        "devices",
        "problem",
        "ranks 0, 1 on alpha all use the GPU GPU-a",
    ),
    "GPU that torch does not see": (
        lambda: [facts(machine__nvidia_smi={"gpus": ["GPU 0: Fast GPU"]})] * 2,
        "devices",
        "warning",
        "this torch is a CPU build",
    ),
    "a driver that fails": (
        lambda: [facts(machine__nvidia_smi={"error": "no devices"})] * 2,
        "devices",
        "problem",
        "no devices",
    ),
    "both bound to one core": (
        lambda: [facts(machine__cores=[1])] * 2,
        "cores",
        "problem",
        "bound to core 1, and no rank uses 0, 2, 3",
    ),
    "more ranks than cores": (
        lambda: [facts(machine__cores=[0], machine__host_cores=[0])] * 2,
        "cores",
        "warning",
        "2 ranks on alpha share 1 core",
    ),
    "bound to one of many": (
        lambda: [facts(r, machine__cores=[r], machine__host_cores=list(range(16))) for r in (0, 1)],
        "cores",
        "warning",
        "to 1 of 16 cores",
    ),
    "a CPU quota": (lambda: [facts(machine__cpu_quota=0.5)] * 2, "cores", "warning", "0.5 cores"),
    "busy waiting": (lambda: [facts(machine__busy_waiting=True)] * 2, "cores", "warning", "busy while they wait"),
    "full shared memory": (lambda: [facts(machine__shm_free_bytes=1 << 20)] * 2, "shared memory", "problem", "1 MiB free"),
    "Docker's shared memory": (
        lambda: [facts(machine__shm_bytes=64 << 20, machine__shm_free_bytes=64 << 20)] * 2,
        "shared memory",
        "warning",
        "64 MiB",
    ),
    "a slow card": (
        lambda: [gpu(0, "GPU-a"), gpu(1, "GPU-b", 2.5e13), gpu(2, "GPU-c")],
        "slow rank",
        "warning",
        "rank 1 on alpha computes at 50%",
    ),
    "a core shared with others": (lambda: [facts(), facts(1, speed__cpu_share=0.5)], "busy cores", "warning", "rank 1 got 50%"),
    "slow claims": (lambda: [facts(), facts(1, claims__median_s=0.03)], "claims", "warning", "slow on rank 1"),
    "kernels that do not compile": (
        lambda: [facts(kernels={"error": "no cache"}), facts(1)],
        "kernels",
        "warning",
        "rank 0: no cache",
    ),
    "a slow link": (
        lambda: [
            facts(
                links=[
                    {"from": a, "to": b, "bytes_per_s": rate, "small_s": 1e-3, "small_bytes": 4096, "bytes": 8 << 20}
                    for a, b, rate in (("a", "b", 1e9), ("b", "c", 1e8), ("c", "a", 1e9))
                ]
            ),
            facts(1),
        ],
        "links",
        "warning",
        "b to c: 100 MB/s",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_with_a_remedy(case: str) -> None:
    ranks, subject, status, text = CASES[case]
    (finding,) = bad(ranks())
    assert (finding.subject, finding.status) == (subject, status)
    assert text in finding.text
    assert finding.remedy or "start one rank per GPU" in finding.text or "let every rank see" in finding.text


def test_facts_that_end_early_still_make_a_page() -> None:
    stages = ["machine", "torch", "horovod", "mpi4py", "world", "device", "kernels", "speed"]
    for end in range(1, len(stages) + 1):
        judge([{stage: facts()[stage] for stage in stages[:end]}], joined=False)


def test_the_page_fits_80_columns_and_says_the_same_without_symbols() -> None:
    findings = [
        Finding("cores", "problem", "much " * 40, "do " * 40),
        Finding("speed", "warning", "slow"),
        Finding("world", "ok", "fine"),
    ]
    whole = document("head", findings, [])
    assert whole["problems"] == whole["warnings"] == 1
    with_symbols, plain = page(whole, symbols=True), page(whole, symbols=False)
    assert max(map(len, with_symbols.splitlines())) <= 80 and plain.isascii()
    assert "✗ FAIL" in with_symbols and "FAIL" in plain and "1 problem, 1 warning" in plain


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    assert parse_cores("0-2,8\n") == [0, 1, 2, 8] and parse_cores("\n") == []
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/cpu.max").write_text("150000 100000\n")
    (tmp_path / "job/step/cpu.max").write_text("max 100000\n")
    (tmp_path / "job/step/cpuset.cpus.effective").write_text("4-5\n")
    groups = own_groups("0::/job/step\n", tmp_path)
    assert cpu_quota(groups) == 1.5 and host_cores(groups) == [4, 5]
    (tmp_path / "cpu/x").mkdir(parents=True)
    (tmp_path / "cpu/x/cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu/x/cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(own_groups("3:cpu,cpuacct:/x\n0::/\n", tmp_path)) == 0.5
    assert cpu_quota({}) is None


def test_an_error_that_is_not_the_end_is_forgotten() -> None:
    outcome = Outcome()
    for line in ({"begin": "kernels"}, {"end": "kernels", "facts": {"error": "x"}}, {"begin": "claims"}):
        _take(line, outcome, lambda stage: None)
    assert (outcome.stage, outcome.kind, outcome.facts["kernels"]) == ("claims", "", {"error": "x"})


SAYS_ALL = """#!{python}
import json, os, sys, time
with os.fdopen(json.loads(sys.argv[-1])["pipe"], "w") as pipe:
    for line in ({{"begin": "end"}}, {{"end": "end", "facts": None}}, {{"done": True}}):
        pipe.write(json.dumps(line) + "\\n")
{then}
"""


@pytest.mark.parametrize(
    ("then", "stage", "kind"),
    [("", None, ""), ("os.abort()", "end", "crash"), ("sys.exit(1)", "end", "crash"), ("time.sleep(1000)", "end", "hang")],
)
def test_what_fails_after_the_last_word_is_a_failure(
    then: str, stage: str | None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI ends when all stages are over."""
    child = tmp_path / "python"
    child.write_text(SAYS_ALL.format(python=sys.executable, then=then))
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    outcome = supervise({"machine": {}}, limit_s=5.0)
    assert (outcome.stage, outcome.kind) == (stage, kind)
    assert ("SIGABRT" in outcome.text) == (then == "os.abort()")


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD_HOROVODS)
def test_a_horovod_that_crashes_or_hangs_is_a_finding(kind: str, examinations: Examinations) -> None:
    _, text = BAD_HOROVODS[kind]
    folder, child = examinations[kind]
    # What needs no Horovod is examined all the same.
    examined = {"devices", "cores", "shared memory", "kernels", "speed"}
    for limit_s in LIMITS_S[kind]:
        if limit_s != LIMITS_S[kind][0]:
            child = begin_examination(folder, limit_s)
        output, errors = child.communicate(timeout=400)
        assert child.returncode == 1, errors
        found = json.loads(output)
        first = found["findings"][0]
        subjects = {one["subject"] for one in found["findings"]}
        if first["subject"] == "Horovod" and examined <= subjects:
            break
    assert found["problems"] == 1 and first["subject"] == "Horovod"
    assert first["text"].startswith(text.format(limit_s=limit_s)) and "setup.sh" in first["remedy"]
    assert examined <= subjects


@pytest.mark.slow
def test_the_page_appears_when_the_launcher_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("import time; time.sleep(1000)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen([*COMMAND, "--as-rank"], env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if '"stage": "horovod"' in line:
            break
    child.send_signal(signal.SIGTERM)
    text, _ = child.communicate(timeout=200)
    assert "the launcher ended the job here" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_examination(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Ended), ending_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_nohup_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
