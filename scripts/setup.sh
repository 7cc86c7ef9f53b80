#!/usr/bin/env bash
# Makes .venv in the repository's root: PyTorch, MPI, mpi4py, Horovod, this project. No root rights needed.
# This file only finds a Python; scripts/setup/ does the work. `scripts/setup.sh --help` lists the options.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

fits() { # fits COMMAND: whether it starts and is Python 3.10 or newer
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

wanted=
previous=
for argument in "$@"; do
    case "$argument" in
        --python=*) wanted=${argument#--python=} ;;
        *) [[ $previous == --python ]] && wanted=$argument ;;
    esac
    previous=$argument
done

if [[ -n $wanted ]]; then
    if ! command -v -- "$wanted" >/dev/null 2>&1; then
        echo "setup: error: --python must name a Python interpreter, got '$wanted', which is not found." >&2
        echo "setup: give a path, or a command on PATH such as python3.11." >&2
        exit 2
    fi
    if ! fits "$wanted"; then
        version=$("$wanted" --version 2>&1 | head -n 1 || true)
        echo "setup: error: --python must be Python 3.10 or newer, got '$wanted' (${version:-does not start})." >&2
        exit 2
    fi
    python=$wanted
else
    python=
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [[ -z $python ]]; then
        echo "setup: error: no Python 3.10 or newer on PATH." >&2
        echo "setup: install one (Debian: apt-get install python3 python3-venv python3-dev; HPC: module load python)," >&2
        echo "setup: or name it: scripts/setup.sh --python /path/to/python3.11" >&2
        exit 2
    fi
fi

# Modules' PYTHONPATH would hide what .venv has, or lacks.
if [[ -n ${PYTHONPATH-} ]]; then
    echo "setup: warning: PYTHONPATH is set ($PYTHONPATH): not used here, but it can hide .venv's packages later." >&2
fi
exec env -u PYTHONHOME -u PYTHONPATH -u VIRTUAL_ENV PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 \
    "$python" "$root/scripts/setup/main.py" --root "$root" "$@"
