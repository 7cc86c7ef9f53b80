"""Which checkpoint a run goes on from: the newest that is whole and its own, the same on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_adaptive.algorithm.world_scale import global_batch_size
from hvd_adaptive.cluster.last_checkpoint import find_checkpoints, newest_checkpoint, number_of
from hvd_adaptive.comm.protocols import AgreedError, Transport, agree, agree_equal, from_rank_0, long_task
from hvd_adaptive.config import GONE_OPTIONS, GONE_VALUES, Config
from hvd_adaptive.engine.shards import describe_type
from hvd_adaptive.session.sameness import compare_models
from hvd_adaptive.session.session import Session
from hvd_adaptive.state import checkpoint
from hvd_adaptive.state.checkpoint import RefusedError
from hvd_adaptive.state.nested import check_like

log = logging.getLogger(__name__)

# Fields of Config that say how a run is watched, not what it computes, or what another number of ranks means for it. The rest
# must be as in the checkpoint.
_MAY_CHANGE = frozenset({
    "backend", "by_default", "drain_limit_s", "elastic_batch", "hash_interval", "record", "reference_ranks", "replay", "slowdown",
    "stall_limit_s", "straggler_limit",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run and its checkpoints must have in common.

    Attributes:
        model: name, shape, dtype and whether trainable, of each parameter and buffer in the model's order.
        data: fingerprints by name.
        options: the configuration: values by name. ``by_default`` lists those that follow from others, where somebody knows.
    """

    model: list[list[Any]]
    data: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, session: Session, *, data: dict[str, Any], options: dict[str, Any]) -> Identity:
        """Returns a session's identity.

        Args:
            session: gives the model and the options of ``Config``.
            data: fingerprints by name.
            options: further options, as JSON has them.
        """
        model = session.model
        return cls(
            model=[
                *(
                    [name, list(p.shape), describe_type(p), p.requires_grad]
                    for name, p in model.named_parameters()
                ),
                *([name, list(b.shape), str(b.dtype), False] for name, b in model.named_buffers()),
            ],
            data=data,
            options={**dataclasses.asdict(session.config), **options},
        )

    def check_same_run(self, path: Path, manifest: dict[str, Any]) -> None:
        """Raises RefusedError for a checkpoint of another model or other data."""
        theirs = manifest["model"]
        if theirs != self.model:
            pairs = zip(theirs, self.model, strict=False)
            there, here = next(
                ((a, b) for a, b in pairs if a != b), (f"{len(theirs)} tensors", f"{len(self.model)} tensors")
            )
            raise RefusedError(f"{path} is of another model: {there} there, {here} here")
        for name, value in self.data.items():
            if manifest["data"].get(name) != value:
                raise RefusedError(
                    f"{path} is of other data: {name} is {manifest['data'].get(name)} there and {value} here"
                )

    def changed_options(self, manifest: dict[str, Any], may_change: frozenset[str]) -> list[str]:
        """Returns a sentence for each option that is not what it was, though it may not change. One that was not there yet
        had its default. Those that followed from others then and now are named only if no other differs."""
        defaults = {item.name: item.default for item in dataclasses.fields(Config)}
        theirs = {**defaults, **manifest["options"]}
        gone = [
            f"{name} was {theirs[name]!r}, and there is no such option any more"
            for name, unset in GONE_OPTIONS
            if theirs.get(name, unset) != unset
        ]
        by_default = self.options.get("by_default", [])
        changed = {
            name: f"{name} was {theirs[name]!r} and is {value!r}" + " by default" * (name in by_default)
            for name, value in self.options.items()
            if name in theirs and theirs[name] != value and name not in may_change | _MAY_CHANGE
            and (name, theirs[name]) not in GONE_VALUES
        }
        # Older checkpoints do not say.
        following = {name for name in by_default if name in theirs.get("by_default", by_default)}
        return gone + [text for name, text in changed.items() if name not in following] or list(changed.values())


def find_candidates(source: Path, transport: Transport, also: Sequence[Path] = ()) -> list[Path]:
    """Returns the checkpoints that a path names, newest first: itself, or those in it or in its ``checkpoints``. COLLECTIVE.

    Args:
        source: the path.
        transport: the world.
        also: further folders to look in; of equally new ones theirs come first.

    Raises:
        AgreedError: on all ranks, if rank 0 may not look there.
    """
    return from_rank_0(transport, lambda: _look_for_candidates(source, also))


