"""Batch scripts for Slurm, rendered from options: those in slurm/, and those of ``hvd-adaptive submit``.

A value goes where it cannot become something else: into an #SBATCH line only without quotes, backslashes and control characters,
into a line of shell quoted. What follows from Slurm is read by the running script, so that a script may be copied.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from hvd_adaptive.exit_codes import EXIT_PREEMPTED

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite", re.ASCII | re.IGNORECASE)
# Slurm may send a signal so many seconds before its time.
_EARLY_S = 60
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;%@/_+-=~")


def _check_directive(name: str, value: str | None) -> None:
    """Raises ValueError for a text that sbatch would not read back as it is: in its quotes a backslash still escapes."""
    if value is not None and (not value or not value.isprintable() or set(value) & set("\"'\\")):
        raise ValueError(f"{name} must be a line without quotes and backslashes, not empty, got {value!r}: it goes into #SBATCH")


def _check_one_line(name: str, value: str) -> None:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ValueError(f"{name} must be of single lines without control characters, got {value!r}: it goes into a script")


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """What one component of a job asks for; several make a heterogeneous job, whose ranks are one world.

    Attributes:
        nodes: number of nodes.
        ntasks_per_node: ranks on each.
        cpus_per_task: cores of each rank.
        gpus_per_node: GPUs of each node; None: one a rank; 0: none.
        partition: Slurm's partition; None: the site's default.
        constraint: features that the nodes must have, as for ``sbatch --constraint``.

    Raises:
        ValueError: on construction, for a number below 1 or a text that cannot stand in an #SBATCH line.
    """

    nodes: int = 1
    ntasks_per_node: int = 4
    cpus_per_task: int = 8
    gpus_per_node: int | None = None
    partition: str | None = None
    constraint: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ntasks_per_node", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.gpus_per_node is not None and self.gpus_per_node < 0:
            raise ValueError(f"gpus_per_node must be >= 0, got {self.gpus_per_node}")
        for name in ("partition", "constraint"):
            _check_directive(name, getattr(self, name))

    def lines(self) -> list[str]:
        """Returns its #SBATCH lines."""
        tasks = f"--ntasks-per-node={self.ntasks_per_node}"
        gpus = self.ntasks_per_node if self.gpus_per_node is None else self.gpus_per_node
        if gpus:
            tasks += f" --gpus-per-node={gpus}" + "      # one rank a GPU" * (gpus == self.ntasks_per_node)
        lines = [f"--nodes={self.nodes}", tasks, f"--cpus-per-task={self.cpus_per_task}"]
        lines += [_option(name, getattr(self, name)) for name in ("partition", "constraint") if getattr(self, name)]
        return [f"#SBATCH {line}" for line in lines]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScript:
    """A batch script.

    Attributes:
        components: one, or those of a heterogeneous job.
        command: arguments of ``hvd-adaptive``; () for ``train`` with the script's own arguments.
        launcher: ``srun``, by PMIx, or ``mpirun``.
        time: time limit as for ``sbatch --time``.
        name: of the job.
        log: file of its output, as for ``sbatch --output``.
        account: to charge.
        requeue: the job saves what it has before its end, and is queued again.
        signal_s: with requeue, seconds before the time limit at which Slurm tells the job; it may do so up to 60 s earlier.
        venv: the virtual environment; None: ``VENV`` of the environment, else ``.venv``.
        modules: environment modules to load.
        prologue: lines of shell to run before the ranks, taken as they are.
        title: lines of comment at the top.

    Raises:
        ValueError: on construction, for what cannot stand in a script or does not go together.
    """

    components: tuple[Component, ...] = (Component(),)
    command: tuple[str, ...] = ()
    launcher: str = "srun"
    time: str = "04:00:00"
    name: str = "hvd-adaptive"
    log: str = "%x-%j.out"
    account: str | None = None
    requeue: bool = False
    signal_s: int = 120
    venv: str | None = None
    modules: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    title: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("time", "name", "log", "account"):
            _check_directive(name, getattr(self, name))
        if not _TIME.fullmatch(self.time):
            raise ValueError(f"time must be one of Slurm's, MINUTES, M:S, H:M:S, D-H, D-H:M or D-H:M:S, got {self.time!r}")
        texts = [("command", self.command), ("modules", self.modules), ("prologue", self.prologue), ("venv", (self.venv or "",))]
        for name, values in texts:
            for value in values:
                _check_one_line(name, value)
        if self.launcher not in ("srun", "mpirun"):
            raise ValueError(f"launcher must be srun or mpirun, got {self.launcher!r}")
        if not 1 <= self.signal_s <= 65535:
            raise ValueError(f"signal_s must be in [1, 65535], which Slurm takes, got {self.signal_s}")
        limit_s = _seconds(self.time)
        if self.requeue and limit_s and limit_s <= self.signal_s + _EARLY_S:
            raise ValueError(
                f"time {self.time} must be longer than signal_s, {self.signal_s} s, and the minute that Slurm may be early: else "
                "each start gets its signal at once and is queued again; raise time, or lower signal_s"
            )
        if len(self.components) > 1 and (self.launcher != "srun" or self.requeue):
            raise ValueError("components of a heterogeneous job need launcher srun and no requeue")
        if self.requeue and self.command and self.command[0] != "train":
            raise ValueError(
                f"requeue needs the command train, which saves what it has at a signal, got {self.command[0]!r}: a script of "
                "your own ends at a signal as it is written to"
            )


