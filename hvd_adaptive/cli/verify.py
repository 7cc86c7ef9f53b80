"""``run --verify``: the script's first steps with equal and with unequal batches, and whether their gradients are the same."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adaptive.cli.arguments import NUM_RANKS, without_options
from hvd_adaptive.cluster.output import say
from hvd_adaptive.cluster.relaunch import relaunch
from hvd_adaptive.exit_codes import EXIT_PROBLEMS
from hvd_adaptive.wrap.run_options import RunConfig

_FILE = "--verify-file"
# Differences of a parameter's gradient, relative to its norm, that are more than rounding: where both runs begin the step from
# the same weights, and where these differ by rounding and a ReLU may be on in one run only.
_SAME_WEIGHTS, _LATER = 2e-3, 2e-2
# The same of gradients that are rounded to 16 bits.
_OF_16_BITS = 3e-2
# How much more a difference grows in one step than by rounding, where weights differ.
_JUMP = 10.0
# Smaller gradients, relative to the largest of all parameters and steps so far, are rounding, as those that are zero in theory.
_SMALLEST = 1e-3
_SETTLED = 5
# Unequal steps from the same weights that are a proof by themselves.
_ENOUGH = 8


def check_verify(options: argparse.Namespace, config: RunConfig) -> None:
    """Raises ValueError for options that do not go with ``--verify``, or where it was not this command that started the ranks."""
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
    # What follows the script is the script's.
    end = len(arguments) - len(options.arguments)
    rest = [*without_options(arguments[1:end], (*NUM_RANKS, "--shares")), *arguments[end:]]
    num_ranks = options.num_ranks
    shares = config.shares or ",".join(f"{share:.4g}" for share in np.linspace(1, 2, num_ranks))
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for number, (name, part) in enumerate((("equal batches", "equal"), (f"shares {shares}", shares)), 1):
            _say(f"run {number} of 2, with {name}")
            file = Path(folder) / f"{number}.npz"
            code = relaunch(num_ranks, ["run", "--shares", part, _FILE, str(file), *rest])
            if code:
                _say(f"run {number}, with {name}, ended with exit code {code}")
                return code
            if not file.exists():
                raise RuntimeError(
                    f"--verify: run {number} has left no gradients here: rank 0 must run on this host, and not end by os._exit()"
                )
            with np.load(file, allow_pickle=False) as values:
                found.append(dict(values))
    is_same, lines = judge(*found)
    for line in lines:
        _say(line)
    return 0 if is_same else EXIT_PROBLEMS


def judge(equal: Mapping[str, Any], unequal: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Compares what two runs have kept, see :class:`hvd_adaptive.wrap.verification.Verification`.

    Returns:
        Whether gradients are the same as far as they were compared, and what to tell the person.
    """
    counts = len(equal["sketches"]), len(unequal["sketches"])
    num_steps, is_unequal = min(counts), unequal["are_unequal"][: min(counts)]
    if counts[0] != counts[1]:
        return False, [
            f"cannot be seen: the script made {counts[0]} steps with equal batches, and {counts[1]} in the second run. It may go "
            "on from what the first run has saved, or decide by the number of its samples"
        ]
    if not is_unequal.any():
        if unequal["has_reasons"]:
            return True, [f"shares stay equal in all {num_steps} steps, so gradients do; the report above says why"]
        return False, [f"cannot be seen: no batch of the {num_steps} steps had unequal shares yet. Let it make more steps"]
    differences, parameters = _differences(equal["sketches"], unequal["sketches"])
    first = int(is_unequal.argmax())
    if differences[:first].max(initial=0.0) > _SAME_WEIGHTS:
        at = int((differences[:first] > _SAME_WEIGHTS).argmax())
        return False, [
            f"cannot be seen: step {at + 1} has other gradients (by {differences[at]:.1%}) even with the same batches. Set the "
            "script's seeds, and start both runs alike, as without a checkpoint that the first has left"
        ]
    # Before the first unequal step all was the same, also what is not recorded, as sparse gradients.
    num_alike = max(first, int(np.logical_and.accumulate(unequal["are_recorded"][:num_steps]).sum())) + 1
    has_same_weights = np.arange(num_steps) < num_alike
    has_16_bits = equal["has_16_bits"] or unequal["has_16_bits"]
    limits = np.where(has_same_weights, _SAME_WEIGHTS, _LATER)
    if has_16_bits:
        limits[:] = _OF_16_BITS
    before = np.concatenate([[0.0], differences[:-1]])
    are_other = (differences > limits) & (has_same_weights | (differences > _JUMP * before))
    compared = f"{num_steps} steps, {int(is_unequal.sum())} of them with unequal batches"
    compared += f" and {num_alike} from the same weights" if num_alike < num_steps else ""
    if are_other.any():
        at = int(are_other.argmax())
        number, place = equal["optimizers"][at], parameters[at]
        name = str(equal["names"][number, place]) or f"parameter {place} of optimizer {number + 1}"
        what = f"at step {at + 1} the gradient of {name} differs by {differences[at]:.1%} of its norm; {compared}"
        if equal["draws"] or unequal["draws"]:
            why = "The script draws random numbers in its steps or its collate_fn, or has workers not by fork"
            return False, [f"cannot be seen: {what}. {why}"]
        return False, [
            f"DIFFERENT: {what}. Run the script with --shares equal",
            "if its steps draw from generators of its own (np.random.default_rng), leave these out and verify the rest",
        ]
    largest = differences.max()
    if (differences > limits).any() or np.median(differences[-_SETTLED:]) > limits[first]:
        grow = f"differences grow from step to step, as by rounding, to {largest:.1%}"
        num_unequal = int(is_unequal[:num_alike].sum())
        if num_unequal < _ENOUGH:
            return False, [f"cannot be seen: {grow}; {compared}"]
        largest = differences[:num_alike].max()
        compared = f"{num_alike} steps from the same weights, {num_unequal} of them with unequal batches (later {grow})"
    return True, [f"the same gradients, up to rounding: {compared}, largest difference {largest:.1e} of a parameter's norm"]


def _differences(one: Any, other: Any) -> tuple[Any, Any]:
    """Returns for each step the largest distance of a parameter's sketches, relative to the larger norm, and of which parameter.

    Where both are not finite there is none.

    Args:
        one: sketches, shape (steps, parameters, width).
        other: the same of another run.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.maximum(np.linalg.norm(one, axis=2), np.linalg.norm(other, axis=2))
        totals = np.linalg.norm(np.nan_to_num(norms, nan=0.0, posinf=0.0), axis=1)
        least = _SMALLEST * np.maximum.accumulate(totals)[:, None]
        scale = np.maximum(norms, least)
        differences = np.linalg.norm(one - other, axis=2) / np.where(scale > 0, scale, 1.0)
    are_lost = ~np.isfinite(one).all(2) & ~np.isfinite(other).all(2)
    differences = np.where(are_lost, 0.0, np.nan_to_num(differences, nan=1.0, posinf=1.0))
    return differences.max(axis=1, initial=0.0), differences.argmax(axis=1)


def _say(text: str) -> None:
    sys.stdout.flush()
    say(f"verify: {text}")
