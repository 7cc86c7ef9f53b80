"""PyTorch: keep one that fits, or install one; and what kind it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from setup_console import say
from setup_options import DEFAULT_TORCH_SPEC, Options, SetupError
from step_venv import Venv

_QUERY = (
    "import json, torch\n"
    "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, 'hip': torch.version.hip}))"
)
_FITS = (
    "import json, sys\nfrom importlib import metadata\n"
    "from pip._vendor.packaging.requirements import Requirement\n"
    "try: version = metadata.version('torch')\n"
    "except metadata.PackageNotFoundError: version = None\n"
    "fits = version is not None and all(\n"
    "    Requirement(spec).specifier.contains(version, prereleases=True) for spec in sys.argv[1:])\n"
    "print(json.dumps([version, fits]))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """The installed PyTorch.

    Attributes:
        version: with its build, e.g. "2.13.0+cpu".
        cuda: the CUDA version that it was built for, or None for a CPU build.
    """

    version: str
    cuda: str | None

    @property
    def key(self) -> str:
        """The version, always with its build: "+cpu" or "+cu130"."""
        if "+" in self.version:
            return self.version
        return f"{self.version}+" + ("cpu" if self.cuda is None else "cu" + self.cuda.replace(".", ""))


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU: a device file, or an nvidia-smi that lists one."""
    if Path("/dev/nvidia0").exists():
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        result = subprocess.run(
            [smi, "-L"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0 and "GPU" in result.stdout


def install(venv: Venv, options: Options) -> Torch:
    """Keeps a PyTorch that fits, else installs the requirement.

    Without --torch-spec, on a machine without an NVIDIA GPU, a CUDA build is refused before its gigabytes are
    fetched: it could only be paired with a Horovod built for CUDA.

    Raises:
        SetupError: none can be installed, or only a CUDA build is on offer for a machine without a GPU.
    """
    specs = ["torch>=2.2"] if options.torch_spec is None else ["torch>=2.2", options.torch_spec]
    if options.torch_spec is not None and "@" in options.torch_spec:
        specs = specs[:1]
    version, fits = venv.query(_FITS, *specs)
    if fits:
        say(f"PyTorch: keeping {version}, which fits {' and '.join(specs)}")
    else:
        spec = options.torch_spec or DEFAULT_TORCH_SPEC
        if options.torch_spec is None:
            _explain_default(venv, spec, replaced=version)
        venv.pip(["install", spec], label=f"installing {spec}")
    found = venv.query(_QUERY)
    if found["hip"] is not None:
        raise SetupError(
            f"PyTorch {found['version']} is a ROCm build, which this script does not build Horovod for\n"
            "  what to do: --torch-spec with a CPU or CUDA build"
        )
    torch = Torch(version=found["version"], cuda=found["cuda"])
    if not fits:
        say(
            f"PyTorch: {torch.version}, "
            + ("a CPU build" if torch.cuda is None else f"for CUDA {torch.cuda}")
        )
    return torch


def _explain_default(venv: Venv, spec: str, *, replaced: str | None) -> None:
    old = "none in .venv" if replaced is None else f"{replaced} in .venv is older than 2.2"
    if has_nvidia_gpu():
        say(f"PyTorch: {spec} ({old}; this machine has an NVIDIA GPU, so a CUDA build is welcome)")
        return
    if venv.offline is None and _would_be_cuda(venv, spec):
        raise SetupError(
            f"this machine has no NVIDIA GPU, and the package index offers {spec} as a CUDA build\n"
            "  only (gigabytes, and Horovod would have to be built for CUDA too)\n"
            "  what to do, one of:\n"
            "    PIP_EXTRA_INDEX_URL=<the CPU index that PyTorch's install page names> scripts/setup.sh\n"
            "    scripts/setup.sh --offline DIR, with a CPU build of torch among the wheels in DIR\n"
            f"    scripts/setup.sh --torch-spec '{spec}' takes the CUDA build all the same (on a login\n"
            "    node of a GPU cluster, say), and PyPI's CUDA toolkit where the site has none"
        )
    say(f"PyTorch: {spec} ({old}; this machine has no NVIDIA GPU, so a CPU build)")


def _would_be_cuda(venv: Venv, spec: str) -> bool:
    """Whether pip would install a CUDA build, told from the dependencies of what it would choose."""
    command = [
        str(venv.python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
    ]
    command += ["--report", "-", spec]
    result = subprocess.run(
        command, env=venv.environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=os.sep
    )
    if result.returncode != 0:
        return False  # the installation itself will say why
    report = json.loads(result.stdout)
    requirements = [name for item in report["install"] for name in item["metadata"].get("requires_dist", [])]
    return any(name.startswith(("nvidia-", "cuda-")) and "extra ==" not in name for name in requirements)