def _look_for_candidates(source: Path, also: Sequence[Path]) -> list[Path]:
    try:
        # One whose manifest is missing is to be refused by name, not overlooked.
        if (source / checkpoint.MANIFEST).exists() or source in find_checkpoints(source.parent):
            found = [source]
        else:
            found = find_checkpoints(source) or find_checkpoints(source / "checkpoints")
        if more := find_checkpoints(*also):
            found = sorted(more + found, key=number_of, reverse=True)
    except OSError as failure:
        raise ValueError(f"{source} cannot be read: {failure}") from None
    return found


def load_newest_valid(
    candidates: list[Path], session: Session, identity: Identity, may_change: frozenset[str]
) -> tuple[Path, dict[str, Any]]:
    """Loads the first of the checkpoints that all ranks can use, saying why the others were refused. COLLECTIVE.

    Args:
        candidates: newest first, the same on every rank.
        session: gets the state.
        identity: what this run is.
        may_change: names of options that may differ, besides those of ``Config`` that only watch a run.

    Returns:
        The checkpoint and its manifest.

    Raises:
        AgreedError: on all ranks, if none is valid, or an option that may not change is not what it was.
    """
    refusals = []
    # Once: what a checkpoint leaves behind that is refused halfway is not asked of the next.
    like = session.state_dict()
    for path in candidates:
        manifest, error = _choose(path, session.transport, identity)
        if manifest is not None and (changed := identity.changed_options(manifest, may_change)):
            raise AgreedError(
                f"{path} cannot be resumed with other options: {'; '.join(changed)}. Give them as they were, or start anew "
                "without resume and in another folder."
            )
        if manifest is not None:
            error = _load(path, manifest, session, like)
            if error is None:
                digest, _ = compare_models(session.model, session.transport, buffers=session.config.strategy != "horovod")
                remedy = f"Do all hosts see the same files in {path}?"
                agree_equal(session.transport, {"model after the resume": digest}, remedy)
                if session.rank == 0:
                    _tell_of_batch(manifest, session)
                return path, manifest
        refusals.append(f"checkpoint refused: {error}")
        if session.rank == 0:
            log.error("%s%s", refusals[-1], "; trying the next older one" if path != candidates[-1] else "")
    raise AgreedError(
        "\n".join([*refusals, "no valid checkpoint is left: restore one, or start anew without resume and in another folder"])
    )


def _tell_of_batch(manifest: dict[str, Any], session: Session) -> None:
    """Logs that the samples of a step have followed the number of ranks, where no option says that they may."""
    config, num_then, num_now = session.config, manifest["world_size"], session.world_size
    if config.strategy not in ("sync", "horovod") or config.reference_ranks is not None:
        return
    theirs = {name: manifest["options"].get(name, getattr(config, name)) for name in ("reference_ranks", "elastic_batch")}
    then = global_batch_size(dataclasses.replace(config, **theirs), num_then)
    now = global_batch_size(config, num_now)
    if now != then:
        log.warning(
            "the global batch is %d samples with %d rank%s, and was %d with %d: the learning rate may not fit it. Set "
            "reference_ranks=%d to keep it (elastic_batch says how).",
            now, num_now, "s" * (num_now > 1), then, num_then, theirs["reference_ranks"] or num_then,
        )  # fmt: skip


def _choose(path: Path, transport: Transport, identity: Identity) -> tuple[dict[str, Any] | None, str | None]:
    """Rank 0's verdict on a checkpoint, for all: its manifest, or why it is refused. COLLECTIVE."""

    def check() -> tuple[dict[str, Any] | None, str | None]:
        try:
            manifest = checkpoint.read_manifest(path)
            identity.check_same_run(path, manifest)
            with long_task(transport, "checking a checkpoint"):
                checkpoint.check_files(path, manifest)
        except RefusedError as refusal:
            return None, str(refusal)
        return manifest, None

    return from_rank_0(transport, check)


