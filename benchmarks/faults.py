"""A long campaign of faults: python benchmarks/faults.py --runs 300 --folder DIR; the same command goes on where it was ended.

Each run is two ranks of `hvd-adaptive train --resume auto`, in one run directory as long as this program runs. In a phase that
the seed chooses one of them is killed, frozen for good or for a while, or has a wrong clock; or the disk is full; or, with the
ranks on two hosts (root only), the link between them is slow or cut. tests/mpi/test_faults.py runs twenty. What every run must do
is in tests/support/campaign.py. `outcomes.jsonl` in the folder has a line of each, from which the counts are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))

from campaign import Campaign, cases, site, write_data  # noqa: E402
from jobs import exit_on_signals, run_job  # noqa: E402


def main() -> int:
    """Runs what is left of the campaign; returns 1 if a run was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="runs in all (default: 300)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--folder", type=Path, required=True, help="where the campaign is kept")
    options = parser.parse_args()
    exit_on_signals()
    options.folder.mkdir(parents=True, exist_ok=True)
    data = options.folder / "data"
    if not data.exists():
        write_data(data)
    outcomes = options.folder / "outcomes.jsonl"
    done = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
    end_s = time.monotonic() + 60 * options.minutes
    with site(options.folder) as (hosts, faults):
        campaign = Campaign(options.folder, data, run_job, hosts=hosts, done=len(done))
        for case in itertools.islice(cases(options.seed, faults), len(done), options.runs):
            if time.monotonic() > end_s:
                break
            try:
                outcome = campaign.run(case)
            except AssertionError as failure:
                outcome = {"case": str(case), "failure": str(failure)}
            done.append({**outcome, "fault": case.fault, "phase": case.phase})
            with outcomes.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(f"{len(done):4} {json.dumps(outcome)[:300]}", flush=True)
        campaign.finish()
        print(f"{len(campaign.rounds())} rounds in this call, and the ledger is exact")
    failures = report(done)
    return 1 if failures else 0


def report(done: list[dict[str, object]]) -> int:
    """Prints the counts; returns the number of runs that were not as they must be."""
    counts = Counter((str(item["fault"]), str(item["phase"])) for item in done)
    failures = [item for item in done if "failure" in item]
    phases = sorted({phase for _, phase in counts})
    print("| fault | " + " | ".join(phases) + " |\n|" + " --- |" * (len(phases) + 1))
    for fault in sorted({fault for fault, _ in counts}):
        print(f"| {fault} | " + " | ".join(str(counts[fault, phase]) for phase in phases) + " |")
    print(f"{len(done)} runs, {len(failures)} not as they must be")
    for item in failures:
        print(str(item["failure"])[:2000])
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
