#!/usr/bin/env bash
# Runs a rank's program in the control group of its local rank: in_cgroup.sh GROUP... -- COMMAND...
set -euo pipefail
groups=()
while [[ $1 != -- ]]; do groups+=("$1"); shift; done
shift
echo $$ >"${groups[$OMPI_COMM_WORLD_LOCAL_RANK]}/cgroup.procs"
exec "$@"
