"""hvd.elastic under ``run --elastic``: commits outlive the job, and its next launch goes on from the newest.

Horovod keeps a commit in each rank's memory and rebuilds its world within the processes, which MPI cannot: with a rank the job
ends. So rank 0 also writes what it commits to a file. Its state is the state of all, as in Horovod's own ``sync``: a step has
the gradients of every rank, and ``ElasticSampler`` counts the samples of all ranks together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from hvd_adaptive.cluster.last_checkpoint import COMMIT, find_checkpoints, number_of
from hvd_adaptive.cluster.output import refuse, say
from hvd_adaptive.comm.job_end import end_job
from hvd_adaptive.comm.protocols import AgreedError, agree
from hvd_adaptive.comm.script_world import ScriptWorld
from hvd_adaptive.exit_codes import EXIT_BAD_INPUT, EXIT_PREEMPTED
from hvd_adaptive.session.supervised import lack_of_room, num_bytes
from hvd_adaptive.state.checkpoint import RefusedError, prune, read_commit, remove_parts, write_commit
from hvd_adaptive.state.folder_owner import FolderLostError, FolderOwner
from hvd_adaptive.state.nested import flatten_state
from hvd_adaptive.state.preemption import PREEMPTION
from hvd_adaptive.state.shared_folder import check_shared_folder
from hvd_adaptive.wrap.launched import Launched

log = logging.getLogger(__name__)

# Of an optimizer's groups; commits of other versions of torch lack some.
_SWITCHES = {"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
_NO_PICKLE = "hvd-adaptive run --elastic keeps commits without pickling"


def contents(state: Any) -> dict[str, Any]:
    """Returns what an ``ObjectState`` or ``TorchState`` tracks, by name: what has a ``state_dict``, as that."""
    return {name: value.state_dict() if _has_state_dict(value) else value for name, value in _tracked(state).items()}


def load(state: Any, saved: dict[str, Any]) -> None:
    """Puts saved contents into a state.

    Raises:
        ValueError: naming what does not fit.
    """
    tracked = _tracked(state)
    if saved.keys() != tracked.keys():
        raise ValueError(f"it holds {', '.join(sorted(saved))}, and the script's state {', '.join(sorted(tracked))}")
    for name, value in tracked.items():
        if not _has_state_dict(value):
            setattr(state, name, saved[name])
            continue
        # Before torch adds to them.
        expected = set(getattr(value, "defaults", ())) - _SWITCHES if isinstance(value, Optimizer) else set()
        try:
            value.load_state_dict(saved[name])
        except Exception as error:
            # Whatever the script's own classes raise.
            raise ValueError(f"its {name} does not fit the script's: {type(error).__name__}: {error}") from error
        # It takes groups of any other kind.
        missing = sorted(expected.difference(*value.param_groups)) if expected else []
        if missing:
            raise ValueError(f"its {name} is of another kind than the script's: it has no {', '.join(missing)}")


def _tracked(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in (*getattr(state, "_handlers", {}), *state._saved_state)}


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Commits:
    """The commits of a script's elastic state; see the module.

    Args:
        launched: this launch.
        hvd: the module ``horovod.torch``.
    """

    def __init__(self, launched: Launched, hvd: Any) -> None:
        self._launched = launched
        self._hvd = hvd
        # A folder that nobody chose no other job has.
        self._owner = FolderOwner(launched.folder, socket.gethostname(), job=launched.job) if launched.job else None
        self._world: ScriptWorld
        self._state: Any = None
        self._number = 0
        self._tensors: dict[str, Tensor] = {}
        self._is_failing = self._is_told = self._is_stored = self._is_refused = False

    def run(self, function: Callable[..., Any], state: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Runs the script's elastic function from the newest commit on. COLLECTIVE.

        Raises:
            SystemExit: the ranks were asked to stop, and have; or the state cannot be stored or is not the commit's.
        """
        from horovod.common.exceptions import HostsUpdatedInterrupt

        self._begin(state)
        try:
            return function(state, *arguments, **options)
        except HostsUpdatedInterrupt:
            self._stop()

    @contextlib.contextmanager
    def committing(self, state: Any) -> Iterator[None]:
        """The script commits on this rank; within, the ranks may be told to stop."""
        if state is self._state:
            self._is_stored = self._store()
            self._launched.stepped()
        yield
        self._is_stored = False

    def asks_to_stop(self, state: Any) -> bool:
        """Whether to tell the ranks now, once, to stop where they agree on changes of hosts."""
        is_due = state is self._state and PREEMPTION.signal_number > 0 and not self._is_told
        self._is_told |= is_due
        return is_due

    def _begin(self, state: Any) -> None:
        rank = self._launched.rank
        world = self._world = ScriptWorld(self._hvd, lambda what: contextlib.nullcontext())
        error: str | None = None
        try:
            flatten_state(contents(state))
        except TypeError as reason:
            error = f"{reason}. {_NO_PICKLE}"
        self._agree(error)
        is_first, self._state = self._state is None, state
        # The next commit may be far: the supervisor decides how long to wait for it.
        PREEMPTION.catch_signals((signal.SIGUSR1,), ends_late=False)
        self._launched.say("commits")
        self._prepare()
        path, saved, error = self._find() if rank == 0 and is_first else (None, None, None)
        path = world.allgather_object(path)[0]
        if path is not None:
            try:
                # On every rank: Horovod fills an optimizer state that is empty by a step, which may move weights.
                load(state, read_commit(path) if saved is None else saved)
            except ValueError as reason:
                error = f"commit {path} cannot be gone on from: {reason}. Remove it, or name another folder with --commit-dir"
        self._agree(error)
        self._take_folder()
        if path is not None:
            self._number = self._launched.commit = number_of(path)
            if rank == 0 and self._launched.launch == 1:
                say(f"goes on from commit {self._number} in {path.parent}")
            # What sync() sends is what was saved last; the callbacks follow a restore in Horovod, too.
            state.save()
            state.on_reset()
        state.sync()
        self._launched.mark("load")

    def _prepare(self) -> None:
        """Says where commits go, if not to memory, and tries whether all ranks find them there."""
        launched = self._launched
        if launched.memory is not None:
            return
        try:
            check_shared_folder(launched.folder, self._world, "--commit-dir on storage that all hosts share")
        except AgreedError as error:
            raise SystemExit(refuse(error, speaks=launched.rank == 0)) from error
        if launched.rank == 0:
            say(f"commits go to {launched.folder}")

    def _take_folder(self) -> None:
        """Makes the folder this job's, on rank 0. Not before: a job that is refused leaves it as it was."""
        launched = self._launched
        if launched.memory is not None or launched.rank != 0:
            return
        if self._owner is not None and self._owner.take():
            launched.say("has folder")
        remove_parts(launched.folder)

    def _find(self) -> tuple[Path | None, Any, str | None]:
        """The newest commit that can be read with what it holds, and an error if there are only others."""
        launched = self._launched
        folders = [folder for folder in (launched.memory, launched.folder) if folder is not None]
        refused = []
        for path in find_checkpoints(*folders, kind=COMMIT):
            try:
                return path, read_commit(path), None
            except RefusedError as error:
                log.warning("%s; trying the one before it", error)
                refused.append(str(error))
        return None, None, f"no commit can be read: {'; '.join(refused)}. Remove them to begin anew" if refused else None

    def _agree(self, error: str | None) -> None:
        try:
            agree(self._world, error)
        except AgreedError as agreed:
            raise SystemExit(refuse(agreed, speaks=self._launched.rank == 0)) from agreed

    def _store(self) -> bool:
        """Writes the state as it is now, on rank 0; returns whether that is done."""
        self._number += 1
        if self._launched.rank != 0:
            return True
        try:
            skeleton, self._tensors = flatten_state(contents(self._state), self._tensors)
            self._write(skeleton)
        except TypeError as error:
            # The others are past the place where all could agree to leave.
            end_job(f"hvd-adaptive: error: {error}. {_NO_PICKLE}", _abort, code=EXIT_BAD_INPUT)
        except FolderLostError as error:
            end_job(f"hvd-adaptive: error: {error}", _abort, code=EXIT_BAD_INPUT)
        except OSError as error:
            if not self._is_failing:
                log.error(
                    "commit %d cannot be written: %s. The job goes on; until one can be, a lost rank costs all that came after "
                    "the last that was. Make room, or name another folder with --commit-dir", self._number, error,
                )  # fmt: skip
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def _write(self, skeleton: Any) -> None:
        folder, memory = self._place(num_bytes(self._tensors)), self._launched.memory
        if self._owner is not None:
            self._owner.hold()
        write_commit(folder, self._number, skeleton, self._tensors, world_size=self._hvd.size())
        # Of memory only the newest is kept, of a disk two: one may be damaged.
        prune(self._launched.folder, 2, COMMIT)
        if memory is not None:
            prune(memory, 1 if folder == memory else 0, COMMIT)

    def _place(self, needed: int) -> Path:
        memory = self._launched.memory
        if memory is None:
            return self._launched.folder
        refusal: str | None = "the ranks are on several hosts"
        if self._hvd.local_size() == self._hvd.size():
            refusal = f"{memory} is on another host" if not (memory / "lock").exists() else lack_of_room(memory, needed)
        if refusal is None:
            return memory
        if not self._is_refused:
            log.warning("commits cannot be kept in memory: %s. They go to %s", refusal, self._launched.folder)
        self._is_refused = True
        return self._launched.folder

    def _stop(self) -> NoReturn:
        """Leaves with what was done since the last commit; all ranks are at the same place."""
        if not self._is_stored:
            self._store()
        self._launched.say("stopped")
        # Else the first rank to leave would have the launcher end rank 0 while it writes.
        self._hvd.barrier()
        raise SystemExit(EXIT_PREEMPTED)


