"""Horovod 0.28.1: its unmodified source archive, built with C++17, as a wheel that is cached."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import step_cuda
from setup_cache import binary_key, cache_dir, locked
from setup_console import run_logged, say
from setup_options import SetupError
from step_mpi import Mpi
from step_torch import CC_LIST, Torch
from step_venv import Venv

VERSION = "0.28.1"
ARCHIVE = f"horovod-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_RECIPE = "horovod_cxx17.cmake", "horovod_cmake.sh"
# What a person may set for a build beside the list of GPUs: for any, and for one with CUDA.
_FOR_COMPILER = frozenset({"CXX", "CXXFLAGS", "HOROVOD_BUILD_ARCH_FLAGS"})
_FOR_CUDA = step_cuda.KEPT_VARIABLES - {CC_LIST} - _FOR_COMPILER
_BYTES_PER_JOB = 2 * 1024**3  # a compiler on PyTorch's headers
_ADVICE = "read the log's first error; a CPU build needs g++ 9 or newer, make, and Python's headers"


def build_variables(*, cuda: bool = True) -> dict[str, str]:
    """Returns the variables that are set for the build of Horovod, but for the list of GPUs, and for CXX where it is g++.

    Args:
        cuda: those for a build with CUDA as well.
    """
    names = _FOR_COMPILER | _FOR_CUDA if cuda else _FOR_COMPILER
    found = {name: value for name in sorted(names) if (value := os.environ.get(name))}
    return {name: value for name, value in found.items() if (name, value) != ("CXX", "g++")}


def build_digest(*, cuda: bool = True) -> str:
    """Returns a short hash of `build_variables`, and of this machine's processor if they ask for its code; "" if none is set."""
    chosen = build_variables(cuda=cuda)
    if not chosen:
        return ""
    text = repr(chosen) + (_processor() if any("native" in value for value in chosen.values()) else "")
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _processor() -> str:
    """What this machine's processor can do, as the kernel says it on x86 ("flags") and on Arm ("Features")."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def wheel_key(torch: Torch, mpi: Mpi, python_tag: str, *, toolkit: str | None = None) -> str:
    """Names the cache folder of a wheel: all that its binary depends on.

    Args:
        torch: version and build.
        mpi: flavour, version, and place of a site's.
        python_tag: e.g. "cp311".
        toolkit: where CUDA's is to come from; named only if somebody chose.
    """
    recipe = hashlib.sha256()
    for name in _RECIPE:
        recipe.update((Path(__file__).parent / name).read_bytes())
    parts = [f"horovod-{VERSION}", f"torch-{torch.key}", mpi.key, binary_key(python_tag)]
    parts += [f"set-{digest}"] if (digest := build_digest(cuda=torch.cuda is not None)) else []
    if torch.cuda is not None:
        parts += [] if toolkit is None else [f"toolkit-{toolkit}"]
        parts += [f"cc-{words}"] if (words := "-".join(re.findall(r"\d+", os.environ.get(CC_LIST, "")))) else []
    return "_".join([*parts, recipe.hexdigest()[:8]])


def install(
    venv: Venv, torch: Torch, mpi: Mpi, *, installed_key: str | None, toolkit: str | None = None
) -> str:
    """Brings a Horovod that fits `torch` and `mpi` into the environment; builds it if no cached wheel does.

    Args:
        venv: the environment.
        torch: the installed PyTorch.
        mpi: the MPI in use.
        installed_key: key of the Horovod that the last set-up installed, or None.
        toolkit: where CUDA's comes from: "site", "pypi", or None for the site's where there is one.

    Returns:
        The key of the installed wheel.

    Raises:
        SetupError: a prerequisite is missing, or the build failed.
    """
    key = wheel_key(torch, mpi, venv.python_tag(), toolkit=toolkit)
    if installed_key == key and venv.versions("horovod").get("horovod") == VERSION:
        say(f"Horovod: keeping {VERSION}, which was built for this PyTorch and MPI")
        return key
    folder = cache_dir() / "wheels" / key
    with locked(folder.with_name(f"{key}.lock"), what="a Horovod build for the same PyTorch and MPI"):
        wheel = _cached(folder, torch)
        if wheel is None:
            wheel = _build(venv, torch, mpi, folder, toolkit)
        else:
            say(f"Horovod: {VERSION} from the cached wheel in {folder}")
    if "horovod" in venv.versions("horovod"):
        venv.uninstall("horovod")
    venv.pip(["install", wheel], label=f"installing Horovod {VERSION}")
    return key


def verify(venv: Venv, torch: Torch, mpi: Mpi) -> None:
    """Refuses a Horovod that does not go with the PyTorch or the MPI.

    Raises:
        SetupError: a CPU Horovod beside a CUDA PyTorch, one without MPI, or one on another MPI library.
    """
    found = venv.query(
        "import json, selfcheck; print(json.dumps(selfcheck.describe()))",
        environment=venv.environment() | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    if torch.cuda is not None and not (found["horovod_cuda"] and found["horovod_nccl"]):
        raise SetupError(
            f"refused: PyTorch {torch.version} is a CUDA build, and the Horovod in .venv was built without\n"
            "  CUDA or NCCL; together they would copy GPU tensors without waiting for them\n"
            "  what to do: scripts/setup.sh --recreate builds a fitting one, or --torch-spec with a CPU build"
        )
    if not found["horovod_mpi"]:
        raise SetupError(
            "the Horovod in .venv was built without MPI\n  what to do: scripts/setup.sh --recreate"
        )
    if Path(found["libmpi"]) != mpi.library:
        raise SetupError(
            f"Horovod loads {found['libmpi']}, mpi4py loads {mpi.library}: two separate MPI worlds\n"
            "  what to do: unset LD_PRELOAD, take other MPIs off LD_LIBRARY_PATH, then\n"
            "    scripts/setup.sh --recreate"
        )


def _cached(folder: Path, torch: Torch) -> Path | None:
    """The wheel in a cache folder if it is whole and was built for this very PyTorch, else None."""
    for wheel in sorted(folder.glob("horovod-*.whl")):
        try:
            with zipfile.ZipFile(wheel) as content:
                metadata = json.loads(content.read("horovod/metadata.json"))
                note = json.loads((folder / "build.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            continue
        if metadata.get("pytorch") == torch.version and note.get("cuda") == torch.cuda:
            return wheel
    return None


def _build(venv: Venv, torch: Torch, mpi: Mpi, folder: Path, toolkit: str | None) -> Path:
    """Builds the wheel and puts it into the cache folder; returns its place there."""
    environment = _build_environment(venv, torch, mpi)
    require_toolchain(venv, environment)
    with tempfile.TemporaryDirectory(prefix="hvd-adaptive-build-") as work:
        if torch.cuda is not None:
            environment |= step_cuda.build_environment(venv, torch, Path(work), source=toolkit)
            # Horovod asks the first nvcc on PATH which GPUs there are.
            environment["PATH"] = os.pathsep.join([str(Path(environment["CUDACXX"]).parent), environment["PATH"]])
        if not (venv.bin / "cmake").exists():
            venv.pip(["install", "cmake>=3.26"], label="installing cmake (for the build)")
        archive = _archive(venv)
        say(
            f"Horovod: no cached wheel for PyTorch {torch.key} and {mpi.version}; "
            "building takes 2 to 10 minutes"
        )
        if chosen := build_variables(cuda=torch.cuda is not None):
            say("Horovod: built with " + ", ".join(f"{name}={value}" for name, value in chosen.items()))
        run_logged(
            [
                venv.python,
                "-m",
                "pip",
                "wheel",
                "--verbose",
                *venv.pip_sources(),
                "--no-build-isolation",
                "--no-deps",
                "--no-cache-dir",
                "--wheel-dir",
                Path(work, "wheels"),
                archive,
            ],
            label=f"building Horovod {VERSION}",
            log=venv.log,
            environment=environment,
            advice=_ADVICE,
        )
        (built,) = Path(work, "wheels").glob("horovod-*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / built.name
        draft = folder / f"{built.name}.part"
        shutil.copyfile(built, draft)
        note = {"torch": torch.version, "cuda": torch.cuda, "mpi": mpi.version, "library": str(mpi.library)}
        (folder / "build.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        draft.replace(target)
    say(f"Horovod: wheel kept in {folder}")
    return target


def _build_environment(venv: Venv, torch: Torch, mpi: Mpi) -> dict[str, str]:
    here = Path(__file__).parent
    environment = venv.environment(mpi.mpicc.parent)
    for name in [name for name in environment if name.startswith("HOROVOD_")]:
        if name not in step_cuda.KEPT_VARIABLES:
            del environment[name]
    environment.pop("CMAKE_GENERATOR", None)  # Horovod's setup.py passes make's arguments
    rpath = ["$ORIGIN/../../torch/lib"]
    if mpi.flavour == "pypi":
        rpath.append("$ORIGIN/../../../..")
    else:
        rpath.append(str(mpi.library.parent))
    if torch.cuda is not None:
        rpath.append("$ORIGIN/../../nvidia/nccl/lib")
    environment.setdefault("MAKEFLAGS", f"-j{num_jobs()}")
    return environment | {
        "HOROVOD_CMAKE": str(here / "horovod_cmake.sh"),
        "HVD_ADAPTIVE_CMAKE": str(venv.bin / "cmake"),
        "HVD_ADAPTIVE_CMAKE_INCLUDE": str(here / "horovod_cxx17.cmake"),
        "HVD_ADAPTIVE_MPICXX": str(mpi.mpicxx),
        "HVD_ADAPTIVE_RPATH": ";".join(rpath),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }


def num_jobs() -> int:
    """Parallel compilers that the usable cores and the free memory allow, at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, free_bytes // _BYTES_PER_JOB))


