"""What the person is told: what was intercepted, what not and why, and what it brought."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.wrap.loaders import Loader
from hvd_adaptive.wrap.reasons import Reason, told
from hvd_adaptive.wrap.run_options import parse_shares

# Of the script's collectives that are named.
_MOST_NAMES = 4
# The part of a step from which on its exchange is worth a word.
_LONG_EXCHANGE = 0.3
# So many steps with equal shares, at the start, may be slower than later ones: caches are cold, libraries choose their ways.
_FEW_STEPS = 16


@dataclass
class _Windows:
    """Of one loader: sums over the windows with equal shares, and over those since shares last changed.

    The first window after a change has steps with the shares before it; it counts only until there is another one.
    """

    equal: Gathered | None = None
    newest: Gathered | None = None
    is_other: bool = False  # the newest has other shares than equal ones
    fractions: tuple[float, ...] | None = None
    num_changes: int = 0
    num_since: int = 0

    def take_in(self, gathered: Gathered, fractions: tuple[float, ...] | None) -> None:
        """Takes in a window of the shares so far, and those from now on."""
        if gathered["timed_steps"].all():
            self.num_since += 1
            is_mixed = self.num_changes > 0 and self.num_since == 1
            self.newest = _added(self.newest if self.num_since > 1 + (self.num_changes > 0) else None, gathered)
            self.is_other = self.fractions is not None
            if not self.is_other and (self.equal is None or not is_mixed):
                self.equal = _added(self.equal, gathered)
        if fractions != self.fractions:
            self.num_changes, self.num_since = self.num_changes + 1, 0
        self.fractions = fractions


@dataclass
class Report:
    """Collects what happens on this rank; rank 0 prints it.

    Attributes:
        loaders: every loader that the script iterated.
        is_started: Horovod was initialized.
        is_dry_run: only some steps were run.
        is_silent: nothing is told.
        is_check: shares are unequal to check the script (``--verify``), whatever the speeds: tells neither what the script does
            not meet of the conditions of equal updates, nor times.
        pinned: the fixed shares that were asked for; None: none.
        is_only_tried: a dry run's first steps did not show that unequal shares are better; they were tried all the same.
        is_plain: gradients are exchanged in each step, by Horovod itself.
        is_spread: the ranks are on several hosts.
        more: gives further lines.
    """

    loaders: list[Loader] = field(default_factory=list)
    is_started: bool = False
    is_dry_run: bool = False
    is_silent: bool = False
    is_check: bool = False
    pinned: str | None = None
    is_only_tried: bool = False
    is_plain: bool = True
    is_spread: bool = False
    more: Callable[[], list[str]] = list
    _world_size: int = 1
    _optimizers: list[str] = field(default_factory=list)
    _left_alone: list[str] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _conditions: dict[str, None] = field(default_factory=dict)
    _averaged: dict[str, None] = field(default_factory=dict)
    _averaged_later: dict[str, None] = field(default_factory=dict)
    _windows: dict[int, _Windows] = field(default_factory=dict)

    def started(self, world_size: int) -> None:
        """Horovod runs."""
        self.is_started, self._world_size = True, world_size

    def note(self, text: str) -> None:
        """Adds a line on the script as a whole, once."""
        if text not in self._notes:
            self._notes.append(text)

    def condition(self, text: str) -> None:
        """Adds a condition of equal updates that the script does not meet."""
        self._conditions[f"updates differ a little from those with equal shares: {text}"] = None

    def optimizer(self, optimizer: Any) -> None:
        """The script has wrapped an optimizer."""
        self._optimizers.append(describe_optimizer(optimizer))

    def left_alone(self, optimizer: str) -> None:
        """The script has wrapped an optimizer that is not intercepted."""
        self._left_alone.append(optimizer)

    def averaged(self, what: str, *, in_pass: bool = True) -> None:
        """The script exchanges something of its own while ranks have unequal shares, or after a pass in which they had."""
        # What one rank tells the others, as parameters, is no mean of theirs.
        names = self._averaged if in_pass else self._averaged_later
        if len(names) < _MOST_NAMES and not what.startswith("broadcast"):
            names[what] = None

    def window(self, loader: Loader, gathered: Gathered) -> None:
        """Takes in the ranks' numbers of a loader since the last exchange, and the shares from now on."""
        self._windows.setdefault(id(loader), _Windows()).take_in(gathered, loader.fractions)

    def lines(self) -> list[str]:
        """Returns the report, line by line."""
        lines = ["compatibility report"]
        lines += [f"  intercepted: {text}" for text in dict.fromkeys(self._optimizers)]
        lines += [f"  not intercepted: {text}" for text in dict.fromkeys(self._left_alone)]
        lines += [f"  note: {text}" for text in self._notes]
        may_differ = any(loader.num_steps and (loader.num_shared or not loader.reasons) for loader in self.loaders)
        if may_differ and not self.is_check:
            lines += [f"  note: {text}" for text in self._conditions]
        if self._world_size == 1:
            lines.append("  note: there is one rank, so there is nothing to share out")
        lines += self.more()
        lines += self._advice()
        # Of loaders that were made anew, as in each epoch, the one with the most steps with unequal shares speaks; of several,
        # or if none had any, the last one that was looked at.
        alike: dict[Any, list[Loader]] = {}
        for loader in self.loaders:
            alike.setdefault((loader.kind, loader.num_steps > 0, frozenset(loader.reasons)), []).append(loader)
        for group in alike.values():
            speaker = max(reversed(group), key=lambda loader: (loader.num_shared, loader.is_traced))
            lines += self._loader_lines(speaker)
            if len(group) > 1:
                num_shared = sum(loader.num_shared for loader in group)
                how = "made anew" if all(loader.is_successor for loader in group[1:]) else "others like it:"
                count = f"{how} {len(group) - 1}{' times' if how == 'made anew' else ''}"
                shared = f", {num_shared} of them with unequal shares; the lines above are of {speaker.name} alone"
                total = sum(loader.num_steps for loader in group)
                lines.append(f"    {count}; {total} steps in all{shared if num_shared else ''}")
        if any(loader.num_shared for loader in self.loaders):
            lines += self._figures()
        if not self._optimizers and not self._left_alone:
            lines.append("  not intercepted: the script has wrapped no optimizer in hvd.DistributedOptimizer")
            if "hvd_adaptive.session.session" in sys.modules:
                lines.append("    it uses hvd_adaptive.Session, which adapts by itself: start it by mpirun, srun or horovodrun")
        return lines

    def _advice(self) -> list[str]:
        """What would help where a link between hosts takes a good part of each step."""
        measured = [windows.newest for windows in self._windows.values() if windows.newest is not None]
        if not measured or not (self.is_plain and self.is_spread):
            return []
        newest = max(measured, key=lambda sums: float(sums["num_steps"].max()))
        # Who waits least waits for no other rank.
        exchange_s = float((newest["wait_s"] / np.maximum(newest["num_steps"], 1)).min())
        step_s = float(newest["wall_s"].sum() / max(newest["wall_steps"].sum(), 1))
        if exchange_s < _LONG_EXCHANGE * step_s or not step_s:
            return []
        return [
            f"  note: ranks wait for Horovod for at least {1e3 * exchange_s:.0f} of {1e3 * step_s:.0f} ms a step. If the link "
            "between the hosts is slow: --compression maxmin:4 sends an eighth of the bytes, and --strategy local exchanges "
            "seldom (docs/compression.md)"
        ]

    def _figures(self) -> list[str]:
        """What the script's own figures mean now."""
        lines = [
            "  the script's own figures: len(batch) is the rank's share, so counted samples, and samples a second, are those of "
            "that rank only"
        ]
        if self._averaged:
            lines.append(
                f"    what it reduces in training ({', '.join(self._averaged)}) counts each rank alike, whatever its share; "
                "for a mean over samples, reduce sums and counts"
            )
        later = [what for what in self._averaged_later if what not in self._averaged]
        if later:
            # What it is made of cannot be seen: validation's figures, with equal shares, come here as well.
            lines.append(
                f"    what it exchanges after training passes ({', '.join(later)}) counts each rank alike: if it is made of "
                "training batches, reduce sums and counts, or a schedule or an early stop that follows it may decide otherwise "
                "than with plain Horovod"
            )
        return lines

    def _loader_lines(self, loader: Loader) -> list[str]:
        if not loader.num_steps:
            trained = [other.kind for other in self.loaders if other.num_steps]
            is_validation = bool(trained) and loader.kind not in trained
            why = f"no optimizer step followed its batches{' (validation)' if is_validation else ''}"
            if Reason.INTERLEAVED in loader.reasons or (loader.num_losses and any(other.num_steps for other in self.loaders)):
                why = "its batches go into steps together with those of another loader"
            elif loader.num_losses:
                why = "no optimizer that is intercepted steps on its batches"
            return [f"  left alone: {loader.label}: {why}"]
        if not loader.is_traced and not loader.reasons:
            return [f"  not adaptive: {loader.label}, {loader.num_steps} steps, too few to see how it is used"]
        if loader.reasons:
            # What was seen too late: the script's updates were others for a while.
            unequal = f" and {loader.num_shared} with others, whose updates may differ"
            others, num_equal = unequal if loader.num_shared else "", loader.num_steps - loader.num_shared
            return [
                f"  not adaptive: {loader.label}, {num_equal} steps with equal shares{others}, because",
                *(f"    - {_why(loader, reason)}" for reason in told(loader.reasons)),
            ]
        windows = self._windows.get(id(loader), _Windows())
        if self.pinned is not None and len(set(parse_shares(self.pinned))) > 1 and not windows.num_changes:
            return [
                f"  not adaptive: {loader.label}, {loader.num_steps} steps, all with equal shares: it ended before the "
                f"first measurement (--interval) after its third batch, from which on --shares {self.pinned} hold"
            ]
        would = "would be " if self.is_dry_run else ""
        how = "adaptive" if self.pinned is None else f"fixed by --shares {self.pinned}"
        if windows.newest is None and self.pinned is None:
            return [f"  not adaptive yet: {loader.label}, {loader.num_steps} steps, too few to measure speeds"]
        gain = self._gain(windows)
        gained = "" if gain is None else f"; a step is {gain:.2f} times as fast as with equal shares"
        lines = [f"  {would}{how}: {loader.label}, {loader.num_steps} steps{gained}"]
        if loader.adds_up:
            lines.append("    its loss is a sum over samples: gradients are added up as they are, without weights")
        if loader.targets.agreed is not None:
            lines.append("    its loss is a mean over targets (class weights, ignore_index, masks): ranks add up what they count")
        lines += self._summary(windows, loader)
        if windows.num_changes and windows.fractions is None and loader.controller and loader.controller.why_equal:
            lines.append(f"    shares are equal again: {loader.controller.why_equal}")
        return lines

    def _gain(self, windows: _Windows) -> float | None:
        """Returns how many times as fast steps have become by the wall clock; None: shares were not changed for speed."""
        first, last = windows.equal, windows.newest
        if first is None or last is None or not windows.is_other or windows.fractions is None or self._is_no_gain:
            return None
        walls = _wall_seconds(first, last)
        return walls[0] / walls[1] if all(walls) else None

    @property
    def _is_no_gain(self) -> bool:
        return self.is_only_tried or self.is_check

    def _summary(self, windows: _Windows, loader: Loader) -> list[str]:
        if windows.newest is None:
            return ["    too few steps to measure speeds"]
        newest = windows.newest
        # At equal batches: a rank with few samples looks slow by what every step costs.
        first = windows.equal if windows.equal is not None else newest
        speeds = first["timed_samples"] / first["compute_s"]
        equal = np.full(len(speeds), 1 / len(speeds))
        shares = np.array(windows.fractions) if windows.fractions is not None else equal
        # Whole samples may be other parts than those that were asked for, and are what ranks computed.
        fractions, sizes = loader.split
        used = np.array(sizes) / sum(sizes) if sizes and fractions == windows.fractions else shares
        percent, asked = _numbers(100 * used, ".1f"), _numbers(100 * shares, ".1f")
        # Shares that were given up are not those of now.
        is_other = windows.is_other and windows.fractions is not None
        last = newest if is_other else first
        before_s, now_s = (w["compute_s"] / np.maximum(w["timed_steps"], 1) for w in (first, last))
        # If no rank waited, at its speed with the last shares: with many samples a rank computes faster than with few.
        samples = last["timed_samples"] / np.maximum(last["timed_steps"], 1)
        least_s = samples.sum() / (last["timed_samples"] / last["compute_s"]).sum()
        with_equal = " with equal shares" if windows.num_changes else ""
        asked_for = f"; {asked} % were asked for" if percent != asked else ""
        changed = asked_for if self.pinned else f", {_changed(windows.num_changes)}"
        per_s = ", ".join(f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}" for speed in speeds)
        lines = [
            f"    speeds{' with these shares' if windows.equal is None else with_equal}: {per_s} samples/s",
            f"    shares: {percent} % of each global batch{changed}",
        ]
        if self.is_only_tried:
            lines.append(
                "    the first steps did not show that unequal shares are better; these were tried to see whether the script "
                "allows them"
            )
        if windows.equal is None or self._is_no_gain:
            # Of pinned shares it may be that no step with equal ones was timed. Others are not for speed.
            return lines
        if is_other:
            before, after = (w["wait_s"] / np.maximum(w["num_steps"], 1) for w in (windows.equal, newest))
            lines.append(
                f"    waiting in a step: {_numbers(1e3 * before, '.1f')} ms with equal shares, "
                f"{_numbers(1e3 * after, '.1f')} ms now"
            )
        now = f", {1e3 * now_s.max():.1f} ms now: {before_s.max() / now_s.max():.2f}x" if is_other else ""
        lines.append(
            f"    longest computing time of a step: {1e3 * before_s.max():.1f} ms{with_equal}{now}; "
            f"the ceiling (no rank waits): {max(1.0, before_s.max() / least_s):.2f}x"
        )
        walls = _wall_seconds(first, last)
        if all(walls):
            now = f", {1e3 * walls[1]:.1f} ms now: {walls[0] / walls[1]:.2f}x" if is_other else ""
            # Shares shorten what ranks compute, and nothing else. The computing time has the optimizer's step in it as well.
            rest_s = walls[1] - now_s.max()
            most = max(1.0, walls[0] / (rest_s + least_s))
            of_wall = f"; the ceiling, as {1e3 * rest_s:.1f} ms are no computing: {most:.2f}x" if rest_s > 0 else ""
            lines.append(
                f"    by the wall clock, from asking for a batch to its gradients: {1e3 * walls[0]:.1f} ms a step"
                f"{with_equal}{now}{of_wall}"
            )
            num_equal = int(first["wall_steps"].max())
            if is_other and num_equal < _FEW_STEPS:
                steps = "step" if num_equal == 1 else "steps"
                lines.append(
                    f"    equal shares had {num_equal} early {steps} only, which may be slow: for the true gain compare with a "
                    "run with --shares equal"
                )
        return lines


