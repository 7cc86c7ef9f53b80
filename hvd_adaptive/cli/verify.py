"""``run --verify``: the script's first steps with equal and with unequal batches, and whether their gradients are the same."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adaptive.cli.arguments import NUM_RANKS, without_options
from hvd_adaptive.cluster.relaunch import relaunch
from hvd_adaptive.exit_codes import EXIT_PROBLEMS
from hvd_adaptive.wrap.run_options import RunConfig

_FILE = "--verify-file"
# Differences of gradients, relative to their norm. Rounding makes some 1e-7 in 32 bits, and 1e-3 in 16.
_ROUNDING, _OTHER = 1e-3, 1e-2
# How much more a difference grows in one step than by rounding.
_JUMP = 10.0


def check_verify(options: argparse.Namespace, config: RunConfig) -> None:
    """Raises ValueError for options that do not go with ``--verify``, or where it was not this command that started the ranks."""
    if options.verify is None:
        return
    if options.verify < 8:
        raise ValueError(f"--verify must be >= 8 steps, got {options.verify}: shares are equal in the first four")
    if options.verify_file is not None:
        return
    if (options.num_ranks or 0) < 2:
        raise ValueError("--verify starts the script twice, as two ranks or more: give their number by -np")
    for is_given, name in (
        (config.dry_run, "--dry-run"), (config.strategy != "sync", f"--strategy {config.strategy}"),
        (config.has_equal_shares(), f"--shares {config.shares}"), (config.slowdown is not None, "--slowdown"),
        (config.compression not in ("auto", "none"), f"--compression {config.compression}"),
    ):  # fmt: skip
        if is_given:
            raise ValueError(f"--verify compares the script's own gradients with equal and unequal batches: leave {name} out")


def verify(options: argparse.Namespace, arguments: Sequence[str], config: RunConfig) -> int:
    """Runs the script twice; returns 0 if no gradient differs, or shares stay equal, 1 if one does or it cannot be seen, and the
    script's exit code if it fails.

    Args:
        options: those of ``run``.
        arguments: of the command.
        config: the options' values.

    Raises:
        RuntimeError: if ranks cannot be started from here, or have left nothing to compare.
    """
    first = len(arguments) - len(options.arguments) - 1
    own, script = without_options(arguments[1:first], (*NUM_RANKS, "--shares")), arguments[first:]
    num_ranks = options.num_ranks
    shares = config.shares or ",".join(f"{share:.4g}" for share in np.linspace(1, 2, num_ranks))
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for number, (name, part) in enumerate((("equal batches", "equal"), (f"shares {shares}", shares)), 1):
            _say(f"verify: run {number} of 2, with {name}")
            file = Path(folder) / f"{number}.npz"
            code = relaunch(num_ranks, ["run", *own, "--shares", part, _FILE, str(file), *script])
            if code:
                _say(f"verify: run {number}, with {name}, ended with exit code {code}")
                return code
            if not file.exists():
                raise RuntimeError(
                    f"--verify: run {number} has left no gradients here: rank 0 must run on this host, and not end by os._exit()"
                )
            with np.load(file) as values:
                found.append(dict(values))
    is_same, lines = judge(*found)
    for line in lines:
        _say(f"verify: {line}")
    return 0 if is_same else EXIT_PROBLEMS


def judge(equal: dict[str, Any], unequal: dict[str, Any]) -> tuple[bool, list[str]]:
    """Compares what two runs have kept, see :class:`hvd_adaptive.wrap.verification.Verification`.

    Returns:
        Whether gradients are the same as far as they were compared, and what to tell the person.
    """
    counts = len(equal["sketches"]), len(unequal["sketches"])
    num_steps = min(counts)
    is_unequal = unequal["are_unequal"][:num_steps]
    if not is_unequal.any():
        return True, [f"shares stay equal in all {num_steps} steps, so gradients do; the report above says why"]
    differences = _differences(equal["sketches"][:num_steps], unequal["sketches"][:num_steps])
    first = int(is_unequal.argmax())
    compared = f"{num_steps} steps, {int(is_unequal.sum())} of them with unequal batches"
    if differences[:first].max(initial=0.0) > _ROUNDING:
        at = int((differences[:first] > _ROUNDING).argmax())
        return False, [
            f"cannot be seen: step {at + 1} has other gradients (by {differences[at]:.1%}) even with the same batches. Set the "
            "script's seeds, and start both runs alike, as without a checkpoint that the first has left"
        ]
    before = np.concatenate([[0.0], differences[:-1]])
    jumps = (differences > _OTHER) & (differences > _JUMP * np.maximum(before, _ROUNDING / _JUMP))
    jumps[:first] = False
    largest = f"largest difference {differences.max():.1e} of their norm"
    draws = bool(equal["draws"] or unequal["draws"])
    lines = []
    if counts[0] != counts[1]:
        lines.append(f"the script made {counts[0]} steps with equal batches, and {counts[1]} with unequal ones")
    if jumps.any():
        at = int(jumps.argmax())
        what = f"step {at + 1} has other gradients, by {differences[at]:.1%} of their norm; {compared}"
        if draws:
            return False, [*lines, f"cannot be seen: {what}. The script draws random numbers in its steps, which may be why"]
        return False, [
            *lines,
            f"DIFFERENT: {what}. Run the script with --shares equal",
            "a collate_fn that draws random numbers (mixup) makes them differ as well: set it off to verify the rest",
        ]
    if differences.max() > _OTHER:
        return False, [*lines, f"cannot be seen: differences grow slowly, as by rounding, to {differences.max():.1%}; {compared}"]
    return counts[0] == counts[1], [*lines, f"the same gradients, up to rounding: {compared}, {largest}"]


def _differences(one: Any, other: Any) -> Any:
    """Returns for each step the distance relative to the larger norm; none where both are not finite."""
    with np.errstate(invalid="ignore"):
        norms = np.maximum(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1))
        differences = np.linalg.norm(one - other, axis=1) / np.where(norms > 0, norms, 1.0)
    are_lost = ~np.isfinite(one).all(1) & ~np.isfinite(other).all(1)
    return np.where(are_lost, 0.0, np.nan_to_num(differences, nan=1.0, posinf=1.0))


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"hvd-adaptive: {text}", file=sys.stderr, flush=True)