def _abort() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(EXIT_BAD_INPUT)


def intercept_elastic(launched: Launched, note: Callable[[str], None]) -> None:
    """Makes commits outlive the job, in the classes and functions of hvd.elastic. After ``intercept_horovod``.

    Args:
        launched: this launch.
        note: for the report.
    """
    import horovod.torch as hvd
    from horovod.common.elastic import ObjectState, State
    from horovod.runner.elastic.worker import HostUpdateResult
    from horovod.torch import elastic

    kept = Commits(launched, hvd)
    own_run, check = elastic.run, State.check_host_updates

    @functools.wraps(own_run)
    def run(function: Callable[..., Any]) -> Callable[..., Any]:
        as_it_is = own_run(function)

        @functools.wraps(function)
        def from_commit(state: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(state, ObjectState):
                note(
                    f"its state is a {type(state).__name__}, neither TorchState nor ObjectState: its commits end with the job, "
                    "and --elastic starts the script again from its beginning"
                )
                return as_it_is(state, *arguments, **options)
            return kept.run(function, state, arguments, options)

        return from_commit

    def commit(self: Any) -> None:
        self.save()
        with kept.committing(self):
            self.check_host_updates()

    @functools.wraps(check)
    def check_host_updates(self: Any) -> None:
        # By Horovod's own way: rank 0's word is everyone's, at the same place of the script.
        if kept.asks_to_stop(self):
            self.on_hosts_updated(time.time(), HostUpdateResult.added)
        check(self)

    elastic.run = run
    State.commit, State.check_host_updates = functools.wraps(State.commit)(commit), check_host_updates
