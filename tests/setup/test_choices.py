"""The set-up's decisions: which MPI, which wheel, which pairs are refused. Nothing is installed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import main
import pytest
import setup_cache
import setup_console
import setup_options
import step_cuda
import step_horovod
import step_mpi
import step_torch
import step_venv
from setup_options import Options, SetupError
from step_mpi import Mpi
from step_torch import Torch
from step_venv import Record, Venv

CPU = Torch(version="2.13.0+cpu", cuda=None)
CUDA = Torch(version="2.13.0", cuda="13.0")
LIBRARY = Path("/venv/lib/libmpi.so.40")
PYPI = Mpi(
    flavour="pypi",
    version="Open MPI v4.1.8",
    library=LIBRARY,
    mpicc=Path("/venv/bin/mpicc"),
    mpicxx=Path("/venv/bin/mpicxx"),
    mpirun=None,
)
SITE = replace(PYPI, flavour="site", mpicc=Path("/opt/mpi/bin/mpicc"))


class FakeVenv(Venv):
    """An environment whose answers are given."""

    def __init__(self, path: Path, answer: Any = None) -> None:
        super().__init__(path, log=path / "log", offline=None)
        self.answer = answer

    def query(self, code: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
        return self.answer


def mpicc(folder: Path) -> Path:
    folder.mkdir(parents=True)
    file = folder / "mpicc"
    file.write_text("#!/bin/sh\n", encoding="utf-8")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("torch", "key"),
    [(CPU, "2.13.0+cpu"), (CUDA, "2.13.0+cu130"), (replace(CPU, version="2.2.0"), "2.2.0+cpu")],
)
def test_torch_key_always_names_the_build(torch: Torch, key: str) -> None:
    assert torch.key == key


def test_wheel_key_changes_with_everything_that_the_binary_depends_on() -> None:
    keys = {
        step_horovod.wheel_key(CPU, PYPI, "cp311"),
        step_horovod.wheel_key(CUDA, PYPI, "cp311"),
        step_horovod.wheel_key(CPU, PYPI, "cp312"),
        step_horovod.wheel_key(CPU, SITE, "cp311"),
        step_horovod.wheel_key(CPU, replace(SITE, mpicc=Path("/opt/other/bin/mpicc")), "cp311"),
        step_horovod.wheel_key(CPU, replace(SITE, version="MPICH 4.0.2"), "cp311"),
    }
    assert len(keys) == 6
    assert not any("/" in key or " " in key for key in keys)


def test_wheel_key_of_a_cuda_build_has_the_toolkit_and_the_gpus_that_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(step_torch.CC_LIST, raising=False)
    keys = {step_horovod.wheel_key(CUDA, PYPI, "cp311", toolkit=toolkit) for toolkit in (None, "site", "pypi")}
    monkeypatch.setenv(step_torch.CC_LIST, "70, 80")
    keys |= {step_horovod.wheel_key(CUDA, PYPI, "cp311", toolkit=toolkit) for toolkit in (None, "pypi")}
    assert len(keys) == 5 and any("cc-70-80" in key for key in keys)
    cpu = {step_horovod.wheel_key(CPU, PYPI, "cp311", toolkit=toolkit) for toolkit in (None, "pypi")}
    assert len(cpu) == 1 and not any("cc-" in key for key in cpu)


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*step_cuda.KEPT_VARIABLES, "CXX", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)


def key(torch: Torch) -> str:
    return step_horovod.wheel_key(torch, PYPI, "cp311")


def test_wheel_key_has_what_is_set_for_the_build(nothing_set: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {torch: key(torch) for torch in (CPU, CUDA)}
    assert not any("_set-" in text for text in plain.values())
    for name, value in (("CXX", "g++-12"), ("HOROVOD_BUILD_ARCH_FLAGS", "-mavx2"), ("CXXFLAGS", "-O1")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert key(CPU) != plain[CPU] and key(CUDA) != plain[CUDA]
            assert not any(letter in key(CPU) for letter in "/ =")
            context.setenv(name, "g++" if name == "CXX" else "")
            assert key(CPU) == plain[CPU]
    monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
    assert key(CPU) == plain[CPU] and key(CUDA) != plain[CUDA]


def test_code_for_this_processor_is_no_other_processors(nothing_set: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_BUILD_ARCH_FLAGS", "-march=native")
    here = key(CPU)
    assert step_horovod._processor()
    monkeypatch.setattr(step_horovod, "_processor", lambda: "flags : fpu")
    assert key(CPU) != here


def test_what_is_set_for_the_build_is_remembered(nothing_set: None, monkeypatch: pytest.MonkeyPatch) -> None:
    options, record = Options(root=Path(__file__).parents[2], torch_spec="torch"), Record(venv="/r/.venv")
    plain = main._inputs(options, record)
    with monkeypatch.context() as context:
        context.setenv("CXX", "g++-12")
        record.build_variables = step_horovod.build_variables()
        chosen = main._inputs(options, record)
    assert chosen != plain and record.build_variables == {"CXX": "g++-12"}
    # Put back at the end of the test.
    monkeypatch.setenv("CXX", "")
    main._with_remembered(options, record)
    assert main._inputs(options, record) == plain
    monkeypatch.delenv("CXX")
    main._with_remembered(options, record)
    assert os.environ["CXX"] == "g++-12" and main._inputs(options, record) == chosen


def test_site_mpicc_skips_virtual_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = mpicc(tmp_path / "venv" / "bin")
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    monkeypatch.setenv("PATH", str(inside.parent))
    assert step_mpi.find_site_mpicc() is None
    site = mpicc(tmp_path / "site" / "bin")
    monkeypatch.setenv("PATH", f"{inside.parent}:{site.parent}")
    assert step_mpi.find_site_mpicc() == site


@pytest.mark.parametrize(
    ("asked", "remembered", "on_path", "expected"),
    [
        (None, None, True, "site"),
        (None, None, False, "pypi"),
        (None, "pypi", True, "pypi"),
        (None, "pypi", False, "pypi"),
        (None, "site", True, "site"),
        ("pypi", "site", True, "pypi"),
        ("site", "pypi", True, "site"),
        ("site", None, False, "--mpi pypi"),
        (None, "site", False, "module load"),
    ],
)
def test_flavour(
    asked: str | None, remembered: str | None, on_path: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_mpi, "find_site_mpicc", lambda: Path("/opt/mpi/bin/mpicc") if on_path else None)
    options, record = Options(root=Path("/r"), mpi=asked), Record(venv="/r/.venv", mpi=remembered)
    if expected in ("site", "pypi"):
        assert step_mpi.choose_flavour(options, record) == expected
    else:
        with pytest.raises(SetupError, match=expected):
            step_mpi.choose_flavour(options, record)


def test_options_default_to_the_remembered_ones() -> None:
    options = setup_options.parse(["--root", "/r"])
    assert (options.torch_spec, options.mpi, options.dev, options.self_check) == (None, None, None, True)


def test_the_choices_for_cuda_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(step_torch.CC_LIST, "80")
    monkeypatch.delenv(step_torch.CC_LIST)
    record = Record(venv="/r/.venv", cuda="pypi", cuda_cc_list="70,80")
    assert main._with_remembered(Options(root=Path("/r")), record).cuda == "pypi"
    assert os.environ[step_torch.CC_LIST] == "70,80"
    monkeypatch.setenv(step_torch.CC_LIST, "90")
    assert main._with_remembered(Options(root=Path("/r"), cuda="site"), record).cuda == "site"
    assert os.environ[step_torch.CC_LIST] == "90"
    root = Path(__file__).parents[2]
    others = [Options(root=root, cuda="pypi"), Options(root=root, cuda="site")]
    inputs = [main._inputs(options, record) for options in others]
    monkeypatch.setenv(step_torch.CC_LIST, "100")
    assert len({*inputs, main._inputs(others[0], record)}) == 3


@pytest.mark.parametrize(
    ("code", "runs", "does_not"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", ["7.5", "8.0", "8.9", "9.0", "10.3", "12.1", "13.0"], ["7.0"]),
        ("sm_70 sm_75 sm_80", ["7.0", "7.2", "8.6"], ["6.1", "9.0"]),
        ("sm_80 sm_90a", ["8.0", "9.0"], ["9.1", "10.0", "7.5"]),
        ("", ["7.0"], []),
    ],
)
def test_which_gpus_a_pytorch_has_code_for(code: str, runs: list[str], does_not: list[str]) -> None:
    torch = replace(CUDA, code=tuple(code.split()))
    for number in (*runs, *does_not):
        major, minor = map(int, number.split("."))
        assert torch.runs_on((major, minor)) == (number in runs), number


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi on PATH that lists GPUs of these compute capabilities."""
    monkeypatch.delenv(step_torch.CC_LIST, raising=False)
    (tmp_path / "smi").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/smi:/usr/bin:/bin")

    def list_gpus(*capabilities: str) -> None:
        file = tmp_path / "smi" / "nvidia-smi"
        lines = "\n".join(capabilities)
        file.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && echo 'GPU 0: one' || echo '{lines}'\n", encoding="utf-8")
        file.chmod(0o755)

    return list_gpus


