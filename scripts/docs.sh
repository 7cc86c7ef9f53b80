#!/usr/bin/env bash
# Builds the documentation site into site/, with broken links as errors, or shows it while you write:
#   scripts/docs.sh              scripts/docs.sh serve
# The packages are those of the extra `docs` in setup.cfg, in an environment of their own, .venv-docs: neither training nor tests need them.
# Exit code 69: the packages cannot be had.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
python=$root/.venv-docs/bin/python

packages=$(python3 - <<'PY'
import configparser
config = configparser.ConfigParser()
config.read("setup.cfg", encoding="utf-8")
print("\n".join(line.replace(" ", "") for line in config["options.extras_require"]["docs"].split("\n") if line))
PY
)
if [[ ! -x $python ]] || [[ $(cat .venv-docs/packages 2>/dev/null) != "$packages" ]]; then
    rm -rf .venv-docs
    # shellcheck disable=SC2086
    if ! { python3 -m venv .venv-docs && "$python" -m pip install --quiet --disable-pip-version-check --retries 2 $packages; }; then
        rm -rf .venv-docs
        echo "docs: error: cannot install ${packages//$'\n'/ }: pip says why above" >&2
        exit 69
    fi
    printf '%s\n' "$packages" >.venv-docs/packages
fi

# Material prints an advertisement for its successor to every build.
export NO_MKDOCS_2_WARNING=1
case "${1-build}" in
    build) exec "$python" -m mkdocs build --strict --clean ;;
    serve) exec "$python" -m mkdocs serve "${@:2}" ;;
    *) echo "docs: error: want build or serve, got '$1'" >&2; exit 2 ;;
esac
