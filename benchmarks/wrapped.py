"""Seconds a step of a Horovod script, plain and under `hvd-adaptive run`: on equal ranks, and on unequal ones.

python benchmarks/wrapped.py [--starts 12] [--pairs 30] [--steps 15] [--kind equal|unequal] [--batch-size 48] [--slowdown 8,4,2]
    [--record FILE] [-- OPTIONS OF hvd-adaptive run]

Both jobs are started, and take turns of some steps each (a third of a second or so) while the other one's ranks are stopped
(SIGSTOP): what else runs on the machine meets both alike. The job that goes first changes from pair to pair. A start of both
jobs gives one measurement, the median over its pairs of turns of the ratio of their seconds a step: where processes lie in memory
and on cores stays as it is until the next start. The median of those counts, and its spread. The script is
benchmarks/wrapped_script.py.

Equal ranks: `mpirun python SCRIPT` against `hvd-adaptive run SCRIPT`; nothing can be won, so the ratio shows what interception
costs. Unequal speeds are emulated: each rank's computing is stretched, by 8, 4 and 2 if not told otherwise. There the other side
is the script with pinned equal shares, as a plain one cannot be slowed down. The first turns are not counted: shares settle. The
ceiling is the last one in the report of the pinned job: computing gets shorter by the mean of the ranks' speeds over the least
one, and the rest of a step, where there is one, stays. The wrapped job's own report names a part of a ceiling, too: there speeds
are those of its own steps, so it shows what unfit shares lose, and not what steps of other sizes or full cores lose.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from intervals import median_interval
from numpy.typing import NDArray
from recording import header, publish

from hvd_adaptive.cluster.relaunch import ranks_command

Array = NDArray[np.float64]

SCRIPT = str(Path(__file__).with_name("wrapped_script.py"))
RUN = [sys.executable, "-m", "hvd_adaptive", "run"]
_WARMUP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=12, help="starts of both jobs")
    parser.add_argument("--pairs", type=int, default=30, help="counted pairs of turns of a start")
    parser.add_argument("--steps", type=int, default=15, help="counted steps of a turn")
    parser.add_argument("--settle", type=int, default=4, help="pairs before those that count")
    parser.add_argument("--batch-size", type=int, default=48, help="samples of a rank's step; 48 take 6 ms")
    # With 4,2,1 three ranks with the best shares want 1.75 cores, and Horovod's threads some more.
    parser.add_argument("--slowdown", default="8,4,2", help="of the unequal ranks, one each")
    parser.add_argument("--kind", choices=("equal", "unequal"), help="one of the two only")
    parser.add_argument("--record", type=Path)
    parser.add_argument("rest", nargs="*", help="options for hvd-adaptive run, after --")
    options = parser.parse_args()
    unequal = [*RUN, "--slowdown", options.slowdown, "--interval", "10"]
    num_unequal = options.slowdown.count(",") + 1
    kinds = {
        "equal": ("equal ranks", 2, [sys.executable], [*RUN, *options.rest], "0.97"),
        "unequal": (
            f"slowed {options.slowdown} times", num_unequal, [*unequal, "--shares", ",".join("1" * num_unequal)],
            [*unequal, *options.rest], "0.95 of the ceiling",
        ),
    }  # fmt: skip
    lines = [
        *header("Seconds a step of a Horovod script, plain and wrapped"),
        f"Turns of {options.steps} steps of {options.batch_size} samples a rank, each job stopped while it is the other's. "
        "Where ranks are slowed, plain stands for pinned equal shares.",
        "",
        "| ranks | starts x pairs | plain, ms a step | wrapped, ms a step | times as fast: median of the starts (95% interval) "
        "| starts' extremes | wanted | of the ceiling (extremes) | of its own report's (extremes) "
        "| largest difference of the losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, (title, num_ranks, plain, wrapped, wanted) in kinds.items():
        if options.kind in (None, kind):
            lines.append(compare(options, title, num_ranks, plain, wrapped, wanted))
    publish(lines, options.record)


def compare(
    options: argparse.Namespace, title: str, num_ranks: int, plain: list[str], wrapped: list[str], wanted: str
) -> str:
    """Returns a line of the table."""
    measured = [measure(options, num_ranks, [plain, wrapped]) for _ in range(options.starts)]
    starts, losses, ceilings, own = zip(*measured, strict=True)
    difference = max(np.abs(loss[1] / loss[0] - 1.0).max() for loss in losses)
    ratios = np.array([np.median(seconds[0] / seconds[1]) for seconds in starts])
    middle = 1e3 * np.median(np.concatenate(starts, axis=1), axis=1)
    low, high = median_interval(ratios)
    return (
        f"| {title} | {options.starts} x {options.pairs} | {middle[0]:.2f} | {middle[1]:.2f} "
        f"| **{np.median(ratios):.3f}** ({low:.3f} to {high:.3f}) | {ratios.min():.3f} to {ratios.max():.3f} | {wanted} "
        f"| {spread(ratios / np.array(ceilings))} | {spread(np.array(own))} | {difference:.1e} |"
    )


def spread(parts: Array) -> str:
    """Returns the median and the extremes; "-" where there is no number."""
    if not np.isfinite(parts).all():
        return "-"
    return f"{np.median(parts):.3f} ({parts.min():.3f} to {parts.max():.3f})"


def measure(options: argparse.Namespace, num_ranks: int, commands: list[list[str]]) -> tuple[Array, Array, float, float]:
    """Starts both jobs; returns seconds a step of their turns, shape (2, pairs), the losses after all of them, the ceiling that
    the first job's report names, and the part that the second one has of its own; NaN where there is none."""
    jobs: list[Job] = []
    try:
        for command in commands:
            jobs.append(Job(command, num_ranks, options.steps, options.batch_size))
        turns = np.zeros((2, options.settle + options.pairs, 2))
        for pair in range(turns.shape[1]):
            for number in (0, 1) if pair % 2 == 0 else (1, 0):
                turns[number, pair] = jobs[number].turn()
        for job in jobs:
            job.end()
    finally:
        for job in jobs:
            job.kill()
    return turns[:, options.settle :, 0], turns[:, :, 1], jobs[0].ceiling, jobs[1].part