VOLTA_AND_TURING = ("sm_70", "sm_75", "sm_80")


def test_a_pytorch_without_code_for_the_gpus_is_refused_with_one_that_has_it(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = replace(CUDA, code=("sm_75", "sm_80", "compute_80"))
    step_torch.require_code_for_gpus(new)  # no GPU
    gpus("8.0", "9.0")
    step_torch.require_code_for_gpus(new)
    gpus("7.0", "8.0")
    with pytest.raises(SetupError, match=r"this machine has a GPU of sm_70, and[\s\S]*torch==2\.10\.0[\s\S]*no nvcc 12"):
        step_torch.require_code_for_gpus(new)
    step_torch.require_code_for_gpus(replace(new, code=VOLTA_AND_TURING))
    step_torch.require_code_for_gpus(CPU)
    gpus()
    monkeypatch.setenv(step_torch.CC_LIST, "70,80")
    with pytest.raises(SetupError, match="CC_LIST names GPUs of sm_70"):
        step_torch.require_code_for_gpus(new)
    monkeypatch.setenv(step_torch.CC_LIST, "100")
    with pytest.raises(SetupError, match="a newer PyTorch"):
        step_torch.require_code_for_gpus(replace(new, code=VOLTA_AND_TURING))


@pytest.mark.parametrize(("capability", "spec"), [("7.0", "torch==2.10.0"), ("8.0", "torch==2.13.0")])
def test_without_a_choice_a_v100_gets_a_pytorch_with_code_for_it(
    tmp_path: Path, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capability: str, spec: str
) -> None:
    gpus(capability)
    venv = FakeVenv(tmp_path)
    answers = iter([[None, False], {"version": "2", "cuda": "12.8", "hip": None, "code": list(VOLTA_AND_TURING)}])
    monkeypatch.setattr(venv, "query", lambda *_: next(answers))
    installed: list[list[str]] = []
    monkeypatch.setattr(venv, "pip", lambda arguments, *, label: installed.append(arguments))
    assert step_torch.install(venv, Options(root=tmp_path)).code == VOLTA_AND_TURING
    assert installed == [["install", spec]]


@pytest.mark.parametrize(
    ("origin", "spec", "fits"),
    [
        (None, "torch==2.13.0", True),
        (None, "torch==2.12.0", False),
        (None, "torch @ https://site/torch.whl", False),
        ({"url": "https://site/torch.whl"}, "torch @ https://site/torch.whl", True),
        ({"url": "https://site/torch.whl"}, "torch@https://site/torch.whl#sha256=ab", True),
        ({"url": "https://site/torch.whl"}, "torch @ https://site/other.whl", False),
        ({"url": "https://site/torch.whl"}, "torch @ https://me:token@site/torch.whl", True),
        ({"url": "https://site/torch.whl"}, "torch @ https://me:token@site/other.whl", False),
        ({"url": "file:///here/torch.whl"}, "torch>=2.12", True),
        ({"url": "https://x/y", "vcs_info": {"vcs": "git", "requested_revision": "v1"}}, "torch @ git+https://x/y@v1", True),
        ({"url": "https://x/y", "vcs_info": {"vcs": "git", "requested_revision": "v1"}}, "torch @ git+https://x/y@v2", False),
    ],
)
def test_a_pytorch_fits_an_address_only_if_it_came_from_there(
    tmp_path: Path, origin: dict[str, Any] | None, spec: str, fits: bool
) -> None:
    installed = tmp_path / "torch-2.13.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n", encoding="utf-8")
    if origin is not None:
        (installed / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    command = [sys.executable, "-c", step_torch._FITS, "torch>=2.2", spec]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert json.loads(result.stdout) == ["2.13.0", fits], result.stderr


@pytest.mark.parametrize("same_version", [False, True])
def test_a_pytorch_from_an_address_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_version: bool
) -> None:
    venv, spec = FakeVenv(tmp_path), "torch @ file:///here/torch.whl"
    found = {"version": "2.13.0+cpu", "cuda": None, "hip": None, "code": []}
    answers = iter([["2.13.0", False], ["2.13.0+cpu", not same_version], found])
    monkeypatch.setattr(venv, "query", lambda *_: next(answers))
    installed: list[list[str]] = []
    monkeypatch.setattr(venv, "pip", lambda arguments, *, label: installed.append(arguments))
    step_torch.install(venv, Options(root=tmp_path, torch_spec=spec))
    assert installed == [["install", spec]] + [["install", "--force-reinstall", "--no-deps", spec]] * same_version


