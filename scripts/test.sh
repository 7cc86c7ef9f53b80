#!/usr/bin/env bash
# Runs all tests, after the set-up where it is needed. Arguments go to pytest:
#   scripts/test.sh -k dispatch        scripts/test.sh tests/core
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh" --dev --quick

cd "$root"
export VIRTUAL_ENV="$root/.venv" PATH="$root/.venv/bin:$PATH"
pytest=("$root/.venv/bin/python" -m pytest)
# Without a path among the arguments, pytest takes `tests` (testpaths in pyproject.toml).
[[ $# -eq 0 ]] || exec "${pytest[@]}" "$@"

# Two at a time: tests that start ranks on this host, and beside them unit tests and those that mostly wait. Slurm's after those of two
# hosts: the hosts that it runs on have the same names, and stay.
scratch=$(mktemp -d)
# Two jobs of ranks on few cores: who yields in turns has kept Linux 6.18 from running its own threads. Asleep they leave it the cores.
patient=$("$root/.venv/bin/python" -m hvd_adaptive.launch.patience)
export LD_PRELOAD="$patient${LD_PRELOAD:+:$LD_PRELOAD}"
beside=(tests/unit tests/setup tests/net tests/slurm tests/docs)
"${pytest[@]}" "${beside[@]}" --durations=15 >"$scratch/output" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null || true; rm -rf "$scratch"' EXIT
status=0
"${pytest[@]}" tests "${beside[@]/#/--ignore=}" --durations=15 || status=$?
wait "$other" || status=$?
echo "== ${beside[*]} =="
cat "$scratch/output"
exit "$status"