def _load(path: Path, manifest: dict[str, Any], session: Session, like: dict[str, Any]) -> str | None:
    """Loads a checkpoint of the form of a state on every rank; returns why some rank could not. COLLECTIVE.

    Each rank loads by itself, and only then they meet: what fails on one must not leave the others in a collective.
    """
    error = None

    @functools.cache
    def own_of(rank: int) -> Any:
        file = checkpoint.rank_file(rank)
        if session.rank:
            # This host may see other bytes than rank 0's.
            checkpoint.check_files(path, manifest, [file])
        return read(file, "own")

    def read(file: str, part: str) -> Any:
        state = checkpoint.read_state(path / file)
        # Random states may have parts or not, and what others have registered is theirs to judge.
        check_like(state, {name: {} if name in ("random", "registered") else value for name, value in like[part].items()}, file)
        return state

    codecs = None
    try:
        with long_task(session.transport, "loading a checkpoint"):
            if session.rank:
                checkpoint.check_files(path, manifest, [checkpoint.GLOBAL_FILE])
            session.load_state_dict(
                {
                    "world_size": manifest["world_size"],
                    "shared": read(checkpoint.GLOBAL_FILE, "shared"),
                },
                own_of,
            )
        codecs = _codecs(own_of(session.rank % manifest["world_size"]))
    except Exception as failure:
        # Its bytes are those that were written, but who wrote them is not known: whatever does not fit is a refusal.
        error = f"rank {session.rank}: {path}: {_why(failure)}"
    found: list[tuple[str | None, Any]] = session.transport.allgather_object((error, codecs))
    first = next((text for text, _ in found if text is not None), None)
    if first is not None:
        return first
    rank = next((rank for rank, (_, own) in enumerate(found) if own != found[0][1]), 0)
    return f"{path}: the ranks' codecs differ: {found[0][1]} on rank 0 and {found[rank][1]} on rank {rank}" if rank else None


def _codecs(own: dict[str, Any]) -> tuple[str, int] | None:
    """What a rank's own state holds of codecs, and must be the same on all ranks: their policy, and how often they were used."""
    compressed = own["strategy"].get("compressed")
    if compressed is None:
        return None
    compressed = compressed.get("sum", compressed)
    return compressed["exchange"]["policy"], compressed["num_rounds"]


def _why(failure: Exception) -> str:
    if isinstance(failure, KeyError):
        return f"its state has no {failure}"
    # The others' words say little without their names: "list index out of range".
    return str(failure) if isinstance(failure, ValueError) and str(failure) else f"it cannot be loaded: {failure!r}"


def refuse_newer(folder: Path, session: Session) -> None:
    """Raises AgreedError if a folder holds checkpoints of a later round than the session's, which is another run's. COLLECTIVE.

    They would count as the newest: the run's own would be removed first, and a resume would not find them.
    """
    error = None
    try:
        newest = newest_checkpoint(folder) if session.rank == 0 else None
    except OSError as failure:
        newest, error = None, f"{folder} cannot be read: {failure}"
    if newest and number_of(newest) > session.round:
        error = (
            f"{folder} holds checkpoints of another run, the newest {newest}, and this one is at round {session.round}: go on "
            "from them with Checkpointer.resume() before the first batch, or give this run a folder of its own"
        )
    agree(session.transport, error)


def go_back(folder: Path, session: Session) -> list[Path]:
    """Renames the checkpoints that are newer than the session's round: they are no part of the run that goes on from there.
    COLLECTIVE.

    Returns:
        The other ones, oldest first, on rank 0.

    Raises:
        AgreedError: on all ranks, if one cannot be renamed.
    """
    left: list[Path] = []
    error = None
    try:
        for path in find_checkpoints(folder) if session.rank == 0 else ():
            if number_of(path) > session.round:
                number = 1
                while (aside := path.with_name(f"set-aside-{number}-{path.name}")).exists():
                    number += 1
                with contextlib.suppress(FileNotFoundError):
                    path.rename(aside)
                log.warning("%s is newer than the round that this run goes on from: set aside as %s", path, aside.name)
            else:
                left.insert(0, path)
    except OSError as failure:
        error = f"checkpoints in {folder} that are newer than round {session.round} cannot be set aside: {failure}"
    agree(session.transport, error)
    return left