@pytest.mark.parametrize(
    ("torch", "answer", "words"),
    [
        (CUDA, {"horovod_cuda": False, "horovod_nccl": False}, "refused.*CUDA"),
        (CUDA, {"horovod_cuda": True, "horovod_nccl": False}, "refused.*CUDA"),
        (CPU, {"horovod_mpi": False}, "without MPI"),
        (CPU, {"libmpi": "/usr/lib/libmpi.so.40"}, "two separate MPI worlds"),
    ],
)
def test_a_horovod_that_does_not_fit_is_refused(
    tmp_path: Path, torch: Torch, answer: dict[str, Any], words: str
) -> None:
    good = {"horovod_cuda": True, "horovod_nccl": True, "horovod_mpi": True, "libmpi": str(LIBRARY)}
    step_horovod.verify(FakeVenv(tmp_path, good), torch, PYPI)
    with pytest.raises(SetupError, match=words):
        step_horovod.verify(FakeVenv(tmp_path, good | answer), torch, PYPI)


def toolkit(folder: Path, release: str | None) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(
        f"#!/bin/sh\n[ \"$1\" != --dryrun ] || echo '#$ TOP={folder}/bin/..' >&2\n"
        f"echo 'Cuda compilation tools, release {release}, V1'\n",
        encoding="utf-8",
    )
    nvcc.chmod(0o755)
    return folder


