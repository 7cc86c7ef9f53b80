"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled for GPUs, by processes of their own.

The interpreter is chosen before Triton is imported, and does not see what cannot be compiled; the compiler runs nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("75", "80", "90", "100")

FAULTS = """
import os, sys, tempfile
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=sys.argv[1])
import triton
import triton_ahead as ahead
from hvd_adaptive.compress.kernels import cuda_codes

def faults(most_seconds=60.0):
    variants = ahead.compile_case(80, number, most_seconds)
    return sorted({fault for variant in variants for fault in variant.faults})

number = next(number for number, case in enumerate(ahead.cases()) if case.text == "bucket=24 bits=4 add=1")
print(faults(0.0))
real = ahead.JITFunction.run
ahead.JITFunction.run = lambda self, *a, **o: real(self, *a, **{**o, "enable_fp_fusion": True})
print(faults())
ahead.JITFunction.run = real
cuda_codes.levels_decode = triton.jit(cuda_codes.levels_decode.fn)
print(faults())
ahead.JITFunction.run = lambda self, *a, **o: real(self, *a, **{**o, "BITS": None})
print(faults()[0].split(":")[0])
"""


@pytest.fixture(autouse=True, scope="module")
def triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton (pip install triton); its interpreter and its compiler need no GPU")


def run(*command: str, timeout_s: float = 900, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], capture_output=True, text=True, env=variables, timeout=timeout_s
    )


PARTS = ("levels", "pieces", "peers", "cast", "squares", "large", "large_decoded", "doctor")


@pytest.fixture(scope="module")
def interpreted() -> subprocess.CompletedProcess[str]:
    """All parts in one process: importing Triton takes longer than most of them."""
    return run(str(ROOT / "tests" / "support" / "triton_bits.py"), ",".join(PARTS), "cpu", TRITON_INTERPRET="1")


@pytest.mark.parametrize("part", PARTS)
def test_triton_gives_the_references_bits(part: str, interpreted: subprocess.CompletedProcess[str]) -> None:
    assert f"{part}: same bits" in interpreted.stdout.splitlines(), interpreted.stderr[-3000:]


def test_every_kernel_compiles_for_gpus_once_without_spills_and_fused_additions(pytestconfig: pytest.Config) -> None:
    """Every kernel for each target, and each of the corners for one of them; without --cases every variant is compiled.

    What an earlier run has found to be right is examined, and compiled again only if Triton finds that it changed.
    """
    kept = pytestconfig.cache.mkdir("compiled-kernels")  # type: ignore[union-attr]
    done = run("benchmarks/triton_ahead.py", "--targets", ",".join(TARGETS), "--cases", "sample", "--kept", str(kept))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    found = re.findall(r"^sm_(\d+) (\w+) .* registers, 0 bytes spilled, .*: ok$", done.stdout, re.M)
    names = {
        "levels_encode", "levels_decode", "cast_encode", "cast_decode", "squares", "count_large", "store_large", "decode_large",
    }  # fmt: skip
    assert set(found) == {(target, name) for target in TARGETS for name in names}
    assert len(found) == done.stdout.count("\n") - 2


def test_what_is_wrong_with_a_variant_is_found(tmp_path: Path) -> None:
    """So that the test above could fail: a slow one, fused additions, variants by count and address, and what is no Triton."""
    done = run("-c", FAULTS, str(tmp_path))
    assert done.stdout.splitlines() == [
        "['took longer than 0 s']",
        "['fused multiply-add', 'fused multiply-add in machine code']",
        "['compiled 5 times for other arguments']",
        "CompilationError",
    ], done.stdout + done.stderr[-3000:]