def describe_optimizer(optimizer: Any) -> str:
    """Returns what the report calls an optimizer that the script has wrapped."""
    op = {0: "Average", 1: "Sum", 2: "Adasum"}.get(int(optimizer.op), str(optimizer.op))
    passes = optimizer.backward_passes_per_step
    more = f", backward_passes_per_step={passes}" if passes > 1 else ""
    return f"DistributedOptimizer ({type(optimizer).__name__}, op={op}{more})"


def _why(loader: Loader, reason: Reason) -> str:
    again = f"; {loader.num_repeated} of them came a second time"
    return reason.value + (again if reason is Reason.SKIPPED and loader.num_repeated else "")


def _wall_seconds(*windows: Gathered) -> list[float]:
    """Returns the seconds of a step of each window by the wall clock, mean over ranks; 0 where none was timed."""
    return [float(window["wall_s"].sum() / max(window["wall_steps"].sum(), 1)) for window in windows]


def _changed(count: int) -> str:
    return {0: "never changed", 1: "changed once"}.get(count, f"changed {count} times")


def _added(sums: Gathered | None, window: Gathered) -> Gathered:
    return window if sums is None else {name: sums[name] + window[name] for name in window}


def _numbers(values: Array, form: str) -> str:
    return ", ".join(format(float(value), form) for value in values)
