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

# PyPI's last PyTorch with code for sm_70 (V100): built for CUDA 12.8. CUDA 13 has none.
VOLTA_TORCH_SPEC = "torch==2.10.0"

# For which GPUs Horovod is built, e.g. "70,80"; where it is not set, for all that nvcc knows.
CC_LIST = "HOROVOD_BUILD_CUDA_CC_LIST"

_TURING = (7, 5)
_QUERY = (
    "import json, torch\n"
    "flags = getattr(torch._C, '_cuda_getArchFlags', lambda: '')() or ''\n"
    "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, 'hip': torch.version.hip,\n"
    "                  'code': flags.split()}))"
)
# An installation from an address says which (PEP 610): without a fragment, and that of a repository in parts.
_FITS = """
import json, sys
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement

def fits(spec):
    wanted = Requirement(spec)
    if wanted.url is None:
        return wanted.specifier.contains(torch.version, prereleases=True)
    origin = json.loads(torch.read_text("direct_url.json") or "{}")
    url, vcs = origin.get("url"), origin.get("vcs_info")
    if vcs is not None:
        url = f"{vcs['vcs']}+{url}" + (f"@{vcs['requested_revision']}" if "requested_revision" in vcs else "")
    # Nor does it name users and tokens.
    place = wanted.url.partition("#")[0]
    scheme, slashes, rest = place.partition("://")
    host, slash, path = rest.partition("/")
    return url in (place, scheme + slashes + host.rpartition("@")[2] + slash + path)

try:
    torch = metadata.distribution("torch")
    print(json.dumps([torch.version, all(map(fits, sys.argv[1:]))]))
except metadata.PackageNotFoundError:
    print(json.dumps([None, False]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """The installed PyTorch.

    Attributes:
        version: with its build, e.g. "2.13.0+cpu".
        cuda: the CUDA version that it was built for, or None for a CPU build.
        code: what it has code for, e.g. ("sm_75", "sm_80", "compute_80"); empty if it does not say.
    """

    version: str
    cuda: str | None
    code: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The version, always with its build: "+cpu" or "+cu130"."""
        if "+" in self.version:
            return self.version
        return f"{self.version}+" + ("cpu" if self.cuda is None else "cu" + self.cuda.replace(".", ""))

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it has code for GPUs of a compute capability; True where it does not say what it has."""
        if not self.code:
            return True
        for name in self.code:
            kind, _, digits = name.partition("_")
            if digits.isdigit():
                major, minor = int(digits[:-1]), int(digits[-1])
                # Machine code runs on its own major version, PTX on all that are newer.
                if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
                    return True
            elif digits[:-1].isdigit() and (int(digits[:-2]), int(digits[-2])) == capability:
                return True  # sm_90a and the like run on nothing else
        return False


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU: a device file, or an nvidia-smi that lists one."""
    return Path("/dev/nvidia0").exists() or "GPU" in _nvidia_smi("-L")


def gpus_to_run_on() -> dict[tuple[int, int], str]:
    """The compute capabilities that PyTorch must have code for, and who asks for each.

    These are this machine's GPUs, and those that HOROVOD_BUILD_CUDA_CC_LIST names, on a login node say.
    """
    found = {}
    for word in os.environ.get(CC_LIST, "").split(","):
        if word.strip().isdigit() and int(word) >= 10:
            found[divmod(int(word), 10)] = f"{CC_LIST} names GPUs"
    for line in _nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader").splitlines():
        major, _, minor = line.strip().partition(".")
        if major.isdigit() and minor.isdigit():
            found[int(major), int(minor)] = "this machine has a GPU"
    return found


def _nvidia_smi(*arguments: str) -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    try:
        result = subprocess.run(
            [smi, *arguments], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def install(venv: Venv, options: Options) -> Torch:
    """Keeps a PyTorch that fits, else installs the requirement.

    Without --torch-spec, on a machine without an NVIDIA GPU, a CUDA build is refused before its gigabytes are
    fetched: it could only be paired with a Horovod built for CUDA.

    Raises:
        SetupError: none can be installed, only a CUDA build is on offer for a machine without a GPU, or the CUDA build has no
            code for the GPUs.
    """
    specs = ["torch>=2.2"] if options.torch_spec is None else ["torch>=2.2", options.torch_spec]
    version, fits = venv.query(_FITS, *specs)
    if fits:
        say(f"PyTorch: keeping {version}, which fits {' and '.join(specs)}")
    else:
        spec = options.torch_spec
        if spec is None:
            old = sorted(gpu for gpu in gpus_to_run_on() if gpu < _TURING)
            spec = VOLTA_TORCH_SPEC if old else DEFAULT_TORCH_SPEC
            _explain_default(venv, spec, replaced=version)
            if old:
                say(f"PyTorch: {spec} is the last one on PyPI with code for {_names(old)}; builds for CUDA 13 have none")
        venv.pip(["install", spec], label=f"installing {spec}")
        if "@" in spec and not venv.query(_FITS, spec)[1]:
            # pip leaves an installed one of the same version as it is.
            venv.pip(["install", "--force-reinstall", "--no-deps", spec], label=f"installing {spec} in place of {version}")
    found = venv.query(_QUERY)
    if found["hip"] is not None:
        raise SetupError(
            f"PyTorch {found['version']} is a ROCm build, which this script does not build Horovod for\n"
            "  what to do: --torch-spec with a CPU or CUDA build"
        )
    torch = Torch(version=found["version"], cuda=found["cuda"], code=tuple(found["code"]))
    if not fits:
        say(
            f"PyTorch: {torch.version}, "
            + ("a CPU build" if torch.cuda is None else f"for CUDA {torch.cuda}: {' '.join(torch.code)}")
        )
    require_code_for_gpus(torch)
    return torch


def require_code_for_gpus(torch: Torch) -> None:
    """Refuses a CUDA build that would fail on its first use of a GPU, before Horovod is built for it.

    Raises:
        SetupError: it has no code for one of `gpus_to_run_on`.
    """
    missing = {gpu: who for gpu, who in gpus_to_run_on().items() if torch.cuda is not None and not torch.runs_on(gpu)}
    if not missing:
        return
    reasons = "; ".join(f"{who} of {_names([gpu])}" for gpu, who in sorted(missing.items()))
    text = f"{reasons}, and PyTorch {torch.version} for CUDA {torch.cuda} has code for\n  {' '.join(torch.code)} only\n"
    if min(missing) < _TURING:
        text += (
            f"  what to do: --torch-spec '{VOLTA_TORCH_SPEC}' is PyPI's last one with code for sm_70 (V100), for CUDA 12.8;\n"
            "    PyTorch's own index has newer ones for CUDA 12.6 (PIP_INDEX_URL; its install page names it).\n"
            "    Both need a CUDA 12 toolkit of the site: CUDA 13 has no code for sm_70, and PyPI has no nvcc 12"
        )
    else:
        text += "  what to do: --torch-spec with a newer PyTorch, or one for a newer CUDA"
    raise SetupError(text)


def _names(capabilities: list[tuple[int, int]]) -> str:
    return ", ".join(f"sm_{major}{minor}" for major, minor in capabilities)


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
