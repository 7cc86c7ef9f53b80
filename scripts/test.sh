#!/usr/bin/env bash
# Runs all tests, after the set-up where it is needed. --quick leaves out those marked slow, and those that start ranks.
# Other arguments go to pytest, which then takes one test after the other:
#   scripts/test.sh -k dispatch        scripts/test.sh tests/unit
# --store-durations writes tests/durations.json anew, by which the workers take first what takes longest.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh" --dev --quick

cd "$root"
# Ranks and workers read the tests and the package compiled; where nothing is written, each would compile them anew.
unset PYTHONDONTWRITEBYTECODE
export VIRTUAL_ENV="$root/.venv" PATH="$root/.venv/bin:$PATH"
# Two jobs of ranks on few cores: who yields in turns has kept Linux 6.18 from running its own threads. Asleep they leave it the cores.
patient=$("$root/.venv/bin/python" -m hvd_adaptive.cluster.patience)
export LD_PRELOAD="$patient${LD_PRELOAD:+:$LD_PRELOAD}"
pytest=("$root/.venv/bin/python" -m pytest)
# More than two cores: tests wait for limits, for Slurm, for processes to end. Quick ones do not.
all=(-n 3 --dist loadscope --no-loadscope-reorder --durations=15)
case "$*" in
    "") ;;
    --quick) all+=(-n 2 -m "not slow") ;;
    --store-durations) all+=("$1") ;;
    *) exec "${pytest[@]}" "$@" ;;
esac
exec "${pytest[@]}" "${all[@]}"
