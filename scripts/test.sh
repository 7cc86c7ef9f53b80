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

# Unit tests beside those that start ranks. Not two jobs of ranks at once: ranks with few cores wait by giving up their turn, and
# on Linux 6.18 two such jobs have kept the kernel's own threads, the network's among them, from running for a minute.
output=$(mktemp)
"${pytest[@]}" tests/unit tests/setup --durations=15 >"$output" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null || true; rm -f "$output"' EXIT
status=0
"${pytest[@]}" tests --ignore=tests/unit --ignore=tests/setup --durations=15 || status=$?
wait "$other" || status=$?
echo "== tests/unit and tests/setup =="
cat "$output"
exit "$status"
