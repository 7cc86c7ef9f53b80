"""``hvd-adaptive submit``: a batch script from options, shown, saved, or sent with sbatch."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from hvd_adaptive.cli.arguments import Parser
from hvd_adaptive.cluster.batch_script import BatchScript, Component, render
from hvd_adaptive.cluster.output import say

USAGE = "hvd-adaptive submit [options] [: options of a second component ...] -- train|run ..."
_EXAMPLES = """examples:
  hvd-adaptive submit --nodes 2 -- train --data PREFIX                            shows the script
  hvd-adaptive submit --nodes 2 --requeue --yes -- train --data PREFIX            sends it
  hvd-adaptive submit --constraint h100 : --constraint a100 -- run train.py       two kinds of nodes in one job
docs/slurm.md says what the scripts do."""


def submit(arguments: Sequence[str], check_command: Callable[[Sequence[str], int], None]) -> int:
    """Shows the script; with ``--output`` saves it, with ``--yes`` sends it. Returns the exit code: sbatch's.

    Args:
        arguments: of the command line, after ``submit``.
        check_command: raises ValueError, or ends with a message, for arguments of ``train`` or ``run`` that are wrong for so
            many ranks, so that the job does not find out when its turn has come.

    Raises:
        ValueError: for a bad value, or a file that is there already.
        RuntimeError: if there is no sbatch.
    """
    own = list(arguments)
    command: list[str] = []
    if "--" in own:
        command = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    parts: list[list[str]] = [[]]
    for argument in own:
        if argument == ":":
            parts.append([])
        else:
            parts[-1].append(argument)
    options = make_parser().parse_args(parts[0])
    if not command or command[0] not in ("train", "run"):
        raise ValueError(f"submit needs a command after --: {USAGE}; got {' '.join(command) or 'none'}")
    others = [_component_parser(prog="hvd-adaptive submit ... :").parse_args(part) for part in parts[1:]]
    components = tuple(_component(values) for values in (options, *others))
    # As in the script.
    resumes = ["--out", "runs/job", "--resume", "auto"] if options.requeue and command[0] == "train" else []
    check_command([command[0], *resumes, *command[1:]], sum(part.nodes * part.ntasks_per_node for part in components))
    if options.signal_s is not None and not options.requeue:
        raise ValueError("--signal-s needs --requeue, without which no signal is asked for: add it, or leave --signal-s out")
    script = BatchScript(
        components=components,
        command=tuple(command),
        launcher=options.launcher,
        time=options.time,
        name=options.job_name,
        # Slurm does not do it, nor a shell in quotes.
        log=os.path.expanduser(options.log),
        account=options.account,
        requeue=options.requeue,
        signal_s=BatchScript().signal_s if options.signal_s is None else options.signal_s,
        venv=options.venv and os.path.expanduser(options.venv),
        modules=tuple(options.module),
        prologue=tuple(options.prologue),
        title=("Written by hvd-adaptive submit.",),
    )
    text = render(script)
    environment = script.venv or os.environ.get("VENV") or ".venv"
    if not os.path.exists(os.path.join(environment, "bin", "activate")):
        say(
            f"warning: {environment}/bin/activate, which the script reads, is not there: name the environment with --venv or "
            f"VENV; this one is {sys.prefix}"
        )
    print(text, end="", flush=True)
    if options.output:
        try:
            with open(options.output, "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ValueError(f"--output {options.output} cannot be written: {error}") from None
    return _send(text) if options.yes else 0


def _send(text: str) -> int:
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise RuntimeError("there is no sbatch on PATH: run this on a login node of the cluster, or save the script: --output")
    answer = subprocess.run([sbatch, "--parsable"], input=text, stdout=subprocess.PIPE, text=True)
    if answer.returncode == 0:
        # Where there are several clusters their name follows.
        print(f"submitted job {answer.stdout.strip().partition(';')[0]}")
    return answer.returncode


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options before ``--``, of the first component."""
    parser = Parser(
        prog="hvd-adaptive submit", usage=USAGE, parents=[_component_parser(add_help=False)],
        description="Writes a batch script for Slurm and shows it; --yes sends it.",
        epilog=_EXAMPLES,
    )  # fmt: skip
    add = parser.add_argument
    default = BatchScript()
    add("--launcher", choices=("srun", "mpirun"), default=default.launcher, help="what starts the ranks (default: srun, by PMIx)")
    add("--time", default=default.time, metavar="LIMIT", help=f"time limit, as for sbatch (default: {default.time})")
    add("--job-name", default=default.name, metavar="NAME", help=f"the job's name (default: {default.name})")
    add("--log", default=default.log, metavar="FILE", help="the job's output, as sbatch --output (default: %(default)s)")
    add("--account", metavar="NAME", help="account to charge")
    add("--requeue", action="store_true", help="save a checkpoint before the end, queue the job again, and continue by itself")
    add("--signal-s", type=int, metavar="SECONDS",
        help=f"with --requeue: how long before the time limit the job starts to save and end (default: {default.signal_s})")
    add("--venv", metavar="DIR", help="virtual environment (default: $VENV, else .venv)")
    add("--module", action="append", default=[], metavar="NAME", help="environment module to load; may be repeated")
    add("--prologue", action="append", default=[], metavar="LINE",
        help="shell line to run before the ranks start; may be repeated")
    add("--output", metavar="FILE", help="also save the script; the file must not exist")
    add("--yes", action="store_true", help="send it with sbatch")
    return parser


def _component_parser(*, prog: str | None = None, add_help: bool = True) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, add_help=add_help)
    group = parser.add_argument_group("nodes (after a ':' for a second component)")
    default = Component()
    for name, text in (
        ("nodes", "number of nodes"),
        ("ntasks_per_node", "ranks on each node"),
        ("cpus_per_task", "cores of each rank"),
    ):
        value = getattr(default, name)
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, default=value, metavar="N", help=f"{text} (default: {value})")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each node (default: one a rank); 0: none")
    group.add_argument("--partition", metavar="NAME", help="Slurm's partition (default: the site's)")
    group.add_argument("--constraint", metavar="FEATURES", help="features of the nodes, as for sbatch")
    return parser


def _component(values: argparse.Namespace) -> Component:
    return Component(**{name: getattr(values, name) for name in Component.__dataclass_fields__})
