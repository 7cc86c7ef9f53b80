#!/usr/bin/env bash
# Runs all tests, after the set-up where it is needed. Arguments go to pytest:
#   scripts/test.sh -k dispatch        scripts/test.sh tests/core
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh" --dev --quick

cd "$root"
export VIRTUAL_ENV="$root/.venv" PATH="$root/.venv/bin:$PATH"
# Without a path among the arguments, pytest takes `tests` (testpaths in pyproject.toml).
exec "$root/.venv/bin/python" -m pytest "$@"
