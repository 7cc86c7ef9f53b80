"""What a Horovod build for CUDA needs: the toolkit that matches PyTorch, and NCCL with headers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from setup_console import say
from setup_options import SetupError
from step_torch import CC_LIST, Torch
from step_venv import Venv

KEPT_VARIABLES = frozenset(
    {
        "HOROVOD_CUDA_HOME",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_NCCL_INCLUDE",
        "HOROVOD_NCCL_LIB",
        "HOROVOD_NCCL_LINK",
        "HOROVOD_BUILD_ARCH_FLAGS",
        CC_LIST,
    }
)

_SITE = Path("/usr/local")
_PYPI_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
_SYSTEM_PREFIXES = (Path("/usr"), Path("/usr/local"), Path("/usr/local/cuda"))
_CPU_WAY_OUT = "    or use a CPU build of PyTorch: --torch-spec with one, and see docs/install.md"


def build_environment(venv: Venv, torch: Torch, work: Path, *, source: str | None = None) -> dict[str, str]:
    """Environment variables that turn Horovod's GPU operations on.

    Args:
        venv: the environment; PyTorch's own NCCL lies in it, and so does the toolkit from PyPI.
        torch: a CUDA build.
        work: an existing folder that lives as long as the build.
        source: "site" (a toolkit of this machine), "pypi", or None: the site's, else PyPI's.

    Raises:
        SetupError: the CUDA toolkit or NCCL is missing or does not match; the message has the remedy.
    """
    home = None if source == "pypi" else find_toolkit(torch)
    if home is None and source == "site":
        raise SetupError(_missing(torch) + _CPU_WAY_OUT)
    if home is None:
        home = pypi_toolkit(venv, torch)
    if not _has_headers(home):
        raise SetupError(
            f"the CUDA toolkit in {home} has nvcc but no headers (cuda_runtime.h)\n"
            "  what to do: install its development files, or set HOROVOD_CUDA_HOME to a whole toolkit;\n"
            + _CPU_WAY_OUT
        )
    version = toolkit_version(home)
    if not _matches(version, torch):
        raise SetupError(
            f"the CUDA toolkit in {home} is {version}, and PyTorch {torch.version} is for CUDA {torch.cuda}\n"
            f"  what to do: load or install a toolkit {torch.cuda} and set HOROVOD_CUDA_HOME to it,\n"
            "    or take a PyTorch for your toolkit with --torch-spec"
        )
    say(f"CUDA: toolkit {version or 'of unknown version'} in {home}; GPU operations by NCCL")
    result = {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(home)}
    result |= {"CUDA_HOME": str(home), "CUDACXX": str(home / "bin" / "nvcc")}
    return result | _nccl(venv, work)


def find_toolkit(torch: Torch) -> Path | None:
    """The toolkit's folder on this machine; None if there is none that fits.

    HOROVOD_CUDA_HOME and CUDA_HOME are taken as they are, so that what is wrong with them is said. After them the first whole
    toolkit of PyTorch's major version: what nvcc on PATH belongs to, /usr/local/cuda, /usr/local/cuda-*.
    """
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        home = Path(os.environ.get(name) or "/nowhere")
        if (home / "bin" / "nvcc").is_file() and (home / "include").is_dir():
            return home
    passed: list[str] = []
    for home in dict.fromkeys(_site_toolkits(torch)):
        if not (home / "bin" / "nvcc").is_file():
            continue
        version = toolkit_version(home)
        if _has_headers(home) and _matches(version, torch):
            for text in passed:
                say(text)
            return home
        why = f"it is {version}, PyTorch is for {torch.cuda}" if _has_headers(home) else "it has no cuda_runtime.h"
        passed.append(f"CUDA: not the toolkit in {home}: {why}")
    for text in passed:
        say(text)
    return None


def pypi_toolkit(venv: Venv, torch: Torch) -> Path:
    """Installs PyPI's toolkit of PyTorch's version into the environment and returns its folder.

    Raises:
        SetupError: before CUDA 13, whose packages have no nvcc, or if one cannot be installed.
    """
    major = (torch.cuda or "0").split(".")[0]
    if int(major) < 13:
        raise SetupError(
            _missing(torch) + f"    (PyPI has one from CUDA 13 on; its packages for CUDA {major} have no nvcc)\n" + _CPU_WAY_OUT
        )
    packages = [f"{name}=={torch.cuda}.*" for name in _PYPI_PACKAGES]
    venv.pip(["install", *packages], label=f"installing the CUDA toolkit {torch.cuda} from PyPI")
    home = site_packages(venv) / "nvidia" / f"cu{major}"
    # nvcc's linker looks into lib64, and for the name without a number.
    if not (home / "lib64").exists():
        (home / "lib64").symlink_to("lib")
    if not (home / "lib" / "libcudart.so").exists():
        (home / "lib" / "libcudart.so").symlink_to(f"libcudart.so.{major}")
    return home


def site_packages(venv: Venv) -> Path:
    """Where the environment's packages with libraries are."""
    return Path(venv.query("import json, sysconfig; print(json.dumps(sysconfig.get_path('platlib')))"))


def _site_toolkits(torch: Torch) -> Iterator[Path]:
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        # A wrapper lies elsewhere than its toolkit, which nvcc itself tells. Debian's has its headers around the wrapper.
        told = _top(nvcc)
        yield from ([told] if told is not None else [])
        yield Path(nvcc).resolve().parent.parent
        yield Path(nvcc).parent.parent
    yield _SITE / "cuda"
    yield _SITE / f"cuda-{torch.cuda}"
    versions = [(tuple(map(int, re.findall(r"\d+", home.name))), home) for home in _SITE.glob("cuda-[0-9]*")]
    yield from (home for _, home in sorted(versions, reverse=True))


def _top(nvcc: str) -> Path | None:
    """The toolkit that an nvcc uses, as it says itself; None if it does not."""
    with tempfile.TemporaryDirectory(prefix="hvd-adaptive-nvcc-") as folder:
        source = Path(folder, "nothing.cu")
        source.touch()
        try:
            result = subprocess.run(
                [nvcc, "--dryrun", "-c", str(source)],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                timeout=60,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
    found = re.search(r"^#\$ TOP=(.+)$", result.stderr, re.M)
    return Path(found.group(1).strip()).resolve() if found else None


def _has_headers(home: Path) -> bool:
    return any((home / place / "cuda_runtime.h").is_file() for place in ("include", "targets/x86_64-linux/include"))


def _matches(version: str | None, torch: Torch) -> bool:
    return version is None or torch.cuda is None or version.split(".")[0] == torch.cuda.split(".")[0]


def _missing(torch: Torch) -> str:
    return (
        f"PyTorch {torch.version} is a CUDA build, so Horovod must be built for CUDA, and a CUDA toolkit\n"
        f"  {torch.cuda} is missing (none that fits in HOROVOD_CUDA_HOME, CUDA_HOME, by nvcc on PATH, in\n"
        "  /usr/local/cuda or /usr/local/cuda-*)\n"
        f"  what to do: install or module load the CUDA toolkit {torch.cuda}, or set HOROVOD_CUDA_HOME;\n"
    )


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
    own = site_packages(venv) / "nvidia" / "nccl"
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
