#!/usr/bin/env bash
# The main job, on the embedded data: four MPI ranks of unequal speed (1:1:2:4, emulated) train with Adaptive SGD, then with
# plain Horovod at the same speeds; a table and a picture compare them. Takes about three minutes after the set-up.
#   scripts/demo.sh [DIR]      DIR: where the runs go (default: runs/demo-DATE)
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh" --quick

out=${1:-runs/demo-$(date +%Y%m%d-%H%M%S)}
if [[ -e $out/adaptive ]]; then
    echo "demo: error: $out holds a demo already: name another folder" >&2
    exit 2
fi
mkdir -p "$out"
hvd_adaptive=("$root/.venv/bin/python" -m hvd_adaptive)
# Ours with nothing set but how long; plain Horovod with the same optimizer, at the rate that suited it on most sets (benchmarks/records/).
common=(-np 4 --slowdown 8,8,4,2 --eval-rounds 1)

echo "== Adaptive SGD =="
"${hvd_adaptive[@]}" train "${common[@]}" --epochs 4 --name adaptive --out "$out/adaptive"
echo
echo "== plain Horovod (synchronous, equal batches) =="
# A limit keeps the demo short on a slow machine; the log says how far each got.
"${hvd_adaptive[@]}" train "${common[@]}" --strategy horovod --lr 0.05 --name "plain Horovod" --time-limit 80 --out "$out/horovod"
echo
"${hvd_adaptive[@]}" report "$out/horovod" "$out/adaptive" --out "$out/report.html" --png "$out/png"
echo "The target is the best P@1 of this one run of Horovod, so the speed-up varies from demo to demo. README.md has measured ones."
