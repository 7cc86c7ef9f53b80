"""The checks of `hvd-adaptive doctor --gpu` on what there is without a GPU, and what it makes of facts, crashes and hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pretended_cuda
import pytest
import torch
from jobs import forking_environment

from hvd_adaptive.cli.main import main
from hvd_adaptive.comm import shared_gpus
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress.kernels import reference
from hvd_adaptive.doctor import gpu, gpu_checks
from hvd_adaptive.doctor.gpu import cleaned, run_check
from hvd_adaptive.doctor.gpu_verdict import WHAT, judge_check
from hvd_adaptive.doctor.supervise import Ended
from hvd_adaptive.doctor.text_page import page

CPU = torch.device("cpu")
COMMAND = [sys.executable, "-m", "hvd_adaptive", "doctor", "--gpu"]
GPU = {
    "torch": "2.13", "cuda": "13.0", "num_gpus": 2, "num_different_gpus": 2, "name": "H100", "capability": "9.0",
    "memory_bytes": 80 << 30, "built_for": [], "nccl": [2, 28, 9], "sum": 1000.0,
}  # fmt: skip


# Each check, where it can run


def test_kernels_are_compared_code_by_code() -> None:
    """The real ones in Triton's interpreter: test_triton.py."""
    found = gpu_checks.kernel_bits(CPU, reference)
    assert found["differing"] == [] and found["codes"] > 20
    assert judge_check("kernels", found).status == "ok"

    def spoilt(values: Any, payload: torch.Tensor, bits: int, *rest: Any) -> None:
        reference.levels_encode(values, payload, bits, *rest)
        if bits == 3:
            payload[-1] ^= 1

    broken: Any = types.SimpleNamespace(**{**vars(reference), "levels_encode": spoilt})
    found = gpu_checks.kernel_bits(CPU, broken)
    assert {text.split(",")[0] for text in found["differing"]} == {"encoding 3 bits"}
    finding = judge_check("kernels", found)
    assert finding.status == "problem" and "encoding 3 bits, bucket 24, nearest" in finding.text


def test_codecs_are_timed_beside_a_copy() -> None:
    found = gpu_checks.codec_speeds(CPU, 1 << 14)
    assert set(found["codecs"]) == {"maxmin:4", "maxmin:8", "normal:2", "topk:0.01"}
    assert all(speed > 0 for one in found["codecs"].values() for speed in one.values())
    slow = {"maxmin:4": {"encode_gb_s": 900, "decode_add_gb_s": 1200, "copy_gb_s": 1300},
            "normal:2": {"encode_gb_s": 5, "decode_add_gb_s": 900, "copy_gb_s": 1300}}  # fmt: skip
    finding = judge_check("codecs", {"num_values": 1, "codecs": slow})
    assert finding.status == "warning" and "Too slow to be of use: normal:2" in finding.text


def test_events_add_up_to_the_wall_clock() -> None:
    found = gpu_checks.step_events(CPU, num_steps=5, size=300)
    assert found["in_order"] and 0.5 < found["event_s"] / found["wall_s"] <= 1.01
    good = {"num_steps": 30, "launch_s": 0.01, "event_s": 0.98, "wall_s": 1.0, "in_order": True}
    assert judge_check("events", good).status == "ok"
    for change in ({"event_s": 0.1}, {"event_s": 1.3}, {"in_order": False}):
        assert judge_check("events", {**good, **change}).status == "problem"
    assert judge_check("events", {**good, "launch_s": 0.9}).status == "warning"


