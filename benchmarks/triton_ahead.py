"""Compiles the Triton kernels for GPUs, on a machine without one, by the calls that the product makes. Nothing is run.

    python benchmarks/triton_ahead.py                                   # every variant for every target: 5 minutes on 2 cores
    python benchmarks/triton_ahead.py --cases turns                     # every variant for one target, every kernel for all: CI
    python benchmarks/triton_ahead.py --cases sample                    # each corner for one target, every kernel for all
    python benchmarks/triton_ahead.py --targets 90 --cases quick        # every kernel, and the corners

One line a variant: the CPU's seconds that compiling took, registers a thread, bytes spilled, shared memory. Each variant is asked
for with several counts, keys, numbers of peers, and with aligned and other addresses: all must find the same compiled kernel.

Ends with 1 if a variant does not compile, spills, takes longer than --most-seconds, is compiled more than once, flushes small
numbers to zero, or fuses multiplications and additions where the CPU's bits are promised.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from hvd_adaptive.compress.kernels import cuda, cuda_codes, cuda_select
from hvd_adaptive.compress.kernels.reference import cast_bytes, levels_bytes
from hvd_adaptive.compress.quantize import SPREADS

BUCKETS = (8, 24, 512, 4096, 65536)
# Elements; the last is beyond 32 bits, on torch's device that holds no values.
COUNTS = (1, 16, 1001, 2**31 + 9)
KEYS = (1, 16, 2**40 + 3, 2**64 - 1)


@dataclass(frozen=True)
class Arguments:
    """What may not make another variant: each kernel is asked for with all of these."""

    num: int
    shift: int
    key: int
    num_peers: int

    def tensor(self, num: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor whose address is a multiple of 16, or of 4 only."""
        if self.num > 2**30:
            return torch.empty(num, dtype=dtype, device="meta")
        shift = self.shift * max(1, 4 // dtype.itemsize)
        whole = torch.empty(num + 16, dtype=dtype)
        skipped = -whole.data_ptr() % 16 // dtype.itemsize
        return whole[skipped + shift :][:num]


ARGUMENTS = tuple(
    Arguments(num, shift, key, peers)
    for num, shift, key, peers in zip((*COUNTS, 1001), (0, 1, 1, 0, 0), (*KEYS, 5), (1, 3, 16, 1, 2), strict=True)
)


@dataclass(frozen=True)
class Case:
    """A call of the product.

    Attributes:
        text: its options.
        is_quick: whether it is among the quick ones.
        call: makes it.
    """

    text: str
    is_quick: bool
    call: Callable[[Arguments], None]

    @property
    def front(self) -> str:
        """The name of the function that calls the kernel."""
        return self.call.func.__name__ if isinstance(self.call, functools.partial) else "sum_of_squares"


def cases() -> Iterator[Case]:
    """Yields every kernel with every choice that makes another variant of it."""
    kinds = ("stochastic", "nearest", "normal")
    for bucket, bits, kind, feedback in itertools.product(BUCKETS, range(1, 9), kinds, (False, True)):
        if kind == "normal" and bits not in SPREADS:
            continue
        text = f"bucket={bucket} bits={bits} {kind}{' feedback' if feedback else ''}"
        quick = (bits == 4 and bucket == 512) or (bits == 7 and kind == "stochastic" and feedback)
        call = functools.partial(levels_encode, bucket=bucket, bits=bits, kind=kind, feedback=feedback)
        yield Case(text, quick or (bits == 2 and kind == "normal" and feedback), call)
    for bucket, bits, add in itertools.product(BUCKETS, range(1, 9), (0, 1, -1)):
        quick = (bits == 4 and bucket == 512) or (bits == 7 and add == 1)
        call = functools.partial(levels_decode, bucket=bucket, bits=bits, add=add)
        yield Case(f"bucket={bucket} bits={bits} add={add}", quick, call)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        text = str(dtype).removeprefix("torch.")
        for feedback in (False, True):
            call = functools.partial(cast_encode, dtype=dtype, feedback=feedback)
            yield Case(f"{text}{' feedback' if feedback else ''}", feedback, call)
        for add in (0, 1, -1):
            yield Case(f"{text} add={add}", dtype != torch.float32, functools.partial(cast_decode, dtype=dtype, add=add))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        text = str(dtype).removeprefix("torch.")
        yield Case(text, dtype == torch.float32, lambda a, dtype=dtype: void(cuda.sum_of_squares(a.tensor(a.num, dtype))))
    for sampled, take in itertools.product((False, True), (False, True)):
        text = f"{'sampled' if sampled else 'exact'}{' feedback' if take else ''}"
        yield Case(text, True, functools.partial(select_large, sampled=sampled, take=take))
    for add in (0, 1, -1):
        yield Case(f"add={add}", True, functools.partial(decode_large, add=add))


def void(_: Tensor) -> None:
    """Takes a result."""


def levels_encode(a: Arguments, *, bucket: int, bits: int, kind: str, feedback: bool) -> None:
    payload = a.tensor(levels_bytes(a.num, bits, bucket), torch.uint8)
    residual = a.tensor(a.num) if feedback else None
    key, piece = a.key if kind == "stochastic" else None, 8 * bucket if a.num_peers > 1 else None
    spread = SPREADS[bits] if kind == "normal" else None
    cuda.levels_encode(a.tensor(a.num), payload, bits, bucket, key, spread, residual, 1.0 / a.num_peers, piece)


def levels_decode(a: Arguments, *, bucket: int, bits: int, add: int) -> None:
    payload = a.tensor(a.num_peers * levels_bytes(a.num, bits, bucket), torch.uint8)
    piece = None if a.num_peers > 1 else 8 * bucket
    cuda.levels_decode(payload, a.tensor(a.num), bits, bucket, add, a.num_peers, piece)


def cast_encode(a: Arguments, *, dtype: torch.dtype, feedback: bool) -> None:
    payload = a.tensor(cast_bytes(a.num, dtype), torch.uint8)
    residual = a.tensor(a.num) if feedback else None
    cuda.cast_encode(a.tensor(a.num), payload, dtype, residual, 1.0 / a.num_peers, 4096 if a.num_peers > 1 else None)


def cast_decode(a: Arguments, *, dtype: torch.dtype, add: int) -> None:
    payload = a.tensor(a.num_peers * cast_bytes(a.num, dtype), torch.uint8)
    cuda.cast_decode(payload, a.tensor(a.num), dtype, add, a.num_peers, 4096 if a.num_peers > 1 else None)


def select_large(a: Arguments, *, sampled: bool, take: bool) -> None:
    values, payload = a.tensor(a.num * a.num_peers), a.tensor(8 * a.num_peers, torch.uint8)
    cuda.select_large(
        values.view(a.num_peers, a.num), a.tensor(a.num_peers), payload.view(a.num_peers, 8), sampled=sampled, take=take
    )


def decode_large(a: Arguments, *, add: int) -> None:
    payload, piece = a.tensor(8 * a.num_peers * a.num, torch.uint8), None if a.num_peers > 1 else 4096
    cuda.decode_large(payload, a.tensor(a.num), lambda num: num, add, a.num_peers, piece)


class PretendedDriver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """Kernels are kept apart by device: a number for each target."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        """None is needed."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return GPUTarget("cuda", self._capability, 32)


@dataclass(frozen=True)
class Variant:
    """A compiled kernel.

    Attributes:
        name: of the kernel, its options, and the target.
        seconds: of a CPU that compiling took.
        registers: of a thread.
        spilled: bytes of a thread.
        shared: bytes of a program.
        faults: what is wrong with it.
    """

    name: str
    seconds: float
    registers: int
    spilled: int
    shared: int
    faults: tuple[str, ...]


def work(targets: list[int], which: str) -> list[tuple[int, int]]:
    """Returns the targets and numbers of the cases to compile: all, the quick ones, or each of these for one target.

    The targets take turns (``turns`` of all cases, ``sample`` of the quick ones), and have the first case of each front all.
    """
    known = list(cases())
    numbers = [number for number, case in enumerate(known) if case.is_quick or which in ("all", "turns")]
    first = {case.front: number for number, case in reversed([*enumerate(known)]) if case.is_quick}
    return [
        (target, number)
        for turn, target in enumerate(targets)
        for number in numbers
        if which in ("all", "quick") or number % len(targets) == turn or first[known[number].front] == number
    ]


def cpu_seconds() -> float:
    """This process's, and those of compilers that it has waited for: other work on the machine does not count."""
    return sum(os.times()[:4])


def compile_case(capability: int, number: int, most_seconds: float) -> list[Variant]:
    """Compiles what one call of the product launches.

    Args:
        capability: of the GPU, as 90 for sm_90.
        number: of the case.
        most_seconds: that a kernel may take.
    """
    case = list(cases())[number]
    driver.set_active(PretendedDriver(capability))
    found: dict[JITFunction, dict[int, tuple[Any, float]]] = {}
    real = JITFunction.run

    def compiled_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        begin = cpu_seconds()
        kernel = real(self, *args, grid=grid, warmup=True, **options)
        found.setdefault(self, {}).setdefault(id(kernel), (kernel, cpu_seconds() - begin))
        return kernel

    JITFunction.run = compiled_only
    try:
        for arguments in ARGUMENTS:
            case.call(arguments)
    except Exception as error:  # Triton and its assembler fail in many ways.
        reason = " ".join(str(error).split())[-300:]
        return [Variant(f"sm_{capability} {case.text}", 0, 0, 0, 0, (f"{type(error).__name__}: {reason}",))]
    finally:
        JITFunction.run = real
    variants = []
    for function, kernels in found.items():
        name = f"sm_{capability} {function.__name__} {case.text}"
        for kernel, seconds in kernels.values():
            variants.append(examine(name, function.__name__, kernel, seconds, len(kernels), most_seconds))
    return variants


def examine(name: str, function: str, kernel: Any, seconds: float, num_compiled: int, most_seconds: float) -> Variant:
    """Reads what the assembler made, and finds its faults."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = ("REG", "STACK", "LOCAL")
    registers, stack, local = (int(re.findall(rf"\b{word}:(\d+)", usage)[0]) for word in words)
    ptx, faults = kernel.asm["ptx"], []
    if stack + local:
        faults.append("spills")
    if seconds > most_seconds:
        faults.append(f"took longer than {most_seconds:g} s")
    if num_compiled > 1:
        faults.append(f"compiled {num_compiled} times for other arguments")
    if ".ftz" in ptx:
        faults.append("flushes small numbers to zero")
    if re.search(r"\bfma\.\w+\.f\d+", ptx):
        faults.append("fused multiply-add")
    # Divisions are made of fused ones, so that only a decoder's machine code has none.
    if function in ("levels_decode", "cast_decode", "decode_large"):
        machine_code = disassemble(kernel, function)
        if "EXIT" not in machine_code:
            faults.append("has no machine code that can be read")
        if re.search(r"\b[FD]FMA\b", machine_code):
            faults.append("fused multiply-add in machine code")
    return Variant(name, seconds, registers, stack + local, kernel.metadata.shared, tuple(faults))


def disassemble(kernel: Any, function: str) -> str:
    """Returns a kernel's machine code as text, and keeps it beside the kernel: it takes as long as to compile one."""
    if "machine" not in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow", file.name]
            kernel.asm["machine"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        get_cache_manager(kernel.hash).put(kernel.asm["machine"], f"{function}.machine", binary=False)
    return kernel.asm["machine"]


def copy_kernels(source: Path, target: Path) -> None:
    """Copies what Triton keeps to another folder, where it finds them: it notes where each file of a kernel is."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for group in target.glob("*/__grp__*.json"):
        files = [file for file in group.parent.iterdir() if file.is_file() and file != group]
        group.write_text(json.dumps({"child_paths": {file.name: str(file) for file in files}}))


def kernels() -> set[str]:
    """The names of all kernels; others are called by kernels."""
    members = itertools.chain(*(vars(module).items() for module in (cuda_codes, cuda_select)))
    return {name for name, value in members if isinstance(value, JITFunction) and not name.startswith("_")}


def main() -> int:
    """Compiles, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--targets", default="75,80,90,100", help="compute capabilities, without the point")
    which = "quick: every kernel, and the corners; turns, sample: of all or of these each for one target, every kernel for all"
    parser.add_argument("--cases", choices=("all", "turns", "quick", "sample"), default="all", help=which)
    parser.add_argument("--most-seconds", type=float, default=5.0, help="of a CPU for a variant")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--kept", type=Path, help="folder of what compiled without faults, which is not compiled again")
    options = parser.parse_args()
    targets = [int(target) for target in options.targets.split(",")]
    chosen = work(targets, options.cases)
    print(f"Triton {triton.__version__}; compiled only, not run: no GPU is used", flush=True)
    seen, num_variants, num_faulty, slowest = set(), 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        os.environ["TRITON_CACHE_DIR"] = str(cache)
        if options.kept and options.kept.exists():
            copy_kernels(options.kept, cache)
        # Torch imports much for the first one of its device without values: before the processes fork.
        torch.empty(1, device="meta").cumsum(0)
        with ProcessPoolExecutor(options.jobs) as pool:
            for variants in pool.map(compile_case, *zip(*((t, n, options.most_seconds) for t, n in chosen), strict=True)):
                for v in variants:
                    verdict = "; ".join(v.faults) or "ok"
                    print(
                        f"{v.name}: {v.seconds:.2f} s, {v.registers} registers, {v.spilled} bytes spilled, "
                        f"{v.shared} bytes shared: {verdict}",
                        flush=True,
                    )
                    seen.add(v.name.split()[1])
                    num_variants, num_faulty = num_variants + 1, num_faulty + bool(v.faults)
                    slowest = max(slowest, v.seconds)
        if options.kept and not num_faulty:
            copy_kernels(cache, options.kept)
    missing = kernels() - seen
    if missing:
        print(f"never compiled: {', '.join(sorted(missing))}")
    print(f"{num_variants} variants for {len(targets)} targets, {num_faulty} with faults; the slowest took {slowest:.2f} s")
    return 1 if num_faulty or missing else 0


if __name__ == "__main__":
    sys.exit(main())
