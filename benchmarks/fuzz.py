"""A longer campaign of the mutations that tests/unit/test_fuzz.py runs 10,000 of: python benchmarks/fuzz.py --cases 1000000.

Prints how many cases of each reader were refused and accepted; the first one that ends otherwise ends the campaign, with the
command that repeats it. Coverage of the readers, branch by branch:

    python -m coverage run --branch --source=hvd_adaptive benchmarks/fuzz.py --cases 10000
    python -m coverage report -m --include='*/data/*,*/option_sources.py,*/validation.py,*/binding.py,*/checkpoint.py,*/replay.py'
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from fuzz import Failure, fuzz, make_targets, memory_limit, no_unpickling, quiet, run_case  # type: ignore[attr-defined]


def main() -> int:
    """Runs the campaign; returns 1 for a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000, help="over all readers (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations; the tests use 0 (default: 1)")
    parser.add_argument("--target", default="", help="one reader only, by its name")
    parser.add_argument("--case", type=int, help="with --target: one case only, as a failure names it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, quiet(), memory_limit(), no_unpickling():
        targets = make_targets(Path(folder))
        names = [target.name for target in targets]
        if options.target and options.target not in names:
            parser.error(f"--target must be one of {', '.join(names)}")
        start_s = time.perf_counter()
        try:
            if options.case is not None:
                (target,) = [target for target in targets if target.name == options.target]
                print(run_case(target, options.seed, options.case))
                return 0
            counts = fuzz(targets, options.seed, options.cases, only=options.target)
        except Failure as failure:
            print(failure, file=sys.stderr)
            return 1
    for name, counter in counts.items():
        print(f"{name:32} {counter['refused']:8,} refused {counter['accepted']:8,} accepted")
    total = sum(counter.total() for counter in counts.values())
    print(f"{total:,} cases with seed {options.seed} in {time.perf_counter() - start_s:.0f} s: no other end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