def test_sums_over_ranks_are_checked() -> None:
    for found in LocalWorld(2).run(lambda transport: gpu_checks.allreduce(CPU, transport, 1 << 12)):
        assert found["right"] and found["world_size"] == 2
        assert judge_check("allreduce", found).status == "ok"

    class Wrong(LocalTransport):
        def allreduce_sum_(self, tensor: torch.Tensor, name: str) -> None:
            super().allreduce_sum_(tensor, name)
            if self.rank == 1 and tensor.numel() == 1000:
                tensor[7] += 1

    found = LocalWorld(2).run(lambda t: gpu_checks.allreduce(CPU, Wrong(t._world, t.rank), 1 << 12))[0]
    assert not found["right"] and "WRONG" in judge_check("allreduce", found).text
    alone = gpu_checks.allreduce(CPU, LocalTransport(), 1 << 12)
    assert judge_check("allreduce", alone).status == "warning"


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_on_one_gpu_are_found(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(range(100))
    uuid = lambda device: "GPU-1" if shared else f"GPU-{next(names)}"  # noqa: E731
    monkeypatch.setattr(gpu_checks, "gpu_of", uuid)
    monkeypatch.setattr(shared_gpus, "gpu_of", uuid)
    for found in LocalWorld(2).run(lambda transport: gpu_checks.shared_gpu(CPU, transport, 1 << 12)):
        assert found["right"] and found["found"] is shared
        assert judge_check("sharing", found).status == ("ok" if shared else "problem")


def test_a_short_training_on_ranks() -> None:
    for found in LocalWorld(2).run(lambda transport: gpu_checks.training(CPU, transport)):
        finding = judge_check("training", found)
        assert finding.status == "ok", finding
        assert len(found["losses"]) == 6 and sum(found["samples"]) == 6144
    flat = {**found, "losses": [2.0, 1.99]}
    assert "does not fall" in judge_check("training", flat).text
    assert judge_check("training", {**found, "samples": [0, 6144]}).status == "problem"


def test_checks_on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    with pretended_cuda.pretended_cuda(monkeypatch), pretended_cuda.recording(pretended_cuda.Log()):
        # Its events take no time: only the order can be seen.
        assert gpu_checks.step_events(cuda, num_steps=3, size=64)["in_order"]
        assert gpu_checks.allreduce(cuda, LocalTransport(), 1 << 10)["right"]
        found = gpu_checks.training(cuda, LocalTransport(), num_samples=1024)
        assert found["losses"][-1] < found["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["horovod", "torch"])
@pytest.mark.parametrize("name", ["allreduce", "training"])
def test_checks_of_real_ranks(name: str, backend: str) -> None:
    found = run_check(name, device="cpu", num_ranks=2, backend=backend, limit_s=200, extra=forking_environment())
    assert judge_check(name, found).status == "ok", found


# What goes wrong, and the whole command


@pytest.mark.parametrize(
    ("code", "limit_s", "kind", "text"),
    [
        ("import os; print('last words', flush=True); os.abort()", 60, "crash", "ended by SIGABRT. last words"),
        ("import time; print('last words', flush=True); time.sleep(1000)", 3, "hang", "not over after 3 s. last words"),
    ],
)
@pytest.mark.parametrize("num_ranks", [None, 2])
def test_a_check_that_crashes_or_hangs_is_a_finding(
    tmp_path: Path, code: str, limit_s: float, kind: str, text: str, num_ranks: int | None
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(code)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = run_check(
        "training", device="cpu", num_ranks=num_ranks, backend="torch", limit_s=limit_s, extra={"PYTHONPATH": paths}
    )
    assert found["kind"] == kind and "last words" in found["error"]
    if num_ranks is None:
        assert found["error"].startswith(text)
    finding = judge_check("training", found)
    assert finding.status == "problem" and finding.text.startswith(f"a short training {'crashed' if kind == 'crash' else 'hung'}")


def test_a_check_that_raises_says_why() -> None:
    found = run_check(
        "gpu", device="cuda:99", num_ranks=None, backend="torch", limit_s=100, extra=forking_environment(alone=True)
    )
    assert found["error"] and "kind" not in found
    assert judge_check("gpu", found).text.startswith("the look at the GPU failed: ")


def test_on_a_machine_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    file = tmp_path / "found.json"
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run([*COMMAND, str(file)], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 1, done.stderr
    assert "torch sees no GPU here" in done.stdout and "nothing was tried" in done.stdout and str(file) in done.stdout
    written = file.read_text()
    found = json.loads(written)
    assert found["problems"] == 1 and found["ranks"][0]["checks"]["gpu"]["num_gpus"] == 0
    assert socket.gethostname() not in written and str(Path.home()) + "/" not in written


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "2"], "without -np"),
        (["/nowhere/at/all.json"], "/nowhere/at is not there"),
        (["--json", "-"], "--json - would have no effect with --gpu"),
        (["--device", "cuda:1"], "--device cuda:1 would have no effect with --gpu"),
        (["--limit", "90"], "--limit 90.0 would have no effect with --gpu"),
        (["--probe-seconds", "30"], "--probe-seconds 30.0 would have no effect with --gpu"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_all_checks_run_and_make_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def pretend(name: str, **options: Any) -> dict[str, Any]:
        asked[name] = options
        return dict(GPU) if name == "gpu" else {"error": "no such luck", "kind": "hang"}

    monkeypatch.setattr(gpu, "run_check", pretend)
    found = gpu.examine_gpu(backend="horovod")
    assert list(asked) == list(WHAT) == list(gpu.LIMITS_S) and found["problems"] == 6
    assert asked["sharing"]["device"] == "cuda:0" and asked["sharing"]["num_ranks"] == 2
    assert asked["allreduce"]["device"] == "cuda" and asked["training"]["device"] == "cuda"
    text = page(found, symbols=False)
    assert "H100" in text and "6 problems: do not train" in text
    monkeypatch.setattr(gpu, "TOTAL_S", 4.0)
    late = gpu.examine_gpu(backend="horovod", limits_s={**gpu.LIMITS_S})
    assert ["not begun after" in finding["text"] for finding in late["findings"]] == [False, *[True] * 6]
    assert late["problems"] == 0 and late["warnings"] == 6 and late["verdict"].startswith("What was tried works.")


def test_a_slow_node_is_not_condemned_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pretend(name: str, *, limit_s: float, **options: Any) -> dict[str, Any]:
        nonlocal now
        if name == "gpu":
            return dict(GPU)
        # Each check but the last takes its whole time and is over then.
        now += limit_s
        return {"error": f"not over after {limit_s:.0f} s.", "kind": "hang"} if name in ("codecs", "events") else {"right": False}

    monkeypatch.setattr(gpu, "run_check", pretend)
    monkeypatch.setattr(gpu, "TOTAL_S", 100.0)
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: now))
    limits_s = {"gpu": 40.0, "codecs": 60.0, "events": 60.0, "allreduce": 60.0}
    found = gpu.examine_gpu(backend="torch", limits_s=limits_s)
    # The second one had 40 of its 60 s.
    assert [finding["status"] for finding in found["findings"]] == ["ok", "problem", "warning", "warning"]
    assert "not tried" in found["findings"][2]["text"] and found["verdict"].startswith("1 problem:")
    now = -30.0
    limits_s.pop("codecs")
    monkeypatch.setattr(gpu, "TOTAL_S", 59.0)
    found = gpu.examine_gpu(backend="torch", limits_s=limits_s)
    assert found["problems"] == 0 and "the measurement of steps by events and sums over ranks: run it" in found["verdict"]


def test_an_old_report_stays_until_the_checks_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.json"
    file.write_text("old")

    def interrupted(**options: Any) -> dict[str, Any]:
        raise Ended

    monkeypatch.setattr("hvd_adaptive.cli.doctor.examine_gpu", interrupted)
    assert main(["doctor", "--gpu", str(file), "--backend", "torch"]) == 2
    assert file.read_text() == "old"


def test_one_gpu_is_shared_by_the_training_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def pretend(name: str, **options: Any) -> dict[str, Any]:
        asked[name] = options
        return {**GPU, "num_gpus": 1, "num_different_gpus": 1} if name == "gpu" else {"error": "x"}

    monkeypatch.setattr(gpu, "run_check", pretend)
    gpu.examine_gpu(backend="torch")
    assert asked["training"]["device"] == "cuda:0" and asked["allreduce"]["num_ranks"] == 1


@pytest.mark.parametrize(
    ("change", "text"), [({"sum": 999.0}, "a sum of 1000 ones is 999"), ({"num_different_gpus": 1}, "same UUID")]
)
def test_a_gpu_that_is_not_what_it_should_be(change: dict[str, Any], text: str) -> None:
    finding = judge_check("gpu", {**GPU, **change})
    assert finding.status == "problem" and text in finding.text


@pytest.mark.parametrize("own_name", ["node12", "node12.cluster.acme.com"])
def test_the_file_holds_no_form_of_the_hosts_name(own_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own_name)
    said = "[node12:4711] lost node12.cluster.acme.com:80 and node12. Not node123, my-node12 or node12-b.acme.com."
    assert cleaned(said) == "[HOST:4711] lost HOST:80 and HOST. Not node123, my-node12 or node12-b.acme.com."


def test_the_file_names_neither_host_nor_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "node07")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    said = {"error": ["at /home/ada/x.py on node07: ada", 7, {"y": f"{sys.prefix}/lib, badajoz node071"}]}
    assert cleaned(said) == {"error": ["at ~/x.py on HOST: USER", 7, {"y": "PREFIX/lib, badajoz node071"}]}