def whole_toolkit(folder: Path, release: str) -> Path:
    (toolkit(folder, release) / "include" / "cuda_runtime.h").touch()
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's /usr/local without any toolkit, and no nvcc elsewhere."""
    for name in ("CUDA_HOME", "HOROVOD_CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere:/usr/bin:/bin" if not Path("/usr/bin/nvcc").exists() else "/nowhere")
    monkeypatch.setattr(step_cuda, "_SITE", tmp_path / "local")
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


def test_a_toolkit_is_found_around_a_wrapper_script(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sites have them on PATH: the folder around such a script may even have an include/."""
    home = whole_toolkit(tmp_path / "opt" / "cuda 13", "13.0")
    wrapper = toolkit(tmp_path / "tools", None) / "bin" / "nvcc"
    wrapper.write_text(f"#!/bin/sh\nexec '{home}/bin/nvcc' \"$@\"\n", encoding="utf-8")
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    assert step_cuda.find_toolkit(CUDA) == home
    wrapper.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    assert step_cuda.find_toolkit(CUDA) is None


def test_the_sites_toolkit_of_pytorchs_version_is_found(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_cuda.find_toolkit(CUDA) is None
    whole_toolkit(site / "cuda-12.8", "12.8")
    (site / "cuda").symlink_to("cuda-12.8")
    assert step_cuda.find_toolkit(CUDA) is None
    assert "12.8" in capsys.readouterr().out
    assert step_cuda.find_toolkit(replace(CUDA, cuda="12.6")) == site / "cuda"
    toolkit(site / "cuda-13.10", "13.10")  # without headers
    for release in ("13.2", "13.1"):
        whole_toolkit(site / f"cuda-{release}", release)
    assert step_cuda.find_toolkit(CUDA) == site / "cuda-13.2"
    whole_toolkit(site / "cuda-13.0", "13.0")
    assert step_cuda.find_toolkit(CUDA) == site / "cuda-13.0"


def test_pypis_toolkit_is_taken_where_the_site_has_none(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = FakeVenv(tmp_path, str(tmp_path / "site-packages"))
    home = tmp_path / "site-packages" / "nvidia" / "cu13"
    installed: list[list[str]] = []

    def pip(arguments: list[str], *, label: str) -> None:
        installed.append(arguments)
        whole_toolkit(home, "13.0")
        (home / "lib").mkdir()
        (home / "lib" / "libcudart.so.13").touch()

    monkeypatch.setattr(venv, "pip", pip)
    for file in ("lib/libnccl.so.2", "include/nccl.h"):
        nccl = tmp_path / "site-packages" / "nvidia" / "nccl" / file
        nccl.parent.mkdir(parents=True)
        nccl.touch()
    with pytest.raises(SetupError, match=r"13\.0 is missing"):
        step_cuda.build_environment(venv, CUDA, tmp_path, source="site")
    with pytest.raises(SetupError, match="from CUDA 13 on"):
        step_cuda.build_environment(venv, replace(CUDA, cuda="12.8"), tmp_path)
    assert not installed
    found = step_cuda.build_environment(venv, CUDA, tmp_path)
    assert found["HOROVOD_CUDA_HOME"] == str(home) and found["CUDACXX"] == str(home / "bin" / "nvcc")
    assert "nvidia-cuda-nvcc==13.0.*" in installed[0]
    assert (home / "lib64" / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"
    # The site's comes first, unless PyPI's is asked for.
    whole_toolkit(site / "cuda", "13.0")
    assert step_cuda.find_toolkit(CUDA) == site / "cuda"
    monkeypatch.setattr(venv, "pip", lambda arguments, *, label: installed.append(arguments))
    assert step_cuda.pypi_toolkit(venv, CUDA) == home and len(installed) == 2


def test_cuda_build_names_what_is_missing_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    venv = FakeVenv(tmp_path, str(tmp_path / "site-packages"))
    monkeypatch.setattr(step_cuda, "find_toolkit", lambda torch: None)
    with pytest.raises(SetupError, match=r"toolkit\s+13\.0 is missing"):
        step_cuda.build_environment(venv, CUDA, tmp_path, source="site")

    monkeypatch.undo()
    home = toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(home))
    monkeypatch.setattr(step_cuda, "_SYSTEM_PREFIXES", ())
    with pytest.raises(SetupError, match="no headers"):
        step_cuda.build_environment(venv, CUDA, tmp_path)

    (home / "include" / "cuda_runtime.h").touch()
    with pytest.raises(SetupError, match=r"NCCL with headers is missing[\s\S]*HOROVOD_NCCL_HOME"):
        step_cuda.build_environment(venv, CUDA, tmp_path)
    with pytest.raises(SetupError, match=r"13\.0.*12\.8"):
        step_cuda.build_environment(venv, replace(CUDA, cuda="12.8"), tmp_path)

    own = tmp_path / "site-packages" / "nvidia" / "nccl"
    for file in ("lib/libnccl.so.2", "include/nccl.h"):
        (own / file).parent.mkdir(parents=True)
        (own / file).touch()
    found = step_cuda.build_environment(venv, CUDA, tmp_path)
    assert found["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert found["HOROVOD_NCCL_INCLUDE"] == str(own / "include")
    assert (Path(found["HOROVOD_NCCL_LIB"]) / "libnccl.so").resolve() == (own / "lib/libnccl.so.2").resolve()


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        (["filelock", "nvidia-nccl-cu13==2.29.7; platform_system == 'Linux'"], True),
        (["filelock", "sympy>=1.13.3", 'nvidia-x; extra == "gpu"'], False),
    ],
)
def test_a_cuda_build_is_told_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirements: list[str], expected: bool
) -> None:
    report = json.dumps({"install": [{"metadata": {"requires_dist": requirements}}]})
    completed = subprocess.CompletedProcess([], 0, stdout=report)
    monkeypatch.setattr(step_torch.subprocess, "run", lambda *_, **__: completed)
    monkeypatch.setattr(step_torch, "has_nvidia_gpu", lambda: False)
    if expected:
        with pytest.raises(SetupError, match="--torch-spec"):
            step_torch._explain_default(FakeVenv(tmp_path), "torch==2.13.0", replaced=None)
    else:
        step_torch._explain_default(FakeVenv(tmp_path), "torch==2.13.0", replaced=None)


def test_an_environment_from_another_path_is_not_used(tmp_path: Path) -> None:
    venv = Venv(tmp_path / ".venv", log=tmp_path / "log", offline=None)
    reason = step_venv._why_unusable(venv, Record(venv="/elsewhere/.venv"))
    assert reason is not None
    assert "/elsewhere/.venv" in reason


def test_a_changed_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / step_horovod.ARCHIVE).write_bytes(b"not Horovod")
    venv = Venv(tmp_path / ".venv", log=tmp_path / "log", offline=tmp_path)
    with pytest.raises(SetupError, match="SHA-256"):
        step_horovod._archive(venv)


def test_a_cached_wheel_that_is_broken_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").write_bytes(b"half a wheel")
    assert step_horovod._cached(tmp_path, CPU) is None


def test_the_record_of_a_set_up_survives_and_a_broken_one_counts_as_none(tmp_path: Path) -> None:
    venv = Venv(tmp_path, log=tmp_path / "log", offline=None)
    record = Record(venv=str(tmp_path), mpi="pypi", versions={"torch": "2.13.0+cpu"})
    venv.write_record(record)
    assert venv.read_record() == record
    (tmp_path / "hvd-adaptive-setup.json").write_text("{", encoding="utf-8")
    assert venv.read_record() is None


def test_a_lock_keeps_another_process_waiting(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "lock"
    code = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'a')\n"
        "try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept BlockingIOError: sys.exit(3)"
    )
    with setup_cache.locked(file, what="a test"):
        assert subprocess.run([sys.executable, "-c", code, str(file)]).returncode == 3
    assert subprocess.run([sys.executable, "-c", code, str(file)]).returncode == 0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(setup_cache.fcntl, "flock", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"), setup_cache.locked(tmp_path / "lock", what="a test"):
            pass
        return
    with setup_cache.locked(tmp_path / "lock", what="a test"):
        pass
    said = capsys.readouterr()
    assert f"{tmp_path} is on a file system without locks" in said.out + said.err and "apart from a test" in said.out + said.err


def test_a_failed_command_shows_the_compilers_lines_the_remedy_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "print('noise'); print('a.cc:3:10: fatal error: Python.h: No such file'); raise SystemExit(1)"
    with pytest.raises(SetupError) as caught:
        setup_console.run_logged([sys.executable, "-c", code], label="building", log=log, environment={})
    message = str(caught.value)
    assert "fatal error: Python.h" in message
    assert "python3-dev" in message
    assert str(log) in message
    assert "noise" not in message
    assert "noise" in log.read_text(encoding="utf-8")


def test_a_cmake_error_is_shown_with_its_message_and_without_pips_frame() -> None:
    lines = [
        "-- Check for working CXX compiler: /bin/false - broken",
        "  CMake Error at CMakeTestCXXCompiler.cmake:71 (message):",
        "    The C++ compiler",
        "",
        '      "/bin/false"',
        "",
        "    is not able to compile a simple test program.",
        "  error: subprocess-exited-with-error",
        "  ERROR: Failed building wheel for horovod",
    ]
    reasons = setup_console.failure_reasons(lines)
    assert "is not able to compile a simple test program." in reasons
    assert not any("subprocess" in line or "Failed building" in line for line in reasons)
    assert any("CXX" in remedy for remedy in setup_console.hints(reasons))
