"""What a Horovod build for CUDA needs: the toolkit that matches PyTorch, and NCCL with headers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from setup_console import say
from setup_options import SetupError
from step_torch import Torch
from step_venv import Venv

KEPT_VARIABLES = frozenset(
    {
        "HOROVOD_CUDA_HOME",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_NCCL_INCLUDE",
        "HOROVOD_NCCL_LIB",
        "HOROVOD_NCCL_LINK",
        "HOROVOD_BUILD_ARCH_FLAGS",
        "HOROVOD_BUILD_CUDA_CC_LIST",
    }
)

_SYSTEM_PREFIXES = (Path("/usr"), Path("/usr/local"), Path("/usr/local/cuda"))
_CPU_WAY_OUT = "    or use a CPU build of PyTorch: --torch-spec with one, and see docs/install.md"


def build_environment(venv: Venv, torch: Torch, work: Path) -> dict[str, str]:
    """Environment variables that turn Horovod's GPU operations on.

    Args:
        venv: the environment; PyTorch's own NCCL lies in it.
        torch: a CUDA build.
        work: an existing folder that lives as long as the build.

    Raises:
        SetupError: the CUDA toolkit or NCCL is missing or does not match; the message has the remedy.
    """
    home = find_toolkit()
    if home is None:
        raise SetupError(
            f"PyTorch {torch.version} is a CUDA build, so Horovod must be built for CUDA, and the CUDA\n"
            "  toolkit is missing (no nvcc in HOROVOD_CUDA_HOME, CUDA_HOME, on PATH or in /usr/local/cuda)\n"
            f"  what to do: install or module load the CUDA toolkit {torch.cuda}, or set HOROVOD_CUDA_HOME;\n"
            + _CPU_WAY_OUT
        )
    if not any(
        (home / place / "cuda_runtime.h").is_file() for place in ("include", "targets/x86_64-linux/include")
    ):
        raise SetupError(
            f"the CUDA toolkit in {home} has nvcc but no headers (cuda_runtime.h)\n"
            "  what to do: install its development files, or set HOROVOD_CUDA_HOME to a whole toolkit;\n"
            + _CPU_WAY_OUT
        )
    version = toolkit_version(home)
    if version is not None and torch.cuda is not None and version.split(".")[0] != torch.cuda.split(".")[0]:
        raise SetupError(
            f"the CUDA toolkit in {home} is {version}, and PyTorch {torch.version} is for CUDA {torch.cuda}\n"
            f"  what to do: load or install a toolkit {torch.cuda} and set HOROVOD_CUDA_HOME to it,\n"
            "    or take a PyTorch for your toolkit with --torch-spec"
        )
    say(f"CUDA: toolkit {version or 'of unknown version'} in {home}; GPU operations by NCCL")
    result = {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(home)}
    result |= {"CUDA_HOME": str(home), "CUDACXX": str(home / "bin" / "nvcc")}
    return result | _nccl(venv, work)


def find_toolkit() -> Path | None:
    """The toolkit's folder: HOROVOD_CUDA_HOME, CUDA_HOME, nvcc on PATH, /usr/local/cuda; None if none."""
    candidates = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    candidates.append("/usr/local/cuda")
    for candidate in candidates:
        # A script named nvcc elsewhere on PATH has no toolkit around it.
        if (
            candidate
            and (Path(candidate) / "bin" / "nvcc").is_file()
            and (Path(candidate) / "include").is_dir()
        ):
            return Path(candidate)
    return None


def toolkit_version(home: Path) -> str | None:
    """The toolkit's version, e.g. "13.0", as its nvcc says; None if it does not."""
    try:
        result = subprocess.run(
            [str(home / "bin" / "nvcc"), "--version"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        return None
    match = re.search(r"release (\d+\.\d+)", result.stdout)
    return match.group(1) if match else None


def _nccl(venv: Venv, work: Path) -> dict[str, str]:
    """Where NCCL is: HOROVOD_NCCL_* as set, else PyTorch's own, else the system's (CMake finds that)."""
    if any(name.startswith("HOROVOD_NCCL_") for name in os.environ):
        say("NCCL: as HOROVOD_NCCL_* say")
        return {}
    site = Path(venv.query("import json, sysconfig; print(json.dumps(sysconfig.get_path('platlib')))"))
    own = site / "nvidia" / "nccl"
    library = own / "lib" / "libnccl.so.2"
    if library.is_file() and (own / "include" / "nccl.h").is_file():
        # CMake looks for libnccl.so, which the package does not have.
        folder = work / "nccl"
        folder.mkdir()
        (folder / "libnccl.so").symlink_to(library)
        say(f"NCCL: PyTorch's own, in {own}")
        return {
            "HOROVOD_NCCL_INCLUDE": str(own / "include"),
            "HOROVOD_NCCL_LIB": str(folder),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    for prefix in _SYSTEM_PREFIXES:
        if (prefix / "include" / "nccl.h").is_file():
            say(f"NCCL: the system's, in {prefix}")
            return {}
    raise SetupError(
        "NCCL with headers is missing (nccl.h, libnccl.so): neither PyTorch's nor the system's was found\n"
        "  what to do: set HOROVOD_NCCL_HOME to a folder with include/nccl.h and lib/libnccl.so\n"
        "    (HPC: module load nccl)"
    )