def require_toolchain(venv: Venv, environment: dict[str, str]) -> None:
    """Looks for what the build needs before it starts.

    Raises:
        SetupError: a compiler, make or Python's headers are missing; all that is missing is named.
    """
    missing = []
    compiler = (environment.get("CXX") or "g++").split()[0]
    if shutil.which(compiler, path=environment["PATH"]) is None:
        is_set = "that CXX names (CXX= scripts/setup.sh drops it)"
        source = is_set if environment.get("CXX") else "(Debian: g++; HPC: module load gcc)"
        missing.append(f"the C++ compiler {compiler} {source}")
    if shutil.which("make", path=environment["PATH"]) is None:
        missing.append("make (Debian: make)")
    headers = Path(venv.query("import json, sysconfig; print(json.dumps(sysconfig.get_path('include')))"))
    if not (headers / "Python.h").is_file():
        missing.append(
            f"Python's headers in {headers} (Debian: python3-dev, or another --python with --recreate)"
        )
    if missing:
        raise SetupError("building Horovod needs, and did not find: " + "; ".join(missing))


def _archive(venv: Venv) -> Path:
    """The source archive, its checksum verified: from --offline's folder, the cache, or the index."""
    if venv.offline is not None:
        archive = venv.offline / ARCHIVE
        if not archive.is_file():
            raise SetupError(
                f"--offline: no {ARCHIVE} in {venv.offline}\n  what to do: see docs/install.md, Offline"
            )
    else:
        archive = cache_dir() / "archives" / ARCHIVE
        if not archive.is_file() or _sha256(archive) != ARCHIVE_SHA256:
            archive.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
                venv.pip(
                    [
                        "download",
                        "--no-deps",
                        "--no-build-isolation",
                        "--no-binary",
                        "horovod",
                        "--dest",
                        folder,
                        f"horovod=={VERSION}",
                    ],
                    label=f"downloading {ARCHIVE}",
                    HOROVOD_WITHOUT_MPI="1",
                )
                Path(folder, ARCHIVE).replace(archive)
    digest = _sha256(archive)
    if digest != ARCHIVE_SHA256:
        raise SetupError(
            f"{archive} is not Horovod's published source archive:\n"
            f"  SHA-256 {digest}, expected {ARCHIVE_SHA256}\n"
            "  what to do: remove that file and run this again"
        )
    return archive


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