class Job:
    """The script as ranks, which are stopped except in their turns.

    Args:
        command: what runs it.
        num_ranks: ranks.
        num_steps: counted steps of a turn.
        batch_size: samples of a rank's step.

    Attributes:
        ceiling: times as fast as equal shares, as its report names it after :meth:`end`; NaN where there is none.
        part: that it has of it by the same report.
    """

    def __init__(self, command: list[str], num_ranks: int, num_steps: int, batch_size: int) -> None:
        arguments, environment = ranks_command(
            num_ranks, [*command, SCRIPT, str(_WARMUP_STEPS), str(num_steps), str(batch_size)]
        )
        self._pids: list[int] = []
        self.ceiling = self.part = float("nan")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._pids = self._read()["pids"]
        self._signal(signal.SIGSTOP)

    def turn(self) -> tuple[float, float]:
        """Trains a block of steps; returns seconds a step and the loss after it."""
        self._signal(signal.SIGCONT)
        self._write("go\n")
        result = self._read()
        self._signal(signal.SIGSTOP)
        return result["step_s"], result["loss"]

    def end(self) -> None:
        """Lets the script come to its end."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(60)
        self._errors.seek(0)
        text = self._errors.read()
        sys.stderr.write(text)
        if found := re.findall(r"the ceiling[^:]*: ([0-9.]+)x", text):
            self.ceiling = float(found[-1])
        if found := re.findall(r"now: ([0-9.]+)x; the ceiling[^:]*: ([0-9.]+)x", text):
            self.part = float(found[-1][0]) / float(found[-1][1])
        if code:
            raise SystemExit(f"{shlex.join(map(str, self._process.args))} ended with {self._process.returncode}")  # type: ignore[arg-type]

    def kill(self) -> None:
        """Ends what is left of it."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(30)

    def _write(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word)
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                values: dict[str, Any] = json.loads(line)
                return values
        raise SystemExit(f"{shlex.join(map(str, self._process.args))} ended early")  # type: ignore[arg-type]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


if __name__ == "__main__":
    main()
