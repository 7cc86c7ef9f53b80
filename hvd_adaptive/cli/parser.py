"""The command line's options: what each command takes, in groups, each with examples."""

from __future__ import annotations

import argparse
from typing import Any

from hvd_adaptive import __version__
from hvd_adaptive.cli.arguments import NUM_RANKS, Parser
from hvd_adaptive.cli.bench import add_bench
from hvd_adaptive.cli.calibrate_options import add_calibrate
from hvd_adaptive.cli.doctor import add_doctor
from hvd_adaptive.cli.fields import add_backend, add_options, fields_of
from hvd_adaptive.cli.option_groups import RUN, RUN_MORE, TRAIN, TRAIN_MORE
from hvd_adaptive.cli.simulate import add_simulate_options
from hvd_adaptive.config import Config
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.xmc.train_config import TrainConfig

_EXAMPLES = {
    "train": """
  hvd-adaptive train -np 4                                 data that come with it, four ranks on this machine
  hvd-adaptive train -np 4 --slowdown 8,8,4,2              the same with emulated unequal ranks
  mpirun -np 8 hvd-adaptive train --data PREFIX --out runs/a --resume auto
  hvd-adaptive train -np 4 --strategy horovod              the baseline to compare with
docs/training.md and docs/rules.md explain the options. The command line beats a --config file, and that beats
HVD_ADAPTIVE_* variables.""",
    "run": """
  hvd-adaptive run -np 4 train.py --its-own-options
  hvd-adaptive run -np 4 --dry-run train.py                only say what would be adaptive, and end
  hvd-adaptive run -np 4 --verify 100 train.py             do unequal batches give the same gradients?
  hvd-adaptive run --elastic --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh train.py
  horovodrun -np 4 hvd-adaptive run train.py
docs/wrapping.md says what is intercepted.""",
    "evaluate": """
  hvd-adaptive evaluate runs/a
  hvd-adaptive evaluate -np 4 runs/a/model-last.safetensors --data PREFIX""",
    "predict": """
  hvd-adaptive predict runs/a -k 3 > predictions.jsonl""",
    "doctor": """
  hvd-adaptive doctor -np 4                                before the first training
  srun --mpi=pmix hvd-adaptive doctor --json found.json    in an allocation""",
    "calibrate": """
  hvd-adaptive calibrate -np 4 --data PREFIX --out calibration.toml
  hvd-adaptive train -np 4 --data PREFIX --config calibration.toml""",
    "report": """
  hvd-adaptive report runs/a                               a table
  hvd-adaptive report runs/horovod runs/a --out report.html --png pictures
docs/report.md says what to look for.""",
    "simulate": """
  hvd-adaptive simulate --speeds 1,1,2,4 --link 1gbit --model-mb 400
  hvd-adaptive simulate --ranks 2..4096 --png scaling.png""",
    "bench": """
  hvd-adaptive bench compress
  hvd-adaptive bench comm -np 2""",
}
_MOST_IN_USAGE = 20
_FIRST_STEPS = """first steps:
  hvd-adaptive doctor -np 2                   will this machine do?
  hvd-adaptive train -np 4                    train on the data that come with it
  hvd-adaptive report runs/*                  compare what was trained
Each command has --help with examples; docs/quickstart.md goes through them."""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands except ``submit``, which has its own. It raises ValueError for bad arguments."""
    parser = Parser(
        prog="hvd-adaptive",
        description="Adaptive data-parallel training with Horovod and MPI on GPUs that are not equal.",
        epilog=_FIRST_STEPS,
    )
    parser.add_argument("--version", action="version", version=f"hvd-adaptive {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    launch = argparse.ArgumentParser(add_help=False)
    launch.add_argument(
        *NUM_RANKS, type=int, metavar="N", help="start N ranks (default: those of mpirun or srun, else one)"
    )
    launch.add_argument("--terminal", action="store_true", help=argparse.SUPPRESS)
    _add_train(commands, launch)
    add_calibrate(commands, launch)
    _add_run(commands, launch)
    _add_using(commands, launch)
    _add_looking(commands, launch)
    add_bench(commands, launch)
    for name, text in _EXAMPLES.items():
        command = commands.choices[name]
        command.epilog = f"examples:{text.rstrip()}"
        if command.usage is None and len(command._actions) > _MOST_IN_USAGE:
            command.usage = f"{command.prog} [options]"
    parser.commands = commands.choices
    return parser


def _add_train(commands: Any, launch: argparse.ArgumentParser) -> None:
    train = commands.add_parser(
        "train",
        parents=[launch],
        help="train a model on sparse data with many labels",
        usage="hvd-adaptive train [-np N] [--data PATH] [--out DIR] [options]",
        description="Trains the model of the Adaptive SGD paper on sparse multi-label data, and writes a run directory.",
    )
    train.add_argument("--config", metavar="FILE", help=".toml or .json of these options; a run's config.json is one")
    _add_elastic(train, "continue when ranks or hosts are lost or added; docs/elastic.md")
    add_options(train, fields_of(TrainConfig, Config), TRAIN, TRAIN_MORE)


def _add_run(commands: Any, launch: argparse.ArgumentParser) -> None:
    run = commands.add_parser(
        "run",
        parents=[launch],
        help="run an existing PyTorch Horovod script, unedited; faster ranks get more of each batch",
        usage="hvd-adaptive run [-np N] [options] {script.py | -m module} [its arguments]",
        description="Runs a Horovod script. Options of run come first. At the end rank 0 says what was intercepted and gained.",
    )
    run.add_argument("--config", metavar="FILE", help=".toml or .json of options of run and train")
    run.add_argument(
        "--verify", type=int, metavar="STEPS", help="run so many steps twice, and say whether unequal batches change gradients"
    )
    run.add_argument("--verify-file", help=argparse.SUPPRESS)
    elastic = _add_elastic(run, "start the script again when ranks or hosts are lost or added; docs/elastic.md")
    elastic.add_argument(
        "--commit-dir",
        metavar="DIR",
        help="folder for the commits of hvd.elastic, on storage that all hosts share; give it again to continue a job that did "
        "not finish (default: memory while all ranks are on this host, else a new folder in the working directory)",
    )
    elastic.add_argument("--job", help=argparse.SUPPRESS)
    add_options(run, fields_of(RunConfig), RUN, RUN_MORE)
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    run.add_argument("script", help="the script; what follows it is the script's own")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")


def _add_using(commands: Any, launch: argparse.ArgumentParser) -> None:
    using = argparse.ArgumentParser(add_help=False)
    using.add_argument(
        "model", metavar="RUN_DIR|FILE", help="a run directory or a checkpoint (its best model), or a .safetensors file in one"
    )
    using.add_argument("--data", metavar="PATH", help="data as for train (default: HVD_ADAPTIVE_DATA, else the model's own)")
    using.add_argument("--test-data", metavar="PATH", help="test data, where --data names one file")
    using.add_argument(
        "--cache-dir", metavar="DIR", help="folder of the binary cache (default: the run's for its own data, else the user's)"
    )
    add_backend(using)
    using.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:K (default: auto)")
    commands.add_parser(
        "evaluate",
        parents=[launch, using],
        help="score a saved model on the test split",
        description="Prints P@1/3/5 and PSP@1/3/5 as one JSON object, the same for any number of ranks.",
    )
    predict = commands.add_parser(
        "predict",
        parents=[launch, using],
        help="print the best labels of each test row as JSON lines",
        description="Prints one JSON object a test row: labels, probabilities and, where the data have them, names.",
    )
    predict.add_argument("-k", type=int, default=5, metavar="K", help="labels a row (default: 5)")


def _add_looking(commands: Any, launch: argparse.ArgumentParser) -> None:
    add_doctor(commands, launch)
    report = commands.add_parser(
        "report",
        help="look at runs, and compare them: a table, a page with charts, pictures",
        description="Prints a table of runs. A run that has not ended is shown up to its last round.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run directories; the baseline first")
    report.add_argument("--out", metavar="FILE", help="write a page with charts: one HTML file with everything in it")
    report.add_argument("--png", metavar="FOLDER", help="write each chart as a PNG; overview.png has P@1 and samples a round")
    report.add_argument(
        "--target-p1",
        type=float,
        metavar="P",
        help="compare the seconds to this P@1 (default: the best of the first run of plain Horovod)",
    )
    # Parsed by itself, for its components; here for the list of commands.
    commands.add_parser("submit", help="write a batch script for Slurm from options; --yes sends it", add_help=False)
    simulate = commands.add_parser(
        "simulate",
        help="compare strategies on a described or calibrated cluster of 2 to 4096 ranks, without training",
        description="Plays each strategy in virtual time and prints its samples a second. Nothing is trained.",
    )
    add_simulate_options(simulate)


def _add_elastic(parser: Parser, text: str) -> Any:
    parser.add_argument("--elastic", action="store_true", help=text)
    group = parser.add_more_group("elastic jobs (--elastic)")
    group.add_argument("--min-np", type=int, metavar="A", help="fewest ranks to continue with (default: 1)")
    group.add_argument("--max-np", type=int, metavar="B", help="most ranks (default: -np)")
    group.add_argument(
        "--host-discovery-script",
        metavar="FILE",
        help="program that prints the available hosts, one host:slots a line, as Horovod's (default: the Slurm job's nodes, else "
        "this machine)",
    )
    group.add_argument(
        "--elastic-timeout",
        type=float,
        metavar="S",
        help="seconds to wait for --min-np ranks before the job ends (default: 600)",
    )
    group.add_argument("--launch", type=int, help=argparse.SUPPRESS)
    group.add_argument("--memory-dir", help=argparse.SUPPRESS)
    return group
