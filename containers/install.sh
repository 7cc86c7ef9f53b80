#!/usr/bin/env bash
# What both recipes run, as root in a bare Debian or Ubuntu: its packages, then scripts/setup.sh, which gets the arguments.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends \
    build-essential ca-certificates openssh-client openssh-server python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

# The closing check starts two ranks.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
"$root/scripts/setup.sh" --no-dev "$@"

# What pip fetched and built is in .venv now.
rm -rf ~/.cache/pip ~/.cache/hvd_adaptive "$root"/.venv-setup.*
chmod -R a+rX "$root"
