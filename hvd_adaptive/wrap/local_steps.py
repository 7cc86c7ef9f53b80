"""Strategy ``local`` for a script: which of its optimizers step by themselves, and when the ranks' models are merged.

Merges are collective, so they happen where plain Horovod would have every rank, too: at a counted number of the optimizer's
steps (``synchronize`` calls, which a rank makes even where its GradScaler leaves the step out), at the end of a pass of a
loader that ends together on all ranks, when all ranks have called ``hvd.join()``, and before ``eval()`` and ``state_dict()``
where all ranks meet.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hvd_adaptive.comm.protocols import Collectives, Store
from hvd_adaptive.exchange.known_names import KnownNames
from hvd_adaptive.wrap.index_lists import Handed
from hvd_adaptive.wrap.loaders import IndexStream
from hvd_adaptive.wrap.meeting import Meetings
from hvd_adaptive.wrap.merging import MergeLog, Merger
from hvd_adaptive.wrap.run_options import BadOptions, RunConfig

_OWNER = "_hvd_adaptive_local"
# How long a rank stands where other ranks may come, too; one that is only slow comes within a step.
_PATIENCE_S = 60.0


@dataclass
class _Owner:
    """What is known of one optimizer.

    Attributes:
        named: its parameters.
        merger: None until its first step.
        is_plain: it does not step locally.
        fed_by: the pass and the batch of the last gradients since its last step; None: there are none, or of no loader.
    """

    named: list[tuple[str, nn.Parameter]]
    merger: Merger | None = None
    is_plain: bool = False
    fed_by: tuple[IndexStream, Handed] | None = None


class LocalSteps:
    """The optimizers of a script that step locally.

    Args:
        config: the options.
        make_world: makes the world of all ranks, once Horovod runs.
        note: adds a line to the report.

    Attributes:
        copies: modules that are copies of others, as a moving average of the weights.
        is_merging: a collective that is under way is a merge's own.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        make_world: Callable[[], Collectives],
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._make_world = make_world
        self._note = note
        self._names = KnownNames()
        # In the order of the script, as merges follow each other.
        self._optimizers: list[weakref.ref[Any]] = []
        # Modules that the script calls, in its order (True), and their parts. Weakly: it may build another model.
        self._modules: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self.copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._finder: Any = None
        # What the report tells, also of optimizers that are gone.
        self._logs: list[MergeLog] = []
        self.is_merging = False
        self._meetings: Meetings | None = None
        self._num_steps = 0
        self._num_merges = 0
        # Steps so far at the last eval() and state_dict().
        self._last_look: dict[str, int] = {}

    def registered(self, optimizer: Any) -> None:
        """Takes over an optimizer that the script has wrapped."""
        names = optimizer._parameter_names
        named = [(names[p], p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        # On the optimizer, not beside it: what it holds leads back to the optimizer, which must stay free to go.
        setattr(optimizer, _OWNER, _Owner(named))
        self._names.add(named)
        self._optimizers.append(weakref.ref(optimizer))
        if self._finder is None:
            self._finder = register_module_forward_pre_hook(self._find_root)

    def steps_alone(self, optimizer: Any) -> bool:
        """Whether an optimizer's steps use this rank's gradients, as far as is known now."""
        owner = getattr(optimizer, _OWNER, None)
        return owner is not None and not owner.is_plain

    def accumulated(self, optimizer: Any, stream: IndexStream | None) -> bool:
        """Takes note of a gradient of an optimizer's, of a batch of a pass; returns whether its steps use this rank's."""
        owner = getattr(optimizer, _OWNER, None)
        if owner is None or owner.is_plain:
            return False
        owner.fed_by = None if stream is None else (stream, stream.current)
        return True

    def begin_step(
        self, optimizer: Any, stream: IndexStream | None, batches: list[Handed], *, refused: Callable[[], bool]
    ) -> bool:
        """Counts a step that is about to be taken. COLLECTIVE for an optimizer's first one.

        Args:
            optimizer: whose step it is.
            stream: the pass whose batches led to it, if any.
            batches: those; none where a step on them was counted before.
            refused: at the first step, whether something of the script forbids local steps. COLLECTIVE.

        Returns:
            False if this optimizer does not step locally, from now on.

        Raises:
            BadOptions: on all ranks, at the first step, for a pattern of ``compression`` that is no parameter's.
        """
        owner: _Owner = getattr(optimizer, _OWNER)
        if not batches and owner.fed_by is not None:
            # Another optimizer has stepped on them before, as a GAN's, or this one has. They are equally long.
            stream, batches = owner.fed_by[0], [owner.fed_by[1]] * optimizer.backward_passes_per_step
        owner.fed_by = None
        if owner.merger is None and not self._start(optimizer, owner, refused()):
            return False
        assert owner.merger is not None
        self.goes_on()
        self._num_steps += 1
        if stream is not None or owner.merger.stream is None or not owner.merger.stream.is_open:
            # Else a synchronize without batches of its own, as of a GAN's critic: it is of the same pass.
            owner.merger.stream = stream
        samples = sum(handed.global_samples for handed in batches)
        if not samples and self._config.mega_batch:
            self._note("--mega-batch: a step of a rank counts as one sample, as no DataLoader gave its batch")
        owner.merger.begin_step(
            num_samples=sum(handed.num_samples for handed in batches),
            global_samples=samples,
            epoch_samples=0 if stream is None or not batches else stream.num_batches * samples // len(batches),
        )
        return True

    def timed(self, optimizer: Any, seconds: float) -> None:
        """Takes note of what a step of an optimizer took, now or at a later step."""
        owner = getattr(optimizer, _OWNER, None)
        if owner is not None and owner.merger is not None:
            owner.merger.timed(seconds)

    def end_step(self, optimizer: Any) -> None:
        """Counts a step that was taken."""
        owner = getattr(optimizer, _OWNER, None)
        if owner is not None and owner.merger is not None:
            owner.merger.end_step()

    def due(self, over: IndexStream | None = None) -> list[Merger]:
        """Returns what is to be merged on every rank: what is due, and what has counted steps on a pass that is over on all."""
        mergers = [owner.merger for owner in self._owners() if owner.merger is not None]
        return [m for m in mergers if m.is_due or (over is not None and m.stream is over and m.num_calls)]

    def merge(self, mergers: list[Merger], *, have_joined: bool = False) -> None:
        """Makes merges; ``have_joined``: all ranks have just called hvd.join(). COLLECTIVE."""
        for merger in mergers:
            self._run(functools.partial(merger.merge, have_joined=have_joined))
            self._num_merges += 1
        if self._meetings is not None:
            self._meetings.merged(self._num_merges)

    def joining(self) -> None:
        """This rank calls hvd.join()."""
        if self._meetings is not None:
            self._meetings.joining()

    def joined(self) -> None:
        """All ranks have called hvd.join(), after different numbers of steps and merges: merges, so that they count alike from
        here and have one model. COLLECTIVE."""
        # Those that were missed are not counted alike.
        self._num_merges = 0
        if not self._logs or not self._optimizers:
            return
        owners = [None if (optimizer := ref()) is None else getattr(optimizer, _OWNER) for ref in self._optimizers]
        mergers = [None if owner is None else owner.merger for owner in owners]
        # One that the script has dropped may be gone on some ranks only.
        here = torch.tensor([float(merger is not None) for merger in mergers], dtype=torch.float64)
        world = self._make_world()
        self._run(lambda: world.allreduce_sum_(here, name="joined"))
        everywhere = [m for m, count in zip(mergers, here.tolist(), strict=True) if m is not None and count == world.world_size]
        self.merge(everywhere, have_joined=True)

    def goes_on(self) -> None:
        """The script goes on to a step, or to a wait for other ranks."""
        if self._meetings is not None and not self.is_merging:
            self._meetings.advance()

    def looked_at(self, kind: str, module: nn.Module) -> list[Merger]:
        """Returns what could be merged before the script validates or saves a model: optimizers with steps, all of whose
        parameters it has. Nothing where it does so at every step, as for a moving average of the weights."""
        held = [] if self.is_merging else self._held_by(module)
        if not held:
            return []
        before, self._last_look[kind] = self._last_look.get(kind), self._num_steps
        found = [merger for merger in held if merger.num_calls]
        if found and before == self._num_steps - 1:
            self._note(f"{kind} at every step, as for a moving average of the weights: it sees the rank's own model")
            return []
        return found

    def loaded(self, module: nn.Module) -> None:
        """The script has loaded weights into a model, or into a part of one."""
        ids = {id(parameter) for parameter in module.parameters()}
        for owner in self._owners():
            if owner.merger is not None and any(id(parameter) in ids for _, parameter in owner.named):
                owner.merger.loaded(module)

    def merge_if_all_here(self, kind: str, mergers: list[Merger]) -> None:
        """Merges before the script validates or saves, if it does so on all ranks now."""
        if self._meetings is None:
            self._note(f"{kind} between merges sees the rank's own model: without MPI ranks cannot tell whether all are there")
        elif not self._meetings.all_here():
            self._note(f"{kind} between merges on some ranks only saw the rank's own model")
        else:
            self.merge(mergers)

    def meet_through(self, store: Store | None, world_size: int) -> None:
        """Sets through what ranks find out whether all have come to the same point; None: they cannot, unless they could."""
        if store is not None and self._meetings is None:
            patience_s = min(_PATIENCE_S, self._config.stall_limit_s)
            self._meetings = Meetings(store, world_size=world_size, patience_s=patience_s)

    def over(self) -> None:
        """The script has ended on this rank."""
        if self._meetings is not None:
            self._meetings.over()
            self._meetings = None

    def forget(self) -> None:
        """Horovod has been initialized anew."""
        self._optimizers.clear()
        self._modules.clear()

    def lines(self) -> list[str]:
        """Returns what local steps mean and how many merges there were, for the report."""
        lines = []
        # What becomes of the optimizers, and the kinds of which that holds.
        rules: dict[str, dict[str, None]] = {}
        has_kinds = len({log.kind for log in self._logs}) > 1
        for log in self._logs:
            state = f"optimizer state after a merge: {log.optimizer_state}"
            rule = f"{state}; outer step: {log.outer_step}; compression: {log.compression}"
            rules.setdefault(rule, {})[log.kind] = None
            of = f" of {log.kind}" if has_kinds else ""
            weights = "" if log.weight is None else ", last weights " + ", ".join(f"{w:.3f}" for w in log.weight)
            lines.append(
                f"  local steps{of}: {log.num_merges} merges, at last every {log.steps_per_merge} steps, "
                f"{1e3 * log.merge_s / max(log.num_merges, 1):.1f} ms each without waiting{weights}"
            )
        if any(log.copies_differ for log in self._logs):
            lines.append(
                "    a copy of the model (a moving average, a teacher) differs between ranks, as it follows each rank's own "
                "steps: broadcast rank 0's before it is used, update it after model.eval() on all ranks, or run the script with "
                "--strategy sync"
            )
        if lines:
            lines += [
                "    each optimizer.step() uses the rank's own gradients: clipping, synchronize(), GradScaler act on those",
                f"    learning rate: the script's x (share of the batch / equal share), rule {self._config.lr_rule}",
                *(f"    {', '.join(kinds) + ': ' if len(rules) > 1 else ''}{rule}" for rule, kinds in rules.items()),
                "    validation and checkpoints see the merged model at the end of a whole pass over the loader, and after "
                "model.eval() or state_dict() on all ranks",
            ]
        return lines

    def _start(self, optimizer: Any, owner: _Owner, refused: bool) -> bool:
        if refused:
            owner.is_plain = True
            self._stop_finding()
            return False
        ids = {id(parameter) for _, parameter in owner.named}
        called = [module for module, is_called in self._modules.items() if is_called]
        roots = [module for module in called if any(id(p) in ids for p in module.parameters())]
        try:
            compression = self._names.policy_for(self._config.compression, owner.named)
        except ValueError as error:
            raise BadOptions(str(error)) from None
        config = dataclasses.replace(self._config, compression=compression)
        try:
            make = functools.partial(Merger, optimizer, owner.named, roots, config)
            self._run(lambda: setattr(owner, "merger", make(self._make_world(), self._find_copies)))
        except ValueError as error:
            # Every rank has the same model and so the same error.
            owner.is_plain = True
            self._note(f"no local steps: {error}; this optimizer averages gradients as in plain Horovod")
            self._stop_finding()
            return False
        except RuntimeError as error:
            if "not supported with Join" not in str(error):
                raise
            raise RuntimeError(
                "a rank has called hvd.join() before this optimizer's first step, in which local steps need every rank: see to "
                "it that each rank has a batch in the first epoch, or run the script with --strategy sync"
            ) from None
        assert owner.merger is not None
        self._logs.append(owner.merger.log)
        self._stop_finding()
        return True

    def _stop_finding(self) -> None:
        """Takes the hook off all forwards once every optimizer has begun."""
        if self._finder is not None and not any(o.merger is None and not o.is_plain for o in self._owners()):
            self._finder.remove()
            self._finder = None

    def _owners(self) -> list[_Owner]:
        alive = (ref() for ref in self._optimizers)
        return [getattr(optimizer, _OWNER) for optimizer in alive if optimizer is not None]

    def _held_by(self, module: nn.Module) -> list[Merger]:
        """The optimizers all of whose parameters a module has."""
        owners = [owner for owner in self._owners() if owner.merger is not None]
        ids = {id(parameter) for parameter in module.parameters()} if owners else set()
        return [o.merger for o in owners if o.merger is not None and all(id(parameter) in ids for _, parameter in o.named)]

    def _find_copies(self) -> list[torch.Tensor]:
        """The parameters of copies of modules, none of which is trained."""
        trained = {id(parameter) for owner in self._owners() for _, parameter in owner.named}
        found = [list(module.parameters()) for module in self.copies]
        beside = {id(p): p for part in found if not any(id(p) in trained for p in part) for p in part}
        return list(beside.values())

    def _run(self, action: Callable[[], None]) -> None:
        self.is_merging = True
        try:
            action()
        finally:
            self.is_merging = False

    def _find_root(self, module: nn.Module, args: Any) -> None:
        if module in self._modules:
            return
        trained = {id(parameter) for owner in self._owners() for _, parameter in owner.named}
        if any(id(parameter) in trained for parameter in module.parameters()):
            self._modules.update((part, part is module) for part in module.modules())