def _seconds(time: str) -> int:
    """Returns the seconds of a time limit as Slurm writes them; 0: there is none."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")] if rest[:1].isdigit() else []
    # With days hours come first; else three parts begin with hours, and one or two with minutes.
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def render(script: BatchScript) -> str:
    """Returns the text of a batch script."""
    lines = ["#!/bin/bash", *(f"# {line}" for line in script.title)]
    lines += [f"#SBATCH {line}" for line in (_option("job-name", script.name), _option("output", script.log))]
    if script.account:
        lines.append(f"#SBATCH {_option('account', script.account)}")
    if script.requeue:
        lines.append("#SBATCH --requeue --open-mode=append")
        lines.append(f"#SBATCH --signal=B:USR1@{script.signal_s}      # to this script, so many seconds before the time limit")
    for index, component in enumerate(script.components):
        lines += ["#SBATCH hetjob"] * (index > 0) + [f"#SBATCH {_option('time', script.time)}", *component.lines()]
    lines.append("set -euo pipefail")
    if script.modules:
        # Many sites' module commands read variables that are not set.
        lines.append(f"set +u; module load {' '.join(map(shlex.quote, script.modules))}; set -u")
    venv = '"${VENV:-.venv}/bin/activate"' if script.venv is None else shlex.quote(f"{script.venv}/bin/activate")
    lines += [
        f". {venv}",
        "# srun would take over a site's sbatch --export=NONE, and the ranks would have nothing of what is set up here.",
        "export SLURM_EXPORT_ENV=ALL",
        *script.prologue,
    ]
    if len(script.components) > 1:
        lines.append("# Each component has its own number of cores a rank, and srun's variable would be all components'.")
        numbers = enumerate(component.cpus_per_task for component in script.components)
        lines += [f'cpus_{index}="${{SLURM_CPUS_PER_TASK_HET_GROUP_{index}:-{number}}}"' for index, number in numbers]
    else:
        lines += [
            "# One thread a rank is right only where --cpus-per-task=1; srun of Slurm 22.05 and later asks for this variable.",
            'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}" SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
        ]
    if script.launcher == "mpirun":
        lines.append("# -np calls the MPI's own mpirun with the flags that it needs; mpirun takes the hosts from Slurm.")
    command = _command(script)
    lines += _with_requeue(command) if script.requeue else [command]
    return "\n".join(lines) + "\n"


def _command(script: BatchScript) -> str:
    first, *rest = script.command or ("train",)
    words = ["hvd-adaptive", shlex.quote(first)]
    if script.launcher == "mpirun":
        words += ["-np", '"$SLURM_NTASKS"']
    if script.requeue:
        # The same folder after each start; options that follow win.
        words += ["--out", '"runs/$SLURM_JOB_ID"', "--resume", "auto"]
    words += [shlex.quote(word) for word in rest] if script.command else ['"$@"']
    command = " ".join(words)
    if script.launcher == "mpirun":
        return command
    if len(script.components) == 1:
        return f"srun --mpi=pmix {command}"
    parts = [
        f'--mpi=pmix --het-group={index} --cpus-per-task="$cpus_{index}" env OMP_NUM_THREADS="$cpus_{index}" {command}'
        for index in range(len(script.components))
    ]
    return "srun " + " : \\\n    ".join(parts)


def _with_requeue(command: str) -> list[str]:
    return [
        "# The shell takes a signal only while it waits, so the ranks run beside it. After a signal they save and end with 75.",
        f"{command} &",
        "ranks=$! again=1 told=",
        f"trap 'kill -USR1 \"$ranks\" 2>/dev/null && again=1 told={EXIT_PREEMPTED}' USR1 TERM",
        'while [ "$again" = 1 ]; do again=0 code=0; wait "$ranks" || code=$?; done',
        "# Ranks that were told but not ready in time go on from an older checkpoint. A cancelled job is not RUNNING.",
        f'if [ "$code" != 0 ] && [ "${{told:-$code}}" = {EXIT_PREEMPTED} ]; then',
        "    # In an array a number by itself may mean all its jobs.",
        '    job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"',
        "    # Slurm's controller may be too busy to answer. A signal may end a sleep.",
        "    for pause in 1 2 4 8 0; do",
        '        if state=$(squeue --noheader --format=%T --jobs="$job"); then',
        '            if [ "$state" != RUNNING ] || scontrol requeue "$job"; then break; fi',
        "        fi",
        '        if [ "$pause" = 0 ]; then',
        '            echo "job $job: Slurm fails, so it is not queued again: scontrol requeue $job" >&2',
        "        fi",
        '        sleep "$pause" || true',
        "    done",
        "fi",
        'exit "$code"',
    ]


def _option(name: str, value: str) -> str:
    return f'--{name}="{value}"' if set(value) - _PLAIN else f"--{name}={value}"
